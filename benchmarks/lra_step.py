"""A ListOps training step at the paper's sizes: ours, the released way of computing, exact attention; and the loader.

    python benchmarks/lra_step.py --out results/lra/step

The same model and input three times, forward, backward and optimizer, interleaved in one run: Nyström-64 as
`nystromformer.attention` computes it, as the released code does, and exact attention. The released way is written here
from its formulas: whole n×m softmax matrices, the pseudoinverse scaled by a maximum over the batch, (F Z)(B V), and a
grouped (k, 1) convolution. Then real batches: ours padded to their longest and grouped by length, the released way
padded to 2,048; and the time the loader takes for a batch.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from nystromformer.attention import Attention
from nystromformer.bench.measure import Times, interleaved_times
from nystromformer.data.lra.examples import Examples, as_is
from nystromformer.data.lra.listops import ListOpsOptions, generate, read
from nystromformer.files import write_text
from nystromformer.models.lra import NystromformerForLongRangeArena, lra_config
from nystromformer.records import Recorder, new_job_folder
from nystromformer.report.table import Table
from nystromformer.training.trainer import GroupedByLength

BATCH, LENGTH, LANDMARKS, ITERATIONS = 32, 2048, 64, 6


class ReleasedNystrom(Attention):
    """Nyström attention in the released order of operations. Takes over the convolution of ours."""

    def __init__(self, ours: Attention) -> None:
        super().__init__(ours.num_heads, ours.head_dim, ours.max_length)
        kernel = ours.conv.weight.detach().reshape(self.num_heads, 1, -1, 1)
        self.conv = nn.Conv2d(
            self.num_heads, self.num_heads, kernel.shape[2:], padding=(kernel.shape[2] // 2, 0),
            groups=self.num_heads, bias=False,
        )  # fmt: skip
        self.conv.weight = nn.Parameter(kernel.clone())

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, heads, length, width = query.shape
        if mask is not None:
            keep = mask[:, None, :, None].to(query.dtype)
            query, key, value = query * keep, key * keep, value * keep
        query, key = query / width**0.25, key / width**0.25
        means = (batch, heads, LANDMARKS, length // LANDMARKS, width)
        query_landmarks, key_landmarks = query.reshape(means).mean(-2), key.reshape(means).mean(-2)
        F = torch.softmax(query @ key_landmarks.mT, dim=-1)  # (b h n m)
        A = torch.softmax(query_landmarks @ key_landmarks.mT, dim=-1)  # (b h m m)
        logits = query_landmarks @ key.mT  # (b h m n)
        if mask is not None:
            logits = logits - 1e9 * (1 - keep.mT)
        B = torch.softmax(logits, dim=-1)
        return (F @ self.inverse(A)) @ (B @ value) + self.conv(value)

    @staticmethod
    def inverse(A: Tensor) -> Tensor:
        eye = torch.eye(A.shape[-1], device=A.device)
        Z = A.mT / (A.sum(dim=-2).max() * A.sum(dim=-1).max())  # over the whole batch
        for _ in range(ITERATIONS):
            AZ = A @ Z
            Z = 0.25 * Z @ (13 * eye - AZ @ (15 * eye - AZ @ (7 * eye - AZ)))
        return Z


def build(attention: str, released: bool = False) -> NystromformerForLongRangeArena:
    torch.manual_seed(0)
    model = NystromformerForLongRangeArena(
        lra_config(
            attention=attention, vocab_size=32, max_position_embeddings=LENGTH, num_labels=10,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    if released:
        for layer in model.nystromformer.encoder.layer:
            block = layer.attention.self
            released_way = ReleasedNystrom(block.attention)
            block.conv = None  # now inside
            block.attention = released_way
    return model.train()


def stepper(model: nn.Module, batches: Iterator[dict[str, Tensor]]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.0)

    def step() -> None:
        model(**next(batches)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def check_same_function() -> float:
    """Both ways compute the same where one example makes the batch and 2,048 is divisible by the landmarks."""
    ours, released = build("nystrom-64").eval(), build("nystrom-64", released=True).eval()
    ids = torch.randint(1, 16, (1, LENGTH))
    with torch.no_grad():
        return float((ours(ids).logits - released(ids).logits).abs().max())


def padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch as the release makes it: always 2,048 long."""
    ids = functional.pad(batch["input_ids"], (0, LENGTH - batch["input_ids"].shape[1]))
    return {"input_ids": ids, "attention_mask": ids != 0, "labels": batch["labels"]}


def listops(folder: Path) -> Examples:
    generate(folder / "listops", ListOpsOptions(train=20_000, dev=1, test=1))
    return read(folder / "listops", 2_000).train


def loader_of(examples: Examples) -> DataLoader:
    return DataLoader(examples, BATCH, sampler=GroupedByLength(examples.lengths, BATCH, seed=0), collate_fn=as_is)


def endless(loader: DataLoader, change: Callable = lambda batch: batch) -> Iterator[dict[str, Tensor]]:
    while True:
        yield from map(change, loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lra-step"))
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for each of the two comparisons")
    options = parser.parse_args()
    new_job_folder(options.out)
    config = {"batch": BATCH, "length": LENGTH, "landmarks": LANDMARKS}
    recorder = Recorder(options.out, job="lra-step", config=config, seed=0)
    recorder.record("difference of logits, ours and the released way, one example", check_same_function())
    rows = []

    def compare(case: str, runs: dict[str, Callable[[], None]]) -> dict[str, Times]:
        times = interleaved_times(runs, warm_up=1, budget=options.budget)
        ours = times["ours"]
        for name, found in times.items():
            ratio = found.median / ours.median
            details = {"unit": "s", "case": case, "minimum": found.minimum, "repeats": len(found.seconds)}
            recorder.record(f"step, {name}", found.median, ratio_to_ours=ratio, **details)
            smallest = found.minimum / ours.minimum
            rows.append([case, name, f"{found.median:.3f}", f"{found.minimum:.3f}", f"{ratio:.2f}", f"{smallest:.2f}"])
        return times

    ids = torch.randint(1, 16, (BATCH, LENGTH))
    batch = {"input_ids": ids, "labels": torch.randint(0, 10, (BATCH,))}
    models = {"ours": build("nystrom-64"), "released way": build("nystrom-64", released=True)}
    fixed = {name: stepper(model, iter(lambda: batch, None)) for name, model in models.items()}
    compare("32 × 2,048, no padding", fixed | {"exact": stepper(build("standard"), iter(lambda: batch, None))})
    with TemporaryDirectory() as folder:
        loader = loader_of(listops(Path(folder)))
    real = {
        "ours": stepper(models["ours"], endless(loader)),
        "released way": stepper(models["released way"], endless(loader, padded)),
    }
    times = compare("ListOps batches", real)
    batches = endless(loader)
    loading = interleaved_times({"loader": lambda: next(batches)}, warm_up=5, max_repeats=300)["loader"]
    share = loading.median / times["ours"].median
    recorder.record("loader, a batch", loading.median, unit="s", share_of_step=share)
    table = Table(["case", "step", "median s", "minimum s", "ratio", "ratio of minima"], rows).markdown()
    text = f"{table}\n\nThe loader takes {1e3 * loading.median:.2f} ms per batch, {100 * share:.2f} % of our step.\n"
    write_text(options.out / "table.md", text)
    print(text)


if __name__ == "__main__":
    main()
