"""What a pretrained encoder still does when its attention is replaced, without any training.

    python benchmarks/fidelity.py --model path/to/MiniLM --data path/to/wikipedia --out results/fidelity

Real articles, cut to each length, through a real encoder. Two figures for each attention, against exact attention:

- output error: ‖Ŝ V − S V‖ / ‖S V‖, mean over layers, heads and articles. Each layer is given what it gets in the exact
  model, so that errors do not add up.
- cosine: of the mean-pooled embedding of an article, with all layers replaced, to that of the exact model; mean and
  worst over the articles.

Attentions that need their own projections (Linformer, Reformer) can't be dropped in and are left out.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import pyarrow.parquet as parquet
import torch
from matplotlib import pyplot
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from nystromformer.attention import (
    linear_attention,
    longformer_attention,
    nystrom_attention,
    nystrom_local_attention,
    performer_attention,
)
from nystromformer.attention.nystrom_local.operation import NystromLocalOptions
from nystromformer.attention.performer import draw_projection
from nystromformer.files import write_text
from nystromformer.integrations.hf.attention_interface import AttentionCall
from nystromformer.integrations.probe import Attend, exact_attention, record_calls, relative_error, swap_attention
from nystromformer.progress import steps_bar
from nystromformer.records import Recorder, new_job_folder, read_records, write_config
from nystromformer.report.table import Table
from nystromformer.training.finetuning.models import with_positions

LENGTHS = (128, 256, 512)
AT_ONCE = 4


@dataclass(frozen=True)
class Candidate:
    """An attention to put in place of the exact one."""

    family: str
    size: int | None
    meets: int
    """How many keys, landmarks or features each query meets: what the cost of a token grows with."""
    attend: Attend

    @property
    def name(self) -> str:
        return self.family if self.size is None else f"{self.family}-{self.size}"


def candidates(head_dim: int, seed: int) -> Iterator[Candidate]:
    near = 3 * NystromLocalOptions().block_size
    for m in (16, 32, 64, 128, 256):
        yield Candidate("nystrom", m, m, partial(with_landmarks, nystrom_attention, m))
    for m in (16, 32, 64, 128):
        yield Candidate("nystrom-local", m, m + near, partial(with_landmarks, nystrom_local_attention, m))
    for window in (33, 65, 129, 257):
        yield Candidate("longformer", window, window, partial(windowed, window, 0))
    for window in (33, 65, 129, 257):
        yield Candidate("[CLS] global + longformer", window, window + 1, partial(windowed, window, 1))
    torch.manual_seed(seed)
    yield Candidate("performer", 256, 256, partial(with_features, draw_projection(256, head_dim)))
    yield Candidate("linear", None, head_dim, lambda call: linear_attention(call.query, call.key, call.value))
    yield Candidate("mean of values", None, 1, lambda call: call.value.mean(2, keepdim=True).expand_as(call.value))


def with_landmarks(operation: Callable[..., Tensor], m: int, call: AttentionCall) -> Tensor:
    return operation(call.query, call.key, call.value, num_landmarks=m, scale=call.scale)


def windowed(window: int, global_tokens: int, call: AttentionCall) -> Tensor:
    return longformer_attention(call.query, call.key, call.value, window=window, global_tokens=global_tokens)


def with_features(projection: Tensor, call: AttentionCall) -> Tensor:
    return performer_attention(call.query, call.key, call.value, projection=projection)


def shuffled_texts(folder: Path, seed: int) -> Iterator[str]:
    """The articles of the first Parquet file in an order that `seed` draws."""
    paths = sorted(folder.rglob("*.parquet"))
    if not paths:
        raise ValueError(f"--data {folder}: must hold Parquet files with a column `text`.")
    texts = parquet.read_table(paths[0], columns=["text"])["text"]
    for index in torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist():
        yield texts[index].as_py()


def articles(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> Tensor:
    """Token ids (number, length) of the first articles that are long enough to need no padding."""
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=length)["input_ids"]
        if len(ids) == length:
            rows.append(ids)
        if len(rows) == number:
            return torch.tensor(rows)
    raise ValueError(f"--articles {number}: there are just {len(rows)} of {length} tokens and more.")


def embedding(hidden: Tensor) -> Tensor:
    return functional.normalize(hidden.mean(dim=1), dim=1)


@torch.no_grad()
def study(model: PreTrainedModel, ids: Tensor, tried: Iterable[Attend]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each attention its errors (layers, articles, heads) and cosines (articles,).

    Where the model has too few positions for `ids` (articles, n) they start again.
    """
    if ids.shape[1] > model.config.max_position_embeddings:
        model = with_positions(model, ids.shape[1]).eval()
    inputs = [{"input_ids": part} for part in ids.split(AT_ONCE)]
    captured = [record_calls(model, **given) for given in inputs]
    exact = torch.cat([embedding(output.last_hidden_state) for _, output in captured])
    outputs = [[exact_attention(call) for call in calls] for calls, _ in captured]
    for attend in tried:
        errors = [
            torch.stack([relative_error(attend(call), out) for call, out in zip(calls, outs, strict=True)])
            for (calls, _), outs in zip(captured, outputs, strict=True)
        ]
        with swap_attention(model, attend):
            replaced = torch.cat([embedding(model(**given).last_hidden_state) for given in inputs])
        yield torch.cat(errors, dim=1), (replaced * exact).sum(dim=1)


def table(records: list[dict]) -> str:
    """One table, a row for each attention, as Markdown."""
    lengths = sorted({record["length"] for record in records})
    values = {(r["attention"], r["length"], r["metric"]): r for r in records}
    rows = []
    for name in dict.fromkeys(record["attention"] for record in records):
        cells = []
        for length in lengths:
            error, cosine = values[name, length, "output_error"], values[name, length, "cosine"]
            cells += [f"{error['value']:.3f}", f"{cosine['value']:.3f} ({cosine['worst']:.3f})"]
        rows.append([name, str(values[name, lengths[0], "cosine"]["meets"]), *cells])
    header = ["attention", "meets", *(f"n = {n}: {kind}" for n in lengths for kind in ("error", "cosine (worst)"))]
    return Table(header, rows).markdown()


def draw(records: list[dict], path: Path) -> None:
    """Cosine against what each query meets, a panel for each length."""
    lengths = sorted({record["length"] for record in records})
    figure, axes = pyplot.subplots(
        1, len(lengths), figsize=(4.2 * len(lengths), 3.6), sharey=True, layout="constrained"
    )
    for panel, length in zip(axes, lengths, strict=True):
        for family in dict.fromkeys(record["family"] for record in records):
            points = [
                (record["meets"], record["value"])
                for record in records
                if (record["family"], record["length"], record["metric"]) == (family, length, "cosine")
            ]
            width = 2.4 if family.startswith("nystrom") else 1.3
            panel.plot(*zip(*points, strict=True), label=family, linewidth=width, marker="o", markersize=4)
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        panel.set_title(f"n = {length}", fontsize=10)
        panel.set_xlabel("keys, landmarks or features a query meets", fontsize=9)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("cosine to the exact embedding", fontsize=9)
    axes[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or Hub id of an encoder")
    parser.add_argument("--data", type=Path, required=True, help="folder with Parquet files of articles, column `text`")
    parser.add_argument("--out", type=Path, default=Path("runs/fidelity"))
    parser.add_argument("--articles", type=int, default=16)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        model, tokenizer = AutoModel.from_pretrained(options.model).eval(), AutoTokenizer.from_pretrained(options.model)
        batches = {
            n: articles(shuffled_texts(options.data, options.seed), tokenizer, n, options.articles)
            for n in options.lengths
        }
        new_job_folder(options.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    head_dim = model.config.hidden_size // model.config.num_attention_heads
    tried = list(candidates(head_dim, options.seed))
    config = {"model": Path(options.model).name, "articles": options.articles, "lengths": list(batches)}
    write_config(options.out, config)
    recorder = Recorder(options.out, job="fidelity", config=config, seed=options.seed)
    with steps_bar(len(batches) * len(tried)) as step:
        for length, ids in batches.items():
            results = study(model, ids, [candidate.attend for candidate in tried])
            for candidate in tried:
                step(f"n = {length}: {candidate.name}")
                errors, cosines = next(results)
                place = {"attention": candidate.name, "family": candidate.family, "meets": candidate.meets}
                place["length"] = length
                by_layer = errors.mean(dim=(1, 2)).tolist()
                recorder.record("output_error", errors.mean().item(), by_layer=by_layer, **place)
                recorder.record("cosine", cosines.mean().item(), worst=cosines.min().item(), **place)
    records = list(read_records(options.out))
    write_text(options.out / "table.md", table(records) + "\n")
    draw(records, options.out / "cosine.png")
    print(table(records))


if __name__ == "__main__":
    main()
