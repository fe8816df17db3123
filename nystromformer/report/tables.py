"""The tables of trained models, from records alone: Long Range Arena, fine-tuning, pretraining, distillation, maps."""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from nystromformer.paper import FINETUNING_EPOCHS, GLUE, LRA, paper_row
from nystromformer.records import results
from nystromformer.report.table import MISSING, Code, Table, exact_first, is_ours, with_published

LRA_TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
GLUE_TASKS = ("sst2", "mrpc", "qnli", "qqp", "mnli", "mnli-mm", "imdb", "cola", "rte", "stsb", "wnli", "custom")
"""In the order of the paper's tables; what it does not have comes last."""
PAPER_LENGTH = 512
"""Fine-tuning at most as long stands in the task's own column; longer inputs have a column for their length."""
SCORES = {"f1": "F1", "accuracy": "accuracy", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
ATTENTION_ERROR, PICTURE, MAPS = "matrix_error", "picture", "maps"
Record = dict[str, Any]
Shared = dict[str, set[str]]
"""By task of Long Range Arena, what its runs have in common."""


def lra_tables(records: Iterable[Record]) -> list[Table]:
    """For each preset, so that a reduced run is never mistaken for the full one: accuracies, what was run and, as far
    as it was noted, how fast. The paper's accuracies do not stand beside those of other data than its own."""
    by_preset: dict[str, list[Record]] = defaultdict(list)
    for record in results(records, "lra"):
        by_preset[record["config"]["preset"]].append(record)
    tables = []
    for preset, found in by_preset.items():
        shared = shared_parts(found)
        tables += [_lra_accuracies(found, shared, preset), _lra_runs(found, shared)]
        if timed := [record for record in found if record.get("tokens") and record.get("seconds")]:
            tables.append(_lra_speeds(timed, shared))
    return tables


def lra_method(config: dict[str, Any], left_out: Collection[str] = ()) -> str:
    """The attention of a run, and what else tells it from others with the same, some of it left out.

    >>> lra_method({"attention": "nystrom-64", "self_pretrain": 1000, "positions": "rotary"})
    'nystrom-64 (rotary, self-pretrained)'
    >>> lra_method({"attention": "nystrom-64", "packed": 33000})
    'nystrom-64 (packed)'
    >>> lra_method({"attention": "nystrom-64", "data_departures": ["contours of 6 paddles"]})
    'nystrom-64 (contours of 6 paddles)'
    """
    parts = [part for part in _variant_parts(config) if part not in left_out]
    return config["attention"] + (f" ({', '.join(parts)})" if parts else "")


def _variant_parts(config: dict[str, Any]) -> list[str]:
    parts = []
    if config.get("positions") == "rotary":
        parts.append("rotary")
    if config.get("conv_kernel_size"):
        parts.append(f"kernel {config['conv_kernel_size']}")
    if config.get("self_pretrain") or config.get("pretrained"):
        parts.append("self-pretrained")
    if config.get("after"):
        parts.append("continued")
    if config.get("packed"):
        parts.append("packed")
    return parts + _data_departures(config)


def _data_departures(config: dict[str, Any]) -> list[str]:
    """What makes its data another kind than the paper's."""
    return config.get("data_departures", [])


def shared_parts(found: list[Record]) -> Shared:
    """By task, what all of its runs have in common beside their attentions: their data, and where there are several
    tasks the rest, which would tear the row of an attention apart. It tells nothing from anything, and stands among
    what was run."""
    configs: dict[str, list[Record]] = defaultdict(list)
    for record in found:
        configs[record["config"]["task"]].append(record["config"])
    parts = _variant_parts if len(configs) > 1 else _data_departures
    return {task: set.intersection(*(set(parts(config)) for config in own)) for task, own in configs.items()}


def _lra_accuracies(found: list[Record], shared: Shared, preset: str) -> Table:
    """Attentions × tasks. With several seeds: mean ± standard deviation."""
    tasks = _lra_tasks(found)
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    alike: set[tuple[str, str]] = set()
    """Cells of the paper's own data."""
    shares: dict[str, list[float]] = defaultdict(list)
    for record in found:
        task = record["config"]["task"]
        cell = lra_method(record["config"], shared[task]), task
        cells[cell].append(100 * record["value"])
        shares[task].append(100 * record["majority"])
        if not _data_departures(record["config"]):
            alike.add(cell)
    comparable = {task for _, task in alike}
    rows: list[list[str]] = []
    highlight: set[int] = set()
    for method in exact_first(method for method, _ in cells):
        if is_ours(_attention_of(method)):
            highlight.add(len(rows))
        published = paper_row(LRA, _attention_of(method))
        beside = {task for task in comparable if (method, task) in alike or (method, task) not in cells}
        row = [
            with_published(cells.get((method, task), []), published.get(task) if task in beside else None)
            for task in tasks
        ]
        whole = [statistics.mean(cells[method, task]) for task in LRA_TASKS if (method, task) in cells]
        average = f"{statistics.mean(whole):.2f}" if len(whole) == len(LRA_TASKS) else MISSING
        if published and beside.issuperset(tasks):
            average += f" ({statistics.mean(published.values()):.2f})"
        rows.append([method, *row, average])
    rows.append(["most frequent class", *(f"{statistics.mean(shares[task]):.2f}" for task in tasks), ""])
    title = ("Preset ", Code(preset), ": accuracy in percent" + ", ours (the paper's)" * bool(comparable))
    return Table(["attention", *tasks, "average"], rows, highlight, title=title)


def _batch(config: Record) -> str | int:
    """Of a training step: examples, or tokens that are packed."""
    return f"{config['packed']:,} tokens" if config.get("packed") else config["batch_size"]


def _lra_runs(found: list[Record], shared: Shared) -> Table:
    """Steps, examples and departures of the runs; one row for all runs of a task that are alike, seeds included."""
    runs: dict[tuple, list[Record]] = defaultdict(list)
    for record in found:
        config = record["config"]
        departures = [f"legacy {name}" for name in config["legacy"]] + _settings(config)
        departures += sorted(shared[config["task"]] - {"self-pretrained", "continued"})  # whose budget is told below
        if "dropout" in config:
            departures.append(f"dropout {config['dropout']:g}")
        if config.get("embedding_start") == "picture":
            departures.append("near gray levels and pixels begin alike")
        if config.get("normalize_pooled"):
            departures.append("pooled vectors normalized over the batch")
        if before := record.get("pretraining"):
            departures.append(f"self-pretraining: {before['step']:,} steps, {before['examples_seen']:,} examples")
        if before := record.get("after"):
            departures.append(f"trained before: {before['step']:,} steps, {before['examples_seen']:,} examples")
        key = (
            config["task"],
            f"{record['step']:,}",
            _batch(config),
            f"{record['examples_seen']:,}",
            f"{record['train_examples']:,}",
            f"{record['test_examples']:,}",
            config["max_length"],
            ", ".join(departures) or MISSING,
        )
        runs[key].append(record)
    rows = []
    for key, alike in sorted(runs.items(), key=lambda item: lra_place(item[0][0])):
        methods: dict[str, list[Record]] = defaultdict(list)
        for record in alike:
            methods[lra_method(record["config"], shared[key[0]])].append(record)
        by_seeds: dict[str, list[str]] = defaultdict(list)
        for method in exact_first(methods):
            by_seeds[_seeds(methods[method])].append(method)
        rows += [[*key, ", ".join(together), seeds] for seeds, together in by_seeds.items()]
    header = ["task", "steps", "batch", "examples seen", "train", "test", "length", "departures", "attentions", "seeds"]
    return Table(header, rows, words=("departures", "attentions"), title="What was run")


def _lra_speeds(timed: list[Record], shared: Shared) -> Table:
    """Attentions × tasks: tokens per second of training, evaluations left out, over all runs together."""
    tasks = _lra_tasks(timed)
    tokens: dict[tuple[str, str], float] = defaultdict(float)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for record in timed:
        task = record["config"]["task"]
        cell = lra_method(record["config"], shared[task]), task
        tokens[cell] += record["tokens"]
        seconds[cell] += record["seconds"]
    speeds = {cell: f"{tokens[cell] / seconds[cell]:,.0f}" for cell in tokens}
    methods = exact_first(method for method, _ in tokens)
    rows = [[method, *(speeds.get((method, task), MISSING) for task in tasks)] for method in methods]
    highlight = {place for place, method in enumerate(methods) if is_ours(_attention_of(method))}
    return Table(["attention", *tasks], rows, highlight, title="Training speed: tokens per second")


def _attention_of(method: str) -> str:
    return method.partition(" (")[0]


def _lra_tasks(found: list[Record]) -> list[str]:
    return sorted({record["config"]["task"] for record in found}, key=lra_place)


def lra_place(task: str) -> tuple[int, str]:
    """To sort by."""
    return (LRA_TASKS.index(task) if task in LRA_TASKS else len(LRA_TASKS)), task


def best_results(records: Iterable[Record]) -> list[Record]:
    """The results of finished fine-tuning runs. Of a search, the best on the development part alone."""
    found = results(records, "finetune")
    best: dict[tuple, Record] = {}
    for record in found:
        config = record["config"]
        if config["search"]:
            key = (config["model"], config["preset"], _column(config), variant(config), record["seed"])
            if key not in best or record["dev_score"] > best[key]["dev_score"]:
                best[key] = record
    return [record for record in found if not record["config"]["search"]] + list(best.values())


def finetune_tables(records: Iterable[Record]) -> list[Table]:
    """Two for each preset and model, so that a reduced run is never mistaken for the full one: scores, what was run."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in best_results(records):
        groups[record["config"]["preset"], record["config"]["model"]].append(record)
    return [
        table
        for (preset, model), found in groups.items()
        for table in (_finetune_scores(found, preset, model), _finetune_runs(found))
    ]


def is_shortened(record: Record) -> bool:
    """Whether a run named after the paper had fewer steps or fewer examples than the paper's."""
    config = record["config"]
    fewer = "steps" in config or config["epochs"] < FINETUNING_EPOCHS or "train_examples" in config
    return config["preset"] == "paper" and fewer


def _finetune_scores(found: list[Record], preset: str, model: str) -> Table:
    """Attentions × tasks, with and without a convolution apart. With several seeds: mean ± standard deviation."""
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    titles: dict[str, str] = {}
    attentions: dict[str, str] = {}
    for record in found:
        name = variant(record["config"])
        attentions[name] = record["config"]["attention"]
        for column, title, value in _finetune_columns(record):
            cells[name, column].append(100 * value)
            titles[column] = title
    columns = sorted(titles, key=_finetune_place)
    rows, names = [], exact_first(attentions)
    for name in names:
        published = paper_row(GLUE, attentions[name])
        row = [with_published(cells.get((name, column), []), published.get(column)) for column in columns]
        rows.append([name, *row])
    highlight = {place for place, name in enumerate(names) if is_ours(attentions[name])}
    less = " with less training than the paper's (below)" if any(map(is_shortened, found)) else ""
    scored = f"{less}: scores in percent, ours (the paper's, of BERT-base models)"
    text = (Code(model), ", preset ", Code(preset), scored)
    return Table(["attention", *(titles[column] for column in columns)], rows, highlight, title=text)


def variant(config: dict[str, Any]) -> str:
    """The attention as it stands in tables. Older records, which say nothing of a convolution, had none.

    >>> variant({"attention": "nystrom-64", "conv_kernel_size": 33}), variant({"attention": "nystrom-64"})
    ('nystrom-64 + conv 33', 'nystrom-64')
    """
    size = config.get("conv_kernel_size")
    return config["attention"] + (f" + conv {size}" if size else "")


def _finetune_columns(record: Record) -> list[tuple[str, str, float]]:
    """(column, title, value) of a run: one, or two for MNLI."""
    column, name = _column(record["config"]), SCORES.get(record["name"], record["name"])
    if record["config"]["task"] != "mnli":
        return [(column, f"{column} {name}", record["value"])]
    other = record["scores"].get("dev_mismatched", {}).get(record["name"], math.nan)
    return [(column, f"{column} {name}", record["value"]), ("mnli-mm", f"mnli-mm {name}", other)]


def _finetune_runs(found: list[Record]) -> Table:
    """Examples, steps, settings and further scores; one row for all runs of a task that are alike."""
    runs: dict[tuple, list[Record]] = defaultdict(list)
    for record in found:
        config = record["config"]
        key = (
            _column(config),
            variant(config),
            f"{record['parameters']:,}" if "parameters" in record else MISSING,
            f"{record['train_examples']:,}",
            f"{record['scored_examples'].get(record['part'], 0):,} ({record['part']})",
            f"{record['step']:,}",
            _batch(config),
            f"{config['learning_rate']:g}" + (" (best of a search)" if config["search"] else ""),
            config["max_length"],
            f"{record['mean_length']:g}",
            ", ".join(_settings(config)) or MISSING,
        )
        runs[key].append(record)
    rows = [
        [*key, _further_scores(alike), _seeds(alike)]
        for key, alike in sorted(runs.items(), key=lambda item: _finetune_place(item[0][0]))
    ]
    header = ["task", "attention", "parameters", "train", "scored", "steps", "batch", "learning rate", "length"]
    header += ["mean length", "settings", "further scores", "seeds"]
    return Table(header, rows, words=("attention", "settings", "further scores"), title="What was run")


def _further_scores(alike: list[Record]) -> str:
    """Means of all scores that are not the table's own."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in alike:
        for part, scores in record["scores"].items():
            for name, value in scores.items():
                if (part, name) != (record["part"], record["name"]):
                    values[f"{part} {SCORES.get(name, name)}"].append(100 * value)
    return ", ".join(f"{name} {statistics.mean(found):.2f}" for name, found in values.items()) or MISSING


def _column(config: dict[str, Any]) -> str:
    return config["task"] + (f"-{config['max_length']}" if config["max_length"] > PAPER_LENGTH else "")


def _finetune_place(column: str) -> tuple[int, int, str]:
    """To sort by: longer inputs after shorter ones of a task."""
    task, _, length = column.rpartition("-")
    if column in GLUE_TASKS or not length.isdecimal():
        task, length = column, "0"
    return (GLUE_TASKS.index(task) if task in GLUE_TASKS else len(GLUE_TASKS)), int(length), task


def pretraining_tables(records: Iterable[Record]) -> list[Table]:
    """One row for each finished run: validation accuracies, what was spent on them, and how fast it went."""
    found = results(records, "pretrain")
    header = ["attention", "start", "masked words", "sentence order", "steps", "batch × length", "tokens"]
    header += ["training time", "tokens/s", "parameters"]
    highlight = {place for place, record in enumerate(found) if is_ours(record["config"]["attention"])}
    return [Table(header, [_pretraining_row(record) for record in found], highlight, ("start",))] if found else []


def _pretraining_row(record: Record) -> list[str]:
    config, order = record["config"], record["sop_accuracy"]
    return [
        config["attention"],
        f"from {last_part(config['from'])}" if config["from"] else f"from scratch, {config['size']}",
        f"{record['value']:.1%}",
        MISSING if order is None else f"{order:.1%}",
        f"{record['step']:,}",
        f"{config['batch_size']} × {config['max_length']}",
        f"{record['tokens'] / 1e6:,.2f} M",
        f"{record['seconds'] / 60:,.1f} min",
        f"{record['tokens_per_second']:,.0f}",
        f"{record['parameters'] / 1e6:,.1f} M",
    ]


def distillation_tables(records: Iterable[Record]) -> list[Table]:
    """For each model and length: one row for each finished run and part, and what each layer bore untrained."""
    found = results(records, "distill")
    header = ["attention", "stages", "core-minutes", "judged on", "cosine (worst)", "untrained", "top 1", "top 10"]
    header += ["last layer's error", "times as fast"]
    by_model: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in found:
        by_model[last_part(record["config"]["model"]), record["config"]["max_length"]].append(record)
    return [
        Table(
            header,
            [row for record in alike for row in _distillation_rows(record)],
            words=("attention", "stages", "judged on"),
            title=f"{model}, {length:,} tokens",
        )
        for (model, length), alike in by_model.items()
    ]


def _distillation_rows(record: Record) -> list[list[str]]:
    config, speed = record["config"], record["speed"]
    names = list(dict.fromkeys(config["layers"]))
    attention = names[0] if len(names) == 1 else ", ".join(f"{config['layers'].count(n)} × {n}" for n in names)
    stages = " + ".join(f"{name} {steps:,}" for name, steps in record["stages"].items())
    common = [attention, stages, f"{record['core_seconds'] / 60:.1f}"]
    times = f"{speed['exact'] / speed['ours']:.2f}"
    return [
        [*common, name, *_closeness(part), f"{part['errors'][-1]:.3f}", times] for name, part in record["parts"].items()
    ]


def closeness_table(parts: dict[str, Any]) -> Table:
    """How closely a model follows another on each part."""
    rows = [[name, part["examples"], *_closeness(part)] for name, part in parts.items()]
    return Table(["texts", "number", "cosine (worst)", "untrained", "top 1", "top 10"], rows)


def _closeness(part: dict[str, Any]) -> list[str]:
    before = part["untrained"]
    shares = [f"{part[name]:.1%}" if name in part else MISSING for name in ("top_1", "top_10")]
    return [f"{part['cosine']:.4f} ({part['worst']:.4f})", f"{before['cosine']:.4f} ({before['worst']:.4f})", *shares]


def attention_error_table(run: Iterable[Record]) -> Table:
    """The mean error over all heads of each layer, by attention and number of landmarks."""
    errors: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in run:
        if record["metric"] == ATTENTION_ERROR:
            errors[record["attention"], record["num_landmarks"]][record["layer"]].append(record["value"])
    layers = sorted({layer for by_layer in errors.values() for layer in by_layer})
    rows = [
        [f"{name}-{m}", *(f"{statistics.mean(by_layer[n]):.3f}" if by_layer[n] else MISSING for n in layers)]
        for (name, m), by_layer in sorted(errors.items())
    ]
    return Table(["attention", *(f"layer {layer}" for layer in layers)], rows)


def last_part(path: str) -> str:
    """
    >>> last_part("models/minilm/")
    'minilm'
    """
    return path.rstrip("/").rpartition("/")[2]


def _settings(config: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in config["settings"].items()]


def _seeds(alike: list[Record]) -> str:
    return ", ".join(sorted({str(record["seed"]) for record in alike}))
