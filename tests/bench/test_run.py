"""The whole benchmark: every cell recorded, or left out with a reason, and never an empty table."""

import math

import pytest

from nystromformer.bench.measure import Memory
from nystromformer.bench.run import BenchOptions, reason_to_skip, run_bench
from nystromformer.errors import UserError
from nystromformer.records import Recorder, read_records

SMALL = {"heads": 2, "head_dim": 16}


def test_cells_that_would_take_too_long_or_too_much_are_skipped_and_say_so():
    options = BenchOptions(lengths=[8192], attentions=["standard"], cell_limit=1.0)
    seen = {name: (1024, Memory(10**6, 0.5)) for name in ("standard", "nystrom-64")}
    case = options.case("standard", 8192)
    assert reason_to_skip(case, seen, options) == "would take about 32 s per call"  # 8² times 0.5
    assert reason_to_skip(options.case("nystrom-64", 8192), seen, options) == "would take about 4 s per call"
    huge = {"standard": (1024, Memory(10**13, 0.001))}
    assert "GiB of" in reason_to_skip(case, huge, options)
    assert "divisible" in reason_to_skip(options.case("transformers", 100), {}, options)


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["budget", "cell_limit"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_limits_are_numbers(name, value):
    with pytest.raises(ValueError, match=name):
        BenchOptions(lengths=[64], attentions=["standard"], **{name: value})


def test_inputs_that_fit_no_memory_are_refused_before_anything_is_measured():
    with pytest.raises(ValueError, match="the smallest input alone would need"):
        BenchOptions(lengths=[10**6], attentions=["standard"], batch=10**6)


def test_a_benchmark_of_which_nothing_is_left_is_an_error(tmp_path):
    options = BenchOptions(lengths=[100], attentions=["transformers"], **SMALL)
    with pytest.raises(UserError, match="nothing could be measured .transformers, n = 100: needs a length divisible"):
        run_bench(options, Recorder(tmp_path, job="bench", config={}))
    assert [record["value"] for record in read_records(tmp_path)] == [None], "the reason is recorded"


def test_a_cell_that_is_too_slow_at_a_short_length_is_not_tried_at_a_long_one(monkeypatch):
    monkeypatch.setattr("nystromformer.bench.run.measure_memory", lambda case, timeout: Memory(None, None, "too slow"))
    options = BenchOptions(lengths=[8192], attentions=["standard"], **SMALL)
    assert reason_to_skip(options.case("standard", 8192), {}, options) == "too slow at n = 1,024"
