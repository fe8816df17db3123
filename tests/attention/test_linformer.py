"""Linformer against the `linformer` package with copied weights, and against a dense evaluation of its formula."""

import pytest
import torch
from linformer import LinformerSelfAttention

from nystromformer.attention.linformer import LinformerAttention, linformer_attention

HEADS, DIM, MAX_LENGTH, K = 3, 4, 40, 8


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


def split_heads(x):
    return x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


@pytest.mark.parametrize("share_key_value", [False, True], ids=["two-projections", "one-projection"])
@pytest.mark.parametrize("length", [1, 27, MAX_LENGTH])
def test_equals_the_linformer_package_in_output_and_gradients(length, share_key_value):
    width = HEADS * DIM
    theirs = LinformerSelfAttention(width, MAX_LENGTH, k=K, heads=HEADS, share_kv=share_key_value).double()
    torch.nn.init.eye_(theirs.to_out.weight)
    torch.nn.init.zeros_(theirs.to_out.bias)
    ours = LinformerAttention(HEADS, DIM, MAX_LENGTH, projection_dim=K, share_key_value=share_key_value).double()
    pairs = [(ours.key_projection, theirs.proj_k)]
    if not share_key_value:
        pairs.append((ours.value_projection, theirs.proj_v))
    for mine, other in pairs:
        mine.data.copy_(other.data)

    x = random(2, length, width)
    key = theirs.to_k(x)
    value = key if share_key_value else theirs.to_v(x)  # the package shares the key itself too, not only its projection
    out = ours(*(split_heads(y) for y in (theirs.to_q(x), key, value))).transpose(1, 2).flatten(2)
    expected = theirs(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    weight = random(*out.shape, seed=1).detach()
    mine = torch.autograd.grad(out, [x, *(pair[0] for pair in pairs)], weight)
    other = torch.autograd.grad(expected, [x, *(pair[1] for pair in pairs)], weight)
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("share_key_value", [False, True])
@pytest.mark.parametrize("share_heads", [False, True])
def test_equals_the_dense_formula_over_the_valid_tokens(share_heads, share_key_value):
    query, key, value = (random(2, HEADS, 23, DIM, seed=seed) for seed in range(3))
    mask = torch.rand(2, 23, generator=torch.Generator().manual_seed(3)) < 0.6
    shape = (MAX_LENGTH, K) if share_heads else (HEADS, MAX_LENGTH, K)
    e = random(*shape, seed=4)
    f = None if share_key_value else random(*shape, seed=5)
    out = linformer_attention(query, key, value, mask, key_projection=e, value_projection=f)
    for b in range(2):
        for h in range(HEADS):
            rows = mask[b].nonzero().squeeze(1)
            project = lambda p, x, h=h, rows=rows: (p if share_heads else p[h])[rows].T @ x
            keys = project(e, key[b, h, rows])
            values = project(e if share_key_value else f, value[b, h, rows])
            expected = (query[b, h, rows] @ keys.T / DIM**0.5).softmax(-1) @ values
            torch.testing.assert_close(out[b, h, rows], expected, rtol=0, atol=1e-10)


def test_projections_are_shared_as_asked():
    sizes = {
        (share_heads, share_key_value): sum(
            p.numel()
            for p in LinformerAttention(
                HEADS, DIM, MAX_LENGTH, projection_dim=K, share_heads=share_heads, share_key_value=share_key_value
            ).parameters()
        )
        for share_heads in (False, True)
        for share_key_value in (False, True)
    }
    one = MAX_LENGTH * K
    expected = {(True, True): one, (True, False): 2 * one, (False, True): HEADS * one, (False, False): 2 * HEADS * one}
    assert sizes == expected


def test_projected_keys_start_at_the_scale_of_keys():
    attention = LinformerAttention(1, 16, 4096)
    projected = attention.key_projection.T @ torch.randn(4096, 16)
    assert 0.8 < projected.std() < 1.1


def test_bad_projection_dim_is_refused():
    with pytest.raises(ValueError, match="projection_dim=0: must be at least 1; the paper uses 256"):
        LinformerAttention(HEADS, DIM, MAX_LENGTH, projection_dim=0)
