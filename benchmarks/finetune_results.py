"""SST-2, MRPC and IMDB from real MiniLM weights, exact against Nyström attention, with the same seeds and budget.

    NYSTROMFORMER_DATA=DIR python benchmarks/finetune_results.py --work runs/finetune-results --out results/finetune

Budgets are small, see `RUNS`: each of the ten runs of IMDB at 512 tokens takes about eight minutes of one core. It can
be stopped at any time and started again: finished runs are left alone, others resume where they stopped. `DIR` holds
`glue/SST-2`, `glue/MRPC` and `imdb`. Records and the table come to `--out`; models stay in `--work`. `--only mrpc` does
a part.
"""

import argparse
import sys
from pathlib import Path

from result_runs import copy_records, data_folder, run_each, runs_in, weights_folder

from nystromformer.files import write_text
from nystromformer.records import read_records
from nystromformer.report.table import tables_markdown
from nystromformer.report.tables import finetune_tables

IMDB = ["imdb", "--batch-size", "8", "--learning-rate", "1e-4", "--epochs", "1", "--test-examples", "500"]
"""Small batches and a high rate, since so few examples give few steps."""
IMDB_512 = [*IMDB, "--seeds", "1,2", "--max-length", "512", "--train-examples", "800", "--dev-examples", "100"]
RUNS: dict[str, list[str]] = {
    "imdb-512": [*IMDB_512, "--attention", "standard,nystrom-64,nystrom-local-64"],
    "imdb-512-conv": [*IMDB_512, "--attention", "nystrom-64,nystrom-local-64", "--conv-kernel-size", "33"],
    # Texts of SST-2 have few tokens: Nyström-64 is exact there, Nyström-8 is not.
    "sst2": ["sst2", "--attention", "standard,nystrom-64,nystrom-8", "--seeds", "1", "--epochs", "2",
             "--train-examples", "3000"],
    "mrpc": ["mrpc", "--attention", "standard,nystrom-64", "--seeds", "1", "--epochs", "2", "--learning-rate", "5e-5"],
    "imdb-1024": [*IMDB, "--attention", "standard,nystrom-64", "--seeds", "1", "--max-length", "1024",
                  "--train-examples", "1000", "--dev-examples", "200"],
}  # fmt: skip
"""What is not said here is the paper's recipe."""


def publish(work: Path, out: Path) -> None:
    """Copy configurations and records, and write the table of all that `out` then holds, of earlier parts too."""
    copy_records(runs_in(*(work / name for name in RUNS)), work, out)
    published = runs_in(*(out / name for name in RUNS))
    write_text(out / "table.md", tables_markdown(finetune_tables(read_records(*published))))


def run_all() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/finetune-results"))
    parser.add_argument("--out", type=Path, default=Path("results/finetune"))
    parser.add_argument("--only", choices=RUNS, action="append")
    options = parser.parse_args()
    data = data_folder("glue/ and imdb/")
    common = ["--model", str(weights_folder(options.work)), "--data", str(data)]
    commands = {name: ["finetune", *RUNS[name], *common, "--no-predict"] for name in options.only or RUNS}
    return run_each(commands, publish, options.work, options.out)


if __name__ == "__main__":
    sys.exit(run_all())
