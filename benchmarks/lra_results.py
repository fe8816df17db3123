"""Long Range Arena: the runs that the published tables are made of, attention by attention, resumed by one command.

    NYSTROMFORMER_DATA=DIR python benchmarks/lra_results.py --work runs/lra-results --out results/lra

Six parts, in this order; `--only` does one of them:

- `mini`: five tasks and all attentions, about an hour and a half on two cores.
- `self-pretrained`: the preset `mini` after as many steps of self-pretraining, ListOps with all attentions, Text and
  Retrieval with four of them; self_pretraining_picture.py draws what it changed.
- `hour`: Image and Pathfinder with the paper's lengths, about an hour a run.
- `pathfinder`: the preset `hour` on pictures with shorter contours (pathfinder_curriculum.py goes on to longer ones).
- `paper`: ListOps and Text by the paper's recipe, two hours or more a run; ListOps after self-pretraining and packed,
  too.
- `packed`: ListOps of the preset `mini`, batches grouped by length and packed; minutes.

It can be stopped at any time and started again: finished runs are left alone, others resume where they stopped, days
later if need be. `DIR` holds `imdb/`, `cifar10/` and `aan/`; ListOps and Pathfinder are made and need none. Records,
tables and curves come to `--out`, of finished runs alone unless `--unfinished` is given; models and data stay in
`--work`. `--tasks`, `--attentions` and `--seeds` do less. Parts that share no run may run side by side. Processes may
share the batches of one: with `OMP_NUM_THREADS=1 torchrun --nproc-per-node 2` in place of `python` two cores train
faster than by two threads.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from result_runs import copy_records, data_folder, is_first_process, runs_in
from self_pretraining_picture import PICTURE, draw_change

from nystromformer.cli import main
from nystromformer.files import write_text
from nystromformer.records import read_records, result_in
from nystromformer.report.figures import draw_dev_accuracy
from nystromformer.report.table import tables_markdown
from nystromformer.report.tables import lra_tables
from nystromformer.training.self_pretraining import FOLDER

DATA = {"text": "imdb", "retrieval": "aan", "image": "cifar10"}
"""Where the data of the tasks is that is not made."""
TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
ATTENTIONS = ("nystrom-64", "standard", "nystrom-local-64", "linear", "linformer-256", "longformer-257",
              "performer-256", "reformer-2")  # fmt: skip
"""The paper's, and our own extension."""


@dataclass(frozen=True)
class Run:
    part: str
    task: str
    attention: str
    seed: int = 0
    preset: str = ""
    """That of the same name as the part, unless given."""
    self_pretrain: int = 0
    contour: int = 0
    """Pathfinder's, where it is not the preset's."""
    packed: int = 0
    """Tokens of a step, packed without padding, in place of examples."""

    @property
    def folder(self) -> Path:
        variant = self.attention + (f"-self-pretrained-{self.self_pretrain}" if self.self_pretrain else "")
        variant += f"-packed-{self.packed}" if self.packed else ""
        return Path(self.part, f"contour-{self.contour}" if self.contour else self.task, variant, f"seed-{self.seed}")

    def arguments(self, data: Path | None, work: Path) -> list[str]:
        given = ["lra", self.task, "--preset", self.preset or self.part, "--attention", self.attention]
        given += ["--seed", str(self.seed), "--out", str(work / self.folder), "--resume"]
        if self.self_pretrain:
            given += ["--self-pretrain", str(self.self_pretrain)]
        if self.contour:
            given += ["--data", str(pictures(work, self.contour))]
        if self.packed:
            given += ["--packed", str(self.packed)]
        return given + (["--data", str(data / DATA[self.task])] if data and self.task in DATA else [])

    def is_finished(self, work: Path) -> bool:
        return result_in(work / self.folder) is not None


RUNS = [
    *(Run("mini", task, attention) for attention in ATTENTIONS for task in TASKS),
    *(Run("self-pretrained", "listops", attention, preset="mini", self_pretrain=600) for attention in ATTENTIONS),
    *(
        Run("self-pretrained", task, attention, preset="mini", self_pretrain=600)
        for task in ("text", "retrieval")
        for attention in ("nystrom-64", "linformer-256", "standard", "nystrom-local-64")
    ),
    *(Run("hour", "image", attention) for attention in ("nystrom-64", "standard", "nystrom-local-64")),
    *(Run("hour", "pathfinder", attention) for attention in ("nystrom-64", "nystrom-local-64")),
    Run("pathfinder", "pathfinder", "nystrom-64", preset="hour", contour=6),
    Run("pathfinder", "pathfinder", "nystrom-local-64", preset="hour", contour=6),
    Run("paper", "listops", "nystrom-64", 1),
    Run("paper", "text", "nystrom-64", 1),
    Run("paper", "listops", "standard", 1),
    *(Run("paper", "listops", "nystrom-64", seed) for seed in (2, 3)),
    Run("paper", "listops", "linformer-256", 1),
    Run("paper", "listops", "nystrom-64", 1, self_pretrain=2_500),
    *(Run("packed", "listops", "nystrom-64", seed, "mini", packed=tokens) for seed in (0, 1) for tokens in (0, 2_600)),
    Run("paper", "listops", "nystrom-64", 1, packed=33_000),
]
PARTS = tuple(dict.fromkeys(run.part for run in RUNS))
PICTURES = 100_000
"""Of a set with shorter contours."""


def pictures(work: Path, contour: int) -> Path:
    """Pathfinder with contours of so many paddles, made once."""
    folder = work / "data" / f"pathfinder-{contour}"
    while not is_first_process() and not folder.exists():  # it comes there when it is whole
        time.sleep(1)
    if not folder.exists():
        given = ["lra-data", "pathfinder", "--count", str(PICTURES), "--contour-length", str(contour)]
        if code := main([*given, "--out", str(folder)]):
            sys.exit(code)
    return folder


def publish(part: str, work: Path, out: Path, unfinished: bool) -> None:
    """Copy configurations and records, and make the table and the curves, but those of the grid, of all in `out`."""
    runs = [run for run in RUNS if run.part == part and (work / run.folder).exists()]
    for folder in sorted({(work / run.folder).parents[1] for run in runs}):
        own = [run for run in runs if (work / run.folder).is_relative_to(folder)]
        found = [path for run in own if unfinished or run.is_finished(work) for path in runs_in(work / run.folder)]
        if not found:
            continue
        copy_records(found, work, out)
        trained = [path for path in runs_in(out / part / folder.name) if path.name != FOLDER]
        records = list(read_records(*trained))
        if part != "mini":
            draw_dev_accuracy(records, own[0].task).save(out / part / folder.name)
        if part == "pathfinder":
            write_text(out / part / f"{folder.name}.md", tables_markdown(lra_tables(records)))
    if part != "pathfinder" and (published := runs_in(out / part)):
        write_text(out / part / "table.md", tables_markdown(lra_tables(read_records(*published))))
    if part == "self-pretrained" and (drawing := draw_change(out)) is not None:
        drawing.save(out / PICTURE)


def run_all() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/lra-results"))
    parser.add_argument("--out", type=Path, default=Path("results/lra"))
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=sorted({run.seed for run in RUNS}))
    parser.add_argument("--unfinished", action="store_true", help="publish the curves of runs that are not finished")
    parser.add_argument("--publish", action="store_true", help="publish what is there, and run nothing")
    options = parser.parse_args()
    runs = [
        run
        for run in RUNS
        if options.only in (None, run.part)
        and run.task in options.tasks
        and run.attention in options.attentions
        and run.seed in options.seeds
    ]
    if options.publish:
        for part in dict.fromkeys(run.part for run in runs):
            publish(part, options.work, options.out, options.unfinished)
        return 0
    data = data_folder("imdb/, cifar10/ and aan/") if any(run.task in DATA for run in runs) else None
    for run in runs:
        if code := main(run.arguments(data, options.work)):
            return code
        if is_first_process():
            publish(run.part, options.work, options.out, options.unfinished)
    return 0


if __name__ == "__main__":
    sys.exit(run_all())
