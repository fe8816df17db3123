"""MiniLM distilled into linear attention: both attentions, with and without each stage, and at four times its length.

    NYSTROMFORMER_DATA=DIR python benchmarks/distill_results.py --work runs/distill-results --out results/distill

Each run is the preset `mini`, some ten minutes of one core; see `RUNS`. It can be stopped at any time and
started again: finished runs are left alone, others resume where they stopped. `DIR` holds `wikipedia/`, to train on and
with held-out articles to judge by, and `imdb/`, another kind of text to judge by. Records, table and plot come to
`--out`; models stay in `--work`. `--only nystrom` does a part, `--steps N` a trial.
"""

import argparse
import sys
from pathlib import Path

from result_runs import copy_records, data_folder, run_each, runs_in, weights_folder

from nystromformer.files import write_text
from nystromformer.records import read_records
from nystromformer.report.figures import draw_distillation
from nystromformer.report.table import tables_markdown
from nystromformer.report.tables import distillation_tables

LONG = ["--max-length", "2048", "--batch-size", "1", "--steps", "120", "--test-examples", "40", "--eval-every", "60"]
END_TO_END = ["--stages", "model", "--steps", "270"]
LAYERS = ["--stages", "layers", "--steps", "800"]
"""One stage for as long as both take: a step of layers costs a third. End to end alone is plain training towards the
teacher."""
RUNS: dict[str, list[str]] = {
    "nystrom": ["--attention", "nystrom-64"],
    "nystrom-local": ["--attention", "nystrom-local-64"],
    "nystrom-end-to-end": ["--attention", "nystrom-64", *END_TO_END],
    "nystrom-layers": ["--attention", "nystrom-64", *LAYERS],
    "nystrom-local-2048": ["--attention", "nystrom-local-64", *LONG],
    "nystrom-local-end-to-end": ["--attention", "nystrom-local-64", *END_TO_END],
    "nystrom-local-layers": ["--attention", "nystrom-local-64", *LAYERS],
}

WITH_REVIEWS = ("nystrom", "nystrom-local")
"""Judged by another kind of text, too; the others by held-out articles alone. Reviews of films are short."""


def publish(work: Path, out: Path) -> None:
    """Copy configurations and records, and make table and plot of all that `out` then holds."""
    copy_records(runs_in(*(work / name for name in RUNS if (work / name / "table.md").exists())), work, out)
    published = runs_in(*(out / name for name in RUNS))
    write_text(out / "table.md", tables_markdown(distillation_tables(read_records(*published))))
    for name, drawing in draw_distillation(read_records(*published)).items():
        drawing.save(out / name)


def run_all() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/distill-results"))
    parser.add_argument("--out", type=Path, default=Path("results/distill"))
    parser.add_argument("--only", choices=RUNS, action="append")
    parser.add_argument("--steps", type=int, help="another number of steps, for a trial")
    options = parser.parse_args()
    data = data_folder("wikipedia/ and imdb/")
    common = ["--model", str(weights_folder(options.work)), "--corpus", str(data / "wikipedia"), "--preset", "mini"]
    trial = [] if options.steps is None else ["--steps", str(options.steps)]
    reviews = {name: ["--judge", str(data / "imdb")] for name in WITH_REVIEWS}
    commands = {
        name: ["distill", *common, *reviews.get(name, []), *RUNS[name], *trial] for name in options.only or RUNS
    }
    return run_each(commands, publish, options.work, options.out)


if __name__ == "__main__":
    sys.exit(run_all())
