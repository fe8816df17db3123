"""Sequences of many lengths in one step: packed, as a padded batch, and as many tokens in equal sequences.

    python benchmarks/packed.py --out results/bench/packed

Sixteen sequences with the lengths of IMDB reviews in bytes, cut at 4,000 as in Long Range Arena, and sixteen of 500 to
20,000 as slides have tiles. Models: the paper's classifier for Long Range Arena of the reviews, TransMIL of the slides;
a training step is forward, backward and optimizer. Operation: Nyström attention, 4 heads of 64, 64 landmarks,
convolution of 33. Every figure: interleaved repeats of all sides in this process, by medians and by minima, and met
only where both are; memory in fresh processes. About fifteen minutes on two quiet cores, and 6 GB.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import torch
from attention_targets import Figure, at_least, at_most, ratios, report
from torch import Tensor, nn
from torch.nn import functional

from nystromformer.attention import build_attention
from nystromformer.attention.nystrom import operation
from nystromformer.attention.shared.varlen import lengths_to_offsets
from nystromformer.bench.measure import interleaved_times, peak_of
from nystromformer.models.lra import NystromformerForLongRangeArena, lra_config
from nystromformer.models.mil import TransMIL
from nystromformer.records import Recorder, new_job_folder

LENGTHS = {
    # of the 25,000 reviews for training, the middles of sixteen equal parts in order of length
    "reviews": (300, 490, 633, 678, 727, 783, 850, 933, 1027, 1145, 1301, 1494, 1756, 2108, 2697, 4000),
    # of equal ratios
    "slides": (500, 639, 818, 1046, 1337, 1710, 2187, 2796, 3576, 4573, 5848, 7478, 9564, 12230, 15640, 20000),
}
FASTER = {"reviews": 1.8, "slides": 3.0}
"""How many times faster than the padded batch packed sequences should be."""
AS_EQUAL = 1.15
"""How many times longer than equal sequences of as many tokens they may take, in time and memory."""
HEADS, HEAD_DIM, TILE_FEATURES = 4, 64, 256
SIDES = ("packed", "padded", "equal")

Run = Callable[[], None]


def lengths_of(kind: str, side: str) -> list[int]:
    lengths = LENGTHS[kind]
    return [sum(lengths) // len(lengths)] * len(lengths) if side == "equal" else list(lengths)


def mask_of(lengths: list[int]) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def padded(rows: Tensor, mask: Tensor) -> Tensor:
    """(tokens, ...) → (b, n, ...), zeros at padding."""
    return rows.new_zeros(*mask.shape, *rows.shape[1:]).masked_scatter(_like(mask, rows), rows)


def _like(mask: Tensor, rows: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (rows.dim() - 1))


def model_run(kind: str, side: str, training: bool) -> Run:
    """One call of the model, or one training step, of sixteen sequences."""
    torch.manual_seed(0)
    lengths = lengths_of(kind, side)
    mask, borders = mask_of(lengths), lengths_to_offsets(torch.tensor(lengths))
    labels = torch.arange(len(lengths)) % 2
    model: nn.Module
    if kind == "reviews":
        sizes = {"vocab_size": 256, "max_position_embeddings": 4096, "num_labels": 2}
        model = NystromformerForLongRangeArena(lra_config(**sizes, attention_probs_dropout_prob=0.0))
        ids = torch.randint(1, 256, (sum(lengths),))
        if side == "padded":
            batch = padded(ids, mask)
            forward = lambda: model(batch, mask).logits
        else:
            forward = lambda: model(ids[None], cu_seq_lens_q=borders).logits
    else:
        model = TransMIL(TILE_FEATURES, 2, dim=128, heads=HEADS, num_landmarks=64)
        tiles = torch.randn(sum(lengths), TILE_FEATURES)
        if side == "padded":
            bags = padded(tiles, mask)
            forward = lambda: model(bags, mask)
        else:
            forward = lambda: model(tiles, cu_seqlens=borders)
    return step_of(model, forward, labels) if training else evaluation_of(model, forward)


def step_of(model: nn.Module, forward: Callable[[], Tensor], labels: Tensor) -> Run:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)

    def step() -> None:
        functional.cross_entropy(forward(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def evaluation_of(model: nn.Module, forward: Callable[[], Tensor]) -> Run:
    model.eval()

    def call() -> None:
        with torch.no_grad():
            forward()

    return call


def operation_runs(kind: str, backward: bool) -> dict[str, Run]:
    """Nyström attention alone, of all sides; a padded batch also together, as it is computed on other devices."""
    torch.manual_seed(0)
    attention = build_attention("nystrom-64", num_heads=HEADS, head_dim=HEAD_DIM)
    runs: dict[str, Run] = {}
    for side in SIDES:
        lengths = lengths_of(kind, side)
        rows = [torch.randn(sum(lengths), HEADS, HEAD_DIM) for _ in "qkv"]
        mask, borders = mask_of(lengths), lengths_to_offsets(torch.tensor(lengths))
        named = {"mask": mask} if side == "padded" else {"cu_seqlens": borders}
        leaves = [padded(x, mask).transpose(1, 2) if side == "padded" else x for x in rows]
        leaves = [x.requires_grad_(backward) for x in leaves]
        runs[side] = attention_run(attention, leaves, named, backward)
    runs["together"] = _together(runs["padded"])
    return runs


def attention_run(attention: nn.Module, leaves: list[Tensor], named: dict[str, Tensor], backward: bool) -> Run:
    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = attention(*leaves, **named)
        if backward:
            torch.autograd.grad(out, [*leaves, *attention.parameters()], torch.ones_like(out))

    return run


def _together(run: Run) -> Run:
    """As where Python can't read masks: padding is computed like tokens, in the same passes."""

    def whole() -> None:
        with patch.object(operation, "valid_spans", lambda mask: None):
            run()

    return whole


def models(kind: str, training: bool, budget: float) -> Iterable[Figure]:
    runs = {side: model_run(kind, side, training) for side in SIDES}
    times = interleaved_times(runs, warm_up=1, budget=budget)
    what = f"{kind}, {'training step' if training else 'forward'} of a model"
    yield at_least(f"{what}, padded / packed", FASTER[kind], *ratios(times["padded"], times["packed"]))
    yield at_most(f"{what}, packed / equal sequences", AS_EQUAL, *ratios(times["packed"], times["equal"]))


def operations(kind: str, backward: bool, budget: float) -> Iterable[Figure]:
    times = interleaved_times(operation_runs(kind, backward), warm_up=1, budget=budget)
    what = f"{kind}, {'forward + backward' if backward else 'forward'} of the operation"
    yield at_least(f"{what}, padded together / packed", FASTER[kind], *ratios(times["together"], times["packed"]))
    yield at_most(f"{what}, packed / equal sequences", AS_EQUAL, *ratios(times["packed"], times["equal"]))
    # On CPUs a padded batch is divided into its sequences by itself: there is nothing to gain in the operation.
    yield at_most(f"{what}, packed / padded", 1.1, *ratios(times["packed"], times["padded"]))


def memory(kind: str) -> Iterable[Figure]:
    """Of a training step, which keeps what its backward needs."""
    peaks = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--peak", kind, side]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[side] = json.loads(done.stdout.splitlines()[-1])["bytes"]
    what = f"{kind}, peak memory of a training step of a model"
    yield at_most(f"{what}, packed / equal sequences", AS_EQUAL, peaks["packed"] / peaks["equal"])
    yield at_least(f"{what}, padded / packed", FASTER[kind], peaks["padded"] / peaks["packed"])


def print_peak(kind: str, side: str) -> None:
    small = LENGTHS[kind]
    LENGTHS[kind] = (70, 80)  # what a process needs once, whatever the input
    model_run(kind, side, training=True)()
    LENGTHS[kind] = small
    print(json.dumps(asdict(peak_of(model_run(kind, side, training=True)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/packed"))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of timing for each group of figures")
    parser.add_argument("--peak", nargs=2, metavar=("KIND", "SIDE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print_peak(*options.peak)
        return
    new_job_folder(options.out)

    def parts() -> Iterable[Callable[[], Iterable[Figure]]]:
        for kind in LENGTHS:
            for backward in (False, True):
                yield lambda kind=kind, backward=backward: models(kind, backward, options.budget)
                yield lambda kind=kind, backward=backward: operations(kind, backward, options.budget)
            yield lambda kind=kind: memory(kind)

    report(parts(), Recorder(options.out, job="packed", config={"budget": options.budget, "lengths": LENGTHS}))


if __name__ == "__main__":
    main()
