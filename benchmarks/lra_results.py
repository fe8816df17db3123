"""Long Range Arena: five tasks and all attentions at the preset `mini`, and ListOps by the paper's recipe.

    NYSTROMFORMER_DATA=DIR python benchmarks/lra_results.py --work runs/lra-results --out results/lra

About an hour and a half on two cores for `mini`, and more than one hour for each run of `paper`. It can be stopped at
any time and started again: finished runs are left alone, others go on where they stopped. Attention by attention, so
that a column is whole early. `DIR` holds `imdb/`, `cifar10/` and `aan/`; ListOps and Pathfinder are made and need none.
Records, tables and curves come to `--out`; models and data stay behind. `--only mini` or `--only paper` does a part,
`--tasks`, `--attentions` and `--seeds` less. Parts that share no run may run side by side.
"""

import argparse
import sys
from pathlib import Path

from result_runs import copy_records, data_folder, runs_in

from nystromformer.cli import main
from nystromformer.files import write_text
from nystromformer.records import read_records
from nystromformer.report.figures import draw_dev_accuracy
from nystromformer.report.table import tables_markdown
from nystromformer.report.tables import lra_tables

FOLDERS = {"listops": None, "text": "imdb", "retrieval": "aan", "image": "cifar10", "pathfinder": None}
"""Tasks, and where the data of each is that is not made."""
ATTENTIONS = ("nystrom-64", "standard", "nystrom-local-64", "linear", "linformer-256", "longformer-257",
              "performer-256", "reformer-2")  # fmt: skip
"""The paper's, and our own extension."""
PAPER = [("nystrom-64", 1), ("standard", 1), ("nystrom-64", 2), ("nystrom-64", 3)]
"""Runs of ListOps by the paper's recipe: attention and seed."""
SEEDS = sorted({seed for _, seed in PAPER})


def run(preset: str, task: str, attention: str, seed: int, data: Path | None, work: Path) -> int:
    where = ["--data", str(data / FOLDERS[task])] if FOLDERS[task] else []
    out = work / preset / task / attention / f"seed-{seed}"
    given = ["lra", task, "--preset", preset, "--attention", attention, "--seed", str(seed), "--out", str(out)]
    return main([*given, *where, "--resume"])


def publish(preset: str, work: Path, out: Path) -> None:
    """Copy configurations and records, write the table of what is finished, and draw ListOps as far as it is."""
    runs = runs_in(work / preset)
    copy_records(runs, work, out)
    records = list(read_records(*runs))
    write_text(out / preset / "table.md", tables_markdown(lra_tables(records)))
    if preset == "paper":
        draw_dev_accuracy(records, "listops").save(out / preset / "listops")


def run_all() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/lra-results"))
    parser.add_argument("--out", type=Path, default=Path("results/lra"))
    parser.add_argument("--only", choices=("mini", "paper"))
    parser.add_argument("--tasks", nargs="+", choices=FOLDERS, default=list(FOLDERS))
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS, help="of the paper's recipe")
    options = parser.parse_args()
    mini = [("mini", task, attention, 0) for attention in options.attentions for task in options.tasks]
    paper = [
        ("paper", "listops", attention, seed)
        for attention, seed in PAPER
        if attention in options.attentions and seed in options.seeds
    ]
    runs = [each for each in mini + paper if options.only in (None, each[0])]
    data = data_folder("imdb/, cifar10/ and aan/") if any(FOLDERS[task] for _, task, _, _ in runs) else None
    for preset, task, attention, seed in runs:
        if code := run(preset, task, attention, seed, data, options.work):
            return code
        publish(preset, options.work, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_all())
