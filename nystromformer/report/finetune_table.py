"""The fine-tuning table from records: attentions × tasks, ours beside the paper's, and what each run was."""

import statistics
from collections import defaultdict
from collections.abc import Iterable

from nystromformer.paper import FINETUNING_EPOCHS, GLUE, paper_row
from nystromformer.records import results, table_markdown
from nystromformer.report.lra_table import exact_first, with_published

ORDER = ("sst2", "mrpc", "qnli", "qqp", "mnli", "mnli-mm", "imdb", "cola", "rte", "stsb", "wnli", "custom")
PAPER_LENGTH = 512
"""Runs at most as long stand in the task's own column; longer ones have a column for their length."""
NAMES = {"f1": "F1", "accuracy": "accuracy", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
Record = dict[str, object]


def best_results(records: Iterable[Record]) -> list[Record]:
    """The results of finished runs. Of a search, the best on the development part alone."""
    found = results(records, "finetune")
    best: dict[tuple, Record] = {}
    for record in found:
        config = record["config"]
        if config["search"]:
            key = (config["model"], config["preset"], _column(config), variant(config), record["seed"])
            if key not in best or record["dev_score"] > best[key]["dev_score"]:
                best[key] = record
    return [record for record in found if not record["config"]["search"]] + list(best.values())


def finetune_tables(records: Iterable[Record]) -> str:
    """Tables for each preset and model apart, so that a reduced run is never mistaken for the full one."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in best_results(records):
        groups[record["config"]["preset"], record["config"]["model"]].append(record)
    parts = []
    for (preset, model), found in groups.items():
        less = " with less training than the paper's (below)" if any(map(is_shortened, found)) else ""
        parts += [
            f"`{model}`, preset `{preset}`{less}: scores in percent, ours (the paper's, of BERT-base models)",
            score_table(found),
            "What was run",
            runs_table(found),
        ]
    return "\n\n".join(parts) + "\n" if parts else "No finished run.\n"


def is_shortened(record: Record) -> bool:
    """Whether a run named after the paper had fewer steps or fewer examples than the paper's."""
    config = record["config"]
    fewer = "steps" in config or config["epochs"] < FINETUNING_EPOCHS or "train_examples" in config
    return config["preset"] == "paper" and fewer


def score_table(found: list[Record]) -> str:
    """Attentions × tasks, with and without a convolution apart. With several seeds: mean ± standard deviation."""
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    titles: dict[str, str] = {}
    attentions: dict[str, str] = {}
    for record in found:
        name = variant(record["config"])
        attentions[name] = record["config"]["attention"]
        for column, title, value in columns_of(record):
            cells[name, column].append(100 * value)
            titles[column] = title
    columns = sorted(titles, key=_place)
    rows = []
    for name in exact_first(attentions):
        published = paper_row(GLUE, attentions[name])
        row = [with_published(cells.get((name, column), []), published.get(column)) for column in columns]
        rows.append([name, *row])
    return table_markdown(["attention", *(titles[column] for column in columns)], rows)


def variant(config: dict[str, object]) -> str:
    """The attention as it stands in tables. Older records, which say nothing of a convolution, had none.

    >>> variant({"attention": "nystrom-64", "conv_kernel_size": 33}), variant({"attention": "nystrom-64"})
    ('nystrom-64 + conv 33', 'nystrom-64')
    """
    size = config.get("conv_kernel_size")
    return config["attention"] + (f" + conv {size}" if size else "")


def columns_of(record: Record) -> list[tuple[str, str, float]]:
    """(column, title, value) of a run: one, or two for MNLI."""
    column, name = _column(record["config"]), NAMES[record["name"]]
    if record["config"]["task"] != "mnli":
        return [(column, f"{column} {name}", record["value"])]
    other = record["scores"]["dev_mismatched"][record["name"]]
    return [(column, f"{column} {name}", record["value"]), ("mnli-mm", f"mnli-mm {name}", other)]


def runs_table(found: list[Record]) -> str:
    """Examples, steps, settings and further scores; one row for all runs of a task that are alike."""
    runs: dict[tuple, list[Record]] = defaultdict(list)
    for record in found:
        config = record["config"]
        settings = [f"{name}={value}" for name, value in config["settings"].items()]
        key = (
            _column(config),
            variant(config),
            f"{record['parameters']:,}" if "parameters" in record else "–",
            f"{record['train_examples']:,}",
            f"{record['scored_examples'][record['part']]:,} ({record['part']})",
            f"{record['step']:,}",
            config["batch_size"],
            f"{config['learning_rate']:g}" + (" (best of a search)" if config["search"] else ""),
            config["max_length"],
            f"{record['mean_length']:g}",
            ", ".join(settings) or "–",
        )
        runs[key].append(record)
    rows = [
        [*key, further_scores(alike), ", ".join(sorted({str(record["seed"]) for record in alike}))]
        for key, alike in sorted(runs.items(), key=lambda item: _place(item[0][0]))
    ]
    header = ["task", "attention", "parameters", "train", "scored", "steps", "batch", "learning rate", "length"]
    return table_markdown([*header, "mean length", "settings", "further scores", "seeds"], rows)


def further_scores(alike: list[Record]) -> str:
    """Means of all scores that are not the table's own."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in alike:
        for part, scores in record["scores"].items():
            for name, value in scores.items():
                if (part, name) != (record["part"], record["name"]):
                    values[f"{part} {NAMES[name]}"].append(100 * value)
    return ", ".join(f"{name} {statistics.mean(found):.2f}" for name, found in values.items()) or "–"


def _column(config: dict[str, object]) -> str:
    return config["task"] + (f"-{config['max_length']}" if config["max_length"] > PAPER_LENGTH else "")


def _place(column: str) -> tuple[int, int]:
    """The paper's order, longer inputs behind shorter ones."""
    if column in ORDER:
        return ORDER.index(column), 0
    task, length = column.rsplit("-", 1)
    return ORDER.index(task), int(length)
