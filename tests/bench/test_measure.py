"""Times as measured, of which no test asserts one, and peak memory in a fresh process."""

import pytest

from nystromformer.attention import ATTENTIONS
from nystromformer.bench.cases import Case
from nystromformer.bench.measure import Times, interleaved_times, measure_memory


def test_times_are_interleaved_and_rotate():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = interleaved_times(runs, warm_up=1, max_repeats=3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert all(len(each.seconds) == 3 and each.minimum <= each.median for each in times.values())


def test_a_spent_budget_leaves_the_least_repeats():
    assert len(interleaved_times({"a": lambda: None}, budget=0, min_repeats=4)["a"].seconds) == 4


def test_a_quiet_machine_is_measured_soon_and_a_disturbed_one_for_longer(monkeypatch):
    clock = iter(float(t) for t in range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert len(interleaved_times({"a": lambda: None}, steady=0.1, budget=1e9)["a"].seconds) == 3
    disturbed = Times((1.0, 1.2, 1.3, 1.4))
    assert not disturbed.is_steady(0.1)
    assert Times((*disturbed.seconds, 1.01, 1.02)).is_steady(0.1)


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


def test_what_takes_too_long_is_a_result():
    long = Case(attention="standard", length=32_768)
    assert measure_memory(long, timeout=0.1).failure == "took longer than 1 s"
    assert measure_memory(Case(attention="standard", length=64)).failure == "", "and the next is measured again"


def test_a_fault_says_what_it_is():
    with pytest.raises(RuntimeError, match="failed with exit code 1:\nValueError: length 100: nystrom-attention needs"):
        measure_memory(Case(attention="nystrom-attention", length=100))
