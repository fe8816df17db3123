"""Models for Long Range Arena: the paper's classifier, of one sequence or of a pair, and its self-pretraining."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import ModelOutput, can_return_tuple

from nystromformer.attention.shared.common import shape_of
from nystromformer.checks import check_at_least, check_choice
from nystromformer.models.configuration import PRESETS, NystromformerConfig
from nystromformer.models.encoder import activation
from nystromformer.models.heads import IGNORED, Count, cross_entropy_tally, sequence_loss
from nystromformer.models.model import NystromformerModel, NystromformerPreTrainedModel

EMBEDDING_STARTS = ("random", "picture")


class LongRangeArenaConfig(NystromformerConfig):
    """`lra_config` gives the paper's sizes."""

    pair: bool = False
    """Classify two sequences, encoded alike."""
    pooled_length: int | None = None
    """Divide the sum over tokens by this length instead of their number, as the release does with padded ones."""
    embedding_start: str = "random"
    """How embeddings begin: "random", as in the paper, or "picture", where tokens are the pixels of a square picture,
    row by row: those of near levels of gray, and of near rows and columns, begin alike."""
    normalize_pooled: bool = False
    """Normalize the means over tokens over the batch (in evaluation: by what training saw), before the classifier."""

    def check(self) -> None:
        super().check()
        if self.pooled_length is not None:
            check_at_least("pooled_length", self.pooled_length, 1)
        check_choice("embedding_start", self.embedding_start, EMBEDDING_STARTS)
        if self.embedding_start == "picture":
            pixels, width = self.max_position_embeddings, self.hidden_size
            if self.positions == "learned" and (math.isqrt(pixels) ** 2 != pixels or self.position_offset):
                raise ValueError(
                    f"embedding_start='picture' with {pixels} positions from {self.position_offset} on: must be those "
                    f"of a square picture, as 1,024 are, from 0 on; use embedding_start='random' for other sequences."
                )
            if width % 4:
                raise ValueError(f"embedding_start='picture' with hidden_size={width}: must be divisible by 4.")


def lra_config(**changes: Any) -> LongRangeArenaConfig:
    """The paper's model, with some fields changed.

    >>> config = lra_config(attention="standard", vocab_size=32, max_position_embeddings=2048, num_labels=10)
    >>> config.hidden_size, config.num_hidden_layers, config.norm
    (64, 2, 'pre')
    """
    return LongRangeArenaConfig(**PRESETS["lra"] | changes)


def waves(places: Tensor, width: int, shortest: float, longest: float) -> Tensor:
    """Sines and cosines of `places` (n,), with wave lengths from `shortest` to `longest`: (n, width), mean square 1.

    >>> table = waves(torch.arange(32.0), 64, shortest=4, longest=128)
    >>> near, far = table[8] @ table[9], table[8] @ table[24]
    >>> bool(near > far), round(float(table.square().mean()), 3)
    (True, 1.0)
    """
    steps = torch.linspace(0, 1, width // 2, dtype=places.dtype, device=places.device)
    angles = places[:, None] * (2 * math.pi / shortest * (shortest / longest) ** steps)  # (n width/2)
    return math.sqrt(2) * torch.cat((angles.sin(), angles.cos()), dim=1)


class WaveEmbedding(nn.Embedding):
    """A table whose rows begin as waves, so that near ones begin alike, as large as random ones would be.

    Rows that begin at random say nothing of each other: that two pixels are neighbors, or that two levels of gray are
    nearly the same, has to be learned for each pair of them.
    """

    keeps_own_start = True
    std: float
    """Of the random rows."""

    def __init__(self, rows: int, config: LongRangeArenaConfig) -> None:
        self.std = config.initializer_range  # before the rows, which begin by it
        super().__init__(rows, config.hidden_size)

    def reset_parameters(self) -> None:
        init.copy_(self.weight, self.std * self.start().to(self.weight))

    def start(self) -> Tensor:
        raise NotImplementedError


class GrayLevels(WaveEmbedding):
    """Of padding or masked pixels, which begin at 0, and of each level of gray."""

    def start(self) -> Tensor:
        levels = self.num_embeddings - 1
        shades = waves(torch.arange(levels, dtype=torch.float32), self.embedding_dim, levels / 4, 4 * levels)
        return torch.cat((shades.new_zeros(1, self.embedding_dim), shades))


class PixelGrid(WaveEmbedding):
    """Of the pixels of a square picture, row by row: one half is of the row, the other of the column."""

    def start(self) -> Tensor:
        side = math.isqrt(self.num_embeddings)
        line = waves(torch.arange(side, dtype=torch.float32), self.embedding_dim // 2, 4, 4 * side)
        return torch.cat((line.repeat_interleave(side, dim=0), line.repeat(side, 1)), dim=1)


class PooledNorm(nn.BatchNorm1d):
    """Each number of pooled vectors (b, d) less its mean over the batch, divided by its deviation. Evaluations take
    both from training, and so does a batch of one.

    Means over a thousand tokens hardly differ between examples where most of a picture is background. What they share
    moves as fast as the encoder learns, so that training has to look past it at each step, and what evaluations take
    from training must be of its last steps: half is of the last one.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, affine=False, momentum=0.5)

    def forward(self, input: Tensor) -> Tensor:
        if self.training and len(input) > 1:
            return super().forward(input)
        mean, variance = self.running_mean, self.running_var
        return nn.functional.batch_norm(input, mean, variance, training=False, eps=self.eps)


class LongRangeArenaModel(NystromformerPreTrainedModel):
    """What the arena's models share: the encoder."""

    config: LongRangeArenaConfig
    config_class = LongRangeArenaConfig
    accepts_loss_kwargs = True  # HF Trainer passes num_items_in_batch

    def __init__(self, config: LongRangeArenaConfig) -> None:
        super().__init__(config)
        self.nystromformer = NystromformerModel(config, add_pooling_layer=False)
        if config.embedding_start == "picture":
            tables = self.nystromformer.embeddings
            tables.word_embeddings = GrayLevels(config.vocab_size, config)
            if tables.position_embeddings is not None:
                tables.position_embeddings = PixelGrid(config.max_position_embeddings, config)


class NystromformerForLongRangeArena(LongRangeArenaModel):
    """The paper's classifier: encoder, mean of the tokens, two layers.

    >>> model = NystromformerForLongRangeArena(lra_config(pair=True, num_labels=2))
    >>> model(torch.randint(1, 100, (3, 2, 300))).logits.shape
    torch.Size([3, 2])
    """

    def __init__(self, config: LongRangeArenaConfig) -> None:
        super().__init__(config)
        width = config.classifier_size or config.hidden_size
        self.norm = PooledNorm(config.hidden_size) if config.normalize_pooled else None
        self.dense = nn.Linear(config.hidden_size * (4 if config.pair else 1), width)
        self.activation = activation(config.classifier_activation or config.hidden_act)
        self.out_proj = nn.Linear(width, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        num_items_in_batch: Count = None, cu_seq_lens_q: Tensor | None = None,
    ) -> SequenceClassifierOutput:  # fmt: skip
        """`input_ids` (b, n), or (b, 2, n) of pairs; `attention_mask` alike, True for tokens; `labels` (b,).

        With `cu_seq_lens_q` (b + 1) or, of pairs, (2b + 1), `input_ids` (1, n) is a flattened batch: all sequences one
        after the other, both of a pair together.
        """
        if cu_seq_lens_q is not None:
            pooled = self._pooled_row(input_ids, attention_mask, cu_seq_lens_q)
            return self._classified(pooled, labels, num_items_in_batch)
        dims = 3 if self.config.pair else 2
        if input_ids.dim() != dims or (self.config.pair and input_ids.shape[1] != 2):
            expected = "(batch, 2, length)" if self.config.pair else "(batch, length)"
            raise ValueError(
                f"input_ids has shape {shape_of(input_ids)}: must be {expected}, since pair={self.config.pair}."
            )
        if self.config.pair:
            input_ids = input_ids.flatten(0, 1)
            attention_mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        return self._classified(self.pooled(input_ids, attention_mask), labels, num_items_in_batch)

    def _classified(self, pooled: Tensor, labels: Tensor | None, num_items_in_batch: Count) -> SequenceClassifierOutput:
        """From the pooled vectors of sequences, (b, d), or (2b, d) of pairs."""
        pooled = pooled if self.norm is None else self.norm(pooled)
        if self.config.pair:
            first, second = pooled.unflatten(0, (-1, 2)).unbind(dim=1)  # (b d)
            pooled = torch.cat((first, second, first * second, first - second), dim=1)  # (b 4d)
        logits = self.out_proj(self.activation(self.dense(pooled)))
        loss = None if labels is None else sequence_loss(logits, labels, self.config, num_items_in_batch)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def pooled(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(b, n) → (b, d)"""
        mean = self.nystromformer(input_ids, attention_mask, return_dict=True).pooler_output
        if self.config.pooled_length is None:
            return mean
        tokens = input_ids.shape[1] if attention_mask is None else attention_mask.sum(dim=1, keepdim=True)
        return mean * tokens / self.config.pooled_length

    def _pooled_row(self, input_ids: Tensor, attention_mask: Tensor | None, cu_seq_lens_q: Tensor) -> Tensor:
        """(1, n) → (b, d), or (2b, d) of pairs"""
        if self.config.pair and cu_seq_lens_q.shape[0] % 2 == 0:
            raise ValueError(
                f"cu_seq_lens_q has {cu_seq_lens_q.shape[0] - 1} sequences: must be an even number, since pair=True."
            )
        out = self.nystromformer(input_ids, attention_mask, cu_seq_lens_q=cu_seq_lens_q, return_dict=True)
        if self.config.pooled_length is None:
            return out.pooler_output
        return out.pooler_output * cu_seq_lens_q.diff()[:, None] / self.config.pooled_length


@dataclass
class MaskedTokensOutput(ModelOutput):
    """`correct` and `masked` (b,), in evaluation, count the right answers and the questions of each example."""

    loss: Tensor | None = None
    correct: Tensor | None = None
    masked: Tensor | None = None


class NystromformerForMaskedTokens(LongRangeArenaModel):
    """For self-pretraining: encoder, and one layer from each masked token to the vocabulary.

    >>> model = NystromformerForMaskedTokens(lra_config(vocab_size=257, max_position_embeddings=512)).eval()
    >>> ids = torch.randint(1, 257, (2, 300))
    >>> hidden = torch.arange(300) % 2 == 0
    >>> out = model(torch.where(hidden, 0, ids), labels=torch.where(hidden, ids, -100))
    >>> out.loss.shape, out.masked
    (torch.Size([]), tensor([150, 150]))
    """

    def __init__(self, config: LongRangeArenaConfig) -> None:
        super().__init__(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def start_at(self, frequencies: Tensor) -> None:
        """Let the first guess of each token be its frequency, whatever stands around it.

        Otherwise that is the first thing to be learned, and every token's vector gets a large part in common for it,
        which the task's own head then has to look past.
        """
        with torch.no_grad():
            self.decoder.bias.copy_(frequencies.log())

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        num_items_in_batch: Count = None,
    ) -> MaskedTokensOutput:  # fmt: skip
        """`input_ids` (b, n), or (b, 2, n) of pairs, with the masked tokens replaced; `labels` alike: what these were,
        -100 elsewhere. The others never meet the vocabulary."""
        if labels is None or labels.shape != input_ids.shape:
            given = "none" if labels is None else shape_of(labels)
            raise ValueError(
                f"labels: {given} given; must be {shape_of(input_ids)} like input_ids, -100 where not masked."
            )
        pairs = input_ids.dim() == 3
        ids, mask = (x.flatten(0, 1) if pairs and x is not None else x for x in (input_ids, attention_mask))
        hidden = self.nystromformer(ids, mask, return_dict=True).last_hidden_state.flatten(0, 1)
        chosen = (labels.flatten() != IGNORED).nonzero()[:, 0]
        answers = labels.flatten().index_select(0, chosen)
        logits = self.decoder(hidden.index_select(0, chosen))  # (masked, vocabulary)
        tally = cross_entropy_tally(logits, answers)
        if self.training:
            return MaskedTokensOutput(loss=tally.mean(num_items_in_batch))
        example = chosen // (labels.numel() // len(labels))
        none = torch.zeros(len(labels), dtype=torch.long, device=labels.device)
        return MaskedTokensOutput(
            loss=tally.mean(num_items_in_batch),
            correct=none.index_add(0, example, (logits.argmax(dim=-1) == answers).long()),
            masked=none.index_add(0, example, torch.ones_like(example)),
        )
