"""Landmarks by farthest points are the tokens that the definition says, the sink first."""

import pytest
import torch
from drawn import qkv, random_mask

from nystromformer import nystrom_attention
from nystromformer.attention.farthest_points import farthest_tokens
from nystromformer.attention.landmarks import segments


def by_definition(tokens, number, first):
    places = [first]
    while len(places) < number:
        distance = torch.stack([(tokens - tokens[place]).square().sum(1) for place in places]).amin(0)
        places.append(int(distance.argmax()))
    return tokens[places]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_each_is_the_farthest_from_those_before(masked, of_keys):
    query, tokens, _ = qkv(2, 3, 50, d=4)
    mask = random_mask(2, 50, share=0.7) if masked else None
    if masked:
        query, tokens = (torch.where(mask[:, None, :, None], x, 0) for x in (query, tokens))
    found, new = farthest_tokens(tokens, segments(tokens, 9, mask), mask, query if of_keys else None)
    assert new.all()
    for b in range(2):
        real = torch.ones(50, dtype=torch.bool) if mask is None else mask[b]
        for h in range(3):
            own = tokens[b, h, real]
            apart = (own - own.mean(0)).square().sum(1)
            first = int((own @ query[b, h].sum(0)).argmax() if of_keys else apart.argmax())
            torch.testing.assert_close(found[b, h], by_definition(own, 9, first))


def test_equal_tokens_count_once():
    tokens = torch.tensor([1.0, 2.0]).repeat(10).view(1, 1, 20, 1)
    _, new = farthest_tokens(tokens, segments(tokens, 5))
    assert new.tolist() == [[[True, True, False, False, False]]]


def test_a_sink_that_means_would_blur_is_kept():
    """All queries look at one key, whose value is unlike all others."""
    query, key, value = (0.1 * x for x in qkv(1, 2, 200, d=8, e=8))
    key[:, :, 77] = 4 * torch.nn.functional.normalize(torch.ones(8, dtype=key.dtype), dim=0)
    query += 3 * key[:, :, 77:78]
    value[:, :, 77] += 5
    exact = torch.softmax(query @ key.mT * 8**-0.5, dim=-1) @ value
    errors = [
        (nystrom_attention(query, key, value, num_landmarks=16, landmarks=kind) - exact).norm() / exact.norm()
        for kind in ("segment_means", "fps")
    ]
    assert errors[1] < 0.1 * errors[0]
