"""Does a pretrained encoder still find the same passages when its attention is replaced, without any training?

    python benchmarks/retrieval_agreement.py --model path/to/MiniLM --data path/to/wikipedia \\
        --out results/nystrom-local/retrieval

Articles are cut into consecutive passages, each is embedded by mean pooling, and each is a query for its nearest
neighbors among all others: once with exact attention, once with another. Two settings:

- all: neighbors are mostly passages of the same article, as where chunks of documents are searched.
- other articles: passages of the query's own article don't count, which leaves many near ties.

Embeddings are kept in `--cache`, one file for each attention, so that a second run resumes where the first stopped, and
attentions whose records `--out` has already are not measured again.
The articles are none of those that defaults were chosen with: see `HELD_OUT`.
"""

import argparse
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from fidelity import AT_ONCE, embedding, shuffled_texts, windowed, with_landmarks
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from nystromformer.attention import nystrom_attention, nystrom_local_attention
from nystromformer.files import write_text
from nystromformer.integrations.probe import Attend, exact_attention, swap_attention
from nystromformer.progress import steps_bar
from nystromformer.records import RECORDS, Recorder, read_records, write_config
from nystromformer.report.table import Table

HELD_OUT = 1000
"""The first thousand articles in the order of the seed are for choosing defaults, those after them for reporting."""
NEIGHBORS = 10
EXACT = "exact"


def local(**sizes: int) -> Attend:
    return partial(with_landmarks, partial(nystrom_local_attention, **sizes), 64)


ATTENTIONS: dict[str, Attend] = {
    EXACT: exact_attention,
    "nystrom-64": partial(with_landmarks, nystrom_attention, 64),
    "nystrom-local-64": local(),
    "nystrom-local-64, blocks of 64": local(block_size=64),
    "nystrom-local-64, blocks of 64, 128 core rows": local(block_size=64, core_rows=128),
    "nystrom-local-64, 3 chosen": local(chosen_blocks=3),
    "nystrom-local-64, 3 chosen, 128 core rows": local(chosen_blocks=3, core_rows=128),
    "[CLS] global + longformer-257": partial(windowed, 257, 1),
}


@dataclass(frozen=True)
class Passages:
    ids: Tensor  # (passages, length)
    article: Tensor  # (passages,)

    def __len__(self) -> int:
        return len(self.ids)


def cut(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, of_each: int, number: int) -> Passages:
    """The first `of_each` passages of articles that have as many, none padded, until there are `number`."""
    ids = []
    for text in texts:
        parts = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
        whole = [part for part in parts if len(part) == length][:of_each]
        if len(whole) == of_each:
            ids += whole
        if len(ids) >= number:
            return Passages(torch.tensor(ids), torch.arange(len(ids)) // of_each)
    raise ValueError(f"--passages {number}: the articles have just {len(ids)}; give fewer or more articles.")


@torch.no_grad()
def embed(model: PreTrainedModel, ids: Tensor, attend: Attend, label: str) -> Tensor:
    parts = ids.split(AT_ONCE)
    rows = []
    with swap_attention(model, attend), steps_bar(len(parts)) as step:
        for part in parts:
            step(label)
            rows.append(embedding(model(input_ids=part).last_hidden_state))
    return torch.cat(rows)


def cached_embeddings(cache: Path, model: PreTrainedModel, passages: Passages, name: str, attend: Attend) -> Tensor:
    corpus = hashlib.sha256(passages.ids.numpy().tobytes()).hexdigest()[:16]
    path = cache / corpus / f"{name.replace(' ', '_')}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")
        save_file({"embeddings": embed(model, passages.ids, attend, name)}, aside)
        aside.rename(path)
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("embeddings")


@dataclass(frozen=True)
class Agreement:
    top_1: float
    """Share of queries whose nearest neighbor is the exact one."""
    top_10: float
    """Share of the ten nearest neighbors that are among the exact ten."""
    loss: float
    """How much less near, by exact cosine, the found neighbor is than the nearest; mean over queries."""


def agreement(replaced: Tensor, exact: Tensor, excluded: Tensor) -> Agreement:
    """How far the neighbors by `replaced` (p, d) are those by `exact` (p, d); `excluded` (p, p) pairs don't count.

    >>> points = torch.nn.functional.normalize(torch.randn(20, 8), dim=1)
    >>> agreement(points, points, torch.eye(20, dtype=torch.bool))
    Agreement(top_1=1.0, top_10=1.0, loss=0.0)
    """
    similarity = (exact @ exact.T).masked_fill(excluded, -torch.inf)
    wanted = similarity.topk(NEIGHBORS, dim=1).indices
    found = (replaced @ replaced.T).masked_fill(excluded, -torch.inf).topk(NEIGHBORS, dim=1).indices
    nearest = [similarity.gather(1, indices[:, :1]) for indices in (wanted, found)]
    return Agreement(
        top_1=(wanted[:, 0] == found[:, 0]).double().mean().item(),
        top_10=(wanted[:, :, None] == found[:, None]).any(2).double().mean().item(),
        loss=(nearest[0] - nearest[1]).mean().item(),
    )


def record_all(recorder: Recorder, passages: Passages, embeddings: dict[str, Tensor]) -> None:
    exact = embeddings[EXACT]
    settings = {
        "all": torch.eye(len(passages), dtype=torch.bool),
        "other articles": passages.article[:, None] == passages.article,
    }
    for name, replaced in embeddings.items():
        if name == EXACT:
            continue
        cosine = (replaced * exact).sum(dim=1)
        recorder.record("cosine", cosine.mean().item(), worst=cosine.min().item(), attention=name)
        for neighbors, excluded in settings.items():
            found = agreement(replaced, exact, excluded)
            place = {"attention": name, "neighbors": neighbors}
            recorder.record("top_1_agreement", found.top_1, **place)
            recorder.record("top_10_overlap", found.top_10, **place)
            recorder.record("similarity_lost", found.loss, **place)


def recorded(folder: Path, config: dict[str, Any]) -> set[str]:
    """The attentions that `folder` has records of, which must be of the same passages."""
    records = list(read_records(folder)) if (folder / RECORDS).exists() else []
    if any(record["config"] != config for record in records):
        raise ValueError(f"--out {folder}: holds records of other passages; give another folder or remove it.")
    return {record["attention"] for record in records}


def table(records: list[dict]) -> str:
    """A row for each attention, as Markdown."""
    settings = list(dict.fromkeys(r["neighbors"] for r in records if "neighbors" in r))
    values = {(r["attention"], r["metric"], r.get("neighbors")): r for r in records}
    rows = []
    for name in (name for name in ATTENTIONS if (name, "cosine", None) in values):
        cosine = values[name, "cosine", None]
        cells = [f"{cosine['value']:.3f} ({cosine['worst']:.3f})"]
        for setting in settings:
            top_1, top_10, lost = (
                values[name, metric, setting]["value"]
                for metric in ("top_1_agreement", "top_10_overlap", "similarity_lost")
            )
            cells += [f"{100 * top_1:.1f} %", f"{100 * top_10:.1f} %", f"{lost:.4f}"]
        rows.append([name, *cells])
    header = ["attention", "cosine (worst)"]
    header += [f"{setting}: {kind}" for setting in settings for kind in ("top 1", "top 10", "lost")]
    return Table(header, rows).markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or Hub id of an encoder")
    parser.add_argument("--data", type=Path, required=True, help="folder with Parquet files of articles, column `text`")
    parser.add_argument("--out", type=Path, default=Path("runs/retrieval"))
    parser.add_argument("--cache", type=Path, default=Path("runs/embeddings"), help="where embeddings are kept")
    parser.add_argument("--passages", type=int, default=1200)
    parser.add_argument("--of-each", type=int, default=3, help="passages of each article")
    parser.add_argument("--length", type=int, default=512, help="tokens of a passage")
    parser.add_argument("--only", nargs="+", choices=list(ATTENTIONS), help="these attentions, in quotes")
    parser.add_argument("--skip", type=int, default=HELD_OUT, help="articles to leave out, see above")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        model, tokenizer = AutoModel.from_pretrained(options.model).eval(), AutoTokenizer.from_pretrained(options.model)
        texts = islice(shuffled_texts(options.data, options.seed), options.skip, None)
        passages = cut(texts, tokenizer, options.length, options.of_each, options.passages)
        config = {"model": Path(options.model).name, "passages": len(passages), "length": options.length}
        config |= {"of_each": options.of_each, "skip": options.skip}
        done = recorded(options.out, config)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    asked = [name for name in ATTENTIONS if name in [EXACT, *(options.only or ATTENTIONS)] and name not in done]
    embeddings = {name: cached_embeddings(options.cache, model, passages, name, ATTENTIONS[name]) for name in asked}
    write_config(options.out, config)
    record_all(Recorder(options.out, job="retrieval", config=config, seed=options.seed), passages, embeddings)
    shown = table(list(read_records(options.out)))
    write_text(options.out / "table.md", shown + "\n")
    print(shown)


if __name__ == "__main__":
    main()
