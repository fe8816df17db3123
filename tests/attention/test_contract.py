"""What every attention of the table promises, whichever it is."""

import contextlib
import copy
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import Largest

from nystromformer.attention.registry import ATTENTIONS, build_attention
from nystromformer.attention.shared.varlen import lengths_to_offsets

HEADS, DIM, MAX_LENGTH = 2, 4, 320
LENGTHS = (1, 2, 7, 65, 129, 301)
# sizes at which a few dozen tokens already leave the range where each method is exact; any attention that is not named
# here runs with its defaults
VARIANTS = {
    "standard": [{}],
    "nystrom": [{"num_landmarks": 8}, {"num_landmarks": 8, "landmarks": "fps"}],
    "nystrom-local": [{"num_landmarks": 8, "block_size": 4}, {"num_landmarks": 8, "block_size": 4, "chosen_blocks": 2}],
    "linformer": [{"projection_dim": 16}, {"projection_dim": 16, "share_heads": False, "share_key_value": True}],
    "longformer": [{"window": 9}, {"window": 9, "global_tokens": 3}],
    "reformer": [{"bucket_size": 8}, {"num_hashes": 1, "bucket_size": 5}],
    "performer": [{"num_features": 32}],
    "linear": [{}],
    "agent": [{"num_agents": 8}],
}


def attentions(fit=lambda attention: True):
    """A parameter for each variant of the attentions whose class fits."""
    cases = [
        pytest.param(name, options, id="-".join([name, *(f"{k}={v}" for k, v in options.items())]))
        for name, attention in ATTENTIONS.items()
        if fit(attention)
        for options in VARIANTS.get(name, [{}])
    ]
    return pytest.mark.parametrize("name, options", cases)


every_attention = attentions()
# the gradients of others are checked with fixed random numbers in their own tests
deterministic_attentions = attentions(lambda attention: not attention.stochastic)
linear_attentions = attentions(lambda attention: attention.linear)


def build(name, options, dtype=torch.float64, heads=HEADS, dim=DIM, max_length=MAX_LENGTH):
    torch.manual_seed(7)
    return build_attention(name, num_heads=heads, head_dim=dim, max_length=max_length, **options).to(dtype).eval()


def tokens(batch, length, seed=0, dtype=torch.float64, heads=HEADS, dim=DIM):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, length, dim, generator=generator, dtype=torch.float64).to(dtype) for _ in "qkv"]


def holes(batch, length, seed=0):
    """A mask with holes anywhere, at least one real token an example."""
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[:, length // 2] = True
    return mask


def run(attention, qkv, mask=None, seed=1):
    torch.manual_seed(seed)
    return attention(*qkv, mask)


def gradients(attention, qkv, mask=None, context=None):
    """The output, computed inside the context, and the gradients of a fixed linear function of it."""
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    with context or contextlib.nullcontext():
        out = run(attention, leaves, mask)
    # random, not smooth along the tokens: a softmax cancels what is common to its keys, which leaves rounding alone
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(11)).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, weight, allow_unused=True)
    return out.detach(), [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def assert_close_in_norm(found, expected, bound):
    """bfloat16 rounds each number to 8 bits, about 0.2 %."""
    assert (found.float() - expected).norm() <= bound * expected.norm()


@every_attention
@pytest.mark.parametrize("length", LENGTHS)
def test_any_length_gives_finite_output_and_gradients_of_the_same_shape(name, options, length):
    attention, qkv = build(name, options, torch.float32), tokens(2, length, dtype=torch.float32)
    for mask in (None, holes(2, length)):
        out, grads = gradients(attention, qkv, mask)
        assert out.shape == qkv[0].shape
        assert all(x.isfinite().all() for x in (out, *grads))


@every_attention
def test_bfloat16_is_close_to_float32(name, options):
    attention, qkv, mask = build(name, options, torch.bfloat16), tokens(2, 65, dtype=torch.bfloat16), holes(2, 65)
    out, grads = gradients(attention, qkv, mask)
    expected, expected_grads = gradients(copy.deepcopy(attention).float(), [x.float() for x in qkv], mask)
    assert all(x.dtype == torch.bfloat16 for x in (out, *grads))
    for half, full in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert_close_in_norm(half, full, 0.02)


@every_attention
def test_autocast_is_close_to_float32(name, options):
    attention, qkv, mask = build(name, options, torch.float32), tokens(2, 65, dtype=torch.float32), holes(2, 65)
    out, grads = gradients(attention, qkv, mask, torch.autocast("cpu", torch.bfloat16))
    expected, expected_grads = gradients(attention, qkv, mask)
    for half, full in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert_close_in_norm(half, full, 0.03)


@deterministic_attentions
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_gradients_of_deterministic_attentions_pass_gradcheck(name, options, masked):
    attention = build(name, options, heads=2, dim=3)
    qkv = [x.requires_grad_() for x in tokens(2, 11, heads=2, dim=3)]
    mask = holes(2, 11) if masked else None
    assert torch.autograd.gradcheck(lambda *x: attention(*x, mask), qkv, fast_mode=True)


@every_attention
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
def test_masked_content_never_reaches_real_tokens(name, options, junk):
    attention, qkv, mask = build(name, options), tokens(3, 37), holes(3, 37)
    out, grads = gradients(attention, qkv, mask)
    spoilt = [x.masked_fill(~mask[:, None, :, None], junk) for x in qkv]
    spoilt_out, spoilt_grads = gradients(attention, spoilt, mask)
    assert torch.equal(out, spoilt_out)
    for clean, dirty in zip(grads, spoilt_grads, strict=True):
        assert torch.equal(clean, dirty)
        assert not clean.masked_select(~mask[:, None, :, None]).any()


@every_attention
def test_masked_rows_are_exactly_zero(name, options):
    mask = holes(2, 65)
    out = run(build(name, options), tokens(2, 65), mask)
    assert not out.masked_select(~mask[:, None, :, None]).any()
    assert out.masked_select(mask[:, None, :, None]).all()


@every_attention
def test_an_example_without_real_tokens_gives_zeros_and_finite_gradients(name, options):
    attention, qkv, mask = build(name, options), tokens(3, 37), holes(3, 37)
    mask[1] = False
    out, grads = gradients(attention, qkv, mask)
    assert not out[1].any()
    assert all(g.isfinite().all() and not g[1].any() for g in grads)


@every_attention
def test_an_empty_batch_gives_an_empty_batch(name, options):
    out = run(build(name, options), tokens(0, 37), holes(0, 37))
    assert out.shape == (0, HEADS, 37, DIM)


@every_attention
def test_a_mask_that_is_all_true_changes_nothing(name, options):
    attention, qkv = build(name, options), tokens(2, 37)
    mask = torch.ones(2, 37, dtype=torch.bool)
    torch.testing.assert_close(run(attention, qkv, mask), run(attention, qkv), rtol=0, atol=1e-12)


@every_attention
@settings(max_examples=10, deadline=None)
@given(length=st.integers(1, 50), padding=st.integers(0, 30), seed=st.integers(0, 2**16))
def test_an_example_depends_neither_on_its_batch_nor_on_its_padding(name, options, length, padding, seed):
    attention = build(name, options)
    qkv, mask = tokens(3, length, seed), holes(3, length, seed)
    alone = [run(attention, [x[i : i + 1] for x in qkv], mask[i : i + 1]) for i in range(3)]
    grow = [torch.cat((x, 5 * torch.randn_like(x[:, :, :1]).expand(-1, -1, padding, -1)), dim=2) for x in qkv]
    together = run(attention, grow, torch.nn.functional.pad(mask, (0, padding)))[:, :, :length]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-9, atol=1e-9)


@every_attention
def test_a_long_example_depends_neither_on_its_batch_nor_on_its_padding(name, options):
    attention, qkv = build(name, options), tokens(2, 301)
    mask = torch.arange(301) < torch.tensor([[301], [170]])
    together = run(attention, qkv, mask)
    short = run(attention, [x[1:, :, :170] for x in qkv])
    torch.testing.assert_close(together[1:, :, :170], short, rtol=1e-9, atol=1e-9)


@every_attention
def test_max_length_matters_only_where_a_fixed_length_is_needed(name, options):
    attention = build(name, options, max_length=20)
    assert attention(*tokens(1, 20)).shape == (1, HEADS, 20, DIM)
    if attention.needs_fixed_length:
        with pytest.raises(
            ValueError, match=r"length 21: .* max_length=20; shorten the input or build it with a larger"
        ):
            attention(*tokens(1, 21))
        with pytest.raises(ValueError, match=r"max_length=None: .* give the longest length"):
            build_attention(name, num_heads=HEADS, head_dim=DIM, **options)
    else:
        assert attention(*tokens(1, 21)).shape == (1, HEADS, 21, DIM)
        build_attention(name, num_heads=HEADS, head_dim=DIM, **options)


@every_attention
def test_a_seed_determines_everything(name, options):
    first, second = (run(build(name, options).train(), tokens(2, 65)) for _ in range(2))
    assert torch.equal(first, second)


@every_attention
def test_randomness_is_declared(name, options):
    outs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        attention = build_attention(name, num_heads=HEADS, head_dim=DIM, max_length=MAX_LENGTH, **options)
        for parameter in attention.parameters():  # their start is random for all; only what comes beside them counts
            torch.nn.init.constant_(parameter, 0.1)
        outs.append(attention.double()(*tokens(2, 65)))
    assert torch.equal(*outs) != attention.stochastic


CAPABILITIES = (
    "cross_attention",
    "has_map",
    "linear",
    "needs_fixed_length",
    "shares_query_key",
    "splits_over_ranks",
    "stochastic",
    "takes_convolution",
    "takes_packed",
)


@every_attention
def test_capabilities_are_declared_and_true(name, options):
    attention, (query, key, value) = build(name, options), tokens(2, 37)
    kind = type(attention)
    assert all(isinstance(getattr(kind, capability), bool) for capability in CAPABILITIES)
    assert kind.name == name
    assert kind.size_option is None or kind.size_option in kind.option_defaults()
    assert options.keys() <= kind.option_defaults().keys()
    assert kind.takes_convolution == ("conv_kernel_size" in kind.option_defaults())
    assert kind.takes_convolution == ("conv_weight" in inspect.signature(kind.operation).parameters)
    out = run(attention, (query, key, value))
    ignores_key = torch.equal(out, run(attention, (query, key.flip(2) + 1, value)))
    assert ignores_key == attention.shares_query_key


@every_attention
def test_the_operation_has_the_one_signature(name, options):
    parameters = list(inspect.signature(ATTENTIONS[name].operation).parameters.values())
    assert [parameter.name for parameter in parameters[:4]] == ["query", "key", "value", "mask"]
    assert parameters[3].default is None
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters[4:])


@every_attention
def test_it_is_exact_up_to_what_it_says_and_not_beyond(name, options):
    attention = build(name, options | ({"conv_kernel_size": None} if ATTENTIONS[name].takes_convolution else {}))
    most = min(attention.exact_up_to, 129)
    for length in (1, most // 2, most):
        if 0 < length <= attention.exact_up_to:
            qkv = tokens(2, length)
            exact = torch.nn.functional.scaled_dot_product_attention(*qkv)
            torch.testing.assert_close(run(attention, qkv), exact, rtol=0, atol=1e-9)
    if attention.exact_up_to < MAX_LENGTH - 8:
        qkv = tokens(2, attention.exact_up_to + 8)
        exact = torch.nn.functional.scaled_dot_product_attention(*qkv)
        assert not torch.allclose(run(attention, qkv), exact, atol=1e-6)


@every_attention
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("length", [5, 65])
def test_its_map_times_values_is_its_output(name, options, length, masked):
    attention = build(name, options | ({"conv_kernel_size": None} if ATTENTIONS[name].takes_convolution else {}))
    (query, key, value), mask = tokens(2, length), holes(2, length) if masked else None
    if not attention.has_map:
        with pytest.raises(ValueError, match="has no attention matrix to show"):
            attention.weights(query, key, [0], mask)
        return
    rows = [0, 3, -1]
    weights = attention.weights(query, key, rows, mask)
    assert weights.shape == (2, HEADS, 3, length)
    torch.testing.assert_close(weights @ zeroed(value, mask), run(attention, (query, key, value), mask)[:, :, rows])
    with torch.inference_mode():
        assert torch.equal(attention.weights(query.clone(), key, rows, mask), weights)


def zeroed(value, mask):
    return value if mask is None else value * mask[:, None, :, None]


@attentions(lambda attention: attention.linear and attention.has_map)
def test_rows_of_its_map_need_linear_memory(name, options):
    attention = build(name, options, torch.float32, heads=1, max_length=2048)
    query, key, _ = tokens(1, 2048, dtype=torch.float32, heads=1)
    with Largest() as mode:
        attention.weights(query, key, [0, 1])
    assert mode.elements < 2048 * 100


@every_attention
def test_cross_attention_works_or_is_refused(name, options):
    attention = build(name, options | ({"conv_kernel_size": None} if ATTENTIONS[name].takes_convolution else {}))
    query, (_, key, value) = tokens(2, 20)[0], tokens(2, 37)
    masks = {"query_mask": holes(2, 20), "key_mask": holes(2, 37)}
    if attention.cross_attention:
        out = attention(query, key, value, **masks)
        assert out.shape == query.shape
        assert not out.masked_select(~masks["query_mask"][:, None, :, None]).any()
        with pytest.raises(ValueError, match="mask was given with 20 queries and 37 keys: mask is for self-attention"):
            attention(query, key, value, masks["query_mask"])
        with pytest.raises(ValueError, match="key_mask was given alone, with as many queries as keys"):
            attention(key, key, value, key_mask=masks["key_mask"])
        with pytest.raises(ValueError, match="key_mask was given beside mask"):
            attention(key, key, value, masks["key_mask"], key_mask=masks["key_mask"])
    else:
        with pytest.raises(ValueError, match="20 queries and 37 keys: must be as many"):
            attention(query, key, value)
        with pytest.raises(ValueError, match=r"key_mask was given: .* is for self-attention"):
            attention(key, key, value, key_mask=masks["key_mask"])


PACKED = [5, 1, 40, 17, 90]


@every_attention
def test_packed_sequences_give_what_each_gives_alone(name, options):
    attention = build(name, options)
    qkv = [x[0].transpose(0, 1).requires_grad_() for x in tokens(1, sum(PACKED))]
    leaves = [*qkv, *attention.parameters()]
    pieces = zip(*(x.split(PACKED) for x in qkv), strict=True)
    alone = [run(attention, [x.transpose(0, 1)[None] for x in piece]) for piece in pieces]
    expected = torch.cat([out[0].transpose(0, 1) for out in alone])
    torch.manual_seed(1)
    packed = attention(*qkv, cu_seqlens=lengths_to_offsets(torch.tensor(PACKED)))
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-9)
    weight = torch.randn(packed.shape, generator=torch.Generator().manual_seed(11)).double()
    found, wanted = (torch.autograd.grad(out, leaves, weight, allow_unused=True) for out in (packed, expected))
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


@every_attention
def test_packed_sequences_are_refused_where_they_do_not_fit(name, options, monkeypatch):
    attention, (x, *_) = build(name, options), tokens(1, 20)
    rows, borders = x[0].transpose(0, 1), torch.tensor([0, 8, 20])
    with pytest.raises(ValueError, match="mask was given with packed sequences, which have no padding: leave it out"):
        attention(rows, rows, rows, holes(1, 20), cu_seqlens=borders)
    with pytest.raises(ValueError, match=r"query has shape \(20, 1, 4\): .* so it must be \(tokens, 2, 4\)"):
        attention(rows[:, :1], rows[:, :1], rows[:, :1], cu_seqlens=borders)
    both = {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
    if attention.cross_attention:
        without = {"conv_kernel_size": None} if attention.takes_convolution else {}
        assert build(name, options | without)(rows, rows, rows, **both).shape == rows.shape
    else:
        with pytest.raises(ValueError, match=r"sequences of queries and of keys were given: .* is for self-attention"):
            attention(rows, rows, rows, **both)
    if attention.needs_fixed_length:
        long = torch.randn(MAX_LENGTH + 1, HEADS, DIM, dtype=torch.float64)
        with pytest.raises(ValueError, match=f"length {MAX_LENGTH + 1}: .* max_length={MAX_LENGTH}"):
            attention(long, long, long, cu_seqlens=torch.tensor([0, MAX_LENGTH + 1]))
        assert attention(long, long, long, cu_seqlens=torch.tensor([0, 5, MAX_LENGTH + 1])).shape == long.shape
    attention.operation = type(attention).operation
    with pytest.raises(ValueError, match=r"with an operation of its own, as where sequences are split over processes"):
        attention(rows, rows, rows, cu_seqlens=borders)
    monkeypatch.setattr(type(attention), "takes_packed", False)
    with pytest.raises(ValueError, match=r"packed sequences were given: .* takes none; give a padded batch and mask"):
        attention(rows, rows, rows, cu_seqlens=borders)


@every_attention
def test_forward_mode_gives_the_derivative_or_is_refused(name, options):
    attention, qkv = build(name, options), tokens(2, 37)
    run_all = lambda *x: run(attention, x)
    tangents = tokens(2, 37, seed=3)
    fixed = {"standard", "nystrom", "nystrom-local", "linformer", "longformer", "agent"}  # those with fused kernels
    if name in fixed:
        with pytest.raises(NotImplementedError, match=r"forward-mode .* was asked for: .*use torch.func.vjp"):
            torch.func.jvp(run_all, tuple(qkv), tuple(tangents))
        return
    out, tangent = torch.func.jvp(run_all, tuple(qkv), tuple(tangents))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(11)).to(out.dtype)
    _, grads = gradients(attention, qkv)
    other_way = sum((x * y).sum() for x, y in zip(grads, tangents, strict=True))
    torch.testing.assert_close((tangent * weight).sum(), other_way)


@every_attention
def test_functional_gradients_are_those_of_backward(name, options):
    attention, qkv, mask = build(name, options), tokens(2, 37), holes(2, 37)
    out, expected = gradients(attention, qkv, mask)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(11)).to(out.dtype)
    found = torch.func.grad(lambda *x: (run(attention, x, mask) * weight).sum(), argnums=(0, 1, 2))(*qkv)
    for first, second in zip(found, expected, strict=True):
        torch.testing.assert_close(first, second)


@every_attention
def test_meta_tensors_give_shapes_without_computing(name, options):
    with torch.device("meta"):
        attention = build(name, options, torch.float32)
        qkv = [torch.empty(2, HEADS, 129, DIM) for _ in "qkv"]
        for mask in (None, torch.ones(2, 129, dtype=torch.bool)):
            leaves = [x.clone().requires_grad_() for x in qkv]
            out = attention(*leaves, mask)
            assert out.is_meta
            assert out.shape == qkv[0].shape
            out.sum().backward()
            assert leaves[2].grad.shape == qkv[2].shape


@linear_attentions
def test_no_tensor_grows_with_the_square_of_the_length(name, options):
    # More than 256 blocks are compared with some of the others only: no square from there on.
    short = 1024 if "chosen_blocks" in options else 512
    attention = build(name, options, torch.float32, heads=1, max_length=4 * short)
    largest = []
    for length in (short, 4 * short):
        with Largest() as mode:
            gradients(attention, tokens(1, length, dtype=torch.float32, heads=1), holes(1, length))
        largest.append(mode.elements)
    assert largest[1] < 6 * largest[0]  # 4 times the length, and whole blocks; a square would be 16


@every_attention
def test_a_saved_state_gives_the_same_output(name, options):
    attention, qkv = build(name, options), tokens(2, 37)
    torch.manual_seed(99)
    other = build_attention(name, num_heads=HEADS, head_dim=DIM, max_length=MAX_LENGTH, **options).double().eval()
    other.load_state_dict(attention.state_dict())
    assert torch.equal(run(attention, qkv), run(other, qkv))


@every_attention
def test_wrong_heads_and_masks_are_refused(name, options):
    attention = build(name, options)
    with pytest.raises(ValueError, match=f"num_heads={HEADS} and head_dim={DIM}, so it must be"):
        attention(*tokens(1, 8, heads=HEADS + 1))
    with pytest.raises(TypeError, match=r"must be torch\.bool"):
        attention(*tokens(1, 8), torch.ones(1, 8))
