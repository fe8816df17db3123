"""What stands beside the weights of a distilled model: the files of sentence-transformers, and a model card."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from nystromformer.report.table import Table

MODULES = "modules.json"
LENGTH = "sentence_bert_config.json"
BESIDE = ("config.json", "model.safetensors")
"""What a module of sentence-transformers has in its folder."""
POOLING = {"cls": "first", "mean": "mean"}


def found_file(source: str, name: str) -> Path | None:
    """A file of a model's folder or Hub id."""
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def sentence_modules(source: str) -> list[dict[str, Any]]:
    """The modules of an encoder of sentences, as sentence-transformers lists them; none for other models."""
    path = found_file(source, MODULES)
    return [] if path is None else json.loads(path.read_text(encoding="utf-8"))


def pooling_of(source: str) -> str | None:
    """How an encoder of sentences pools: "mean" or "first"; None for other models, and for other ways."""
    for module in sentence_modules(source):
        path = found_file(source, f"{module['path']}/config.json") if module["type"].endswith("Pooling") else None
        if path is not None:
            config = json.loads(path.read_text(encoding="utf-8"))
            modes = {name: config.get(f"pooling_mode_{name}_token{'' if name == 'cls' else 's'}") for name in POOLING}
            named = config.get("pooling_mode")
            return next((ours for name, ours in POOLING.items() if modes[name] or named == name), None)
    return None


def write_sentence_files(source: str, folder: Path, max_length: int) -> None:
    """Make `folder` a model of sentence-transformers, as its source is one, that cuts texts at `max_length`."""
    modules = sentence_modules(source)
    if not modules:
        return
    names = [MODULES, "config_sentence_transformers.json"]
    names += [f"{module['path']}/{name}" for module in modules if module["path"] for name in BESIDE]
    for name in names:
        if (path := found_file(source, name)) is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
    path = found_file(source, LENGTH)
    settings = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    (folder / LENGTH).write_text(json.dumps(settings | {"max_seq_length": max_length}, indent=2) + "\n")


CARD = """---
library_name: transformers
tags:
- nystromformer
- linear-attention
- distillation
---

# {title}

{name} with attention of linear cost in {linear} of its {count} layers, distilled from itself with exact attention by
`nystromformer distill`: it is meant to give the same embeddings and hidden states, at lengths where exact attention is
slow.

- Attention by layer: {layers}
- Longest input: {max_length:,} tokens
- Trained on {tokens:,} tokens of {corpora} in {steps:,} steps ({stages}); {minutes:.1f} minutes of one core
- Speed of one forward at {speed_length:,} tokens: {speed:.2f} times that of exact attention ({milliseconds})

How closely it follows, on held-out texts:

{table}

Cosine: of the pooled embedding to that of exact attention. Top 1, top 10: how far each text's nearest neighbors among
the others are the same. Untrained: the same attention in the original weights.

## Use

```python
import nystromformer
from transformers import AutoModel, AutoTokenizer

nystromformer.register()  # before loading: without it Transformers refuses the folder
model, tokenizer = AutoModel.from_pretrained("."), AutoTokenizer.from_pretrained(".")
```
{sentences}
The license is that of {name}.
"""

SENTENCES = """
It is a model of sentence-transformers, too: `SentenceTransformer(".")` after `nystromformer.register()`.
"""


def model_card(config: dict[str, Any], result: dict[str, Any], table: Table, is_sentence_encoder: bool) -> str:
    """The text of `README.md`, from what a run was asked for and what its last record says."""
    layers, speed = config["layers"], result["speed"]
    name = Path(config["model"]).name
    linear = [layer for layer in layers if layer != "standard"]
    return CARD.format(
        title=f"{name}, {', '.join(dict.fromkeys(linear))}",
        name=name,
        linear=len(linear),
        count=len(layers),
        layers=", ".join(layers),
        max_length=config["max_length"],
        tokens=result["tokens"],
        corpora=", ".join(result["corpora"]),
        steps=result["step"],
        stages=" and ".join(f"{count:,} of stage {stage}" for stage, count in result["stages"].items()),
        minutes=result["core_seconds"] / 60,
        speed=speed["exact"] / speed["ours"],
        speed_length=speed["length"],
        milliseconds=f"{1e3 * speed['ours']:.0f} against {1e3 * speed['exact']:.0f} ms, batch 1",
        table=table.markdown(),
        sentences=SENTENCES if is_sentence_encoder else "",
    )
