"""Attention over a sequence on three ranks equals that of one process, forward and backward."""

import pytest
import torch
from ranks import run_on_ranks
from sharded_attention import CASES, in_one_process, on_ranks, sent_for_lengths

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_on_ranks(on_ranks, 3, tmp_path_factory.mktemp("attention"))


def joined(results, name, what):
    """A result of all ranks: rows one after another, the kernel's gradient as the sum."""
    parts = [results[rank][name][what] for rank in CASES[name].members]
    return sum(parts) if what == "kernel" else torch.cat(parts, dim=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype in TOLERANCES])
def test_output_and_gradients_equal_those_of_one_process(results, name):
    tolerance = TOLERANCES[CASES[name].dtype]
    for what, expected in in_one_process(CASES[name]).items():
        found = joined(results, name, what)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda m, w=what: f"{w}: {m}")


def test_half_precision_stays_as_close_as_in_one_process(results):
    """Both are compared with the float32 result of the same numbers."""
    from dataclasses import replace

    case = CASES["bfloat16"]
    one = in_one_process(case)
    found = joined(results, "bfloat16", "out")
    assert found.dtype == one["out"].dtype == torch.bfloat16
    exact = in_one_process(replace(case, dtype=torch.float32))["out"]
    error = lambda x: float((x.float() - exact).norm() / exact.norm())
    assert error(found) < max(1.5 * error(one["out"]), 0.02)
    assert all(torch.isfinite(joined(results, "bfloat16", what)).all() for what in one)


def test_what_a_rank_sends_does_not_depend_on_the_length(tmp_path):
    for counted in run_on_ranks(sent_for_lengths, 3, tmp_path, [60, 600, 6000]):
        (short, _), (_, _), (long, by_sockets) = counted
        assert short == long
        # 2 (r - 1) / r = 4/3 of: Q̃ and K̃, and the largest, the weighted values and the weights; twice with backward
        numbers = 2 * 4 * 16  # b h m
        assert long["landmarks"] == pytest.approx(2 * 4 / 3 * 4 * numbers * 2 * 16, abs=4)
        assert long["merge"] == pytest.approx(4 / 3 * 4 * numbers * (1 + 2 * 17), abs=4)
        # the kernel's half of 4 rows to each neighbor, 2 · 4 · 16 numbers a row
        assert long["halo"] in {2 * 4 * 4 * 128, 2 * 2 * 4 * 4 * 128}
        # headers and acknowledgements of the transport come on top
        assert sum(long.values()) <= by_sockets <= 1.1 * sum(long.values()) + 4096
