"""Exact attention in training on a CPU, ours beside PyTorch's: dropout of weights and padding.

    python benchmarks/exact_training.py --out results/bench/exact

`standard_attention` and `scaled_dot_product_attention` with the same mask and dropout, forward alone and with backward,
interleaved in one run. Two sizes: batches of Long Range Arena's ListOps (heads of 32), and of BERT (heads of 64). A
third of each padded batch is padding.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nystromformer.attention.standard import standard_attention
from nystromformer.bench.measure import interleaved_times
from nystromformer.files import write_text
from nystromformer.records import Recorder, command, new_job_folder
from nystromformer.report.table import Table

SIZES = {"ListOps": (8, 2, 1536, 32), "BERT": (4, 12, 512, 64)}
"""Examples, heads, tokens, and numbers of a head."""
CASES = [(False, 0.0), (True, 0.0), (False, 0.1), (True, 0.1)]
"""Whether there is padding, and the dropout."""


def pytorch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    allowed = None if mask is None else mask[:, None, None, :]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed, dropout_p=dropout)


def ours(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    return standard_attention(query, key, value, mask, dropout=dropout)


def runs(sizes: tuple[int, ...], padded: bool, dropout: float, backward: bool) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    batch, heads, length, width = sizes
    *inputs, upstream = (torch.randn(batch, length, heads, width).transpose(1, 2) for _ in range(4))
    inputs = [x.requires_grad_(backward) for x in inputs]
    lengths = torch.linspace(length / 3, length, batch).round()
    mask = torch.arange(length) < lengths[:, None] if padded else None

    def run(attention: Callable[..., Tensor]) -> None:
        out = attention(*inputs, mask, dropout)
        if backward:
            torch.autograd.grad(out, inputs, upstream)

    return {"ours": lambda: run(ours), "PyTorch's": lambda: run(pytorch)}


def measure(recorder: Recorder, budget: float) -> None:
    rows = []
    for name, sizes in SIZES.items():
        for padded, dropout in CASES:
            for backward in (False, True):
                case = {"sizes": name, "padded": padded, "dropout": dropout, "backward": backward}
                times = interleaved_times(runs(sizes, padded, dropout, backward), budget=budget)
                mine, theirs = times["ours"], times["PyTorch's"]
                for who, found in times.items():
                    recorder.record(f"{who} attention", found.median, **found.spread, **case)
                settings = [" × ".join(map(str, sizes)), "a third" if padded else "–", f"{dropout:g}"]
                both = [f"{1e3 * found.median:.0f} / {1e3 * found.minimum:.0f}" for found in (mine, theirs)]
                ratios = f"{theirs.median / mine.median:.2f} / {theirs.minimum / mine.minimum:.2f}"
                rows.append([*settings, "with backward" if backward else "forward", *both, ratios])
                print(*rows[-1], sep="  ")
    header = ["b × h × n × d", "padding", "dropout", "", "ours, ms", "PyTorch's, ms", "ratio"]
    text = f"Medians / minima; {torch.get_num_threads()} threads; `{command()}`"
    write_text(recorder.folder / "table.md", f"{Table(header, rows).markdown()}\n\n{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/exact"))
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for each comparison")
    options = parser.parse_args()
    new_job_folder(options.out)
    sizes = {name: list(given) for name, given in SIZES.items()}
    measure(Recorder(options.out, job="exact_training", config=sizes), options.budget)


if __name__ == "__main__":
    main()
