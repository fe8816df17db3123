"""Errors of approximated attention from records, and the pictures that their runs drew."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

from nystromformer.records import table_markdown

JOB = "attention-map"
ERROR, PICTURE = "matrix_error", "picture"
CAPTION = "‖Ŝ − S‖ / ‖S‖ of attention matrices in the Frobenius norm, mean over the heads of a layer."
Record = dict[str, object]


def by_run(records: Iterable[Record]) -> list[list[Record]]:
    """The records of each attention-map run that has measured something."""
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record["job"] == JOB and record["metric"] in (ERROR, PICTURE):
            runs[json.dumps([record["folder"], record["config"]], sort_keys=True)].append(record)
    return [found for found in runs.values() if any(record["metric"] == ERROR for record in found)]


def title_of(run: list[Record]) -> str:
    config = run[0]["config"]
    text = f" on {Path(config['text']).name}" if "text" in config else ""
    return f"{Path(config.get('model', 'model')).name}{text}"


def error_table(run: list[Record]) -> str:
    """The mean error over all heads of each layer, by attention and number of landmarks."""
    errors: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in run:
        if record["metric"] == ERROR:
            errors[record["attention"], record["num_landmarks"]][record["layer"]].append(record["value"])
    layers = sorted({layer for by_layer in errors.values() for layer in by_layer})
    rows = [
        [f"{name}-{m}", *(f"{mean(by_layer[layer]):.3f}" if by_layer[layer] else "–" for layer in layers)]
        for (name, m), by_layer in sorted(errors.items())
    ]
    return table_markdown(["attention", *(f"layer {layer}" for layer in layers)], rows)


def pictures_of(run: list[Record]) -> dict[Path, str]:
    """The pictures of a run that are still there, with their captions."""
    named = {
        Path(record["folder"]) / record["value"]: record["caption"] for record in run if record["metric"] == PICTURE
    }
    return {path: caption for path, caption in named.items() if path.is_file()}
