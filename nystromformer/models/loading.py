"""Checkpoints that are not what they should be are refused, with what to do."""

import re
from collections.abc import Iterable
from pathlib import Path

SWITCHABLE = re.compile(
    r"(^|\.)pooler\.|\.attention\.self\.(attention|conv|key)\.|embeddings\.(position|token_type)_ids$"
)
"""Parts of the encoder that options add or remove. Transformers reports them as new or unused, and that is all."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SHOWN = 6


def check_source(source: object, use_safetensors: bool | None) -> None:
    """Refuse pickles: opening one can run any code that its author put there."""
    if use_safetensors is False:
        raise ValueError("use_safetensors=False: must be True or left out; pickles can run code when opened.")
    folder = Path(str(source))
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise ValueError(
                f"{folder} has {pickles[0]} but no model.safetensors: pickle checkpoints are not opened, because that "
                f"can run code; fetch the safetensors version or, if you trust it, write one with Transformers' "
                f"AutoModel.from_pretrained(folder).save_pretrained(other_folder)."
            )
        raise ValueError(f"{folder} has no model.safetensors: give a folder that save_pretrained() wrote, or a Hub id.")


def check_keys(name: str, prefix: str, loading: dict[str, Iterable], ignores_sizes: bool = False) -> None:
    """Refuse a checkpoint that lacks weights of the encoder, has some that find no place, or some of another shape.

    Heads may differ: a new one is trained, an old one left behind. Transformers reports them.
    """
    found = {"missing": loading["missing_keys"], "surplus": loading["unexpected_keys"]}
    wrong = {kind: _of_encoder(keys, prefix) for kind, keys in found.items()}
    if any(wrong.values()):
        named = "; ".join(f"{kind} weights: {_some(keys)}" for kind, keys in wrong.items() if keys)
        raise ValueError(
            f"{name} does not fit its configuration. {named}. Check that config.json belongs to the weights (layers, "
            f"sizes), convert BERT-like checkpoints with `nystromformer convert SRC DST`, or pass strict=False to load "
            f"what fits and start the rest at random."
        )
    if loading["mismatched_keys"] and not ignores_sizes:
        sizes = sorted(
            f"{key} {tuple(theirs)}, needed {tuple(ours)}" for key, theirs, ours in loading["mismatched_keys"]
        )
        raise ValueError(
            f"{name} has weights of other shapes: {_some(sizes)}. Check that config.json belongs to the weights, or "
            f"pass ignore_mismatched_sizes=True to start these at random, as for a head with other labels."
        )


def _of_encoder(keys: Iterable[str], prefix: str) -> list[str]:
    """The keys of embeddings and layers among `keys`, whether the checkpoint has a head (and the prefix) or not."""
    pattern = re.compile(rf"^({prefix}\.)?(embeddings|encoder)\.")
    return sorted(key for key in keys if pattern.match(key) and not SWITCHABLE.search(key))


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:SHOWN]) + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")
