"""The parts of the report, each from the records of its jobs. What no run gave is a named gap."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from nystromformer.bench.table import cells, draw_plots, markdown
from nystromformer.files import write_bytes
from nystromformer.records import RECORDS, results, table_markdown
from nystromformer.report import attention_maps, finetune_table, lra_table, pretraining_curves, pretraining_table
from nystromformer.report.lra_curves import draw_dev_accuracy
from nystromformer.report.page import Part, Picture, Section, anchor
from nystromformer.report.provenance import provenance

Record = dict[str, object]
Build = Callable[[list[Record], Path], Section]
SETUP = ("backward", "masked", "batch", "heads", "head_dim", "dtype", "device")
"""What must agree for measurements to stand in one table."""
MOST_CURVES = 6
SMALLER = (
    "Presets other than `paper` take fewer steps on smaller data: they compare attentions with one another, not with "
    "the paper."
)


def all_sections(records: list[Record], figures: Path) -> list[Section]:
    """Every part, in the order of the page. Figures are written to the folder `figures`."""
    sections = [
        section_of(build, [record for record in records if record["job"] == job], figures)
        for job, build in SECTIONS.items()
    ]
    others = other_records(records)
    return sections if others is None else [*sections, others]


def section_of(build: Build, records: list[Record], figures: Path) -> Section:
    """`ValueError` for a record that lacks a field, with its folder."""
    try:
        return build(records, figures)
    except KeyError as missing:
        folders = dict.fromkeys(record["folder"] for record in records)
        if len(folders) == 1:
            raise ValueError(
                f"{next(iter(folders))}: a record lacks the field {missing}; remove that line of {RECORDS}, or run "
                f"the job again."
            ) from missing
        for folder in folders:  # one of them raises the error above
            section_of(build, [record for record in records if record["folder"] == folder], figures)
        raise


def efficiency(records: list[Record], figures: Path) -> Section:
    title, remedy = "Efficiency", "nystromformer bench --peers --out runs/bench"
    measured = [r for r in records if r["metric"] in ("time", "peak_memory")]
    if not measured:
        return Section(title, remedy=remedy)
    by_setup: dict[tuple, list[Record]] = defaultdict(list)
    for record in measured:
        by_setup[tuple(record.get(name, record["config"].get(name)) for name in SETUP)].append(record)
    parts = []
    for setup, found in by_setup.items():
        what = setup_text(dict(zip(SETUP, setup, strict=True)))
        paths = [path for path in draw_plots(cells(found), figures / anchor(what)) if path.suffix == ".svg"]
        captions = [f"{path.stem.capitalize()} of {what[0].lower()}{what[1:]}, against the length" for path in paths]
        tables = markdown(found).replace("## ", "#### ")
        parts.append(Part(f"### {what}\n\n{tables}", tuple(map(Picture, paths, captions))))
    return Section(title, tuple(parts), provenance(measured))


def setup_text(setup: dict[str, object]) -> str:
    """
    >>> setup_text({"backward": True, "masked": False, "batch": 1, "heads": 12, "head_dim": 64, "dtype": "float32"})
    'One call, forward and backward, batch 1, 12 heads × 64, float32'
    """
    parts = ["One call", "forward and backward" if setup["backward"] else "forward"]
    parts += [f"batch {setup['batch']}", f"{setup['heads']} heads × {setup['head_dim']}"]
    parts += [str(setup[name]) for name in ("dtype", "device") if setup.get(name)]
    return ", ".join([*parts, "an eighth of it padding"] if setup.get("masked") else parts)


def long_range_arena(records: list[Record], figures: Path) -> Section:
    title, remedy = "Long Range Arena", "nystromformer lra all --preset mini --out runs/lra"
    found = results(records, "lra")
    if not found:
        return Section(title, remedy=remedy)
    pictures = lra_pictures(records, found, figures / "lra")
    parts = (Part(lra_table.lra_tables(found), pictures),)
    return Section(title, parts, provenance(found), notes=notes_on_presets(found))


def lra_pictures(records: list[Record], finished: list[Record], figures: Path) -> tuple[Picture, ...]:
    """Curves of the finished runs of each task and preset, where they are few enough to be told apart."""
    place = lambda record: (record["config"]["preset"], record["config"]["task"])
    pictures = []
    for preset, task in dict.fromkeys(map(place, finished)):
        folders = {record["folder"] for record in finished if place(record) == (preset, task)}
        if len(folders) <= MOST_CURVES:
            run = [record for record in records if record["folder"] in folders]
            _, svg = draw_dev_accuracy(run, task, figures / f"{task}-{preset}")
            pictures.append(Picture(svg, f"{task}, preset {preset}: accuracy on the dev set while training"))
    return tuple(pictures)


def pretraining(records: list[Record], figures: Path) -> Section:
    title, remedy = "Pretraining", "nystromformer pretrain --corpus TEXT --tokenizer train --preset mini"
    found = results(records, "pretrain")
    drawn = [r for r in records if r["metric"] in pretraining_curves.ACCURACIES]
    if not found and not drawn:
        return Section(title, remedy=remedy)
    against = {"accuracy_steps": "steps", "accuracy_time": "time"}
    paths = pretraining_curves.draw_curves(drawn, figures / "pretraining") if drawn else []
    pictures = tuple(
        Picture(path, f"Validation accuracy of masked words and sentence order against {against[path.stem]}", wide=True)
        for path in paths
        if path.suffix == ".svg"
    )
    return Section(
        title,
        (Part(pretraining_table.pretraining_table(found), pictures),),
        provenance(found or drawn[-1:]),
        notes=(
            "The paper pretrains BERT-base sizes for 500,000 steps of 256 × 512 tokens, and BERT-small for 100,000.",
            *notes_on_presets(found),
        ),
    )


def fine_tuning(records: list[Record], figures: Path) -> Section:
    title, remedy = "Fine-tuning", "nystromformer finetune sst2 --model MODEL --data GLUE --out runs/finetune"
    found = finetune_table.best_results(records)
    if not found:
        return Section(title, remedy=remedy)
    tables = finetune_table.finetune_tables(found)
    return Section(title, (Part(tables),), provenance(found), notes=notes_on_presets(found))


def attention_error(records: list[Record], figures: Path) -> Section:
    title, remedy = "Attention maps", "nystromformer attention-map --model MODEL --text TEXT --out runs/attention-map"
    runs = attention_maps.by_run(records)
    if not runs:
        return Section(title, remedy=remedy)
    parts = []
    for number, run in enumerate(runs, start=1):
        name = attention_maps.title_of(run)
        pictures = []
        for path, caption in attention_maps.pictures_of(run).items():
            copy = figures / f"attention-{number}" / path.name
            write_bytes(copy, path.read_bytes())
            pictures.append(Picture(copy, caption, wide=True))
        parts.append(Part(f"### {name}\n\n{attention_maps.error_table(run)}", tuple(pictures)))
    found = [record for run in runs for record in run]
    return Section(title, tuple(parts), provenance(found), notes=(attention_maps.CAPTION,))


SECTIONS: dict[str, Build] = {
    "bench": efficiency,
    "lra": long_range_arena,
    "pretrain": pretraining,
    "finetune": fine_tuning,
    "attention-map": attention_error,
}
"""By the job whose records each shows."""


def other_records(records: list[Record]) -> Section | None:
    """Names the records that no part of the page shows; None where there are none."""
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["job"] not in SECTIONS:
            found[record["job"], record["folder"]].append(record)
    if not found:
        return None
    rows = [
        [job, folder, len(some), ", ".join(dict.fromkeys(f"{record['metric']}" for record in some))]
        for (job, folder), some in found.items()
    ]
    table = table_markdown(["job", "folder", "records", "what they measure"], rows)
    everything = [record for some in found.values() for record in some]
    return Section("Other records", (Part(table),), provenance(everything), notes=("Recorded, but not drawn here.",))


def notes_on_presets(found: list[Record]) -> tuple[str, ...]:
    return (SMALLER,) if any(record["config"].get("preset") != "paper" for record in found) else ()
