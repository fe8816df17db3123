"""The encoder: embeddings, rotary positions, self-attention, layers, pooling."""

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput

from nystromformer.attention import Attention, skip_convolution
from nystromformer.attention.native import LEVELS, draw_seed, dropped_levels, runs_native
from nystromformer.attention.shared.common import at_least_float32, shape_of, zero_masked
from nystromformer.checks import check_at_least
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.flattened import Borders

ONE_KERNEL = {"gelu_new": "gelu_pytorch_tanh"}
"""The same formula, computed and kept for backward as one operation instead of eight."""

ROTARY_BASE = 10_000.0
"""Wave lengths go from 2π tokens in the first pair of numbers to nearly 2π · ROTARY_BASE in the last."""


def activation(name: str) -> nn.Module:
    """The activation of this name.

    >>> import torch
    >>> activation("gelu_new")(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([-0.1588,  0.0000,  1.9546])
    """
    return ACT2FN[ONE_KERNEL.get(name, name)]


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which queries and keys are turned, each (b or 1, 1, n, d / 2).

    Turned by position, they have a product that depends on how far apart they stand, not on where (Su et al., 2021).
    Any attention that sees them only through products, or through sums weighted alike for each of them, keeps that.
    """

    cosine: Tensor
    sine: Tensor


def rotation_of(position_ids: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """The angles of tokens at `position_ids` (b or 1, n), in `dtype` but at least in float32.

    >>> rotation_of(torch.arange(3)[None], head_dim=4, dtype=torch.float32).cosine.shape
    torch.Size([1, 1, 3, 2])
    """
    dtype = at_least_float32(dtype)
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device=position_ids.device) / head_dim  # (d/2)
    angles = position_ids[:, None, :, None].to(dtype) * ROTARY_BASE**-exponents  # (b 1 n d/2)
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """`x` (b, h, n, d) with each pair of numbers (j, j + d / 2) turned; computed at least in float32.

    >>> x = torch.randn(1, 2, 5, 8)
    >>> turned = rotate(x, rotation_of(torch.arange(5)[None], head_dim=8, dtype=x.dtype))
    >>> torch.allclose(turned.norm(dim=-1), x.norm(dim=-1)), torch.equal(turned[:, :, 0], x[:, :, 0])
    (True, True)
    """
    first, second = x.to(rotation.cosine.dtype).chunk(2, dim=-1)  # (b h n d/2)
    cosine, sine = rotation
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


def tile_positions(table: Tensor, offset: int, length: int) -> Tensor:
    """The position table (offset + n, d) for `length` tokens: its n positions are repeated, or cut off.

    Tiling keeps what the model knows about neighbors, except where one copy ends and the next begins (the paper's
    models for long input start so). The first `offset` rows stand for no position and stay.

    >>> tile_positions(torch.tensor([[-1.0], [0.0], [1.0], [2.0]]), offset=1, length=5).flatten()
    tensor([-1.,  0.,  1.,  2.,  0.,  1.])
    """
    check_at_least("length", length, 1)
    before, positions = table[:offset], table[offset:]
    copies = -(-length // positions.shape[0])
    return torch.cat((before, positions.repeat(copies, 1)[:length]))


def token_mask(attention_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """`attention_mask` (b, n) of 0 and 1, or booleans, as a boolean mask with True for real tokens.

    None where nothing is masked, as far as that can be told without waiting for a device or breaking a graph: the
    unmasked attention is faster.

    >>> token_mask(torch.tensor([[1, 1, 0]]), 1, 3)
    tensor([[ True,  True, False]])
    >>> token_mask(torch.tensor([[1, 1, 1]]), 1, 3) is None
    True
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask is a {type(attention_mask).__name__}: must be a tensor ({batch}, {length}).")
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] != length:
        raise ValueError(
            f"attention_mask has shape {shape_of(attention_mask)}: must be ({batch}, {length}), 1 for real tokens and "
            f"0 for padding; masks over pairs of tokens (4-D or causal ones) do not fit attention of linear cost."
        )
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise TypeError(
            f"attention_mask has dtype {attention_mask.dtype}: must be boolean or whole numbers, 1 for real tokens; "
            f"convert a 0/1 mask with mask.bool() and an additive one with mask == 0."
        )
    can_look = attention_mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if can_look and attention_mask.dtype != torch.bool and bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise ValueError(
            "attention_mask has values besides 0 and 1: must be 1 for real tokens and 0 for padding; sequences packed "
            "into one row are kept apart by cu_seq_lens_q, or by position_ids that begin anew."
        )
    mask = attention_mask.bool()
    return None if can_look and bool(mask.all()) else mask


class NystromformerPooler(nn.Module):
    """A dense layer and tanh on the pooled vector, as in BERT."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, pooled: Tensor) -> Tensor:
        return torch.tanh(self.dense(pooled))


class Dropout(nn.Dropout):
    """`nn.Dropout`, with another generator on CPUs.

    There PyTorch draws a number for each decision, on one thread, and keeps all decisions, which costs a small model
    much of its training step. Here PyTorch's generator gives one number, from which all decisions follow, on all
    threads, and the backward makes them again. Probabilities are rounded to 1/65,536, and what is kept is divided by
    the rounded share: the mean stays the input.

    >>> out = Dropout(0.25)(torch.ones(1000))
    >>> sorted(set(out.tolist()))
    [0.0, 1.3333333730697632]
    """

    def forward(self, input: Tensor) -> Tensor:
        dropped = dropped_levels(self.p)
        some = self.training and 0 < dropped < LEVELS
        if not some or torch.compiler.is_compiling() or not runs_native(input):
            return super().forward(input)
        return _Dropout.apply(input, dropped, draw_seed())


class _Dropout(Function):
    @staticmethod
    def forward(ctx, x: Tensor, *settings: Any) -> Tensor:
        ctx.settings = settings
        return torch.ops.nystromformer.dropout(x, *settings)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Dropout.apply(grad, *ctx.settings), None, None


LONGEST = 1024
"""Sequences for which whole attention matrices are given: 12 heads of 1,024² float32 are 50 MB per layer."""


def attention_and_map(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What `attention` gives for (b, h, n, d), and the matrix (b, h, n, n) that it multiplies the values with.

    The one is computed from the other, so that gradients of an output reach the matrix, as explanations of it need.
    The matrix is the result for the identity in place of values.

    >>> from nystromformer import build_attention
    >>> attention, x = build_attention("nystrom-8", num_heads=2, head_dim=4), torch.randn(1, 2, 20, 4)
    >>> out, matrix = attention_and_map(attention, x, x, x, None)
    >>> torch.allclose(out, attention(x, x, x), atol=1e-5), matrix.shape
    (True, torch.Size([1, 2, 20, 20]))
    """
    batch, heads, length = key.shape[:3]
    if length > LONGEST:
        raise ValueError(
            f"output_attentions=True with {length} tokens: at most {LONGEST}, since the matrices grow with the square "
            f"of the length; ask for single rows with attention.weights(query, key, rows=[0])."
        )
    if not attention.has_map:
        raise ValueError(
            f"output_attentions=True: {type(attention).__name__} has no attention matrix to show; "
            f"use attention='standard' or 'nystrom', or leave output_attentions out."
        )
    arguments = attention.arguments(query)
    kernel = arguments.pop("conv_weight", None)
    identity = torch.eye(length, dtype=query.dtype, device=query.device).expand(batch, heads, length, length)
    matrix = attention.operation(query, key, identity, mask, **arguments)
    value = zero_masked(value, mask)
    out = matrix @ value
    return out if kernel is None else zero_masked(out + skip_convolution(value, kernel), mask), matrix


class NystromformerEmbeddings(nn.Module):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.max_length, self.offset = config.max_position_embeddings, config.position_offset
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        learned = config.positions == "learned"
        self.position_embeddings = nn.Embedding(self.max_length + self.offset, width) if learned else None
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.embedding_norm else None
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds  # (b n d)
        added = []  # each (1 n d) or smaller, the same for the whole batch, unless given
        if self.position_embeddings is not None:
            added.append(self.position_embeddings(self.positions(words) if position_ids is None else position_ids))
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(1, 1, dtype=torch.long, device=words.device)
            added.append(self.token_type_embeddings(token_type_ids))
        elif token_type_ids is not None:
            raise ValueError(
                f"token_type_ids of shape {shape_of(token_type_ids)} were given to a model without token types "
                f"(type_vocab_size=0): leave them out, with tokenizer(..., return_token_type_ids=False)."
            )
        hidden = words + reduce(torch.add, added) if added else words
        return self.dropout(hidden if self.LayerNorm is None else self.LayerNorm(hidden))

    def positions(self, tokens: Tensor) -> Tensor:
        """(1, n) of tokens (b, n, …) whose positions are not given."""
        length = tokens.shape[1]
        self.check_length(length)
        return torch.arange(self.offset, self.offset + length, device=tokens.device).unsqueeze(0)

    def check_length(self, length: int) -> None:
        if self.position_embeddings is not None and length > self.max_length:
            raise ValueError(
                f"length {length}: the position table has room for {self.max_length} tokens; shorten the input with "
                f"tokenizer(..., truncation=True, max_length={self.max_length}), or lengthen the table with "
                f"model.resize_position_embeddings({length}) or `nystromformer convert SRC DST --max-length {length}`."
            )


class NystromformerSelfAttention(nn.Module):
    """Queries, keys and values from (b, n, hidden), and the attention that `config.attention` names."""

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim, width = config.num_attention_heads, config.head_dim, config.hidden_size
        self.attention = config.build_attention()
        self.query = nn.Linear(width, width)
        # an attention that takes its queries as keys would leave a projection without gradient, which DDP refuses
        self.key = None if self.attention.shares_query_key else nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        if "conv" in self.attention._modules:
            # Published checkpoints hold the convolution beside the projections, as `attention.self.conv.weight`.
            self.conv = self.attention._modules.pop("conv")

    def __setattr__(self, name: str, value: Any) -> None:
        """The convolution is a child of this module, and the attention has a plain reference to it, which follows when
        the child is exchanged: PEFT puts a copy to train in its place."""
        super().__setattr__(name, value)
        if name == "conv":
            self.attention.__dict__["conv"] = value

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | Borders | None = None,
        rotation: Rotation | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(b, n, hidden) → the same, and the attention matrix (b, h, n, n) on request.

        With borders in the place of a mask the one row (1, n, hidden) holds a flattened batch.

        Queries and keys are turned by `rotation` before the attention sees them: what it makes of them, such as
        landmarks, is made of turned ones.
        """
        query = self._split_heads(self.query(hidden), rotation)
        key = query if self.key is None else self._split_heads(self.key(hidden), rotation)
        value = self._split_heads(self.value(hidden))
        if isinstance(mask, Borders):
            if output_attentions:
                raise ValueError(
                    "output_attentions=True with a flattened batch: must be False, since its sequences have matrices "
                    "of different sizes; give the sequences one by one."
                )
            rows = (x[0].transpose(0, 1) for x in (query, key, value))  # (n h d)
            packed = self.attention(*rows, cu_seqlens=mask.cu_seqlens, max_seqlen=mask.max_seqlen)
            return packed.flatten(1)[None], None
        if output_attentions:
            context, weights = attention_and_map(self.attention, query, key, value, mask)
        else:
            context, weights = self.attention(query, key, value, mask), None
        return context.transpose(1, 2).flatten(2), weights

    def _split_heads(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        heads = x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)  # (b h n d)
        return heads if rotation is None else rotate(heads, rotation)


class NystromformerOutput(nn.Module):
    """The end of a sublayer: dense layer, dropout, residual connection; and the sublayer's LayerNorm."""

    def __init__(self, config: NystromformerConfig, input_size: int) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.dense = nn.Linear(input_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def sublayer_input(self, hidden: Tensor) -> Tensor:
        return self.LayerNorm(hidden) if self.pre_norm else hidden

    def forward(self, update: Tensor, hidden: Tensor) -> Tensor:
        out = hidden + self.dropout(self.dense(update))
        return out if self.pre_norm else self.LayerNorm(out)


class NystromformerAttentionBlock(nn.Module):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.self = NystromformerSelfAttention(config)
        self.output = NystromformerOutput(config, config.hidden_size)

    def forward(self, hidden: Tensor, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """`inputs` are what `NystromformerSelfAttention` takes besides."""
        update, weights = self.self(self.output.sublayer_input(hidden), *inputs)
        return self.output(update, hidden), weights


class NystromformerIntermediate(nn.Module):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = activation(config.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.activation(self.dense(hidden))


class NystromformerLayer(GradientCheckpointingLayer):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.attention = NystromformerAttentionBlock(config)
        self.intermediate = NystromformerIntermediate(config)
        self.output = NystromformerOutput(config, config.intermediate_size)

    def forward(self, hidden: Tensor, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """`inputs` are what `NystromformerSelfAttention` takes besides."""
        hidden, weights = self.attention(hidden, *inputs)
        return self.output(self.intermediate(self.output.sublayer_input(hidden)), hidden), weights


class NystromformerEncoder(nn.Module):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(NystromformerLayer(config) for _ in range(config.num_hidden_layers))
        # with the LayerNorms before the sublayers nothing has normalized the last sum yet
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm == "pre" else None

    def forward(self, hidden: Tensor, *inputs: Any, output_hidden_states: bool = False) -> BaseModelOutput:
        """`inputs` are what `NystromformerSelfAttention` takes besides; attention maps are there if it gives them.

        `hidden_states` are the embeddings and each layer's output; the last of them is `last_hidden_state`.
        """
        states, maps = [], []
        for layer in self.layer:
            if output_hidden_states:
                states.append(hidden)
            hidden, weights = layer(hidden, *inputs)
            if weights is not None:
                maps.append(weights)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return BaseModelOutput(
            last_hidden_state=hidden,
            hidden_states=(*states, hidden) if output_hidden_states else None,
            attentions=tuple(maps) or None,
        )
