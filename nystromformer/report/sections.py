"""The sections of the report as data: tables, pictures and what made them. What no run gave is a named gap."""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nystromformer.paper import DENSE, PEERS
from nystromformer.records import machine_text, results
from nystromformer.report.efficiency import (
    MAIN,
    SETUP,
    TIME_BASELINE,
    Entries,
    Entry,
    efficiency_tables,
    measured,
    measured_lengths,
    ratio,
    setup_text,
)
from nystromformer.report.figures import (
    PRETRAINING_ACCURACIES,
    Drawing,
    draw_dev_accuracy,
    draw_distillation,
    draw_efficiency,
    draw_pretraining,
)
from nystromformer.report.table import Code, Table, Text, is_ours
from nystromformer.report.tables import (
    ATTENTION_ERROR,
    MAPS,
    PICTURE,
    attention_error_table,
    best_results,
    distillation_tables,
    finetune_tables,
    last_part,
    lra_method,
    lra_tables,
    pretraining_tables,
)

Record = dict[str, Any]
FOLDER = "folder"
"""The field that says where a record was found, and so where the files are that it names."""
DEMO = "demo"
MOST_CURVES = 6
"""More runs than these can't be told apart in one figure."""
CONTENT = "content"
"""The field that has what is in the file that a record names; nothing where the file is gone."""
SMALLER = (
    "Presets other than ",
    Code("paper"),
    " take fewer steps on smaller data: they compare attentions with one another, not with the paper.",
)
PAPERS_PRETRAINING = (
    "The paper pretrains BERT-base sizes for 500,000 steps of 256 × 512 tokens, and BERT-small for 100,000."
)
CLOSENESS_CAPTION = (
    "Cosine of pooled embeddings to those of exact attention; top 1, top 10: how far each text's nearest neighbors "
    "among the others are the same; untrained: the same attention in the original weights."
)
ERROR_CAPTION = "‖Ŝ − S‖ / ‖S‖ of attention matrices in the Frobenius norm, mean over the heads of a layer."


@dataclass(frozen=True)
class Picture:
    """A drawing of ours, or a picture that a run drew: its contents by suffix."""

    name: str
    """A path below the report's folder of figures, without suffix; no text of a record is in it as it stands."""
    caption: str
    content: dict[str, bytes]
    wide: bool = False
    """Takes a whole row, and is scrolled where the screen is narrower than it can be read."""
    drawn: bool = True
    """Drawn here, so that the SVG may be a part of the page itself."""


@dataclass(frozen=True)
class Maps:
    """Attention weights to look at, by layer, head and token."""

    caption: str
    content: dict[str, Any]
    """As `attention-map` writes it."""


@dataclass(frozen=True)
class Part:
    """Tables, and the pictures that belong to them."""

    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    title: str = ""
    maps: tuple[Maps, ...] = ()


@dataclass(frozen=True)
class Headline:
    """A figure to see first, and in a few words what it is."""

    figure: str
    text: str


@dataclass(frozen=True)
class Section:
    """A chapter of the report. Without parts it is a gap, and says what would fill it."""

    title: str
    parts: tuple[Part, ...] = ()
    provenance: tuple[Text, ...] = ()
    """Lines that say what made the figures: command, seed, budget, machine."""
    notes: tuple[Text, ...] = ()
    remedy: str = ""
    """The command that would fill the gap."""
    headlines: tuple[Headline, ...] = ()

    @property
    def is_gap(self) -> bool:
        return not self.parts

    @property
    def anchor(self) -> str:
        return slug(self.title)


def all_sections(records: list[Record]) -> list[Section]:
    """Every section, in the order of the page."""
    sections = [build([record for record in records if record["job"] == job]) for job, build in SECTIONS.items()]
    return [*sections, *other_records(records)]


def slug(text: str) -> str:
    """A text as a part of an address or a file's name.

    >>> slug("Long Range Arena"), slug("/../../x")
    ('long-range-arena', 'x')
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80].rstrip("-")


def efficiency(records: list[Record]) -> Section:
    title, remedy = "Efficiency", "nystromformer bench --peers --out runs/bench"
    found = [r for r in records if r["metric"] in ("time", "peak_memory")]
    if not found:
        return Section(title, remedy=remedy)
    by_setup: dict[tuple, list[Record]] = defaultdict(list)
    for record in found:
        if record["attention"] != "gemm":  # which has no setup of its own, and counts for all
            by_setup[tuple(record.get(name, record["config"].get(name)) for name in SETUP)].append(record)
    products = [record for record in found if record["attention"] == "gemm"]
    parts, headlines = list[Part](), list[Headline]()
    for number, (setup, own) in enumerate(by_setup.items(), start=1):
        what = setup_text(dict(zip(SETUP, setup, strict=True)))
        folders = {record[FOLDER] for record in own}
        own += [record for record in products if record[FOLDER] in folders]
        entries = measured(own)
        against = f"of {what[0].lower()}{what[1:]}, against the length"
        captions = {name: f"{name.capitalize()} {against}" for name in ("time", "memory")}
        pictures = drawn_pictures(f"efficiency-{number}", draw_efficiency(entries), captions)
        parts.append(Part(tuple(efficiency_tables(own)), pictures, what))
        headlines += efficiency_headlines(entries) if not headlines else []
    return Section(title, tuple(parts), provenance(found), headlines=tuple(headlines))


def efficiency_headlines(entries: Entries) -> list[Headline]:
    """Time and memory of our attention at the greatest length at which what it is compared with was measured, too.

    Memory is compared with exact attention that makes its matrix, where that was measured; otherwise with the same work
    in another package; otherwise with the fused kernel, which makes no matrix either.
    """
    found = []
    other = next((name for name in (DENSE, *PEERS) if name in entries), TIME_BASELINE)
    names = {DENSE: "exact attention with its matrix", TIME_BASELINE: "exact attention"}
    for baseline, field in ((TIME_BASELINE, "seconds"), (other, "bytes")):
        what = names.get(baseline, f"the Nyström attention of {baseline}")
        for length in reversed(measured_lengths(entries)):
            ours, theirs = (getattr(entries.get(name, {}).get(length, Entry()), field) for name in (MAIN, baseline))
            if times := ratio(theirs, ours):
                word = {"seconds": ("faster", "slower"), "bytes": ("less memory", "more memory")}[field][times < 1]
                than = f"{word} than {what} at {length:,} tokens, one call of {MAIN}"
                than += ", by medians" if field == "seconds" else ""
                found.append(Headline(f"{max(times, 1 / times):,.1f}×", than))
                break
    return found


def long_range_arena(records: list[Record]) -> Section:
    title, remedy = "Long Range Arena", "nystromformer lra all --preset mini --out runs/lra"
    found = results(records, "lra")
    if not found:
        return Section(title, remedy=remedy)
    parts = (Part(tuple(lra_tables(found)), lra_pictures(records, found)),)
    headlines = accuracy_headlines("of the test examples right", found, lambda record: lra_method(record["config"]))
    return Section(title, parts, provenance(found), notes_on_presets(found), headlines=headlines)


def lra_pictures(records: list[Record], finished: list[Record]) -> tuple[Picture, ...]:
    """Curves of the finished runs of each task and preset, where they are few enough to be told apart."""
    place = lambda record: (record["config"]["preset"], record["config"]["task"])
    pictures = []
    for number, (preset, task) in enumerate(dict.fromkeys(map(place, finished)), start=1):
        folders = {record[FOLDER] for record in finished if place(record) == (preset, task)}
        if len(folders) <= MOST_CURVES:
            drawing = draw_dev_accuracy([record for record in records if record[FOLDER] in folders], task)
            caption = f"{task}, preset {preset}: accuracy on the dev set while training"
            name = f"lra-{number}"
            pictures.append(Picture(f"{name}/{slug(f'{task}-{preset}') or 'task'}", caption, drawing.render(name)))
    return tuple(pictures)


def accuracy_headlines(what: str, found: list[Record], attention_of: Callable[[Record], str]) -> tuple[Headline, ...]:
    """Our best-known attention beside exact attention, over the tasks that both were run on under one preset."""
    values: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in found:
        values[record["config"]["preset"], record["config"]["task"]][attention_of(record)].append(record["value"])
    names = sorted({name for by_name in values.values() for name in by_name if is_ours(name)}, key=lambda n: n != MAIN)
    for name in names:
        both = {place: each for place, each in values.items() if name in each and TIME_BASELINE in each}
        if both:
            preset = next(preset for preset, _ in both)
            tasks = [task for other, task in both if other == preset]
            ours, exact = (
                statistics.mean(statistics.mean(both[preset, task][who]) for task in tasks)
                for who in (name, TIME_BASELINE)
            )
            over = tasks[0] if len(tasks) == 1 else f"mean of {len(tasks)} tasks"
            text = f"{what} with {name}, {exact:.1%} with exact attention: {over}, preset {preset}"
            return (Headline(f"{ours:.1%}", text),)
    return ()


def pretraining(records: list[Record]) -> Section:
    title, remedy = "Pretraining", "nystromformer pretrain --corpus TEXT --tokenizer train --preset mini"
    found = results(records, "pretrain")
    drawn = [r for r in records if r["metric"] in PRETRAINING_ACCURACIES]
    if not found and not drawn:
        return Section(title, remedy=remedy)
    drawings = draw_pretraining(drawn) if drawn else {}
    accuracy = "Validation accuracy of masked words and sentence order against"
    captions = {name: f"{accuracy} {name.removeprefix('accuracy_')}" for name in drawings}
    pictures = drawn_pictures("pretraining", drawings, captions)
    notes = (PAPERS_PRETRAINING, *notes_on_presets(found))
    return Section(title, (Part(tuple(pretraining_tables(found)), pictures),), provenance(found or drawn[-1:]), notes)


def fine_tuning(records: list[Record]) -> Section:
    title, remedy = "Fine-tuning", "nystromformer finetune sst2 --model MODEL --data GLUE --out runs/finetune"
    found = best_results(records)
    if not found:
        return Section(title, remedy=remedy)
    headlines = accuracy_headlines("score of the fine-tuned model", found, lambda record: record["config"]["attention"])
    parts = (Part(tuple(finetune_tables(found))),)
    return Section(title, parts, provenance(found), notes_on_presets(found), headlines=headlines)


def distillation(records: list[Record]) -> Section:
    title, remedy = "Distillation", "nystromformer distill --model MODEL --corpus TEXT --preset mini --out runs/distill"
    found = results(records, "distill")
    if not found:
        return Section(title, remedy=remedy)
    caption = "How closely each run follows its teacher on held-out text, against the time of one core"
    pictures = drawn_pictures("distillation", draw_distillation(records), {"cosine": caption})
    best = max(found, key=lambda record: record["value"])
    text = f"cosine to exact attention of {last_part(best['config']['model'])} with {best['config']['attention']}"
    return Section(
        title,
        (Part(tuple(distillation_tables(found)), pictures),),
        provenance(found),
        (CLOSENESS_CAPTION,),
        headlines=(Headline(f"{best['value']:.3f}", f"{text}, on held-out text after distillation"),),
    )


def attention_error(records: list[Record]) -> Section:
    title, remedy = "Attention maps", "nystromformer attention-map --model MODEL --text TEXT --out runs/attention-map"
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record["metric"] in (ATTENTION_ERROR, PICTURE, MAPS):
            runs[json.dumps([record[FOLDER], record["config"]], sort_keys=True)].append(record)
    parts, shown = [], []
    for number, run in enumerate(runs.values(), start=1):
        if any(record["metric"] == ATTENTION_ERROR for record in run):
            config = run[0]["config"]
            text = f" on {last_part(config['text'])}" if config.get("text") else ""
            name = f"{last_part(config.get('model') or 'model')}{text}"
            maps = [r for r in run if r["metric"] == MAPS and r[CONTENT]]
            shown_maps = tuple(Maps(record["caption"], record[CONTENT]) for record in maps[-1:])
            pictures = run_pictures(run, f"attention-{number}")
            parts.append(Part((attention_error_table(run),), pictures, name, shown_maps))
            shown += run
    if not parts:
        return Section(title, remedy=remedy)
    return Section(title, tuple(parts), provenance(shown), (ERROR_CAPTION,))


def drawn_pictures(folder: str, drawings: dict[str, Drawing], captions: dict[str, str]) -> tuple[Picture, ...]:
    return tuple(
        Picture(f"{folder}/{name}", captions[name], drawing.render(f"{folder}-{name}"))
        for name, drawing in drawings.items()
    )


def run_pictures(run: list[Record], folder: str) -> tuple[Picture, ...]:
    """The pictures of a run that are still there."""
    named = {record["value"]: record for record in run if record["metric"] == PICTURE and record[CONTENT]}
    return tuple(
        Picture(
            f"{folder}/{number}-{slug(Path(name).stem)}".rstrip("-"),
            record["caption"],
            {Path(name).suffix: record[CONTENT]},
            wide=True,
            drawn=False,
        )
        for number, (name, record) in enumerate(named.items(), start=1)
    )


SECTIONS: dict[str, Callable[[list[Record]], Section]] = {
    "bench": efficiency,
    "lra": long_range_arena,
    "pretrain": pretraining,
    "finetune": fine_tuning,
    "distill": distillation,
    "attention-map": attention_error,
}
"""By the job whose records each shows."""

SHOWN_ELSEWHERE = (DEMO, "self-pretrain")
"""The demo has sections of its own, in `report.demo`; what self-pretraining cost is told by the run that it served."""


def other_records(records: list[Record]) -> list[Section]:
    """Names the records that no other section shows, where there are any."""
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["job"] not in (*SECTIONS, *SHOWN_ELSEWHERE):
            found[record["job"], record[FOLDER]].append(record)
    if not found:
        return []
    rows = [
        [job, folder, len(some), ", ".join(dict.fromkeys(record["metric"] for record in some))]
        for (job, folder), some in found.items()
    ]
    table = Table(["job", "folder", "records", "what they measure"], rows, words=("folder", "what they measure"))
    everything = [record for some in found.values() for record in some]
    return [Section("Other records", (Part((table,)),), provenance(everything), ("Recorded, but not drawn here.",))]


def notes_on_presets(found: list[Record]) -> tuple[Text, ...]:
    return (SMALLER,) if any(record["config"].get("preset") != "paper" for record in found) else ()


def provenance(records: Iterable[Record]) -> tuple[Text, ...]:
    """What made a figure: one line for each command on each machine, with all its seeds and budgets.

    >>> machine = {"processor": "a processor", "cores": 4, "threads": 2}
    >>> record = {"job": "bench", "command": "bench --seed 3", "seed": 3, "machine": machine, "config": {"budget": 9.0}}
    >>> provenance([record, record | {"seed": 4}])
    (('bench --seed 3', ': seeds 3, 4; 9 s of timing per length; a processor, 2 of 4 cores'),)
    """
    runs: dict[tuple[str, str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for record in records:
        versions = ", ".join(f"{name} {version}" for name, version in (record.get("versions") or {}).items())
        key = (record.get("command") or record["job"], machine_text(record.get("machine") or {}), versions)
        seeds, budgets = runs.setdefault(key, ({}, {}))
        if record.get("seed") is not None:
            seeds[str(record["seed"])] = None
        budgets[budget_text(record)] = None
    lines = []
    for (command, machine, versions), (seeds, budgets) in runs.items():
        parts = [f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}" if seeds else "no seed", *budgets]
        lines.append((Code(command), ": " + "; ".join(part for part in [*parts, machine, versions] if part)))
    return tuple(lines)


def budget_text(record: Record) -> str:
    """What a run was given: steps of so many examples, or seconds of timing.

    >>> budget_text({"step": 600, "config": {"task": "listops", "batch_size": 32, "max_length": 256}})
    'listops: 600 steps of 32 × 256 tokens'
    """
    config = record["config"]
    task = f"{config['task']}: " if config.get("task") else ""
    if record.get("step") is not None and config.get("batch_size") is not None:
        length = f" × {config['max_length']:,} tokens" if config.get("max_length") is not None else ""
        return f"{task}{record['step']:,} steps of {config['batch_size']}{length}"
    if config.get("budget") is not None:
        return f"{config['budget']:g} s of timing per length"
    if "landmarks" in config and (config.get("examples") or 1) > 1:
        return f"{config['examples']} examples"
    return ""
