"""Pathfinder's contours of 14 paddles after those of 6 and of 9: each set is learned from the model of the one before.

    python benchmarks/pathfinder_curriculum.py --work runs/lra-results --out results/lra/curriculum

The preset `hour` with `nystrom-64`; self-pretraining comes before the first set. It can be stopped at any time and
started again: finished runs are left alone, others resume where they stopped, with as many processes as they began
with. Records, table and curve come to `--out`; models and pictures stay in `--work`. With `OMP_NUM_THREADS=1 torchrun
--nproc-per-node 2` in place of `python` two processes share each batch, which two cores train faster than by threads.
"""

import argparse
import sys
from pathlib import Path

from lra_results import pictures
from result_runs import copy_records, run_each, runs_in

from nystromformer.files import write_text
from nystromformer.records import read_records, result_in
from nystromformer.report.figures import DEV_ACCURACY, Drawing, colors_of, count_steps_and_percent
from nystromformer.report.table import MISSING, Table

STEPS = {6: 3_000, 9: 5_000, 14: 12_000}
"""Of training, by the paddles of a contour, in their order."""


def commands(work: Path) -> dict[str, list[str]]:
    """By the name of a run's folder."""
    made: dict[str, list[str]] = {}
    before = None
    for contour, steps in STEPS.items():
        name = f"contour-{contour}"
        made[name] = ["lra", "pathfinder", "--preset", "hour", "--attention", "nystrom-64", "--steps", str(steps)]
        made[name] += ["--data", str(pictures(work, contour))]
        # What the model before can tell of these pictures is evaluated, too.
        made[name] += [] if before is None else ["--after", str(before), "--set", "eval_on_start=true"]
        before = work / "curriculum" / name
    return made


def publish(work: Path, out: Path) -> None:
    """Copy configurations and records of what is finished, and make table and curve of it."""
    finished = [contour for contour in STEPS if result_in(work / f"contour-{contour}") is not None]
    copy_records(runs_in(*(work / f"contour-{contour}" for contour in finished)), work, out)
    drawing, (axes,) = Drawing.panels(1)
    rows = []
    for contour, color in zip(finished, colors_of(map(str, STEPS)).values(), strict=False):
        records = list(read_records(out / f"contour-{contour}"))
        result = records[-1]
        earlier = result.get("after", {}).get("step", 0)
        points = [
            (earlier + each["step"], each["value"], f"{contour} paddles, step {each['step']:,}: {each['value']:.2%}")
            for each in records
            if each["metric"] == DEV_ACCURACY
        ]
        drawing.line(axes, points, f"{contour} paddles", color=color)
        start = f"{100 * points[0][1]:.2f}" if earlier else MISSING
        scores = [f"{100 * value:.2f}" for value in (result["dev_accuracy"], result["value"])]
        rows.append([contour, f"{result['step']:,}", f"{earlier + result['step']:,}", start, *scores])
    axes.axhline(result["majority"], color="0.5", linestyle=":", linewidth=1, label="chance")
    axes.set(xlabel="steps, from the first set on", ylabel="accuracy on the dev set")
    count_steps_and_percent(axes)
    drawing.legend(axes, 4)
    drawing.save(out / "curve")
    header = ["paddles", "steps", "with those before", "dev before them", "dev at best", "test"]
    write_text(out / "table.md", Table(header, rows).markdown() + "\n")


def run_all() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/lra-results"))
    parser.add_argument("--out", type=Path, default=Path("results/lra/curriculum"))
    options = parser.parse_args()
    return run_each(commands(options.work), publish, options.work / "curriculum", options.out)


if __name__ == "__main__":
    sys.exit(run_all())
