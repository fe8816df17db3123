"""Which sizes of `nystrom-local` keep how much of a pretrained encoder, and what they cost.

    python benchmarks/nystrom_local_study.py quality --model path/to/MiniLM --data path/to/wikipedia --of choosing
    python benchmarks/nystrom_local_study.py quality --model path/to/MiniLM --data path/to/wikipedia --of reporting
    python benchmarks/nystrom_local_study.py heads --model path/to/MiniLM --data path/to/wikipedia
    python benchmarks/nystrom_local_study.py time

One size is changed at a time, and some together. Quality is measured as in `fidelity.py`, on articles that
defaults may be chosen with or on others, for reporting: see `PARTS`. Positions beyond those of the model start again.
Times are of one call, interleaved. `heads` gives each head its own number of chosen blocks, by its errors on articles
for choosing, and compares with as many for all on the others. `quality` resumes where it stopped; each command draws
what there is.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib

matplotlib.use("Agg")
import torch
from fidelity import articles, shuffled_texts, study
from matplotlib import pyplot
from result_runs import found, run_and_show
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModel, AutoTokenizer

from nystromformer.attention import nystrom_attention, nystrom_local_attention, segment_means
from nystromformer.attention.nystrom_local import core as nystrom_local_core
from nystromformer.attention.nystrom_local.operation import NystromLocalOptions
from nystromformer.bench.cases import Case, make_inputs
from nystromformer.bench.measure import interleaved_times
from nystromformer.files import write_text
from nystromformer.integrations.hf.attention_interface import AttentionCall
from nystromformer.progress import steps_bar
from nystromformer.records import Recorder
from nystromformer.report.table import Table

PARTS = {"choosing": slice(0, 1000), "reporting": slice(1000, None)}
"""Which articles, in the order of the seed: two sets that share none."""
ARTICLES = {256: 16, 512: 16, 2048: 4}
"""How many of each length: the errors of a longer one are means over more tokens."""
SHOWN_LENGTH = 512


@dataclass(frozen=True)
class Setting:
    """An operation with its sizes; `varied` says which one differs from the defaults."""

    name: str
    varied: str
    operation: Callable[..., Tensor]
    options: dict[str, int | float]

    def attend(self, call: AttentionCall) -> Tensor:
        return self.operation(call.query, call.key, call.value, scale=call.scale, **self.options)


DEFAULTS = NystromLocalOptions()
VARIED: dict[str, tuple[int | float, ...]] = {
    "num_landmarks": (16, 32, 128, 256),
    "block_size": (8, 16, 64),
    "heavy_keys": (0, 4, 8, 32),
    "core_rows": (16, 32, 128, 256),
    "ridge": (0.001, 0.1, 1.0),
    "chosen_blocks": (1, 3, 6),
}
TOGETHER: list[dict[str, int | float]] = [
    {"num_landmarks": 32, "block_size": 16},
    {"num_landmarks": 128, "block_size": 16},
    {"num_landmarks": 32, "block_size": 64},
    {"num_landmarks": 128, "block_size": 64},
    {"chosen_blocks": 3, "core_rows": 128},
    {"chosen_blocks": 3, "core_rows": 128, "ridge": 0.001},
    {"block_size": 16, "chosen_blocks": 6, "core_rows": 128},
    {"num_landmarks": 128, "chosen_blocks": 3},
    {"num_landmarks": 128, "chosen_blocks": 3, "core_rows": 128},
]
"""Sizes that are changed together."""
BLOCKS_OF_HEADS = (0, 1, 2, 3, 4, 6)
"""Chosen blocks that a head can have, where each has its own number."""


def with_rows_by_leverage(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, **sizes: Any
) -> Tensor:
    """With core rows whose weights of segment means stand out most, by ridge leverage, not with evenly spaced ones."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    weights = torch.softmax(scale * query @ segment_means(key, sizes["num_landmarks"]).mT, dim=-1)
    gram = weights.mT @ weights
    size = sizes["ridge"] * gram.diagonal(dim1=2, dim2=3).mean(-1)[..., None, None]
    leverage = (torch.linalg.solve(gram + size * torch.eye(gram.shape[3]), weights.mT).mT * weights).sum(-1)  # (b h n)
    rows = leverage.topk(min(sizes["core_rows"], query.shape[2])).indices.sort().values.flatten(0, 1)
    with mock.patch.object(nystrom_local_core, "core_places", return_value=rows):
        return nystrom_local_attention(query, key, value, scale=scale, **sizes)


def settings() -> Iterator[Setting]:
    def local(varied: str, **changed: int | float) -> Setting:
        name = ", ".join(f"{option} {value}" for option, value in changed.items())
        return Setting(name or "defaults", varied, nystrom_local_attention, asdict(replace(DEFAULTS, **changed)))

    yield local("defaults")
    for option, values in VARIED.items():
        for value in values:
            yield local(option, **{option: value})
    for changed in TOGETHER:
        yield local("together", **changed)
    for rows in (64, 128):
        sizes = asdict(replace(DEFAULTS, core_rows=rows))
        yield Setting(f"core_rows {rows} by leverage", "leverage", with_rows_by_leverage, sizes)
    for m in (32, 64, 128, 256):
        yield Setting(f"nystrom-{m}", "nystrom", nystrom_attention, {"num_landmarks": m})


def measure_quality(options: argparse.Namespace) -> None:
    model, tokenizer = AutoModel.from_pretrained(options.model).eval(), AutoTokenizer.from_pretrained(options.model)
    part = PARTS[options.of]
    common = {"model": Path(options.model).name, "of": options.of}
    recorder = Recorder(options.out, job="nystrom_local_quality", config=common, seed=options.seed)
    done = {(r["setting"], r["length"], r["config"]["of"]) for r in found(options.out, "cosine")}
    for length in options.lengths:
        asked = [s for s in settings() if options.only is None or s.name in options.only]
        missing = [s for s in asked if (s.name, length, options.of) not in done]
        if not missing:
            continue
        texts = islice(shuffled_texts(options.data, options.seed), part.start, part.stop)
        number = options.articles or ARTICLES[length]
        results = study(model, articles(texts, tokenizer, length, number), [setting.attend for setting in missing])
        with steps_bar(len(missing)) as step:
            for setting in missing:
                step(f"n = {length}: {setting.name}")
                errors, cosines = next(results)
                place = {"setting": setting.name, "varied": setting.varied, "length": length, "articles": number}
                by_layer = errors.mean(dim=(1, 2)).tolist()
                recorder.record("output_error", errors.mean().item(), by_layer=by_layer, **place)
                recorder.record("cosine", cosines.mean().item(), worst=cosines.min().item(), **place)


def measure_heads(options: argparse.Namespace) -> None:
    """Errors with each number of blocks, by layer and head, on both sets: the first gives each head its number."""
    model, tokenizer = AutoModel.from_pretrained(options.model).eval(), AutoTokenizer.from_pretrained(options.model)
    of_heads = [Setting(str(t), "", nystrom_local_attention, {"chosen_blocks": t}) for t in BLOCKS_OF_HEADS]
    errors = {}
    for part, articles_of in PARTS.items():
        texts = islice(shuffled_texts(options.data, options.seed), articles_of.start, articles_of.stop)
        ids = articles(texts, tokenizer, SHOWN_LENGTH, options.articles or ARTICLES[SHOWN_LENGTH])
        found = study(model, ids, [setting.attend for setting in of_heads])
        with steps_bar(len(of_heads)) as step:
            per_setting = []
            for setting in of_heads:
                step(f"articles for {part}: {setting.name} chosen blocks")
                per_setting.append(next(found)[0].mean(dim=1))
        errors[part] = torch.stack(per_setting)
    recorder = Recorder(
        options.out, job="nystrom_local_heads", config={"model": Path(options.model).name}, seed=options.seed
    )
    for same in BLOCKS_OF_HEADS[1:-1]:
        chosen = numbers_by_head(errors["choosing"], same)
        value = errors["reporting"].gather(0, chosen[None])[0].mean().item()
        blocks = torch.tensor(BLOCKS_OF_HEADS)[chosen]
        for_all = errors["reporting"][BLOCKS_OF_HEADS.index(same)].mean().item()
        print(f"{same} chosen blocks on average: error {for_all:.4f} with as many for all heads, {value:.4f} by head")
        recorder.record("error_by_head", value, for_all=for_all, chosen_blocks=same, by_head=blocks.tolist())


def numbers_by_head(errors: Tensor, mean: int) -> Tensor:
    """Which of `BLOCKS_OF_HEADS` each (layer, head) gets, for a mean of at most `mean`: one step after the other
    where it takes away most error for each block.

    >>> numbers_by_head(torch.tensor([[[0.9, 0.5]], [[0.1, 0.4]], [[0.1, 0.4]], [[0.1, 0.4]], [[0.1, 0.4]]]), 1)
    tensor([[1, 1]])
    """
    place = torch.zeros(errors.shape[1:], dtype=torch.long)
    sizes = torch.tensor(BLOCKS_OF_HEADS)
    left = mean * place.numel()
    while True:
        more = (place + 1).clamp(max=len(sizes) - 1)
        cost = sizes[more] - sizes[place]
        gain = (errors.gather(0, place[None]) - errors.gather(0, more[None]))[0] / cost.clamp(min=1)
        gain[(cost == 0) | (cost > left)] = -torch.inf
        best = gain.argmax()
        if gain.flatten()[best] <= 0:
            return place
        left -= cost.flatten()[best].item()
        place.view(-1)[best] += 1


def measure_time(options: argparse.Namespace) -> None:
    case = Case(attention="standard", length=options.length)
    inputs = make_inputs(case)
    joined = (inputs.query, inputs.key, inputs.value)
    tensors = [x.unflatten(2, (case.heads, case.head_dim)).transpose(1, 2) for x in joined]  # (b h n d)
    calls = {"exact": partial(scaled_dot_product_attention, *tensors)}
    calls |= {s.name: partial(s.operation, *tensors, **s.options) for s in settings()}
    with torch.no_grad():
        times = interleaved_times(calls, warm_up=1, budget=options.budget)
    recorder = Recorder(options.out, job="nystrom_local_time", config={"length": options.length})
    for name, measured in times.items():
        repeats = len(measured.seconds)
        recorder.record("time", measured.median, minimum=measured.minimum, repeats=repeats, setting=name, unit="s")


def table(part: str, cosines: list[dict], errors: list[dict], times: dict[str, float]) -> str:
    """A row for each setting, a pair of columns for each length, as Markdown."""
    by_place = {(r["metric"], r["setting"], r["length"]): r for r in cosines + errors if r["config"]["of"] == part}
    lengths = sorted({length for _, _, length in by_place})
    rows = []
    for setting in settings():
        cells = []
        for length in lengths:
            error, cosine = (by_place.get((metric, setting.name, length)) for metric in ("output_error", "cosine"))
            cells += [f"{error['value']:.3f}", f"{cosine['value']:.4f} ({cosine['worst']:.3f})"] if cosine else "––"
        time = times.get(setting.name)
        rows.append([setting.name, *cells, "–" if time is None else f"{1e3 * time:.1f}"])
    if "exact" in times:
        rows.append(["exact", *["0", "1"] * len(lengths), f"{1e3 * times['exact']:.1f}"])
    header = [f"n = {n:,}: {kind}" for n in lengths for kind in ("error", "cosine (worst)")]
    return Table(["setting", *header, "ms"], rows).markdown()


def draw(path: Path, cosines: list[dict], errors: list[dict], times: dict[str, float], time_length: int) -> None:
    """Quality against time, a line for each size that is varied, through the defaults."""
    quality = {
        "error of attention's output": {r["setting"]: r["value"] for r in errors},
        "1 − cosine to the exact embedding": {r["setting"]: 1 - r["value"] for r in cosines},
    }
    lines: dict[str, list[str]] = {option: ["defaults"] for option in VARIED} | {"nystrom": []}
    for setting in settings():
        if setting.varied in lines:
            lines[setting.varied].append(setting.name)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for panel, (label, values) in zip(axes, quality.items(), strict=True):
        for varied, names in lines.items():
            points = sorted((1e3 * times[name], values[name]) for name in names)
            style = {"color": "black", "linewidth": 2.2} if varied == "nystrom" else {"linewidth": 1.4}
            label_of = varied if varied == "nystrom" else f"nystrom-local: {varied}"
            panel.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label_of, **style)
        panel.plot(1e3 * times["defaults"], values["defaults"], marker="*", markersize=15, color="black", linestyle="")
        panel.axvline(1e3 * times["exact"], color="grey", linestyle="--", label="exact: no error")
        panel.loglog()
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
        panel.tick_params(labelsize=8, which="both")
        panel.set_xlabel(f"ms of one call, n = {time_length:,}, 12 heads of 64", fontsize=9)
        panel.set_ylabel(f"{label}, n = {SHOWN_LENGTH}", fontsize=9)
        panel.grid(alpha=0.3, which="both")
    axes[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def show(options: argparse.Namespace) -> None:
    cosines, errors, timed = (found(options.out, metric) for metric in ("cosine", "output_error", "time"))
    length = timed[-1]["config"]["length"] if timed else None
    times = {r["setting"]: r["minimum"] for r in timed if r["config"]["length"] == length}  # the last run counts
    for part in PARTS:
        if any(r["config"]["of"] == part for r in cosines):
            write_text(options.out / f"{part}.md", table(part, cosines, errors, times) + "\n")
    at_shown = lambda records: [r for r in records if (r["config"]["of"], r["length"]) == ("reporting", SHOWN_LENGTH)]
    if times and at_shown(cosines):
        draw(options.out / "quality-time.png", at_shown(cosines), at_shown(errors), times, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    quality = commands.add_parser("quality", help="errors and cosines on real articles")
    quality.add_argument("--of", choices=PARTS, default="reporting", help="which articles")
    quality.add_argument("--lengths", type=int, nargs="+", default=list(ARTICLES))
    names = [setting.name for setting in settings()]
    quality.add_argument("--only", nargs="+", choices=names, help="these settings, in quotes")
    quality.set_defaults(run=measure_quality)
    heads = commands.add_parser("heads", help="errors with another number of chosen blocks for each head")
    heads.set_defaults(run=measure_heads)
    for command in (quality, heads):
        command.add_argument("--model", required=True, help="folder or Hub id of an encoder")
        command.add_argument("--data", type=Path, required=True, help="folder with Parquet files of articles")
        command.add_argument("--articles", type=int, help="of each length, in place of those in the script")
        command.add_argument("--seed", type=int, default=0)
    time = commands.add_parser("time", help="time of one call with each setting")
    time.add_argument("--length", type=int, default=8192)
    time.add_argument("--budget", type=float, default=60.0, help="seconds")
    time.set_defaults(run=measure_time)
    drawn = commands.add_parser("show", help="tables and a plot of what was measured")
    drawn.set_defaults(run=lambda options: None)
    for command in commands.choices.values():
        command.add_argument("--out", type=Path, default=Path("results/nystrom-local/study"))
    run_and_show(parser, show)


if __name__ == "__main__":
    main()
