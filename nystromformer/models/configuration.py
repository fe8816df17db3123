"""`NystromformerConfig`: every choice that makes a model, checked when it is made and again when a model is built."""

from dataclasses import field
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from nystromformer.attention import Attention, build_attention
from nystromformer.attention.nystrom.core import NystromOptions
from nystromformer.attention.registry import parse_attention_name
from nystromformer.checks import check_at_least, check_choice, check_fraction

NORMS = ("post", "pre")

POOLINGS = ("cls", "mean")

LINEAR_INITS = ("normal", "uniform")

POSITIONS = ("learned", "rotary")

OURS_ONLY = "of the package nystromformer-torch: import nystromformer; nystromformer.register()"
"""What configuration files name as `attn_implementation`. Transformers' own Nyströmformer would load our checkpoints
and compute something else; so it refuses them, with these words in its message. Ours knows better."""

SHARED_OPTIONS = ("num_landmarks", "conv_kernel_size", "pinv_iterations", "pinv_scaling")
"""Fields handed to each attention that has an option of that name."""


class NystromformerConfig(PreTrainedConfig):
    """Configuration of a Nyströmformer. Defaults are those of the Hub's
    [uw-madison/nystromformer-512](https://huggingface.co/uw-madison/nystromformer-512).

    Reads the `config.json` of Transformers' own Nyströmformer. Transformers reads ours, for tokenizers, but builds no
    model from it before `nystromformer.register()`. See `nystromformer.models.configuration` for the paper's sizes.

    >>> config = NystromformerConfig(attention="nystrom-32", num_hidden_layers=2)
    >>> config.num_landmarks
    32
    >>> NystromformerConfig(attention="nystrm")
    Traceback (most recent call last):
    ValueError: attention 'nystrm': must be one of ... Did you mean 'nystrom'?
    """

    model_type = "nystromformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["hidden_states", "attentions"]

    vocab_size: int = 30000
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    """Used by attentions that have a dropout of their own: `standard`."""
    max_position_embeddings: int = 510
    """The longest input. The table has `position_offset` rows more."""
    positions: str = "learned"
    """"learned": a table, added to the embeddings. "rotary": none; queries and keys are turned by their position before
    any attention sees them, and the length has no limit but the attention's own."""
    position_offset: int = 2
    """The row of the first token: 2 in the Hub's checkpoints and in RoBERTa, 0 in BERT."""
    type_vocab_size: int = 2
    """0 leaves token types out."""
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    linear_init: str = "normal"
    """Linear layers start from N(0, initializer_range) ("normal") or from PyTorch's default ("uniform", as in LRA)."""
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True

    attention: str = "nystrom"
    """A name for `build_attention`, such as "nystrom-64", "standard" or "linformer-256"."""
    attention_options: dict = field(default_factory=dict)
    """Options of that attention which have no field here, as {"window": 129} for "longformer"."""
    num_landmarks: int | None = None
    """Of the Nyström attentions: what the name's suffix says, otherwise 64."""
    conv_kernel_size: int | None = 65
    """Odd; None (0 in files) leaves the skip convolution out. The paper: 33 in BERT models, 35 in LRA."""
    pinv_iterations: int = NystromOptions.pinv_iterations
    pinv_scaling: str = NystromOptions.pinv_scaling
    """"batch" computes what published code computes; an example's result then depends on its neighbors."""

    norm: str = "post"
    """"post" as in BERT; "pre" (LRA) has a LayerNorm after the last layer, too."""
    embedding_norm: bool = True
    """A LayerNorm after the embeddings."""
    pooling: str = "cls"
    """How one vector stands for a sequence: its first token ("cls") or the mean of its tokens ("mean")."""
    add_pooler: bool = False
    """A dense layer and tanh on the pooled vector, as in BERT. The Hub's checkpoints have none."""
    classifier_size: int | None = None
    """Width between the two layers of the sequence classifier; `hidden_size` by default."""
    classifier_activation: str | None = None
    """Between these layers; `hidden_act` by default. "tanh" in BERT and RoBERTa, "relu" in LRA."""
    classifier_dropout: float | None = None
    """`hidden_dropout_prob` by default."""

    segment_means_seq_len: int = 64
    """For Transformers' code only, which needs the length in advance. Ours takes any length."""
    inv_coeff_init_option: bool = False
    """For Transformers' code only. Ours has `pinv_scaling`."""

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_landmarks is None:
            self.num_landmarks = self._suffix().get("num_landmarks", NystromOptions.num_landmarks)
        if self.conv_kernel_size == 0:
            self.conv_kernel_size = None
        if kwargs.get("attn_implementation") == OURS_ONLY:
            del kwargs["attn_implementation"]
        super().__post_init__(**kwargs)
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "NystromformerConfig":
        given = config_dict.get("model_type", cls.model_type)
        if given != cls.model_type:
            raise ValueError(
                f"the checkpoint's model_type is {given!r}: must be {cls.model_type!r}; BERT-like checkpoints are "
                f"converted with `nystromformer convert SRC DST`."
            )
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        # Transformers' own class reads only whole numbers here, and AutoTokenizer reads the file through that class
        fields = super().to_dict()
        return fields | {"conv_kernel_size": fields["conv_kernel_size"] or 0, "attn_implementation": OURS_ONLY}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"NystromformerConfig has no field {name!r}. If Transformers' own Nyströmformer asks for it: call "
            f"nystromformer.register() before AutoModel builds a model from this configuration."
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def build_attention(self) -> Attention:
        """The attention of one layer."""
        accepted = parse_attention_name(self.attention)[0].option_defaults()
        options = {name: getattr(self, name) for name in SHARED_OPTIONS if name in accepted}
        if "dropout" in accepted:
            options["dropout"] = self.attention_probs_dropout_prob
        return build_attention(
            self.attention,
            num_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            max_length=self.max_position_embeddings,
            **{name: value for name, value in options.items() if name not in self._suffix()},
            **self.attention_options,
        )

    def check(self) -> None:
        """Raise `ValueError` or `TypeError` for choices that make no model."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("max_position_embeddings", self.max_position_embeddings, 1)
        check_at_least("num_landmarks", self.num_landmarks, 1, "the paper uses 64")
        for name in ("position_offset", "type_vocab_size"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            check_fraction(name, getattr(self, name))
        check_choice("norm", self.norm, NORMS)
        check_choice("pooling", self.pooling, POOLINGS)
        check_choice("linear_init", self.linear_init, LINEAR_INITS)
        check_choice("positions", self.positions, POSITIONS)
        check_choice("hidden_act", self.hidden_act, ACT2FN)
        if self.classifier_size is not None:
            check_at_least("classifier_size", self.classifier_size, 1)
        if self.classifier_activation is not None:
            check_choice("classifier_activation", self.classifier_activation, ACT2FN)
        if self.classifier_dropout is not None:
            check_fraction("classifier_dropout", self.classifier_dropout)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}: "
                f"change one of them."
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"positions='rotary' with hidden_size={self.hidden_size}, num_attention_heads="
                f"{self.num_attention_heads}: heads of {self.head_dim} numbers can't be turned in pairs; make their "
                f"width even, or use positions='learned'."
            )
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id={self.pad_token_id}: must be at least 0 and below vocab_size={self.vocab_size}, or None."
            )
        self._check_attention()

    def _check_attention(self) -> None:
        if not isinstance(self.attention_options, dict):
            raise TypeError(f"attention_options={self.attention_options!r}: must be a dict, as {{'window': 129}}.")
        for name in SHARED_OPTIONS:
            given = getattr(self, name)
            if name in self.attention_options:
                raise ValueError(f"attention_options has {name!r}: set {name} of the configuration itself.")
            if self._suffix().get(name, given) != given:
                raise ValueError(
                    f"attention={self.attention!r} sets {name}={self._suffix()[name]}, but {name}={given} is given "
                    f"too: drop the number from the name, or make both equal."
                )
        with torch.device("meta"):  # its constructor checks its options; nothing is allocated
            self.build_attention()

    def _suffix(self) -> dict[str, int]:
        """The option that the number in the attention's name sets: {"num_landmarks": 32} for "nystrom-32"."""
        return parse_attention_name(self.attention)[1]


BERT: dict[str, Any] = {
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


PRESETS: dict[str, dict[str, Any]] = {
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


def preset_config(name: str, **changes: Any) -> NystromformerConfig:
    """The configuration of a preset, with some fields changed.

    >>> preset_config("bert-small", attention="linformer-256").num_hidden_layers
    4
    """
    check_choice("preset", name, PRESETS)
    return NystromformerConfig(**PRESETS[name] | changes)
