"""Borders of packed sequences: what is accepted, what is refused, and the room that graphs give each sequence. Padded
batches whose examples are computed alone."""

import pytest
import torch

from nystromformer import build_attention, nystrom_attention_varlen
from nystromformer.attention import nystrom_attention
from nystromformer.attention.native import library
from nystromformer.attention.shared import varlen
from nystromformer.attention.shared.varlen import Packing, lengths_to_offsets, packed_input, packing
from nystromformer.bench.measure import Kernels

LENGTHS = [3, 1, 4]
BORDERS = torch.tensor([0, 3, 4, 8], dtype=torch.int32)


def rows(tokens=8, heads=2, width=4):
    return torch.arange(tokens * heads * width, dtype=torch.float64).view(tokens, heads, width)


def sequences():
    return packing("cu_seqlens", BORDERS, rows())


def test_borders_become_lengths_owners_and_ranks():
    assert sequences().lengths == LENGTHS
    assert sequences().owner.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert sequences().rank.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert torch.equal(lengths_to_offsets(torch.tensor(LENGTHS)), BORDERS)


@pytest.mark.parametrize(
    "spread, places",
    [
        (lambda packed: packed.chunked(3), [0, 1, 2, 3, 6, 7, 8, 9]),
        (lambda packed: packed.spaced(2), [0, 1, 2, 5, 8, 9, 10, 11]),
        (lambda packed: packed.padded(5), [0, 1, 2, 5, 10, 11, 12, 13]),
    ],
    ids=["chunked", "spaced", "padded"],
)
def test_tokens_go_to_their_places_and_come_back(spread, places):
    room, x = spread(sequences()), rows()
    assert room.place.tolist() == places
    assert room.present.nonzero().flatten().tolist() == places
    assert room.places > max(places)
    assert torch.equal(room.collect(room.spread(x)), x)
    assert not room.spread(x)[~room.present].any()
    assert room.owner_of(room.place).tolist() == sequences().owner.tolist()


@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [1, 6, 13, 2, 1], [20, 1]], ids=str)
def test_chunks_have_room_for_any_lengths_of_as_many_tokens_and_sequences(lengths):
    packed = packing("cu_seqlens", lengths_to_offsets(torch.tensor(lengths)), rows(sum(lengths)))
    room = packed.chunked(6)
    assert room.places % 6 == 0
    owners = torch.full((room.places,), -1).index_copy(0, room.place, packed.owner).view(-1, 6)
    for chunk, owner in zip(owners, room.owner_of(torch.arange(0, room.places, 6)), strict=True):
        assert set(chunk.tolist()) <= {-1, int(owner)}


def test_the_given_borders_are_left_alone_and_may_be_of_64_bits():
    packed = packing("cu_seqlens", BORDERS.long(), rows())
    assert isinstance(packed, Packing)
    assert packed.number == 3


@pytest.mark.parametrize(
    "borders, error, message",
    [
        ([0, 3, 8], TypeError, r"cu_seqlens is a list: must be a torch.Tensor, as torch.tensor\(\[0, 3, 4, 8\]"),
        (torch.tensor([0.0, 8.0]), TypeError, "cu_seqlens has dtype torch.float32: must be torch.int32 or torch.int64"),
        (torch.tensor([0]), ValueError, r"cu_seqlens has shape \(1\): must be \(sequences \+ 1,\)"),
        (torch.tensor([[0, 8]]), ValueError, r"cu_seqlens has shape \(1, 2\)"),
        (torch.tensor([0, 3, 7]), ValueError, "cu_seqlens goes from 0 to 7: must go from 0 to 8, the number of tokens"),
        (torch.tensor([1, 8]), ValueError, "cu_seqlens goes from 1 to 8"),
        (torch.tensor([0, 3, 3, 8]), ValueError, "sequence 1 is empty: every sequence must have a token; leave it out"),
        (torch.tensor([0, 5, 3, 8]), ValueError, "sequence 1 is -2 tokens long"),
        (torch.tensor([0, 8], device="meta"), ValueError, "cu_seqlens is on meta, the tokens on cpu"),
    ],
)
def test_wrong_borders_say_what_is_allowed(borders, error, message):
    x = rows()
    with pytest.raises(error, match=message):
        nystrom_attention_varlen(x, x, x, borders)


def test_wrong_tensors_say_what_is_allowed():
    x = rows()
    with pytest.raises(ValueError, match=r"query has shape \(1, 2, 8, 4\): packed sequences must have 3 dimensions"):
        nystrom_attention_varlen(x.transpose(0, 1)[None], x, x, BORDERS)
    with pytest.raises(TypeError, match="key has dtype torch.int64: must be float16"):
        nystrom_attention_varlen(x, x.long(), x, BORDERS)
    with pytest.raises(ValueError, match="value has length 7, key has 8: must be equal"):
        nystrom_attention_varlen(x, x, x[:7], BORDERS)
    with pytest.raises(ValueError, match="cu_seqlens was given with 8 queries and 7 keys: must be as many"):
        nystrom_attention_varlen(x, x[:7], x[:7], BORDERS)


def test_one_kind_of_borders_is_given():
    x = rows()
    for given, named in (({}, "no cu_seqlens"), ({"cu_seqlens_k": BORDERS}, "cu_seqlens_k")):
        with pytest.raises(ValueError, match=f"{named} given: give cu_seqlens for self-attention, or cu_seqlens_q"):
            packed_input(x, x, x, **given)
    with pytest.raises(ValueError, match="cu_seqlens_q has 3 sequences and cu_seqlens_k 2: must be as many"):
        packed_input(x, x, x, None, BORDERS, torch.tensor([0, 3, 8]))


def nested(x, axis=1):
    jagged = torch.nested.nested_tensor_from_jagged(x, BORDERS.long())
    return jagged if axis == 1 else jagged.transpose(1, 2)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("name", ["nystrom-2", "nystrom-local-2", "standard"])
def test_nested_tensors_give_nested_tensors_of_the_same_form(name, axis):
    attention = build_attention(name, num_heads=2, head_dim=4).double()
    leaves = [x.clone().requires_grad_() for x in (rows().sin(), rows().cos(), rows().sin())]
    out = attention(*(nested(x, axis) for x in leaves))
    expected = attention(*leaves, cu_seqlens=BORDERS)
    assert out.is_nested
    assert [tuple(each.shape) for each in out.unbind()] == [
        (length, 2, 4) if axis == 1 else (2, length, 4) for length in LENGTHS
    ]
    assert torch.equal(out.values() if axis == 1 else out.values().transpose(0, 1), expected)
    found = torch.autograd.grad(out.values().sin().sum(), leaves)
    for x, y in zip(found, torch.autograd.grad(expected.sin().sum(), leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_wrong_nested_tensors_say_what_is_allowed():
    x = rows()
    with pytest.raises(TypeError, match="key is no nested tensor of the jagged layout, as others are"):
        nystrom_attention_varlen(nested(x), x, x)
    with pytest.raises(ValueError, match="cu_seqlens was given with nested tensors, which know their borders"):
        nystrom_attention_varlen(nested(x), nested(x), nested(x), BORDERS)
    flat = torch.nested.nested_tensor_from_jagged(x.flatten(1), BORDERS.long())
    with pytest.raises(ValueError, match="query is nested with 3 dimensions: must be"):
        nystrom_attention_varlen(flat, flat, flat)


SPANS = [(0, 60), (5, 90), (30, 40), (0, 0), (0, 90)]


def mask_of(spans, n=90):
    place = torch.arange(n)
    return torch.stack([(first <= place) & (place < after) for first, after in spans])


def inputs(batch, layout="projections", n=90, e=6):
    generator = torch.Generator().manual_seed(0)
    draw = lambda width: torch.randn(batch, n, 2, width, dtype=torch.float64, generator=generator)
    tensors = [draw(width).transpose(1, 2) for width in (4, 4, e)]
    if layout == "heads first":
        tensors = [x.contiguous() for x in tensors]
    return [x.requires_grad_() for x in tensors]


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(varlen, "SMALLEST_EXAMPLE", 0)


def test_spans_of_valid_tokens():
    assert varlen.valid_spans(mask_of(SPANS)) == SPANS
    with_a_hole = mask_of(SPANS)
    with_a_hole[1, 50] = False
    assert varlen.valid_spans(with_a_hole) is None


def test_calls_of_their_own_pay_for_large_examples_alone():
    assert not varlen.own_calls_pay(torch.zeros(5, 2, 90, 4))
    assert varlen.own_calls_pay(torch.zeros(1, 8, 1024, 64))


@pytest.mark.parametrize("layout", ["projections", "heads first"])
@pytest.mark.parametrize("options", [{}, {"landmarks": "kmeans"}, {"exact_below": 70}], ids=str)
def test_result_and_gradients_equal_those_of_the_masked_batch(monkeypatch, layout, options):
    """By PyTorch's operations; machine code takes examples of any size (tests/attention/test_native.py)."""
    monkeypatch.setattr(library, "_set", None)
    mask = mask_of(SPANS)
    kernel = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    results = []
    for smallest in (2**19, 0):
        monkeypatch.setattr(varlen, "SMALLEST_EXAMPLE", smallest)
        tensors = inputs(5, layout)
        with Kernels() as kernels:
            out = nystrom_attention(*tensors, mask, num_landmarks=8, conv_weight=kernel, **options)
        assert ("aten.cumsum.default" in kernels.names) == (smallest > 0), "only the masked batch ranks its tokens"
        results.append([out, *torch.autograd.grad(out.sin().sum(), [*tensors, kernel])])
    for together, alone in zip(*results, strict=True):
        torch.testing.assert_close(alone, together)


def test_what_padding_holds_changes_nothing_and_its_rows_are_zero(any_size):
    mask = mask_of(SPANS)
    tensors = inputs(5)
    spoiled = [x.detach().masked_fill(~mask[:, None, :, None], float("nan")).requires_grad_() for x in tensors]
    results = []
    for given in (tensors, spoiled):
        out = nystrom_attention(*given, mask, num_landmarks=8)
        results.append([out, *torch.autograd.grad(out.sum(), given)])
    for clean, same in zip(*results, strict=True):
        torch.testing.assert_close(same, clean, rtol=0, atol=0)
        assert (same.detach().transpose(1, 2)[~mask] == 0).all()


def test_without_any_padding_the_batch_is_computed_together(any_size):
    tensors = inputs(2)
    masked = nystrom_attention(*tensors, torch.ones(2, 90, dtype=torch.bool), num_landmarks=8)
    torch.testing.assert_close(masked, nystrom_attention(*tensors, num_landmarks=8), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_masks_that_python_cannot_look_at_are_left_to_the_batch(any_size):
    mask = mask_of([(0, 60), (5, 90)])
    query, key, value = (x.detach() for x in inputs(2))
    run = lambda mask: nystrom_attention(query, key, value, mask, num_landmarks=8)
    torch.testing.assert_close(torch.func.vmap(run)(mask[None])[0], run(mask))
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(mask), run(mask))


def test_scaling_by_the_batch_keeps_the_batch_together(any_size):
    query, key, value = (x.detach() for x in inputs(2))
    mask = mask_of([(0, 60), (5, 90)])
    by_batch = nystrom_attention(query, key, value, mask, num_landmarks=8, pinv_scaling="batch")
    alone = [nystrom_attention(*(x[i : i + 1] for x in (query, key, value, mask)), num_landmarks=8) for i in (0, 1)]
    assert (by_batch - torch.cat(alone)).abs().max() > 1e-6
