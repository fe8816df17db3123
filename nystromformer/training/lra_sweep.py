"""Long Range Arena as the command line asks for it: cells of the table one after the other, each in its folder."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from nystromformer.checks import check_choice
from nystromformer.data.lra import TASKS, Splits, listops, local_folder, pathfinder, task_folder
from nystromformer.data.lra.folders import check_options
from nystromformer.errors import user_input
from nystromformer.files import write_text
from nystromformer.models.lra import lra_config
from nystromformer.progress import count_bar
from nystromformer.records import read_records, result_in
from nystromformer.report.lra_table import lra_tables
from nystromformer.training.arguments import check_device, on_cpu, parse_settings, processes
from nystromformer.training.lra import (
    ATTENTIONS,
    RECIPES,
    Cell,
    Legacy,
    Recipe,
    arguments_of,
    prepare_cell,
    read_splits,
    run_cell,
)
from nystromformer.training.trainer import check_folder

GENERATED = Path("data/lra")
"""Where data that was not given is made."""


@dataclass(frozen=True, kw_only=True)
class LraOptions:
    """The command's options, checked when made."""

    tasks: str
    attentions: str
    preset: str
    data: str
    out: Path
    seeds: str
    steps: int | None
    batch_size: int | None
    max_length: int | None
    attention_dropout: float | None
    resume: bool
    device: str
    dtype: str
    settings: tuple[str, ...]
    legacy: Legacy

    def __post_init__(self) -> None:
        check_choice("--preset", self.preset, tuple(RECIPES))
        check_device(self.device)
        if self.legacy.no_seed and (self.resume or processes() > 1):
            given = "--resume" if self.resume else f"{processes()} processes"
            raise ValueError(f"--legacy-no-seed with {given}: they would need the same seed; give one with --seed.")
        for name in ("steps", "batch_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1.")
        for cell in self.cells:  # each with a position table, which some attentions need
            lra_config(
                attention=cell.attention,
                max_position_embeddings=cell.recipe.positions,
                attention_probs_dropout_prob=cell.recipe.attention_dropout,
            )
            arguments_of(cell, self.folder_of(cell), self.device)

    @cached_property
    def cells(self) -> list[Cell]:
        tasks = _names("TASK", self.tasks, tuple(TASKS))
        attentions = ATTENTIONS if self.attentions == "all" else _split("--attention", self.attentions)
        if not attentions:
            attentions = ATTENTIONS if self.tasks == "all" else ("nystrom-64",)
        dtype = self.dtype or ("float32" if self.preset != "paper" or on_cpu(self.device) else "float16")
        return [
            Cell(
                task=task,
                attention=attention,
                seed=seed,
                preset=self.preset,
                recipe=self.recipe_of(task),
                legacy=self.legacy,
                settings=parse_settings(list(self.settings)),
                dtype=dtype,
            )
            for task in tasks
            for attention in attentions
            for seed in self.all_seeds
        ]

    @cached_property
    def all_seeds(self) -> list[int]:
        if self.legacy.no_seed:
            return [secrets.randbelow(2**31) for _ in _split("--seeds", self.seeds)]
        try:
            seeds = [int(seed) for seed in _split("--seeds", self.seeds)]
        except ValueError as error:
            raise ValueError(f"--seeds {self.seeds}: must be whole numbers separated by commas, as 1,2,3.") from error
        if not seeds or min(seeds) < 0:
            raise ValueError(f"--seeds {self.seeds}: must be at least one number, and none below 0.")
        return list(dict.fromkeys(seeds))

    def recipe_of(self, task: str) -> Recipe:
        recipe = RECIPES[self.preset][task]
        changes: dict[str, object] = {}
        if self.steps is not None:
            share = self.steps / recipe.steps
            changes |= {
                "steps": self.steps,
                "warmup": min(recipe.warmup, round(recipe.warmup * share)),
                "eval_every": min(recipe.eval_every, self.steps),
            }
        for name in ("batch_size", "max_length", "attention_dropout"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        return replace(recipe, **changes)

    def folder_of(self, cell: Cell) -> Path:
        """A single run has the whole folder."""
        if len(self.cells) == 1:
            return self.out
        return self.out / cell.task / cell.attention / f"seed-{cell.seed}"


def run_grid(options: LraOptions, say: Callable[[str], None]) -> None:
    """Run all cells. What is finished is left alone; `say` prints on the first process."""
    with user_input():
        for cell in options.cells:
            check_folder(options.folder_of(cell), cell.config(), options.resume)
    task, splits = None, None
    for cell in options.cells:
        folder = options.folder_of(cell)
        arguments = arguments_of(cell, folder, options.device)
        record = result_in(folder)
        if record is None:
            with user_input():
                if cell.task != task:
                    task, splits = cell.task, None  # the data of one task at a time
                    with arguments.main_process_first():  # which generates what is not there
                        splits = read_data(options, cell, say if arguments.should_save else _silent)
                config = prepare_cell(cell, splits, folder, arguments, options.resume)
            record = run_cell(cell, splits, folder, arguments, config)
        if arguments.should_save:
            say(
                f"{TASKS[cell.task].title}, {cell.attention}, seed {cell.seed}: {100 * record['value']:.2f} % of "
                f"{record['test_examples']:,} test examples right, after {record['step']:,} steps and "
                f"{record['examples_seen']:,} examples"
            )
            write_text(options.out / "table.md", lra_tables(_records(options)))
    if arguments.should_save:
        say(lra_tables(_records(options)))


def read_data(options: LraOptions, cell: Cell, say: Callable[[str], None]) -> Splits:
    return read_splits(cell.task, data_folder(options, cell, say), cell.recipe, cell.legacy)


def data_folder(options: LraOptions, cell: Cell, say: Callable[[str], None]) -> Path:
    """Where the data of a cell's task is: as given, on the Hub, or generated here."""
    task = TASKS[cell.task]
    if options.data:
        folder = local_folder(options.data)
        inner = task_folder(folder, cell.task)
        if inner is not None or len({cell.task for cell in options.cells}) == 1:
            return inner or folder
    if task.hub_id is not None:
        return local_folder(task.hub_id)
    if cell.recipe.data is None:
        raise ValueError(f"{cell.task}: no --data given; {task.source.format(name=cell.task)}, and give its folder.")
    folder = GENERATED / f"{cell.task}-{options.preset}"
    if not folder.exists():
        say(f"making {folder} once, since no --data was given")
        generate(cell.task, folder, cell.recipe.data)
    check_options(folder, asdict(cell.recipe.data))
    return folder


def generate(
    task: str, folder: Path, data: listops.ListOpsOptions | pathfinder.PathfinderSetOptions, workers: int | None = None
) -> None:
    """Make the data of a task, with a progress bar."""
    maker = {"listops": listops.generate, "pathfinder": pathfinder.generate}[task]
    with count_bar(f"{task} examples") as progress:
        maker(folder, data, workers, progress)


def _records(options: LraOptions) -> Iterator[dict[str, object]]:
    folders = [options.folder_of(cell) for cell in options.cells]
    return read_records(*(folder for folder in folders if (folder / "records.jsonl").exists()))


def _split(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if len(names) > 1 and not all(names):
        raise ValueError(f"{option} {text}: must be names separated by commas.")
    return tuple(dict.fromkeys(name for name in names if name))


def _names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = known if text == "all" else _split(option, text)
    for name in names:
        check_choice(option, name, (*known, "all"))
    return names


def _silent(_: str) -> None:
    pass
