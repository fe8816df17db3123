"""The parts of the report, each from the records of its jobs. What no run gave is a named gap."""

import base64
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean

from nystromformer.bench.plots import draw_plots
from nystromformer.bench.table import cells, markdown
from nystromformer.records import table_markdown
from nystromformer.report import finetune_table, lra_table
from nystromformer.report.page import Picture, Section

Record = dict[str, object]


def all_sections(records: list[Record], folder: Path) -> list[Section]:
    """Every part, in the order of the page. Figures are written to `folder`, too."""
    return [build(records, folder) for build in SECTIONS]


def efficiency(records: list[Record], folder: Path) -> Section:
    title, remedy = "Efficiency", "nystromformer bench --peers --out runs/bench"
    measured = [r for r in records if r["job"] in ("bench", "demo") and r["metric"] in ("time", "peak_memory")]
    if not measured:
        return Section(title, remedy=remedy)
    tables, pictures = [], []
    for backward in (False, True):
        chosen = [r for r in measured if r.get("backward", backward) == backward]
        if not any("backward" in r for r in chosen):
            continue
        what = "forward and backward" if backward else "forward"
        tables.append(f"### One call, {what}\n\n{markdown(chosen)}")
        paths = draw_plots(cells(chosen), folder / f"efficiency-{'backward' if backward else 'forward'}")
        pictures += [
            Picture(data_address(path), f"{path.stem.capitalize()} of one call, {what}, against the length")
            for path in paths
            if path.suffix == ".svg"
        ]
    return Section(title, tuple(tables), tuple(pictures), provenance(measured))


def long_range_arena(records: list[Record], folder: Path) -> Section:
    title, remedy = "Long Range Arena", "nystromformer lra all --preset mini --out runs/lra"
    found = lra_table.results(records)
    if not found:
        return Section(title, remedy=remedy)
    return Section(title, (lra_table.lra_tables(found),), provenance=provenance(found))


def fine_tuning(records: list[Record], folder: Path) -> Section:
    title, remedy = "Fine-tuning", "nystromformer finetune sst-2 --model MODEL --data GLUE --out runs/finetune"
    found = finetune_table.results(records)
    if not found:
        return Section(title, remedy=remedy)
    return Section(title, (finetune_table.finetune_tables(found),), provenance=provenance(found))


def attention_error(records: list[Record], folder: Path) -> Section:
    """The mean error of the approximated matrix over all heads of each layer."""
    title, remedy = "Attention error", "nystromformer attention-map --model MODEL --text TEXT --out runs/attention-map"
    found = [r for r in records if r["job"] == "attention-map" and r["metric"] == "matrix_error"]
    if not found:
        return Section(title, remedy=remedy)
    errors: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in found:
        errors[record["attention"], record["num_landmarks"]][record["layer"]].append(record["value"])
    layers = sorted({layer for by_layer in errors.values() for layer in by_layer})
    rows = [
        [f"{name}-{m}", *(f"{mean(by_layer[layer]):.3f}" if by_layer[layer] else "–" for layer in layers)]
        for (name, m), by_layer in sorted(errors.items())
    ]
    table = table_markdown(["attention", *(f"layer {layer}" for layer in layers)], rows)
    caption = "‖Ŝ − S‖ / ‖S‖ in the Frobenius norm, mean over the heads of a layer."
    return Section(title, (table,), notes=(caption,), provenance=provenance(found))


SECTIONS: list[Callable[[list[Record], Path], Section]] = [efficiency, long_range_arena, fine_tuning, attention_error]


def data_address(path: Path) -> str:
    """A picture inside the page itself."""
    kind = {".svg": "image/svg+xml", ".png": "image/png"}[path.suffix]
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def provenance(records: Iterable[Record]) -> tuple[str, ...]:
    """Command, seed, machine and versions of each run, once."""
    lines = []
    for record in records:
        machine = record["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        device = machine.get("gpu", machine["processor"])
        lines.append(
            f"`{record.get('command', record['job'])}`, seed {record['seed']}, "
            f"on {device} with {machine['threads']} threads; {versions}"
        )
    return tuple(dict.fromkeys(lines))
