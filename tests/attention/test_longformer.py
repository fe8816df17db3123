"""Longformer against Transformers' with tied global projections, and against dense attention under a band."""

import pytest
import torch
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from nystromformer.attention.longformer import LongformerAttention, longformer_attention

HEADS, DIM = 2, 8


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


def split_heads(x):
    return x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def transformers_longformer(window):
    """Transformers' layer with its second set of projections, for global tokens, equal to the first."""
    config = LongformerConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        attention_window=[window - 1],
        attention_probs_dropout_prob=0.0,
    )
    layer = LongformerSelfAttention(config, layer_id=0).double().eval()
    for name in ("query", "key", "value"):
        getattr(layer, f"{name}_global").load_state_dict(getattr(layer, name).state_dict())
    return layer


@pytest.mark.parametrize("padding", [0, 13], ids=["whole", "padded"])
@pytest.mark.parametrize("global_tokens", [0, 1, 5])
@pytest.mark.parametrize("window", [9, 33, 129])
def test_equals_transformers_in_output_and_gradients(window, global_tokens, padding):
    length = 256  # a multiple of 2 · window, which Transformers needs
    layer, x = transformers_longformer(window), random(2, length, HEADS * DIM)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length - padding :] = False
    is_global = (torch.arange(length) < global_tokens).expand(2, -1)
    code = torch.where(is_global, 10000.0, 0.0).masked_fill(~mask, -10000.0)
    expected = layer(x, code, ~mask, is_global, bool(global_tokens))[0]

    qkv = [split_heads(projection(x)) for projection in (layer.query, layer.key, layer.value)]
    ours = longformer_attention(*qkv, mask, window=window, global_tokens=global_tokens).transpose(1, 2).flatten(2)
    # Transformers' softmax is in float32 whatever the input
    torch.testing.assert_close(ours[mask], expected[mask], rtol=0, atol=1e-6)
    weight = random(*x.shape, seed=1).detach() * mask.unsqueeze(-1)
    (mine,), (theirs,) = (torch.autograd.grad(out, x, weight) for out in (ours, expected))
    # Transformers' gradient is NaN at masked tokens that see only masked ones
    torch.testing.assert_close(mine[mask], theirs[mask], rtol=0, atol=1e-5)
    assert not mine[~mask].any()


def dense(query, key, value, mask, window, global_tokens):
    place = torch.arange(query.shape[2])
    is_global = place < global_tokens
    seen = ((place[:, None] - place).abs() <= window // 2) | is_global | is_global[:, None]
    # masked queries may see all: their rows count for nothing, and a softmax over nothing has no gradient
    seen = (seen & mask[:, None, None, :]) | ~mask[:, None, :, None]
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value) * mask[:, None, :, None]


@pytest.mark.parametrize("length", [1, 5, 64, 65, 200])
@pytest.mark.parametrize("global_tokens", [0, 1, 70])
@pytest.mark.parametrize("window", [1, 3, 65, 131, 1001])
def test_equals_dense_attention_under_a_band(window, global_tokens, length):
    query, key, value = qkv = [random(2, HEADS, length, DIM, seed=seed) for seed in range(3)]
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(length)) < 0.6
    ours = longformer_attention(*qkv, mask, window=window, global_tokens=global_tokens)
    expected = dense(query, key, value, mask, window, global_tokens)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    weight = random(*ours.shape, seed=4).detach()
    for mine, other in zip(
        torch.autograd.grad(ours, qkv, weight), torch.autograd.grad(expected, qkv, weight), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_a_window_over_everything_is_exact():
    qkv = [random(1, HEADS, 50, DIM, seed=seed) for seed in range(3)]
    expected = torch.nn.functional.scaled_dot_product_attention(*qkv)
    torch.testing.assert_close(longformer_attention(*qkv, window=99), expected, rtol=0, atol=1e-12)


def test_defaults_are_the_papers():
    attention = LongformerAttention(HEADS, DIM)
    assert (attention.window, attention.global_tokens) == (257, 0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 256}, "window=256: must be odd, so that it has a center; use 255 or 257"),
        ({"window": 0}, "window=0: must be at least 1"),
        ({"global_tokens": -1}, "global_tokens=-1: must be at least 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LongformerAttention(HEADS, DIM, **options)
