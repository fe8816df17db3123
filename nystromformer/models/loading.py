"""Checkpoints from elsewhere: checked as far as their files tell, then loaded whole, or refused in one sentence.

Whatever is wrong with the files of a model is a `ValueError` that names it, whichever library found it out.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.model import NystromformerModel, check_source, quiet_transformers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model")

LARGEST = {
    "num_hidden_layers": 1_000,
    "num_attention_heads": 10_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 100_000_000,
    "type_vocab_size": 1_000_000,
    "max_position_embeddings": 100_000_000,
}
"""Sizes in a configuration beyond which it is no model that anyone has, but one that fills memory or never ends."""


def read_config(name: str) -> dict[str, Any]:
    """The content of `config.json`, of which a model can be made."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith((".", "~", "/")) or name.count("/") > 1 or folder.is_file()):
        raise ValueError(f"{name}: no such folder; give one that save_pretrained() wrote, or a Hub id.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{name} has no config.json: give a folder that save_pretrained() wrote, or a Hub id.")
    try:
        fields = PreTrainedConfig.get_config_dict(name)[0]
    except Exception as error:  # Transformers', the Hub's and JSON's own
        where = "can't be read" if folder.is_dir() else "no folder, and no model that can be fetched from the Hub"
        raise ValueError(f"{name}: {where} ({_first_line(error)})") from error
    if not isinstance(fields, dict):
        raise ValueError(
            f"{name}, config.json: must be a JSON object, but is a {type(fields).__name__}; fetch it again."
        )
    for field, most in LARGEST.items():
        value = fields.get(field, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not (field.endswith("embeddings") or value >= 1):
            raise ValueError(
                f"{name}, config.json: {field} is {value!r}; must be a whole number from 1; fetch it again."
            )
        if value > most:
            raise ValueError(f"{name}, config.json: {field} is {value:,}; must be at most {most:,}; fetch it again.")
    return fields


def check_checkpoint(name: str) -> PreTrainedConfig:
    """The configuration of a checkpoint that seems whole: a model can be made of it, and its weights can be opened."""
    is_own = read_config(name).get("model_type") == NystromformerConfig.model_type
    check_source(name, use_safetensors=None)
    try:
        config = (NystromformerConfig if is_own else AutoConfig).from_pretrained(name)
        with torch.device("meta"), quiet_transformers():
            made = NystromformerModel(config) if is_own else AutoModel.from_config(config)
            parameters = made.num_parameters()
    except Exception as error:  # as many kinds as there are models
        raise ValueError(
            f"{name}, config.json: no model can be made of it ({_first_line(error)}); fetch it again."
        ) from error
    folder = Path(name).expanduser()
    if folder.is_dir():
        files = sorted(folder.glob("*.safetensors"))
        for path in files:
            _check_header(path)
        stored = sum(path.stat().st_size for path in files)
        if parameters > 8 * stored:  # no format has less than a bit for each
            raise ValueError(
                f"{name}: config.json describes a model of {parameters:,} parameters, its weights have {stored:,} "
                f"bytes; they do not belong together: fetch it again."
            )
    return config


def check_reads_text(name: str, config: PreTrainedConfig) -> None:
    """Refuse models of pictures or sound, and those for which no batch of texts can be padded."""
    if getattr(config, "vocab_size", None) is None or getattr(config, "pad_token_id", None) is None:
        raise ValueError(
            f"{name} is of type {config.model_type!r}, which has no vocabulary or no padding token: give an encoder of "
            f"texts, such as BERT."
        )


def load_checkpoint(loader: Any, name: str, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model and what `output_loading_info` says; weights of other shapes than its own are among the latter."""
    disable_progress_bar()  # of the weights' files
    try:
        with quiet_transformers():
            return loader.from_pretrained(
                name, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except Exception as error:  # as many kinds as there are models
        raise ValueError(
            f"{name}: can't be loaded ({_first_line(error)}); check that config.json belongs to the weights, or fetch "
            f"it again."
        ) from error


def wrong_keys(info: dict[str, Any]) -> set[str]:
    """Weights that a checkpoint lacks, or has in other shapes."""
    return {key for key, _, _ in info["mismatched_keys"]} | set(info["missing_keys"])


def refuse_lacking(name: str, model: PreTrainedModel, wrong: set[str]) -> None:
    """Raise `ValueError` if any weight of the model is not the checkpoint's but random."""
    if wrong:
        raise ValueError(
            f"{name} lacks weights of {type(model).__name__}, or has them in other shapes: "
            f"{', '.join(sorted(wrong)[:4])}{' and more' if len(wrong) > 4 else ''}; fetch it again, or correct its "
            f"config.json (`architectures`, sizes)."
        )


def has_tokenizer(name: str) -> bool:
    """Whether there are files of one: `AutoTokenizer` makes an empty tokenizer where there are none."""
    return any(cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in TOKENIZER_FILES)


def load_any_tokenizer(name: str, option: str = "--tokenizer") -> Tokenizer:
    """The tokenizer of a folder or Hub id, with a vocabulary."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name) if has_tokenizer(name) else None
    except Exception as error:  # `tokenizers` raises plain Exception, the Hub and protobuf their own
        raise ValueError(f"{option} {name}: its tokenizer can't be read ({_first_line(error)}).") from error
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer ({', '.join(TOKENIZER_FILES[:3])}, …): give one as {option}.")
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(
            f"{option} {name}: its tokenizer has no vocabulary beyond special tokens, so that all words would be the "
            f"same; give the folder of a whole one."
        )
    return tokenizer


def _check_header(path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: can't be read ({_first_line(error)}); fetch it again.") from error


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text}".splitlines()[0][:300]
