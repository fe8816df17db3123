"""A model to convert, from a folder or the Hub."""

from pathlib import Path

import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.conversion.layouts import OURS, kind_of, layout_of
from nystromformer.models.conversion.transfer import Row
from nystromformer.models.loading import check_source

AUTO_CLASSES = {
    "Model": "AutoModel",
    "ForPreTraining": "AutoModelForPreTraining",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}


def load_source(name: str) -> tuple[PreTrainedModel, list[Row]]:
    """The model of a checkpoint, with its head where that can be converted; and the weights that found no place in it.

    A checkpoint that lacks weights is refused, and so are pickles and weights that can't be read.
    """
    fields = read_config(name)
    check_source(name, use_safetensors=None)
    kind = kind_of(next(iter(fields.get("architectures") or []), None))
    try:
        if fields.get("model_type") == NystromformerConfig.model_type:
            model, info = OURS[kind].from_pretrained(name, output_loading_info=True)
        else:
            layout_of(AutoConfig.from_pretrained(name))
            loader = getattr(transformers, AUTO_CLASSES[kind])
            model, info = loader.from_pretrained(
                name, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except SafetensorError as error:
        raise ValueError(f"{name}: its safetensors file can't be read ({error}); fetch it again.") from error
    wrong = {key for key, _, _ in info["mismatched_keys"]} | set(info["missing_keys"])
    if kind == "Model" and wrong and all(key.startswith("pooler.") for key in wrong):
        model.pooler, wrong = None, set()  # many checkpoints come without; a random one would be no conversion
    if wrong:
        raise ValueError(
            f"{name} lacks weights of {type(model).__name__}, or has them in other shapes: "
            f"{', '.join(sorted(wrong)[:6])}{' and more' if len(wrong) > 6 else ''}; fetch it again, or mend its "
            f"config.json (`architectures`, sizes)."
        )
    surplus = [Row(status="left", source=key, note="not used by the source either") for key in info["unexpected_keys"]]
    return model, sorted(surplus, key=lambda row: row.source)


def read_config(name: str) -> dict[str, object]:
    """The content of `config.json`."""
    folder = Path(name)
    if not folder.is_dir() and (name.startswith((".", "~", "/")) or name.count("/") > 1):
        raise ValueError(f"{name}: no such folder; give one that save_pretrained() wrote, or a Hub id.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{name} has no config.json: give a folder that save_pretrained() wrote, or a Hub id.")
    try:
        return PreTrainedConfig.get_config_dict(name)[0]
    except OSError as error:
        reason = str(error).splitlines()[0]
        where = "can't be read" if folder.is_dir() else "no folder, and no model that can be fetched from the Hub"
        raise ValueError(f"{name}: {where} ({reason})") from error
