"""Cases, times and memory as measured; no test asserts a time."""

import pytest
import torch

from nystromformer.attention import ATTENTIONS
from nystromformer.bench import cases
from nystromformer.bench.cases import Case, make_inputs, parse_lengths, prepare
from nystromformer.bench.measure import Memory, interleaved_times, measure_memory
from nystromformer.bench.run import BenchOptions, reason_to_skip, run_bench
from nystromformer.records import Recorder, read_records

SMALL = {"heads": 2, "head_dim": 16}
EVERYTHING = [*ATTENTIONS, "dense", "nystrom-attention", "transformers"]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("attention", EVERYTHING)
def test_every_attention_and_peer_computes_what_is_asked_for(attention, backward, monkeypatch):
    """What is timed is an output for each token that depends on the input, and its gradients only where asked."""
    forward, gradient, outs, gradients = cases._forward, torch.autograd.grad, [], []

    def watched_forward(case, inputs):
        call, parameters = forward(case, inputs)
        return lambda: outs.append(call()) or outs[-1], parameters

    def watched_gradient(*arguments, **options):
        gradients.extend(gradient(*arguments, **options))

    monkeypatch.setattr(cases, "_forward", watched_forward)
    monkeypatch.setattr(torch.autograd, "grad", watched_gradient)
    for seed in (0, 1):
        prepare(Case(attention=attention, length=128, backward=backward, seed=seed, **SMALL))()
    first, second = outs
    assert first.shape == (1, 128, 2 * 16)
    assert first.isfinite().all()
    assert (first - second).norm() > 0.1 * first.norm()
    assert first.requires_grad == backward
    if backward:
        value = gradients[2]
        assert value.shape == first.shape
        assert value.isfinite().all()
        assert value.any(dim=-1).all(), "each token's value reaches the output"
    else:
        assert not gradients


def test_peers_compute_on_the_given_tensors():
    """The stand-ins for projections reach the peer: its result is our operation's, with its scaling."""
    from nystromformer import nystrom_attention
    from nystromformer.bench.cases import _forward

    case = Case(attention="transformers", length=128, **SMALL)
    inputs = make_inputs(case)
    forward, (kernel,) = _forward(case, inputs)
    split = lambda x: x.view(1, 128, 2, 16).transpose(1, 2)
    query, key, value = split(inputs.query), split(inputs.key), split(inputs.value)
    ours = nystrom_attention(query, key, value, conv_weight=kernel, pinv_scaling="batch")
    torch.testing.assert_close(forward(), ours.transpose(1, 2).flatten(2), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if ATTENTIONS[name].linear])
def test_memory_grows_linearly_with_the_length(attention):
    """Forward and backward between n = 2,048 and n = 8,192: four times the length, about four times the memory."""
    short, long = (
        measure_memory(Case(attention=attention, length=n, heads=4, backward=True)).bytes for n in (2048, 8192)
    )
    assert 1.5 * short < long < 5.5 * short


def test_dense_attention_shows_that_the_memory_test_can_fail():
    short, long = (measure_memory(Case(attention="dense", length=n, heads=4)).bytes for n in (512, 2048))
    assert long > 9 * short


def test_memory_of_a_call_counts_what_it_makes():
    case = Case(attention="standard", length=8192, heads=4)
    output = 8192 * 4 * 64 * 4
    assert output <= measure_memory(case).bytes < 2 * output


def test_times_are_interleaved_and_rotate():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = interleaved_times(runs, warm_up=1, max_repeats=3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert all(len(each.seconds) == 3 and each.minimum <= each.median for each in times.values())


def test_a_spent_budget_leaves_the_least_repeats():
    assert len(interleaved_times({"a": lambda: None}, budget=0, min_repeats=4)["a"].seconds) == 4


def test_cells_that_would_take_too_long_or_too_much_are_skipped_and_say_so():
    options = BenchOptions(lengths=[8192], attentions=["standard"], cell_limit=1.0)
    seen = {name: (1024, Memory(10**6, 0.5)) for name in ("standard", "nystrom-64")}
    case = options.case("standard", 8192)
    assert reason_to_skip(case, seen, options) == "would take about 32 s a call"  # 8² times 0.5
    assert reason_to_skip(options.case("nystrom-64", 8192), seen, options) == "would take about 4 s a call"
    huge = {"standard": (1024, Memory(10**13, 0.001))}
    assert "GiB of" in reason_to_skip(case, huge, options)
    assert "divisible" in reason_to_skip(options.case("transformers", 100), {}, options)


def test_a_run_records_every_cell(tmp_path):
    options = BenchOptions(lengths=[64, 100], attentions=["standard", "transformers"], budget=0.1, **SMALL)
    labels = []
    run_bench(options, Recorder(tmp_path, job="bench", config={}), labels.append)
    records = list(read_records(tmp_path))
    found = {(r["metric"], r["attention"], r["length"]) for r in records}
    assert ("time", "standard", 100) in found
    assert ("time", "transformers", 64) in found
    assert ("time", "transformers", 100) not in found
    (skipped,) = [r for r in records if r.get("skipped")]
    assert (skipped["attention"], skipped["length"], skipped["value"]) == ("transformers", 100, None)
    assert len(labels) == 2 * (2 + 1)


@pytest.mark.parametrize("text", ["0", "a", "", "512,-1", "1.5"])
def test_lengths_must_be_whole_and_positive(text):
    with pytest.raises(ValueError, match="--lengths"):
        parse_lengths(text)
