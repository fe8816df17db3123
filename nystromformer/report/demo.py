"""The demo's own sections of the report, and the short table that it ends with."""

import math
from collections.abc import Iterable
from typing import Any

from nystromformer.paper import PEERS
from nystromformer.report.efficiency import (
    MAIN,
    TIME_BASELINE,
    Entries,
    Entry,
    crossing,
    measured,
    measured_lengths,
    ratio,
    rounded,
)
from nystromformer.report.sections import DEMO, Headline, Part, Section, provenance, run_pictures
from nystromformer.report.table import MISSING, Code, Table, Text, is_ours
from nystromformer.report.tables import PICTURE

Record = dict[str, Any]
SHORT = "In short"
SEARCH = "A real model, one line changed"
SLIDES = "Training on long input"
ONE_LINE = Code('nystromformer.replace_attention(model, "nystrom-local-64", chosen_blocks=3)')
SAME_MEMORY = "about the same memory"
NO_MATRIX = "PyTorch's exact attention makes no n×n matrix either; what is gained is time"
FASTEST = "Times are the fastest of repeats that took turns; all of them, and how much they spread, are on the page."


def demo_sections(records: Iterable[Record]) -> list[Section]:
    """Nothing where no demo was run."""
    records = list(records)
    own = [record for record in records if record["job"] == DEMO]
    gains = gains_table(records)
    if not own or not gains.rows:
        return []
    short = Section(SHORT, (Part((gains,)),), headlines=tuple(headlines(own)))
    return [short, *search_section(own), *slides_section(own)]


def gains_table(records: Iterable[Record]) -> Table:
    """What was gained, in words for whoever sees it for the first time."""
    records = list(records)
    own = [record for record in records if record["job"] == DEMO]
    rows = [*search_rows(own), *call_rows(records), *slide_rows(own)]
    header = ["what was done", "exact attention", "Nyström attention", "gain"]
    return Table(header, rows, words=header[1:], note=FASTEST)


def search_rows(own: list[Record]) -> list[list[str]]:
    rows = []
    if answers := of(own, "answer"):
        same = sum(record["value"] == 1 for record in answers)
        gain = "nothing lost" if same == len(answers) else f"{len(answers) - same} other than with exact attention"
        rows.append([f"{len(answers)} questions: the passage found", "as reference", f"{same} the same", gain])
    exact, ours = pair(own, "document")
    if exact and ours:
        times = faster(exact["minimum"], ours["minimum"])
        what = f"MiniLM reads a document of {exact['tokens']:,} tokens"
        gain = f"{times}; cosine {ours['cosine']:.2f} to the exact embedding"
        rows.append([what, seconds_text(exact["minimum"]), seconds_text(ours["minimum"]), gain])
    return rows


def call_rows(records: list[Record]) -> list[list[str]]:
    """One call at the greatest length at which both were measured, ours beside exact attention and other packages."""
    found = [r for r in records if r["job"] == "bench" and r["metric"] in ("time", "peak_memory")]
    entries = measured(found)
    both = [entries.get(name, {}) for name in (MAIN, TIME_BASELINE)]
    lengths = [n for n in measured_lengths(entries) if all(each.get(n, Entry()).minimum for each in both)]
    if not lengths:
        return []
    longest = lengths[-1]
    ours, exact = (each[longest] for each in both)
    what = f"One attention call on {longest:,} tokens"
    gain = "; ".join(filter(None, [faster(exact.minimum, ours.minimum), crossing_text(entries)]))
    rows = [[what, seconds_text(exact.minimum), seconds_text(ours.minimum), gain]]
    if ours.bytes and exact.bytes:
        gain = memory(exact.bytes, ours.bytes)
        gain += f": {NO_MATRIX}" if gain == SAME_MEMORY else ""
        rows.append(["Memory of that call, besides its input", bytes_text(exact.bytes), bytes_text(ours.bytes), gain])
    for peer in (name for name in PEERS if name in entries):
        theirs = entries[peer].get(longest, Entry())
        if theirs.minimum and theirs.bytes and ours.minimum and ours.bytes:
            gain = f"ours is {faster(theirs.minimum, ours.minimum)}, {memory(theirs.bytes, ours.bytes)}"
            cell = f"{seconds_text(theirs.minimum)}, {bytes_text(theirs.bytes)}"
            rows.append([f"The same call in {PACKAGES.get(peer, peer)}", MISSING, cell, gain])
    return rows


PACKAGES = {"transformers": "Transformers", "nystrom-attention": "the package nystrom-attention"}


def slide_rows(own: list[Record]) -> list[list[str]]:
    rows = []
    exact, ours = pair(own, "step")
    if exact and ours:
        what = f"A training step, {ours['batch']} slides of {ours['tiles']:,} tiles"
        times = faster(exact["minimum"], ours["minimum"])
        rows.append([what, seconds_text(exact["minimum"]), seconds_text(ours["minimum"]), times])
    exact, ours = pair(own, "accuracy")
    if exact and ours:
        what = f"Slides told apart after {seconds_text(ours['trained'])} of training"
        cells = [f"{r['value']:.0%} ({r['steps']:,} steps)" for r in (exact, ours)]
        points = round(100 * (ours["value"] - exact["value"]))
        rows.append([what, *cells, f"{points:+} points in the same time" if points else "as many, in the same time"])
    return rows


def headlines(own: list[Record]) -> list[Headline]:
    found = []
    if answers := of(own, "answer"):
        same = sum(record["value"] == 1 for record in answers)
        text = "questions find the same passage with the attention of a real model replaced, nothing trained"
        found.append(Headline(f"{same} of {len(answers)}", text))
    exact, ours = pair(own, "document")
    if exact and ours and (times := ratio(exact["minimum"], ours["minimum"])):
        text = f"as fast as before, MiniLM reads a document of {exact['tokens']:,} tokens"
        found.append(Headline(f"{times:.1f}×", text))
    exact, ours = pair(own, "step")
    if exact and ours and (times := ratio(exact["minimum"], ours["minimum"])):
        found.append(Headline(f"{times:.0f}×", f"as many training steps on slides of {ours['tiles']:,} tiles"))
    exact, ours = pair(own, "accuracy")
    if exact and ours:
        trained = seconds_text(ours["trained"])
        text = f"of slides told apart after {trained} of training; exact attention: {exact['value']:.0%}"
        found.append(Headline(f"{ours['value']:.0%}", text))
    return found


def search_section(own: list[Record]) -> list[Section]:
    answers = of(own, "answer")
    if not answers:
        return []
    rows = [
        [
            record["question"],
            f"{record['exact']} ({record['exact_score']:.2f})",
            "the same" if record["value"] == 1 else record["ours"],
            f"{record['our_score']:.2f}",
        ]
        for record in answers
    ]
    header = ["question", "found with exact attention (cosine)", "with nystrom-local", "cosine"]
    questions = Table(header, rows, words=header[:3], title="Questions over this project's guides")
    tables = [questions]
    if documents := of(own, "document"):
        cells = [
            [
                record["attention"],
                f"{record['minimum']:.2f} s",
                f"{record['value']:.2f} s",
                f"{record['maximum']:.2f} s",
                f"{record['cosine']:.4f}",
            ]
            for record in documents
        ]
        highlight = {place for place, record in enumerate(documents) if is_ours(record["attention"])}
        title = f"One document of {documents[0]['tokens']:,} tokens, positions tiled"
        times = ["attention", "fastest", "median", "slowest", "cosine to exact"]
        tables.append(Table(times, cells, highlight, title=title))
    notes: list[Text] = [("The only change: ", ONE_LINE, ". No weight is trained.")]
    for record in of(own, "cosine"):
        notes.append(
            f"Embeddings of all {record['passages']} passages have a cosine of {record['value']:.3f} to those of exact "
            f"attention in the mean, {record['worst']:.3f} in the worst case."
        )
    return [Section(SEARCH, (Part(tuple(tables)),), provenance(answers), tuple(notes))]


def slides_section(own: list[Record]) -> list[Section]:
    steps = of(own, "step")
    if not steps:
        return []
    rows = []
    for record in steps:
        name = record["attention"]
        accuracy, tiles = (of_attention(own, metric, name) for metric in ("accuracy", "tile_precision"))
        rows.append(
            [
                name,
                f"{record['minimum']:.2f} s",
                f"{record['value']:.2f} s",
                f"{record['steps']:,}",
                f"{accuracy['value']:.0%}" if accuracy else MISSING,
                f"{tiles['value']:.0%}" if tiles else MISSING,
            ]
        )
    header = [
        "attention",
        "fastest step",
        "median step",
        "steps in the same time",
        "slides right",
        "planted tiles found",
    ]
    highlight = {place for place, record in enumerate(steps) if is_ours(record["attention"])}
    title = f"A TransMIL on batches of {steps[0]['batch']} slides of {steps[0]['tiles']:,} tiles"
    note = (
        "Slides right: of held-out slides, half of which are positive. Planted tiles found: their share among as many "
        "tiles of the highest weight. Steps of both took turns until each had used the same time."
    )
    pictures = run_pictures([record for record in own if record["metric"] == PICTURE], "slides")
    table = Table(header, rows, highlight, title=title, note=note)
    return [Section(SLIDES, (Part((table,), pictures),), provenance(steps))]


def of(own: list[Record], metric: str) -> list[Record]:
    return [record for record in own if record["metric"] == metric]


def of_attention(own: list[Record], metric: str, attention: str) -> Record | None:
    return next((record for record in of(own, metric) if record["attention"] == attention), None)


def pair(own: list[Record], metric: str) -> tuple[Record | None, Record | None]:
    """The records of a metric for exact attention and for ours."""
    found = of(own, metric)
    return of_attention(own, metric, TIME_BASELINE), next((r for r in found if is_ours(r["attention"])), None)


def faster(exact: float | None, ours: float | None) -> str:
    """
    >>> faster(10.0, 0.5), faster(1.0, 1.5), faster(1.0, 0.97), faster(None, 1.0)
    ('20 times faster', '1.5 times slower', 'about as fast', '')
    """
    return compared(exact, ours, "faster", "slower", "about as fast")


def memory(exact: float | None, ours: float | None) -> str:
    """
    >>> memory(9e6, 2e6), memory(2e6, 9e6), memory(27.1e6, 26.8e6)
    ('4.5 times less memory', '4.5 times more memory', 'about the same memory')
    """
    return compared(exact, ours, "less memory", "more memory", SAME_MEMORY)


def compared(exact: float | None, ours: float | None, better: str, worse: str, same: str) -> str:
    """How many times better or worse ours is; what differs by less than a tenth is the same."""
    times = ratio(exact, ours)
    if times is None:
        return ""
    number = max(times, 1 / times)
    if number < 1.1:
        return same
    return f"{number:.{0 if number >= 10 else 1}f} times {better if times > 1 else worse}"


def crossing_text(entries: Entries) -> str:
    length = crossing(entries)
    return "" if length is None else f"faster from about {rounded(length):,} tokens on"


def seconds_text(seconds: float | None) -> str:
    """
    >>> [seconds_text(value) for value in (0.0123, 0.5, 7.25, 42.4, None)]
    ['12 ms', '500 ms', '7.2 s', '42 s', '–']
    """
    if not seconds or not math.isfinite(seconds):
        return MISSING
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms" if seconds < 0.01 else f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.{1 if seconds < 10 else 0}f} s"


def bytes_text(count: float) -> str:
    """
    >>> bytes_text(53_400_000), bytes_text(1_612_000_000)
    ('53 MB', '1.6 GB')
    """
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.0f} MB"
