"""The far field and the values fitted to core rows are what counting and a dense solution give."""

import itertools
import math

import pytest
import torch
from drawn import draw, random_mask

from nystromformer.attention.nystrom_local.parts import (
    SMALLEST_GRAM,
    ChosenBlocks,
    HeavyKeys,
    corrected_values,
    far_field,
    token_blocks,
)

FIELDS = [
    # examples, heads, tokens, block, segments, heavy keys, chosen blocks, with a mask
    (1, 2, 50, 4, 6, 3, 0, False),
    (3, 2, 41, 4, 5, 4, 0, True),
    (2, 3, 90, 8, 20, 5, 2, True),
    (1, 3, 130, 16, 48, 16, 3, False),
    (1, 1, 9, 2, 1, 0, 0, False),
]
RIDGES = [(3, 5, 7, 3), (2, 64, 64, 64), (2, 70, 33, 40), (1, 1, 1, 1)]  # heads, core rows, landmarks, width


def some_of(blocks, number, chosen):
    """Heavy keys and chosen blocks by chance."""
    generator = torch.Generator().manual_seed(1)
    present = blocks.for_heads(blocks.present)
    order = torch.rand(present.shape, generator=generator).masked_fill(~present, -1)
    place = order.topk(number, dim=1).indices
    heavy = HeavyKeys(place, present.gather(1, place), order)
    if not chosen:
        return heavy, None
    block = torch.arange(blocks.number)[:, None]
    index = ((block + 2 + torch.arange(chosen)) % blocks.number).expand(present.shape[0], -1, -1)
    return heavy, ChosenBlocks(index, ((index - block).abs() > 1) & (block > 0))


def counted(key, value, heavy, blocks, segments, chosen):
    """The same key by key: means, then heavy keys, and how many keys each block does not see otherwise."""
    keys, values, counts = [], [], []
    for c in range(key.shape[1]):
        valid = blocks.valid[c // blocks.heads].item()
        places = [place for place, real in zip(heavy.place[c].tolist(), heavy.real[c].tolist(), strict=True) if real]
        edges = [math.ceil(j * valid / segments) for j in range(segments + 1)]
        parts = [[i for i in range(*edge) if i not in places] for edge in itertools.pairwise(edges)]
        mean = lambda x, part, c=c: x[part, c].mean(0) if part else 0 * x[0, c]
        keys.append(torch.stack([mean(key, part) for part in parts] + [key[i, c] for i in heavy.place[c]]))
        values.append(torch.stack([mean(value, part) for part in parts] + [value[i, c] for i in heavy.place[c]]))
        rows = []
        for g in range(blocks.number):
            seen = {g - 1, g, g + 1}
            if chosen is not None:
                seen |= set(chosen.index[c, g][chosen.real[c, g]].tolist())
            row = [sum(i // blocks.size not in seen for i in part) for part in parts]
            rows.append(torch.tensor(row + heavy.real[c].long().tolist()))
        counts.append(torch.stack(rows))
    return torch.stack(keys), torch.stack(values), torch.stack(counts, dim=1)


@pytest.mark.parametrize("sizes", FIELDS, ids=str)
def test_the_far_field_is_what_counting_gives(instructions, sizes):
    batch, heads, length, block, segments, number, chosen, masked = sizes
    tokens = [draw(batch, heads, length, width, seed=width) for width in (5, 3)]
    mask = random_mask(batch, length) if masked else None
    if masked:
        mask[0] = torch.arange(length) == 7  # fewer tokens than heavy keys
    blocks = token_blocks(tokens[0], mask, block)
    key, value = (blocks.arrange(x, fill=masked).requires_grad_() for x in tokens)
    heavy, chosen_blocks = some_of(blocks, number, chosen)
    far = far_field(key, value, heavy, blocks, segments, chosen_blocks)
    keys, values, counts = counted(key, value, heavy, blocks, segments, chosen_blocks)
    torch.testing.assert_close(far.key, keys, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(far.value, values, rtol=1e-12, atol=1e-12)
    assert torch.equal(far.bias[:, :, 0].exp().round().long(), counts)
    assert (far.bias[:, :, 0][counts == 0] <= -1e30).all()
    # padding has no weight, so nothing comes back to it
    heads_real = torch.cat((torch.ones_like(keys[:, :segments, 0]).bool(), heavy.real), dim=1)[..., None]
    upstream = [draw(*x.shape, seed=9) * heads_real for x in (keys, values)]
    found = torch.autograd.grad((far.key, far.value), (key, value), upstream)
    expected = torch.autograd.grad((keys, values), (key, value), upstream)
    present = blocks.for_heads(blocks.present).T[: key.shape[0], :, None]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours * present, theirs * present, rtol=1e-12, atol=1e-12)


def dense_values(exact, near_out, near_logsumexp, far_logits, far_value, ridge):
    weights = torch.softmax(torch.cat((near_logsumexp[..., None], far_logits), dim=2), dim=2)
    share, A = weights[..., :1], weights[..., 1:]
    left = exact - share * near_out - A @ far_value
    gram = A.mT @ A
    more = ridge * (gram.diagonal(dim1=1, dim2=2).mean(1) + SMALLEST_GRAM)
    return far_value + torch.linalg.solve(gram + more[:, None, None] * torch.eye(gram.shape[1]), A.mT @ left)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-4)], ids=str)
@pytest.mark.parametrize("sizes", RIDGES, ids=str)
def test_fitted_values_are_the_dense_solution(instructions, sizes, dtype, tolerance):
    heads, rows, m, width = sizes
    shapes = ((heads, rows, width), (heads, rows, width), (heads, rows), (heads, rows, m), (heads, m, width))
    given = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    given[3][0, :, m // 2] = -1e30  # a segment that is empty
    given[2][-1, 0] = 300.0  # a row whose weight is all near
    upstream = draw(heads, m, width, seed=9)

    def results(function, dtype):
        leaves = [x.detach().to(dtype).clone().requires_grad_() for x in given]
        values = function(*leaves, 0.01)
        return [values, *torch.autograd.grad(values, leaves, upstream.to(dtype))]

    found = results(corrected_values, dtype)
    for ours, theirs in zip(found, results(dense_values, torch.float64), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance * max(theirs.abs().max().item(), 1e-3))
    with torch.no_grad():
        assert torch.equal(corrected_values(*(x.to(dtype) for x in given), 0.01), found[0])


def test_a_wrong_number_stays_with_its_head(instructions):
    given = [draw(*shape, seed=i) for i, shape in enumerate(((2, 5, 3), (2, 5, 3), (2, 5), (2, 5, 7), (2, 7, 3)))]
    given[3][0, 2, 1] = torch.nan
    values = corrected_values(*given, 0.01)
    assert values[0].isnan().any()
    assert not values[1].isnan().any()
