"""What was measured, as tables: ratios to the baselines and the paper's, the newest record, and rows that are ours."""

import pytest

from nystromformer.report.efficiency import (
    LIMIT,
    Entry,
    efficiency_tables,
    measured,
    memory_text,
    nystrom_flops,
    paper_ratio,
    peer_rows,
    ratio,
    time_text,
)
from nystromformer.report.table import tables_markdown

SHARED = {"batch": 1, "heads": 12, "head_dim": 64, "backward": False, "length": 8192}


def timed(attention, seconds, **changes):
    return {"metric": "time", "value": seconds, "minimum": 0.9 * seconds, "attention": attention, **SHARED, **changes}


def peaked(attention, peak, skipped="", failure="", **changes):
    shared = {"metric": "peak_memory", "value": peak, "skipped": skipped, "failure": failure}
    return {**shared, "attention": attention, **SHARED, **changes}


RECORDS = [
    peaked("dense", 8_000_000_000),
    peaked("standard", 25_000_000),
    peaked("nystrom-64", 50_000_000),
    peaked("transformers", 200_000_000),
    peaked("linear", None, failure="out of memory"),
    timed("dense", 2.0),
    timed("standard", 1.5),
    timed("nystrom-64", 0.05),
    timed("transformers", 0.125),
    {"metric": "time", "value": 0.2, "minimum": 0.1, "attention": "gemm", "length": 8192, "flops": 1_000_000_000},
]


def test_ratios_are_to_the_baselines_with_the_papers_beside():
    table = measured(RECORDS)
    assert time_text(table, "nystrom-64", 8192) == "50.0 ms (30.0×) [12.6×]"
    assert memory_text(table, "nystrom-64", 8192) == "50 MB (160.0×) [22.7×]"
    assert memory_text(table, "linear", 8192) == "out of memory"
    assert time_text(table, "linear", 8192) == "out of memory"
    assert time_text(table, "dense", 8192) == "2,000.0 ms (0.8×)"


def test_memory_is_compared_with_the_fused_kernel_where_dense_was_not_run():
    table = measured([r for r in RECORDS if r["attention"] != "dense"])
    assert memory_text(table, "nystrom-64", 8192) == "50 MB (0.5×) [22.7×]"


def test_the_limit_is_the_arithmetic_at_the_speed_of_the_product():
    seconds = measured(RECORDS)[LIMIT][8192].seconds
    assert seconds == pytest.approx(nystrom_flops(SHARED) / 1e9 * 0.1)
    assert LIMIT not in measured([r | {"backward": True} for r in RECORDS])


def test_peers_are_compared_by_time_and_memory():
    assert peer_rows(measured(RECORDS)) == [["transformers", "2.5× time, 4.0× memory"]]


def test_missing_values_have_no_ratio():
    assert ratio(None, 1.0) is None
    assert ratio(1.0, None) is None
    assert paper_ratio("linear", 8192, 0) is None
    assert paper_ratio("nystrom-64", 100, 0) is None
    assert paper_ratio("nystrom-64", 8192, 1) == pytest.approx(155.4 / 12.3)
    assert Entry().seconds is None


def test_markdown_holds_every_cell():
    text = tables_markdown(efficiency_tables(RECORDS))
    assert "| nystrom-64 | 50.0 ms (30.0×) [12.6×] |" in text
    assert "| linear | out of memory |" in text
    assert "| transformers | 2.5× time, 4.0× memory |" in text


def test_the_newest_record_of_a_cell_counts():
    assert measured([*RECORDS, timed("standard", 3.0)])["standard"][8192].seconds == 3.0


def test_our_rows_are_highlighted_and_other_packages_are_not():
    time, memory, peers = efficiency_tables([*RECORDS, peaked("nystrom-local", 10), peaked("nystrom-attention", 10)])
    assert [time.rows[place][0] for place in sorted(time.highlight)] == ["nystrom-64", "nystrom-local"]
    assert time.highlight == memory.highlight
    assert not peers.highlight
    assert [row[0] for row in peers.rows] == ["nystrom-attention", "transformers"]
