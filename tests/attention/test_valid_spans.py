"""Examples of a padded batch, each computed alone on its valid tokens: the same result as the batch with its mask."""

import pytest
import torch

from nystromformer.attention import nystrom_attention, valid_spans
from nystromformer.bench.measure import Kernels

LENGTHS = [(0, 60), (5, 90), (30, 40), (0, 0), (0, 90)]


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
    monkeypatch.setattr(valid_spans, "SMALLEST_EXAMPLE", 0)


def test_spans_of_valid_tokens(any_size):
    tokens = torch.zeros(5, 2, 90, 4)
    assert valid_spans.valid_spans(mask_of(LENGTHS), tokens) == LENGTHS
    with_a_hole = mask_of(LENGTHS)
    with_a_hole[1, 50] = False
    assert valid_spans.valid_spans(with_a_hole, tokens) is None
    assert valid_spans.valid_spans(None, tokens) is None
    assert valid_spans.valid_spans(mask_of(LENGTHS).to("meta"), tokens) is None


def test_small_examples_stay_together():
    assert valid_spans.valid_spans(mask_of(LENGTHS), torch.zeros(5, 2, 90, 4)) is None


@pytest.mark.parametrize("layout", ["projections", "heads first"])
@pytest.mark.parametrize("options", [{}, {"landmarks": "kmeans"}, {"exact_below": 70}], ids=str)
def test_result_and_gradients_equal_those_of_the_masked_batch(monkeypatch, layout, options):
    mask = mask_of(LENGTHS)
    kernel = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    results = []
    for smallest in (2**19, 0):
        monkeypatch.setattr(valid_spans, "SMALLEST_EXAMPLE", smallest)
        tensors = inputs(5, layout)
        with Kernels() as kernels:
            out = nystrom_attention(*tensors, mask, num_landmarks=8, conv_weight=kernel, **options)
        assert ("aten.cumsum.default" in kernels.names) == (smallest > 0), "only the masked batch ranks its tokens"
        results.append([out, *torch.autograd.grad(out.sin().sum(), [*tensors, kernel])])
    for together, alone in zip(*results, strict=True):
        torch.testing.assert_close(alone, together)


def test_what_padding_holds_changes_nothing_and_its_rows_are_zero(any_size):
    mask = mask_of(LENGTHS)
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
