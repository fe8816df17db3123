"""Pathfinder's contours of 14 paddles after those of 6 and of 9: each set is learned from the model of the one before.

    python benchmarks/pathfinder_curriculum.py --work runs/lra-results --out results/lra/curriculum

The preset `hour`; self-pretraining comes before the first set. It can be stopped at any time and started again:
finished runs are left alone, others resume where they stopped, with as many processes as they began with. Records,
table and curve come to `--out`; models and pictures stay in `--work`. With `OMP_NUM_THREADS=1 torchrun
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

STEPS = {6: 3_000, 9: 4_000, 14: 8_000}
"""Of training, by the paddles of a contour, in their order."""
ATTENTIONS = ("nystrom-64", "nystrom-local-64")


def folder_of(attention: str, contour: int) -> Path:
    return Path(attention, f"contour-{contour}")


def commands(work: Path, attentions: list[str]) -> dict[str, list[str]]:
    """By the name of a run's folder."""
    made: dict[str, list[str]] = {}
    for attention in attentions:
        after: list[str] = []
        for contour, steps in STEPS.items():
            name = str(folder_of(attention, contour))
            made[name] = ["lra", "pathfinder", "--preset", "hour", "--attention", attention, "--steps", str(steps)]
            made[name] += ["--data", str(pictures(work, contour)), *after]
            # What the model before can tell of the next pictures is evaluated, too.
            after = ["--after", str(work / "curriculum" / name), "--set", "eval_on_start=true"]
    return made


def publish(work: Path, out: Path) -> None:
    """Copy configurations and records of what is finished, and make table and curves of it."""
    done = {name: [c for c in STEPS if result_in(work / folder_of(name, c)) is not None] for name in ATTENTIONS}
    done = {attention: contours for attention, contours in done.items() if contours}
    colors = colors_of(map(str, STEPS))
    drawing, panels = Drawing.panels(len(done))
    rows = []
    for axes, (attention, contours) in zip(panels, done.items(), strict=True):
        for contour in contours:
            run = folder_of(attention, contour)
            copy_records(runs_in(work / run), work, out)
            records = list(read_records(out / run))
            result = records[-1]
            earlier = result.get("after", {}).get("step", 0)
            points = [
                (
                    earlier + each["step"],
                    each["value"],
                    f"{contour} paddles, step {each['step']:,}: {each['value']:.2%}",
                )
                for each in records
                if each["metric"] == DEV_ACCURACY
            ]
            drawing.line(axes, points, f"{contour} paddles", color=colors[str(contour)])
            start = f"{100 * points[0][1]:.2f}" if earlier else MISSING
            scores = [f"{100 * value:.2f}" for value in (result["dev_accuracy"], result["value"])]
            rows.append([attention, contour, f"{result['step']:,}", f"{earlier + result['step']:,}", start, *scores])
        axes.axhline(result["majority"], color="0.5", linestyle=":", linewidth=1, label="most frequent class")
        axes.set_title(attention, fontsize=11, loc="left")
        axes.set(xlabel="steps, from the first set on", ylabel="accuracy on the dev set")
        count_steps_and_percent(axes)
    drawing.legend(panels[0], 4)
    drawing.save(out / "curve")
    header = ["attention", "paddles", "steps", "with those before", "dev before them", "dev at best", "test"]
    write_text(out / "table.md", Table(header, rows).markdown() + "\n")


def run_all() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/lra-results"))
    parser.add_argument("--out", type=Path, default=Path("results/lra/curriculum"))
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    options = parser.parse_args()
    made = commands(options.work, options.attentions)
    return run_each(made, publish, options.work / "curriculum", options.out)


if __name__ == "__main__":
    sys.exit(run_all())
