"""The report of some runs: their records found and checked, and all sections on one HTML page, and in Markdown.

Records may come from anybody. They are checked before anything is made of them, everything is made before anything is
written, and templates escape what they are given; the page allows no script but its own and nothing from elsewhere.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from nystromformer.files import write_bytes, write_text
from nystromformer.records import RECORDS, read_records
from nystromformer.report.demo import demo_sections
from nystromformer.report.efficiency import SETUP
from nystromformer.report.sections import CONTENT, DEMO, FOLDER, Picture, Section, all_sections
from nystromformer.report.table import (
    NO_RUN,
    Code,
    Text,
    markdown_text,
    plain_text,
    printable,
    tables_markdown,
    text_parts,
)
from nystromformer.report.tables import ATTENTION_ERROR, MAPS, PICTURE

PAGE, MARKDOWN, FIGURES = "report.html", "report.md", "figures"
TITLE = "Nyströmformer: what was measured"
INTRO = "Ours beside the paper's. Every figure comes from the records of runs, which its section names."
SIGNATURES = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<"}
"""How pictures that runs drew begin."""
LARGEST_FILE = 32 * 2**20
MEDIA_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}
UNIT = re.compile(r"(?<=\d) (?=(?:%|ms|s|min|MB|GB|M)(?!\w))")
Record = dict[str, Any]


def write_report(
    runs: Iterable[Path], out: Path, *, title: str = TITLE, intro: Text = INTRO, gaps: bool = True
) -> list[Section]:
    """Write the report of `runs` into `out`, whole or not at all; returns its sections, with `gaps` also empty ones.

    `ValueError` for folders without records, and for records that the report can't be made of.
    """
    records = read_runs(runs)
    sections = [*demo_sections(records), *all_sections(records)]
    sections = [section for section in sections if gaps or not section.is_gap]
    page, text = html_page(title, intro, sections), markdown_page(title, intro, sections)
    for picture in pictures_of(sections):
        for suffix, content in picture.content.items():
            write_bytes(out / FIGURES / f"{picture.name}{suffix}", content)
    write_text(out / MARKDOWN, text)
    write_text(out / PAGE, page)
    return sections


def pictures_of(sections: Iterable[Section]) -> list[Picture]:
    return [picture for section in sections for part in section.parts for picture in part.pictures]


def html_page(title: str, intro: Text, sections: Iterable[Section]) -> str:
    environment = Environment(
        loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.tests["code"] = lambda text: isinstance(text, Code)
    environment.filters |= {
        "parts": text_parts,
        "plain": plain_text,
        "gap": gap_text,
        "unbroken": unbroken,
        "digest": lambda script: f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        "inline_svg": lambda picture: picture.content[".svg"].decode(),
        "data_address": data_address,
        "json": lambda value: json.dumps(value, ensure_ascii=False),
    }
    assert environment.loader is not None
    script, _, _ = environment.loader.get_source(environment, "report.js")
    template = environment.get_template("report.html")
    return template.render(title=title, intro=intro, sections=list(sections), script=script, no_run=NO_RUN.strip())


def unbroken(cell: object) -> str:
    """A number stays beside its unit where a narrow page breaks lines.

    >>> unbroken("8.4 ms, +13 %, a b")
    '8.4\\xa0ms, +13\\xa0%, a b'
    """
    return UNIT.sub("\u00a0", str(cell))


def data_address(picture: Picture) -> str:
    """The picture inside the page itself. What is in an `img` runs no script, whoever drew it."""
    ((suffix, content),) = picture.content.items()
    return f"data:{MEDIA_TYPES[suffix]};base64,{base64.b64encode(content).decode()}"


def gap_text(section: Section) -> Text:
    return "Not among the given runs. ", Code(section.remedy), " makes it."


def markdown_page(title: str, intro: Text, sections: Iterable[Section]) -> str:
    """Pictures are linked as they are seen from the report's own folder."""
    blocks = [f"# {title}", markdown_text(intro)]
    for section in sections:
        blocks.append(f"## {section.title}")
        blocks += [f"- **{line.figure}** {markdown_text(line.text)}" for line in section.headlines]
        if section.is_gap:
            blocks.append(markdown_text(gap_text(section)))
        for part in section.parts:
            blocks += [f"### {markdown_text(part.title)}"] if part.title else []
            blocks.append(tables_markdown(part.tables).strip())
            for picture in part.pictures:
                suffix = ".svg" if ".svg" in picture.content else ".png"
                blocks.append(f"![{_in_brackets(picture.caption)}]({FIGURES}/{picture.name}{suffix})")
        blocks += [markdown_text(line) for line in (*section.notes, *section.provenance)]
    return "\n\n".join(blocks) + "\n"


def _in_brackets(text: str) -> str:
    return markdown_text(text).replace("[", "\\[").replace("]", "\\]")


def read_runs(runs: Iterable[Path]) -> list[Record]:
    """All records below `runs`, checked. `ValueError` for a folder that holds none, and for damaged records."""
    folders: dict[Path, None] = {}
    for run in runs:
        found = sorted(path.parent for path in run.rglob(RECORDS) if path.is_file()) if run.is_dir() else []
        if not found:
            raise ValueError(f"{run}: holds no {RECORDS}; give the --out folder of a finished job.")
        folders |= dict.fromkeys(found)
    records: list[Record] = []
    for folder in folders:
        try:
            inside = [_printable(record) for record in read_records(folder)]
        except RecursionError:
            raise ValueError(f"{folder / RECORDS}: a record is nested too deeply; remove that line.") from None
        for record in inside:
            check_record(record, folder)
        records += [{"seed": None, **record, FOLDER: str(folder)} for record in inside]
    return [
        record | {CONTENT: READERS[record["metric"]](Path(record[FOLDER]), record["value"])}
        if (record["job"], record["metric"]) in NAMING_FILES
        else record
        for record in records
    ]


def read_picture(folder: Path, name: str) -> bytes | None:
    """A picture in a run's folder; None where it is gone."""
    content = read_named_file(folder, name, tuple(SIGNATURES))
    suffix = Path(name).suffix
    if content is not None and not content.lstrip().startswith(SIGNATURES[suffix]):
        raise ValueError(
            f"{folder / name}: is no {suffix[1:].upper()} picture; run the job again, or remove its record."
        )
    return content


def read_maps(folder: Path, name: str) -> dict[str, Any] | None:
    """Attention weights in a run's folder; None where they are gone."""
    content = read_named_file(folder, name, (".json",))
    if content is None:
        return None
    try:
        found = _printable(json.loads(content))
        whole = all(isinstance(found[field], list) for field in ("layers", "names", "words"))
        whole = whole and all(map(TEXT.fits, [*found["words"], *found["names"]]))
        whole = whole and all(map(COUNT.fits, [*found["layers"], found["heads"]]))
        sizes = (len(found["layers"]), len(found["names"]), found["heads"], len(found["words"]), len(found["words"]))
        if not whole or len(base64.b64decode(found["levels"], validate=True)) != math.prod(sizes):
            raise ValueError("sizes")
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(
            f"{folder / name}: holds no attention weights; run the job again, or remove its record."
        ) from None
    return {field: found[field] for field in ("words", "layers", "names", "heads", "levels")}


def read_named_file(folder: Path, name: str, suffixes: tuple[str, ...]) -> bytes | None:
    """A file inside a run's folder; None where it is gone. `ValueError` for anything else that a record may name."""
    path = folder / name
    inside = path.parent.resolve().is_relative_to(folder.resolve()) and ".." not in Path(name).parts
    if Path(name).is_absolute() or not inside or path.is_symlink() or Path(name).suffix not in suffixes:
        kinds = " or ".join(suffix[1:].upper() for suffix in suffixes)
        raise ValueError(
            f"{folder}: a record names the file {name!r}: must be a {kinds} file inside this folder, and no link to "
            f"one; remove that record."
        )
    if not path.exists():
        return None
    if not path.is_file() or path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path}: must be a file of at most {LARGEST_FILE // 2**20} MB; remove its record.")
    return path.read_bytes()


READERS = {PICTURE: read_picture, MAPS: read_maps}
NAMING_FILES = {("attention-map", metric) for metric in READERS} | {(DEMO, PICTURE)}
"""Records whose value is the name of a file."""


def _printable(value: Any) -> Any:
    """The same, with every text on one line."""
    if isinstance(value, dict):
        return {printable(name): _printable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    return printable(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Kind:
    """What a field may hold."""

    name: str
    fits: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) > 1e18


NUMBER = Kind("a number up to 1e18", _is_number)
COUNT = Kind("a whole number up to 1e18", lambda value: _is_number(value) and isinstance(value, int) and value >= 0)
TEXT = Kind("a text", lambda value: isinstance(value, str))
SCALAR = Kind("a number or a text", lambda value: _is_number(value) or isinstance(value, (str, bool)))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
LIST = Kind("a list", lambda value: isinstance(value, list))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
NUMBERS = Kind("an object of numbers", lambda value: isinstance(value, dict) and all(map(_is_number, value.values())))
SCORES = Kind("an object for each part", lambda value: OBJECT.fits(value) and all(map(NUMBERS.fits, value.values())))
TEXTS = Kind("a list of texts", lambda value: LIST.fits(value) and value and all(map(TEXT.fits, value)))
ABOVE_ZERO = Kind("a number above 0", lambda value: _is_number(value) and value > 0)


def _is_closeness(part: Any) -> bool:
    """Of `distill`, on one part of its texts."""
    numbers = [part.get(name) for name in ("cosine", "worst", "examples")] if OBJECT.fits(part) else [None]
    if not all(map(_is_number, numbers)) or not OBJECT.fits(part.get("untrained")):
        return False
    errors, before = part.get("errors"), [part["untrained"].get(name) for name in ("cosine", "worst")]
    shares = [part[name] for name in ("top_1", "top_10") if name in part]
    return LIST.fits(errors) and bool(errors) and all(map(_is_number, [*errors, *before, *shares]))


CLOSENESS = Kind(
    "an object for each part", lambda value: OBJECT.fits(value) and value and all(map(_is_closeness, value.values()))
)

ANY_RECORD = {
    "job": TEXT, "metric": TEXT, "config": OBJECT, "seed?": SCALAR, "step?": COUNT, "command?": TEXT,
    "versions?": OBJECT, "machine?": OBJECT,
    "machine.processor?": TEXT, "machine.native?": TEXT, "machine.gpu?": TEXT, "machine.threads?": COUNT,
    "machine.cores?": COUNT,
    "config.task?": TEXT, "config.preset?": TEXT, "config.attention?": TEXT, "config.batch_size?": COUNT,
    "config.max_length?": COUNT, "config.budget?": NUMBER, "config.examples?": COUNT,
}  # fmt: skip
MEASURED = {
    "attention": TEXT, "length": COUNT, "batch": COUNT, "heads": COUNT, "head_dim": COUNT, "backward": FLAG,
    **{f"config.{name}?": SCALAR for name in SETUP}, **{f"{name}?": SCALAR for name in ("masked", "dtype", "device")},
}  # fmt: skip
REPEATED = {"value": NUMBER, "minimum": NUMBER, "maximum": NUMBER}
SLIDES = {"attention": TEXT, "tiles": COUNT, "batch": COUNT, "steps": COUNT}
BUDGET = Kind("an object with step and examples_seen", lambda v: NUMBERS.fits(v) and {"step", "examples_seen"} <= {*v})
LRA_POINT = {
    "config.task": TEXT, "config.attention": TEXT, "config.positions?": TEXT, "config.conv_kernel_size?": COUNT,
    "config.self_pretrain?": COUNT, "config.pretrained?": TEXT, "config.after?": TEXT, "config.dropout?": NUMBER,
    "config.embedding_start?": TEXT, "config.normalize_pooled?": FLAG, "value": NUMBER, "step": COUNT,
}  # fmt: skip
PRETRAINING_POINT = {
    "config.attention": TEXT, "config.from?": TEXT, "value": NUMBER, "step": COUNT, "seconds": NUMBER, "tokens": COUNT,
}  # fmt: skip
DISTILLATION_POINT = {
    "config.attention": TEXT, "config.max_length": COUNT, "config.stages": TEXTS, "value": NUMBER, "step": COUNT,
    "core_seconds": NUMBER,
}  # fmt: skip
FIELDS: dict[tuple[str, str], dict[str, Kind]] = {
    ("bench", "time"): {**MEASURED, "value": NUMBER, "minimum": NUMBER, "maximum?": NUMBER},
    ("bench", "time of gemm"): {"length": COUNT, "minimum": NUMBER, "flops": COUNT},
    ("bench", "peak_memory"): {**MEASURED, "value?": NUMBER, "skipped": TEXT, "failure": TEXT},
    ("lra", "dev_accuracy"): LRA_POINT,
    ("lra", "test_accuracy"): {
        **LRA_POINT, "config.preset": TEXT, "config.legacy": LIST, "config.settings": OBJECT,
        "config.batch_size": COUNT, "config.max_length": COUNT, "best_step": COUNT, "majority": NUMBER,
        "examples_seen": COUNT, "train_examples": COUNT, "test_examples": COUNT,
        "tokens?": COUNT, "seconds?": NUMBER, "pretraining?": BUDGET, "after?": BUDGET,
    },
    ("pretrain", "dev_mlm_accuracy"): PRETRAINING_POINT,
    ("pretrain", "dev_sop_accuracy"): PRETRAINING_POINT,
    ("pretrain", "mlm_accuracy"): {
        **PRETRAINING_POINT, "config.size?": TEXT, "config.batch_size": COUNT, "config.max_length": COUNT,
        "sop_accuracy?": NUMBER, "tokens_per_second": NUMBER, "parameters": COUNT,
    },
    ("finetune", "score"): {
        "config.task": TEXT, "config.model": TEXT, "config.preset": TEXT, "config.attention": TEXT,
        "config.search": FLAG, "config.settings": OBJECT, "config.batch_size": COUNT, "config.learning_rate": NUMBER,
        "config.max_length": COUNT, "config.epochs": NUMBER, "config.conv_kernel_size?": COUNT, "value": NUMBER,
        "name": TEXT, "part": TEXT, "scores": SCORES, "dev_score": NUMBER, "mean_length": NUMBER, "step": COUNT,
        "train_examples": COUNT, "scored_examples": NUMBERS, "parameters?": COUNT,
    },
    ("distill", "dev_cosine"): DISTILLATION_POINT,
    ("distill", "cosine"): {
        **DISTILLATION_POINT, "config.layers": TEXTS, "config.model": TEXT, "stages": NUMBERS, "parts": CLOSENESS,
        "speed.exact": ABOVE_ZERO, "speed.ours": ABOVE_ZERO,
    },
    ("attention-map", ATTENTION_ERROR): {
        "config.model?": TEXT, "config.text?": TEXT, "attention": TEXT, "num_landmarks": COUNT, "layer": COUNT,
        "value": NUMBER,
    },
    **{("attention-map", metric): {"config.model?": TEXT, "config.text?": TEXT, "value": TEXT, "caption": TEXT}
       for metric in (PICTURE, MAPS)},
    (DEMO, "answer"): {
        "value": NUMBER, "question": TEXT, "exact": TEXT, "ours": TEXT, "exact_score": NUMBER, "our_score": NUMBER,
    },
    (DEMO, "cosine"): {"value": NUMBER, "worst": NUMBER, "passages": COUNT},
    (DEMO, "document"): {**REPEATED, "attention": TEXT, "tokens": COUNT, "cosine": NUMBER},
    (DEMO, "step"): {**REPEATED, **SLIDES},
    (DEMO, "accuracy"): {**SLIDES, "value": NUMBER, "trained": NUMBER},
    (DEMO, "tile_precision"): {**SLIDES, "value": NUMBER},
    (DEMO, PICTURE): {"value": TEXT, "caption": TEXT},
}  # fmt: skip
"""What is read of the records that the report shows. A question mark: may be missing, or null."""


def check_record(record: Record, folder: Path) -> None:
    """`ValueError` for a record that lacks a field or has something else in it, with its folder."""
    metric = "time of gemm" if record.get("attention") == "gemm" else record["metric"]
    for field, kind in {**ANY_RECORD, **FIELDS.get((record["job"], metric), {})}.items():
        names = field.rstrip("?").split(".")
        value: Any = record
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        if value is None and not field.endswith("?"):
            wrong = f"a record lacks the field {names[-1]!r}"
        elif value is not None and not kind.fits(value):
            shown = str(value) if len(str(value)) <= 40 else f"{str(value)[:40]}…"
            wrong = f"a record's {'.'.join(names)} is {shown}: must be {kind.name}"
        else:
            continue
        raise ValueError(f"{folder}: {wrong}; remove that line of {RECORDS}, or run the job again.")
