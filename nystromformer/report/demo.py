"""The demo's own sections of the report, and the short table that it ends with."""

import math
from collections.abc import Iterable
from typing import Any

from nystromformer.paper import PEERS
from nystromformer.report.sections import DEMO, Headline, Part, Section, provenance, run_pictures
from nystromformer.report.table import Code, Table, Text, is_ours
from nystromformer.report.tables import (
    MAIN,
    MISSING,
    PICTURE,
    TIME_BASELINE,
    Entries,
    Entry,
    crossing,
    measured,
    measured_lengths,
    ratio,
    rounded,
)

Record = dict[str, Any]
SHORT = "In short"
SEARCH = "A real model, one line changed"
SLIDES = "Training on long input"
ONE_LINE = Code('nystromformer.replace_attention(model, "nystrom-local-64", chosen_blocks=3)')
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
    """One call at the greatest length, ours beside exact attention and beside other packages."""
    found = [r for r in records if r["job"] == "bench" and r["metric"] in ("time", "peak_memory")]
    entries = measured(found)
    lengths = [n for n in measured_lengths(entries) if entries.get(MAIN, {}).get(n, Entry()).minimum]
    if not lengths or TIME_BASELINE not in entries:
        return []
    longest = lengths[-1]
    ours, exact = entries[MAIN][longest], entries[TIME_BASELINE].get(longest, Entry())
    what = f"One attention call on {longest:,} tokens"
    gain = "; ".join(filter(None, [faster(exact.minimum, ours.minimum), crossing_text(entries)]))
    rows = [[what, seconds_text(exact.minimum), seconds_text(ours.minimum), gain]]
    if ours.bytes and exact.bytes:
        times = ours.bytes / exact.bytes
        word = f"{times:.1f} times more" if times >= 1 else f"{1 / times:.1f} times less"
        rows.append(["Its memory, above the input", bytes_text(exact.bytes), bytes_text(ours.bytes), word])
    for peer in (name for name in PEERS if name in entries):
        theirs = entries[peer].get(longest, Entry())
        if theirs.minimum and theirs.bytes and ours.minimum and ours.bytes:
            less = f"{theirs.bytes / ours.bytes:.1f} times less memory"
            gain = f"ours is {faster(theirs.minimum, ours.minimum)}, {less}"
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
        difference = 100 * (ours["value"] - exact["value"])
        rows.append([what, *cells, f"{difference:+.0f} points in the same time"])
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
    >>> faster(10.0, 0.5), faster(1.0, 1.5), faster(None, 1.0)
    ('20 times faster', '1.5 times slower', '')
    """
    times = ratio(exact, ours)
    if times is None:
        return ""
    word, number = ("faster", times) if times >= 1 else ("slower", 1 / times)
    return f"{number:.{0 if number >= 10 else 1}f} times {word}"


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
