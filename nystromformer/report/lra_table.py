"""The Long Range Arena table from records: tasks × attentions, ours beside the paper's, and what each run was."""

import statistics
from collections import defaultdict
from collections.abc import Iterable

from nystromformer.paper import LRA, paper_row
from nystromformer.records import results, table_markdown

TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
Record = dict[str, object]


def lra_tables(records: Iterable[Record]) -> str:
    """One table for each preset, so that a reduced run is never mistaken for the full one, and one of the runs."""
    by_preset: dict[str, list[Record]] = defaultdict(list)
    for record in results(records, "lra"):
        by_preset[record["config"]["preset"]].append(record)
    parts = []
    for preset, found in by_preset.items():
        parts += [f"Preset `{preset}`: accuracy in percent, ours (the paper's)", accuracy_table(found)]
        parts += ["What was run", runs_table(found)]
    return "\n\n".join(parts) + "\n" if parts else "No finished run.\n"


def accuracy_table(found: list[Record]) -> str:
    """Attentions × tasks. With several seeds: mean ± standard deviation."""
    tasks = [task for task in TASKS if any(record["config"]["task"] == task for record in found)]
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in found:
        cells[record["config"]["attention"], record["config"]["task"]].append(100 * record["value"])
    rows = []
    for attention in exact_first(attention for attention, _ in cells):
        published = paper_row(LRA, attention)
        row = [with_published(cells.get((attention, task), []), published.get(task)) for task in tasks]
        ours = [cells.get((attention, task)) for task in TASKS]
        whole = [statistics.mean(values) for values in ours if values]
        mean = f"{statistics.mean(whole):.2f}" if len(whole) == len(TASKS) else "–"
        rows.append([attention, *row, f"{mean} ({statistics.mean(published.values()):.2f})" if published else mean])
    rows.append(["most frequent class", *(majority(found, task) for task in tasks), ""])
    return table_markdown(["attention", *tasks, "average"], rows)


def exact_first(attentions: Iterable[str]) -> list[str]:
    """Each once, as they come, but what the others are compared with first.

    >>> exact_first(["nystrom-64", "linear", "standard", "linear"])
    ['standard', 'nystrom-64', 'linear']
    """
    return sorted(dict.fromkeys(attentions), key=lambda attention: attention != "standard")


def with_published(values: list[float], published: float | None) -> str:
    """
    >>> with_published([36.0, 38.0], 37.15), with_published([36.0], None), with_published([], 37.15)
    ('37.00 ± 1.41 (37.15)', '36.00', '– (37.15)')
    """
    ours = f"{statistics.mean(values):.2f}" if values else "–"
    if len(values) > 1:
        ours += f" ± {statistics.stdev(values):.2f}"
    return ours if published is None else f"{ours} ({published:.2f})"


def majority(found: list[Record], task: str) -> str:
    shares = [record["majority"] for record in found if record["config"]["task"] == task]
    return f"{100 * statistics.mean(shares):.2f}" if shares else ""


def runs_table(found: list[Record]) -> str:
    """Steps, examples and departures of the runs; one row for all runs of a task that are alike."""
    runs: dict[tuple, list[Record]] = defaultdict(list)
    for record in found:
        config = record["config"]
        departures = [f"legacy {name}" for name in config["legacy"]]
        departures += [f"{name}={value}" for name, value in config["settings"].items()]
        key = (
            config["task"],
            f"{record['step']:,}",
            config["batch_size"],
            f"{record['examples_seen']:,}",
            f"{record['train_examples']:,}",
            f"{record['test_examples']:,}",
            config["max_length"],
            ", ".join(departures) or "–",
        )
        runs[key].append(record)
    rows = []
    for key, alike in sorted(runs.items(), key=lambda item: TASKS.index(item[0][0])):
        attentions = exact_first(record["config"]["attention"] for record in alike)
        seeds = sorted({str(record["seed"]) for record in alike})
        rows.append([*key, ", ".join(attentions), ", ".join(seeds)])
    header = ["task", "steps", "batch", "examples seen", "train", "test", "length", "departures", "attentions", "seeds"]
    return table_markdown(header, rows)
