"""Fine-tuning as the command line asks for it: tasks × attentions × seeds, one after the other, each in its folder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from nystromformer.checks import check_choice
from nystromformer.data.glue import CUSTOM, TASKS, Columns, TextSplits, read_custom, read_task, task_name
from nystromformer.errors import user_input
from nystromformer.files import write_text
from nystromformer.integrations import register
from nystromformer.progress import count_bar
from nystromformer.records import RECORDS, read_records
from nystromformer.report.finetune_table import NAMES, finetune_tables
from nystromformer.training.arguments import check_device, parse_settings
from nystromformer.training.finetuning import (
    RECIPES,
    SEARCH_BATCH_SIZES,
    SEARCH_LEARNING_RATES,
    Cell,
    FinetuningData,
    Recipe,
    TokenizedTexts,
    arguments_of,
    metrics_of,
    run_cell,
    tokenize,
)
from nystromformer.training.finetuning_models import Source, check_attention, load_classifier
from nystromformer.training.trainer import check_folder

COUNTS = ("steps", "batch_size", "max_length", "patience", "train_examples", "dev_examples", "test_examples")

PAPER_TASKS = tuple(TASKS)[:6]
"""What `all` stands for."""


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """The command's options, checked when made."""

    tasks: str
    model: str
    tokenizer: str = ""
    data: str = ""
    attentions: str = ""
    conv_kernel_size: int | None = None
    """Of all attentions; None leaves each model with what it has, 0 without."""
    columns: Columns | None = None
    preset: str = "paper"
    out: Path
    seeds: str = "0"
    search: bool = False
    epochs: float | None = None
    learning_rate: float | None = None
    steps: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    patience: int | None = None
    train_examples: int | None = None
    dev_examples: int | None = None
    test_examples: int | None = None
    predict: bool | None = None
    new_head: bool = False
    resume: bool = False
    device: str = "auto"
    dtype: str = "float32"
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("--preset", self.preset, tuple(RECIPES))
        check_device(self.device)
        for name in (*COUNTS, "epochs", "learning_rate"):
            value, least = getattr(self, name), 1 if name in COUNTS else 0
            if value is not None and (value < least or value == 0):
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be {'at least 1' if least else 'above 0'}.")
        if self.search and (self.batch_size or self.learning_rate):
            raise ValueError("--search tries batch sizes and learning rates: leave out --batch-size, --learning-rate.")
        if (CUSTOM in self.all_tasks) != (self.columns is not None) or (self.columns and len(self.all_tasks) > 1):
            raise ValueError(
                f"TASK {self.tasks}: --text-column, --pair-column and --label-column belong to the task {CUSTOM!r} "
                f"alone, which needs --text-column; the columns of other tasks are known."
            )
        if self.columns is not None and not self.data:
            raise ValueError(f"TASK {CUSTOM}: needs --data, a file or a folder with train.csv or the like.")
        for attention in self.all_attentions:
            check_attention(self.source, attention, self.conv_kernel_size)
        if self.max_length is not None:
            self.source.check_length(self.max_length)
        for cell in self.cells:
            arguments_of(cell, self.folder_of(cell), self.device, 1, metrics_of(cell.task, False)[0])

    @cached_property
    def source(self) -> Source:
        register()
        return Source(name=self.model, new_head=self.new_head)

    @cached_property
    def all_tasks(self) -> tuple[str, ...]:
        names = PAPER_TASKS if self.tasks == "all" else tuple(task_name(name) for name in _split("TASK", self.tasks))
        for name in names:
            check_choice("TASK", name, (*TASKS, CUSTOM, "all"))
        if not names:
            raise ValueError(f"TASK: must be one or more of {', '.join((*TASKS, CUSTOM))}, or all.")
        return names

    @cached_property
    def all_attentions(self) -> tuple[str, ...]:
        return _split("--attention", self.attentions) or (self.source.attention,)

    @cached_property
    def all_seeds(self) -> list[int]:
        try:
            seeds = [int(seed) for seed in _split("--seeds", self.seeds)]
        except ValueError as error:
            raise ValueError(f"--seeds {self.seeds}: must be whole numbers separated by commas, as 1,2,3.") from error
        if not seeds or min(seeds) < 0:
            raise ValueError(f"--seeds {self.seeds}: must be at least one number, and none below 0.")
        return seeds

    @cached_property
    def recipe(self) -> Recipe:
        given = {name: getattr(self, name) for name in (*COUNTS, "epochs", "learning_rate")}
        recipe = replace(RECIPES[self.preset], **{name: value for name, value in given.items() if value is not None})
        if self.epochs is not None and self.steps is None:
            recipe = replace(recipe, steps=None)
        room = self.source.max_length
        if self.max_length is None and room is not None:  # only a length that was asked for lengthens a model
            recipe = replace(recipe, max_length=min(recipe.max_length, room))
        return recipe

    @cached_property
    def recipes(self) -> list[Recipe]:
        """One, or all of a search."""
        if not self.search:
            return [self.recipe]
        return [
            replace(self.recipe, batch_size=batch_size, learning_rate=rate)
            for batch_size in SEARCH_BATCH_SIZES
            for rate in SEARCH_LEARNING_RATES
        ]

    @cached_property
    def cells(self) -> list[Cell]:
        return [
            Cell(
                task=task,
                model=self.model,
                attention=attention,
                conv_kernel_size=self.source.conv_kernel_size(attention, self.conv_kernel_size),
                seed=seed,
                preset=self.preset,
                recipe=recipe,
                search=self.search,
                settings=parse_settings(list(self.settings)),
                dtype=self.dtype,
            )
            for task in self.all_tasks
            for attention in self.all_attentions
            for seed in self.all_seeds
            for recipe in self.recipes
        ]

    @property
    def writes_predictions(self) -> bool:
        """By default only full runs predict: test parts are large, and reduced runs not worth submitting."""
        return self.preset == "paper" if self.predict is None else self.predict

    def folder_of(self, cell: Cell) -> Path:
        """A single run has the whole folder."""
        if len(self.cells) == 1:
            return self.out
        folder = self.out / cell.task / cell.variant / f"seed-{cell.seed}"
        return folder / f"batch-{cell.recipe.batch_size}-rate-{cell.recipe.learning_rate:g}" if self.search else folder


def run_sweep(options: FinetuneOptions, say: Callable[[str], None]) -> None:
    """Run everything. What is finished is left alone; `say` prints on the first process."""
    with user_input():
        for cell in options.cells:
            check_folder(options.folder_of(cell), cell.config(), options.resume)
        tokenizer = options.source.tokenizer(options.tokenizer)
    task, data = None, None
    for cell in options.cells:
        folder = options.folder_of(cell)
        with user_input():
            arguments = arguments_of(cell, folder, options.device, 1, metrics_of(cell.task, False)[0])
            if cell.task != task:
                task, data = cell.task, None  # the data of one task at a time
                data = prepare_data(options, task, tokenizer, say if arguments.should_save else _silent)
        load = partial(
            load_classifier,
            options.source,
            attention=cell.attention,
            conv_kernel_size=options.conv_kernel_size,
            max_length=cell.recipe.max_length,
            labels=data.splits.labels,
        )
        record = run_cell(
            cell,
            data,
            load,
            tokenizer,
            folder,
            options.device,
            resume=options.resume,
            predict=options.writes_predictions,
        )
        if arguments.should_save:
            say(
                f"{cell.task}, {cell.variant}, seed {cell.seed}: {NAMES[record['name']]} "
                f"{100 * record['value']:.2f} on {record['scored_examples'][record['part']]:,} examples "
                f"({record['part']}), after {record['step']:,} steps and {record['examples_seen']:,} examples"
            )
            write_text(options.out / "table.md", finetune_tables(_records(options)))
    if arguments.should_save:
        say(finetune_tables(_records(options)))


def prepare_data(
    options: FinetuneOptions, task: str, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]
) -> FinetuningData:
    """Read and tokenize the parts that the recipe uses."""
    recipe = options.recipe
    splits = read_custom(options.data, options.columns) if task == CUSTOM else read_task(task, options.data)
    options.source.check_head(splits.labels)
    if splits.train.left_out:
        say(f"{task}: {splits.train.left_out:,} damaged lines of the training file were left out, as is usual")
    splits = TextSplits(
        splits.train.some(recipe.train_examples),
        {name: part.some(recipe.dev_examples) for name, part in splits.dev.items()},
        {
            name: part if part.labels is None else part.some(recipe.test_examples)
            for name, part in splits.test.items()
            if part.labels is not None or options.writes_predictions
        },
        splits.labels,
    )
    with_types = (
        "token_type_ids" in tokenizer.model_input_names
        and getattr(options.source.config(), "type_vocab_size", 0) > 1
    )  # fmt: skip
    tokenized: dict[str, TokenizedTexts] = {}
    for name, part in {"train": splits.train, **splits.dev, **splits.test}.items():
        with count_bar(f"tokenizing {task} {name}") as progress:
            tokenized[name] = tokenize(part, tokenizer, recipe.max_length, with_types, progress)
    return FinetuningData(
        splits=splits,
        train=tokenized["train"],
        dev={name: tokenized[name] for name in splits.dev},
        test={name: tokenized[name] for name in splits.test},
    )


def _records(options: FinetuneOptions) -> Iterator[dict[str, object]]:
    folders = [options.folder_of(cell) for cell in options.cells]
    return read_records(*(folder for folder in folders if (folder / RECORDS).exists()))


def _split(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if len(names) > 1 and not all(names):
        raise ValueError(f"{option} {text}: must be names separated by commas.")
    return tuple(dict.fromkeys(name for name in names if name))


def _silent(_: str) -> None:
    pass
