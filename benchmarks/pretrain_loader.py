"""Does the loader keep up? Batches a process makes against batches a model takes, in one run.

    python benchmarks/pretrain_loader.py --out results/pretrain/loader

Text of random words with a natural spread of frequencies is tokenized, and batches of 16 × 512 tokens are made from it:
read from the shards, divided, swapped, masked and padded. Beside them a training step of the paper's sizes with
Nyström-64 on such a batch. Interleaved repeats in this process; a run has two loading processes besides.
"""

import argparse
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from nystromformer.bench.measure import interleaved_times
from nystromformer.data.corpus.examples import PretrainingExamples, pretraining_examples
from nystromformer.data.corpus.shards import build_corpus, corpus_tokenizer
from nystromformer.data.corpus.text import Reading
from nystromformer.files import write_text
from nystromformer.records import Recorder, new_job_folder
from nystromformer.report.table import Table
from nystromformer.training.pretraining import build_model, special_tokens
from nystromformer.training.shared.recipes import pretraining_recipe
from nystromformer.training.trainer import grouped_order

BATCH, LENGTH = 16, 512
DOCUMENTS, WORDS = 400, 20_000


def write_documents(path: Path) -> None:
    """Documents of 20 to 400 sentences, with words as frequent as those of a natural language."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = np.array(["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(WORDS)])
    chances = 1 / np.arange(1, WORDS + 1)
    chances /= chances.sum()
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(DOCUMENTS):
            sentences = [
                " ".join(rng.choice(words, rng.integers(3, 40), p=chances)).capitalize() + "."
                for _ in range(rng.integers(20, 400))
            ]
            file.write(json.dumps({"text": " ".join(sentences)}) + "\n")


def examples_in(folder: Path) -> PretrainingExamples:
    file = folder / "text.jsonl"
    write_documents(file)
    tokenizer = corpus_tokenizer([file], Reading(), pretraining_recipe("paper").vocab_size, folder / "cache")
    corpus = build_corpus([file], Reading(), tokenizer.backend_tokenizer.to_str(), folder / "cache")
    return pretraining_examples(corpus, special_tokens(tokenizer), max_length=LENGTH, seed=0)[0]


def loading(examples: PretrainingExamples) -> Callable[[], None]:
    batches = grouped_order(examples.lengths, BATCH, 0, 0)[: len(examples) // BATCH * BATCH].reshape(-1, BATCH)
    numbers = count()

    def load() -> None:
        examples.batch([(0, index) for index in batches[next(numbers) % len(batches)].tolist()])

    return load


def training(examples: PretrainingExamples, size: str) -> Callable[[], None]:
    longest = np.argsort(-examples.lengths, kind="stable")[:BATCH]
    batch = examples.batch(longest.tolist())
    model = build_model(pretraining_recipe("paper", size), "nystrom-64", None, examples.special, seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain-loader"))
    parser.add_argument("--sizes", default="small", help="of the model, separated by commas: small, base")
    options = parser.parse_args()
    new_job_folder(options.out)
    with TemporaryDirectory() as folder:
        examples = examples_in(Path(folder))
        runs = {"loading a batch": loading(examples)}
        runs |= {f"a step, BERT-{size}": training(examples, size) for size in options.sizes.split(",")}
        times = interleaved_times(runs, warm_up=1, max_repeats=20, budget=60.0)
    recorder = Recorder(options.out, job="pretrain-loader", config={"batch": BATCH, "length": LENGTH}, seed=0)
    load, rows = times["loading a batch"].median, []
    for name, taken in times.items():
        recorder.record("seconds", taken.median, what=name, fastest=taken.minimum)
        rows.append(
            [
                name,
                f"{taken.median * 1e3:,.1f} ms",
                f"{BATCH * LENGTH / taken.median:,.0f}",
                f"{taken.median / load:,.0f}×",
            ]
        )
    table = Table(["16 × 512 tokens", "time", "tokens/s", "times the loading"], rows).markdown()
    write_text(options.out / "table.md", table + "\n")
    print(table)


if __name__ == "__main__":
    measure()
