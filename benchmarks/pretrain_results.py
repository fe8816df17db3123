"""Pretraining curves of four attentions under one budget, and "from standard" beside "from scratch".

    NYSTROMFORMER_DATA=DIR python benchmarks/pretrain_results.py --work runs/pretrain-results --out results/pretrain

About half an hour of one core for each of the four attentions and for the control, and 20 minutes for each way to
start, after the corpus is tokenized: two can run side by side, each given its runs by `--only`. It can be stopped at
any time and started again: finished runs are left alone, others resume where they stopped. `DIR` holds `wikipedia/` and
`books/`.

Models are smaller than the paper's BERT-small, so that they leave the first plateau on such a machine: BERT-tiny's 2
layers, 128 wide, with a vocabulary of 8,000 for the four attentions; MiniLM-L6's 6 layers, 384 wide, with its
vocabulary, for the two ways to start. Records, curves and the table come to `--out`; models stay in `--work`.
`--only NAME` does a part, `--steps N` a trial.
"""

import argparse
import sys
from pathlib import Path

from result_runs import copy_records, data_folder, runs_in, weights_folder
from transformers import AutoTokenizer, set_seed

from nystromformer.cli import main
from nystromformer.files import write_text
from nystromformer.models import NystromformerForPreTraining, preset_config
from nystromformer.records import read_records
from nystromformer.report.figures import draw_pretraining
from nystromformer.report.table import tables_markdown
from nystromformer.report.tables import pretraining_tables
from nystromformer.training.pretraining import SIZES

COMMON = ["--preset", "mini", "--max-length", "512", "--batch-size", "8", "--micro-batch", "8"]
ATTENTIONS = ["standard", "nystrom-64", "linformer-256", "linear"]
# The same steps for all, so that the curves differ by what an attention learns from a token and by its speed.
BUDGET = ["--steps", "5000", "--eval-every", "250"]
TINY = ["--size", "tiny", "--tokenizer", "train", "--vocab-size", "8000"]
# One rate for both ways to start: the preset's 1e-3 would undo trained weights.
START = ["--attention", "nystrom-64", "--steps", "150", "--eval-every", "25", "--set", "learning_rate=3e-4"]
WITHOUT_CONVOLUTION = "random-without-convolution"
GROUPS: dict[str, dict[str, list[str]]] = {
    "attentions": {
        **{name: ["--attention", name, *TINY, *BUDGET] for name in ATTENTIONS},
        # The control: no attention but nystrom has a convolution over the values beside it.
        "nystrom-64-without-convolution": ["--attention", "nystrom-64", "--from", WITHOUT_CONVOLUTION, *BUDGET],
    },
    "starts": {
        "from-scratch": ["--size", "minilm", "--tokenizer", "minilm-l6", *START],
        "from-standard": ["--from", "minilm-l6", *START],
    },
}


def without_convolution(work: Path) -> Path:
    """A model as `--size tiny` makes it for nystrom-64, less the convolution: random weights to start from."""
    folder, tokens = work / WITHOUT_CONVOLUTION, work / "nystrom-64" / "tokenizer"
    if not tokens.exists():
        sys.exit(f"{tokens}: no tokenizer yet; begin the run nystrom-64 first, which trains it.")
    tokenizer = AutoTokenizer.from_pretrained(tokens)
    set_seed(0)
    vocabulary = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    options = {"attention": "nystrom-64", "conv_kernel_size": None, "max_position_embeddings": 512}
    model = NystromformerForPreTraining(preset_config("bert-base", **SIZES["tiny"], **vocabulary, **options))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


PLACEHOLDERS = {"minilm-l6": weights_folder, WITHOUT_CONVOLUTION: without_convolution}
"""What stands for a folder in the arguments above, and what gives that folder."""


def publish(group: str, work: Path, out: Path) -> None:
    """Copy configurations and records of a group, draw its curves and write the table of what is finished."""
    runs = runs_in(*(work / name for name in GROUPS[group]))
    copy_records(runs, work, out)
    for name, drawing in draw_pretraining(read_records(*runs)).items():
        drawing.save(out / group / name)
    write_text(out / group / "table.md", tables_markdown(pretraining_tables(read_records(*runs))))


def run_all() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/pretrain-results"))
    parser.add_argument("--out", type=Path, default=Path("results/pretrain"))
    parser.add_argument("--only", choices=[name for runs in GROUPS.values() for name in runs], action="append")
    parser.add_argument("--steps", type=int, help="another number of steps, for a trial")
    options = parser.parse_args()
    data = data_folder("wikipedia/ and books/")
    corpus = ["--corpus", str(data / "wikipedia"), "--corpus", str(data / "books")]
    for group, runs in GROUPS.items():
        for name, arguments in runs.items():
            if options.only and name not in options.only:
                continue
            given = [
                *COMMON,
                *(str(PLACEHOLDERS[each](options.work)) if each in PLACEHOLDERS else each for each in arguments),
            ]
            if options.steps is not None:
                given += ["--steps", str(options.steps), "--eval-every", str(max(1, options.steps // 4))]
            folders = ["--out", str(options.work / name), "--cache", str(options.work / "corpus"), "--resume"]
            if code := main(["pretrain", *corpus, *given, *folders]):
                return code
            publish(group, options.work, options.out)
            print((options.out / group / "table.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(run_all())
