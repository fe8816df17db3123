"""The paper's model sizes by name."""

from nystromformer.attention.checks import check_choice
from nystromformer.models.configuration import NystromformerConfig

BERT: dict[str, object] = {
    "vocab_size": 30000,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "position_offset": 0,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "conv_kernel_size": 33,
    "add_pooler": True,
}
"""What both BERT sizes share."""

PRESETS: dict[str, dict[str, object]] = {
    # The paper says "4 layers" only; the other sizes are those that BERT's authors released as BERT-small.
    "bert-small": BERT
    | {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    "bert-base": BERT
    | {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    # Vocabulary, length and number of labels belong to the task.
    "lra": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "hidden_act": "gelu",
        "type_vocab_size": 0,
        "position_offset": 0,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "conv_kernel_size": 35,
        "linear_init": "uniform",
        "norm": "pre",
        "embedding_norm": False,
        "pooling": "mean",
        "classifier_size": 128,
        "classifier_activation": "relu",
        "classifier_dropout": 0.0,
    },
}


def preset_config(name: str, **changes: object) -> NystromformerConfig:
    """The configuration of a preset, with some fields changed.

    >>> preset_config("bert-small", attention="linformer-256").num_hidden_layers
    4
    """
    check_choice("preset", name, PRESETS)
    return NystromformerConfig(**PRESETS[name] | changes)
