"""Times as measured; no test asserts a time."""

from nystromformer.bench.measure import Times, interleaved_times


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
