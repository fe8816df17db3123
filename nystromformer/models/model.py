"""`NystromformerModel`, what all models share, and the check of checkpoints before they are loaded."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import can_return_tuple, logging

from nystromformer.attention.base import attentions_in
from nystromformer.attention.shared.common import shape_of
from nystromformer.checks import check_at_least
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.encoder import (
    NystromformerEmbeddings,
    NystromformerEncoder,
    NystromformerPooler,
    Rotation,
    rotation_of,
    tile_positions,
    token_mask,
)
from nystromformer.models.flattened import Borders, flattened, pool

SWITCHABLE = re.compile(
    r"(^|\.)pooler\.|\.attention\.self\.(attention|conv|key)\.|embeddings\.(position|token_type)_ids$"
)
"""Parts of the encoder that options add or remove. Transformers reports them as new or unused, and that is all."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

SHOWN = 6


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without what Transformers reports of weights that have no place: our own tables say it."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


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


class WeightShapesError(ValueError, RuntimeError):
    """A checkpoint has weights of other shapes: a `RuntimeError` to those who know Transformers, as there."""


def check_keys(name: str, prefix: str, loading: dict[str, Iterable], ignores_sizes: bool = False) -> None:
    """Refuse a checkpoint that lacks weights of the encoder, has some that find no place, or some of another shape.

    Heads may differ: a new one is trained, an old one left out. Transformers reports them.
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
        raise WeightShapesError(
            f"{name} has weights of other shapes: {_some(sizes)}. Check that config.json belongs to the weights, or "
            f"pass ignore_mismatched_sizes=True to start these at random, as for a head with other labels."
        )


def _of_encoder(keys: Iterable[str], prefix: str) -> list[str]:
    """The keys of embeddings and layers among `keys`, whether the checkpoint has a head (and the prefix) or not."""
    pattern = re.compile(rf"^({prefix}\.)?(embeddings|encoder)\.")
    return sorted(key for key in keys if pattern.match(key) and not SWITCHABLE.search(key))


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:SHOWN]) + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")


class NystromformerPreTrainedModel(PreTrainedModel):
    config: NystromformerConfig
    config_class = NystromformerConfig
    base_model_prefix = "nystromformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ("NystromformerEmbeddings", "NystromformerLayer")

    def __init__(self, config: NystromformerConfig) -> None:
        config.check()  # fields may have been set after it was made, as from_pretrained(folder, num_landmarks=128) does
        super().__init__(config)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, strict: bool = True, **kwargs: Any) -> Any:
        """As in Transformers, from safetensors only.

        `strict` (the default) refuses checkpoints that lack weights of the encoder or have some that find no place.
        """
        if pretrained_model_name_or_path is None:  # weights come as state_dict=
            return super().from_pretrained(None, *args, **kwargs)
        check_source(pretrained_model_name_or_path, kwargs.get("use_safetensors"))
        wants_info = kwargs.pop("output_loading_info", False)
        ignores_sizes = kwargs.pop("ignore_mismatched_sizes", False)
        # we ask for everything that is wrong instead of the first, to name it
        kwargs |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if strict:
            check_keys(str(pretrained_model_name_or_path), cls.base_model_prefix, info, ignores_sizes)
        return (model, info) if wants_info else model

    def _init_weights(self, module: Any) -> None:
        # `init` and, while this runs, torch.nn.init leave alone what was loaded
        starts_as_in_pytorch = isinstance(module, nn.Linear) and self.config.linear_init == "uniform"
        if getattr(module, "keeps_own_start", False) or starts_as_in_pytorch:
            module.reset_parameters()
            for name, drawn in getattr(module, "new_buffers", dict)().items():
                init.copy_(getattr(module, name), drawn)
        else:
            super()._init_weights(module)

    def get_position_embeddings(self) -> nn.Embedding:
        if self.config.positions == "rotary":
            raise ValueError("positions='rotary': this model has no position embeddings; use positions='learned'.")
        return self.base_model.embeddings.position_embeddings

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Make room for longer input by repeating the learned positions, or cut them. Rotary ones need no room.

        >>> from nystromformer import NystromformerModel
        >>> model = NystromformerModel(NystromformerConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
        >>> model.resize_position_embeddings(4096)
        >>> model.config.max_position_embeddings, model.get_position_embeddings().num_embeddings
        (4096, 4098)
        """
        check_at_least("new_num_position_embeddings", new_num_position_embeddings, 1)
        for attention in attentions_in(self):
            if attention.needs_fixed_length:
                raise ValueError(
                    f"{type(attention).__name__} has parameters for each position, which can't be repeated: "
                    f"build the model with a larger max_position_embeddings and train it."
                )
        embeddings = self.base_model.embeddings
        old = embeddings.position_embeddings
        if old is not None:
            table = tile_positions(old.weight.data, embeddings.offset, new_num_position_embeddings)
            embeddings.position_embeddings = nn.Embedding.from_pretrained(table, freeze=not old.weight.requires_grad)
        embeddings.max_length = new_num_position_embeddings
        self.config.max_position_embeddings = new_num_position_embeddings


class NystromformerModel(NystromformerPreTrainedModel):
    """Embeddings, encoder and pooled vector.

    >>> import torch
    >>> config = NystromformerConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64)
    >>> out = NystromformerModel(config)(torch.randint(5, 100, (2, 300)))
    >>> out.last_hidden_state.shape, out.pooler_output.shape
    (torch.Size([2, 300, 32]), torch.Size([2, 32]))
    """

    def __init__(self, config: NystromformerConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = NystromformerEmbeddings(config)
        self.encoder = NystromformerEncoder(config)
        has_pooler = config.add_pooler and add_pooling_layer
        self.pooler = NystromformerPooler(config.hidden_size) if has_pooler else None
        if not has_pooler:
            self._keys_to_ignore_on_load_unexpected = [r"(^|\.)pooler\."]
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
    ) -> BaseModelOutputWithPooling:
        """Encode `input_ids` (b, n) or `inputs_embeds` (b, n, hidden).

        `attention_mask` (b, n) is 1 for real tokens, anywhere. `position_ids` are rows of the position table, or the
        positions by which rotary models turn tokens; by default token i has `position_offset` + i, wherever the padding
        stands. `pooler_output` is the first real token or the mean of the real tokens (`config.pooling`), through the
        pooler where the model has one. `output_attentions` gives whole matrices, for at most 1,024 tokens.

        A flattened batch is one row (1, n) of b sequences, of which each gives what it gives alone. `cu_seq_lens_q`
        (b + 1) says where they begin, or `position_ids` that begin anew do; positions are counted from there.
        `pooler_output` has b rows. `cu_seq_lens_k`, where given, is the same; `max_length_q` and `max_length_k`, the
        most tokens of a sequence, are needed in compiled graphs of other attentions than nystrom.
        """
        batch, length = self._check_input(input_ids, inputs_embeds)
        if input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        real = token_mask(attention_mask, batch, length)
        tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
        counted = position_ids if attention_mask is None else None  # as Transformers: where masks are, rows are whole
        borders = flattened(tokens, real, counted, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        mask = real if borders is None else borders
        if borders is not None:
            position_ids = self._positions_within(borders, tokens)
        hidden = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)
        config = self.config
        encoded = self.encoder(
            hidden,
            mask,
            self._rotation(hidden, position_ids),
            config.output_attentions if output_attentions is None else output_attentions,
            output_hidden_states=config.output_hidden_states if output_hidden_states is None else output_hidden_states,
        )
        pooled = pool(encoded.last_hidden_state, mask, self.config.pooling)
        return BaseModelOutputWithPooling(
            last_hidden_state=encoded.last_hidden_state,
            pooler_output=pooled if self.pooler is None else self.pooler(pooled),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )

    def _positions_within(self, borders: Borders, tokens: Tensor) -> Tensor:
        """(1, n): the positions of tokens (1, n, …) counted from where their sequences begin."""
        sequences = borders.packing(tokens[0])
        longest = borders.max_seqlen if sequences.lengths is None else max(sequences.lengths)
        if longest is not None:
            self.embeddings.check_length(longest)
        return sequences.rank[None] + self.embeddings.offset

    def _rotation(self, hidden: Tensor, position_ids: Tensor | None) -> Rotation | None:
        """By how much tokens are turned; None where positions are learned."""
        if self.config.positions == "learned":
            return None
        positions = self.embeddings.positions(hidden) if position_ids is None else position_ids
        return rotation_of(positions, self.config.head_dim, hidden.dtype)

    def _check_input(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
        """Batch and length of the one input that must be given."""
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids and inputs_embeds: {given} given; give exactly one of them.")
        if input_ids is not None:
            if input_ids.dim() != 2 or input_ids.shape[1] < 1:
                raise ValueError(
                    f"input_ids has shape {shape_of(input_ids)}: must be (batch, length), length at least 1."
                )
            return input_ids.shape[0], input_ids.shape[1]
        assert inputs_embeds is not None
        width = self.config.hidden_size
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[1] < 1 or inputs_embeds.shape[2] != width:
            raise ValueError(f"inputs_embeds has shape {shape_of(inputs_embeds)}: must be (batch, length, {width}).")
        return inputs_embeds.shape[0], inputs_embeds.shape[1]
