"""Models with a head: classification of sequences and tokens, multiple choice, question answering; and their losses.

A loss is a sum and the number of items summed, so that any way of accumulating gradients can divide rightly.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPooling as Encoding
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput, can_return_tuple

from nystromformer.attention.shared.common import shape_of
from nystromformer.checks import check_choice
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.encoder import activation
from nystromformer.models.model import NystromformerModel, NystromformerPreTrainedModel

IGNORED = -100
"""The label of tokens and examples that don't count, as everywhere in Transformers."""

PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")

Count = Tensor | int | None
"""What HF Trainer passes as `num_items_in_batch`."""


def on_encoding(head: Callable[..., ModelOutput]) -> Callable[..., ModelOutput]:
    """The `forward` of a model with a head: it encodes its input, and `head` turns the encoding into the output.

    What all such models take and return beside their own stands here once: the encoder's inputs come before those of
    `head`, and hidden states and attentions are added to what it returns. HF Trainer reads the signature to know
    which columns of a data set to pass on.
    """

    encoder_inputs = inspect.signature(NystromformerModel.forward).parameters.values()
    _, _, *own_inputs = inspect.signature(head).parameters.values()
    own_names = [each.name for each in own_inputs]

    @functools.wraps(head)
    def forward(self: "NystromformerWithHead", *inputs: Any, **named: Any) -> ModelOutput:
        own = {name: named.pop(name) for name in own_names if name in named}
        encoding = self.encode(*inputs, **named)
        output = head(self, encoding, **own)
        output.hidden_states, output.attentions = encoding.hidden_states, encoding.attentions
        return output

    forward.__signature__ = inspect.Signature([*encoder_inputs, *own_inputs])  # type: ignore[attr-defined]
    return can_return_tuple(forward)


class NystromformerWithHead(NystromformerPreTrainedModel):
    """What models with a head share: `nystromformer`, the encoder, and how it is called."""

    accepts_loss_kwargs = True  # HF Trainer passes num_items_in_batch
    has_pooling_layer = False

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__(config)
        self.nystromformer = NystromformerModel(config, self.has_pooling_layer)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: NystromformerConfig) -> None:
        raise NotImplementedError

    def encode(self, *inputs: Any, **named: Any) -> Encoding:
        return self.nystromformer(*inputs, **named, return_dict=True)


class ClassificationHead(nn.Module):
    """Two layers on the pooled vector. BERT's pooler and classifier, RoBERTa's head and LRA's are all of this form."""

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        size = config.classifier_size or config.hidden_size
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dense = nn.Linear(config.hidden_size, size)
        self.activation = activation(config.classifier_activation or config.hidden_act)
        self.out_proj = nn.Linear(size, config.num_labels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.out_proj(self.dropout(self.activation(self.dense(self.dropout(pooled)))))


class NystromformerForSequenceClassification(NystromformerWithHead):
    """Classifier or regressor of sequences.

    >>> import torch
    >>> config = NystromformerConfig(
    ...     hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64, num_labels=3
    ... )
    >>> model = NystromformerForSequenceClassification(config)
    >>> model(torch.randint(5, 100, (2, 300)), labels=torch.tensor([0, 2])).logits.shape
    torch.Size([2, 3])
    """

    def add_head(self, config: NystromformerConfig) -> None:
        self.classifier = ClassificationHead(config)

    @on_encoding
    def forward(
        self, encoding: Encoding, *, labels: Tensor | None = None, num_items_in_batch: Count = None
    ) -> SequenceClassifierOutput:
        """`labels`: classes (b,), several labels (b, labels) of 0.0 and 1.0, or numbers; see `sequence_loss`."""
        logits = self.classifier(encoding.pooler_output)
        loss = None if labels is None else sequence_loss(logits, labels, self.config, num_items_in_batch)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class NystromformerForTokenClassification(NystromformerWithHead):
    """Classifier of tokens.

    >>> import torch
    >>> config = NystromformerConfig(
    ...     hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64, num_labels=5
    ... )
    >>> NystromformerForTokenClassification(config)(torch.randint(5, 100, (2, 300))).logits.shape
    torch.Size([2, 300, 5])
    """

    def add_head(self, config: NystromformerConfig) -> None:
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    @on_encoding
    def forward(
        self, encoding: Encoding, *, labels: Tensor | None = None, num_items_in_batch: Count = None
    ) -> TokenClassifierOutput:
        """`labels` (b, n) are classes, -100 for tokens that don't count."""
        logits = self.classifier(self.dropout(encoding.last_hidden_state))
        return TokenClassifierOutput(loss=class_loss(logits, labels, num_items_in_batch), logits=logits)


class NystromformerForMultipleChoice(NystromformerWithHead):
    """Multiple choice: every input has an axis of choices after the batch.

    >>> import torch
    >>> config = NystromformerConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64)
    >>> NystromformerForMultipleChoice(config)(torch.randint(5, 100, (2, 4, 100))).logits.shape
    torch.Size([2, 4])
    """

    def add_head(self, config: NystromformerConfig) -> None:
        self.pre_classifier = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def encode(self, *inputs: Any, **named: Any) -> Encoding:
        """All choices are encoded as one batch; the pooled vectors are (b, choices, d) again."""
        embedded = named.get("inputs_embeds")
        given = inputs[0] if inputs else named.get("input_ids") if embedded is None else embedded
        if given is None or given.dim() != (3 if embedded is None else 4):
            shape = "nothing" if given is None else shape_of(given)
            raise ValueError(
                f"the input is {shape}: must be input_ids (b, choices, n) or inputs_embeds (b, choices, n, d)."
            )
        flat = [_as_one_batch(x) for x in inputs]
        encoding = super().encode(*flat, **{name: _as_one_batch(x) for name, x in named.items()})
        encoding.pooler_output = encoding.pooler_output.unflatten(0, given.shape[:2])
        return encoding

    @on_encoding
    def forward(
        self, encoding: Encoding, *, labels: Tensor | None = None, num_items_in_batch: Count = None
    ) -> MultipleChoiceModelOutput:
        """Inputs are (b, choices, n); `labels` (b,) is the index of the right choice."""
        logits = self.classifier(self.pre_classifier(encoding.pooler_output).relu())[..., 0]  # (b choices)
        return MultipleChoiceModelOutput(loss=class_loss(logits, labels, num_items_in_batch), logits=logits)


class NystromformerForQuestionAnswering(NystromformerWithHead):
    """Extractive question answering.

    >>> import torch
    >>> config = NystromformerConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64)
    >>> out = NystromformerForQuestionAnswering(config)(torch.randint(5, 100, (2, 300)))
    >>> out.start_logits.shape, out.end_logits.shape
    (torch.Size([2, 300]), torch.Size([2, 300]))
    """

    accepts_loss_kwargs = False

    def add_head(self, config: NystromformerConfig) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    @on_encoding
    def forward(
        self, encoding: Encoding, *, start_positions: Tensor | None = None, end_positions: Tensor | None = None
    ) -> QuestionAnsweringModelOutput:
        """`start_positions` and `end_positions` (b,) are token indices; those outside the input are left out."""
        start_logits, end_logits = self.qa_outputs(encoding.last_hidden_state).unbind(dim=-1)  # (b n) each
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (position_loss(start_logits, start_positions) + position_loss(end_logits, end_positions)) / 2
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits.contiguous(), end_logits=end_logits.contiguous()
        )


def _as_one_batch(x: Any) -> Any:
    return x.flatten(0, 1) if isinstance(x, Tensor) else x


def position_loss(logits: Tensor, positions: Tensor) -> Tensor:
    positions = positions.view(-1)
    if len(positions) != len(logits):
        raise ValueError(
            f"{len(positions)} positions were given for {len(logits)} rows of tokens: must be as many; a loss over the "
            f"tokens of a flattened batch is not there, give a padded batch and attention_mask."
        )
    outside = (positions < 0) | (positions >= logits.shape[1])  # cut off with the end of a long text
    return cross_entropy_tally(logits, positions.masked_fill(outside, IGNORED)).mean()


@dataclass(frozen=True)
class Tally:
    """A loss summed over items, before any division."""

    loss_sum: Tensor
    count: Tensor
    correct: Tensor

    def mean(self, num_items: Count = None) -> Tensor:
        """The loss per item: of this batch, or this batch's part in the mean over `num_items`.

        HF Trainer passes the number of items of all batches between two optimizer steps as `num_items_in_batch`. The
        gradients of those batches then add up to that of one large batch. Nothing to count gives 0.
        """
        count = self.count if num_items is None else torch.as_tensor(num_items, device=self.loss_sum.device)
        return self.loss_sum / count.clamp(min=1)


def cross_entropy_tally(logits: Tensor, labels: Tensor) -> Tally:
    """Cross-entropy of `logits` (..., classes) for `labels` (...), in float32; labels of -100 are left out.

    >>> cross_entropy_tally(torch.tensor([[9.0, 0.0], [0.0, 9.0]]), torch.tensor([0, -100])).count
    tensor(1)
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {shape_of(labels)}: must be {tuple(logits.shape[:-1])}, one for each logit row."
        )
    logits, labels = logits.flatten(0, -2).float(), labels.flatten()
    counted = labels != IGNORED
    loss_sum = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    correct = (logits.detach().argmax(dim=-1) == labels).sum()  # -100 is no class, so ignored ones are never equal
    return Tally(loss_sum, counted.sum(), correct)


def class_loss(logits: Tensor, labels: Tensor | None, num_items: Count = None) -> Tensor | None:
    """The mean cross-entropy, as `Tally.mean` has it; None without labels."""
    return None if labels is None else cross_entropy_tally(logits, labels).mean(num_items)


def sequence_loss(logits: Tensor, labels: Tensor, config: NystromformerConfig, num_items: Count = None) -> Tensor:
    """Loss of a sequence classifier or regressor: `logits` (b, labels), by `config.problem_type`.

    Without a `problem_type`: one label is regression, whole numbers are classes, anything else is several labels at
    once. The mean goes over all numbers in `labels`, which is what HF Trainer counts.
    """
    problem = config.problem_type or _problem(logits, labels)
    check_choice("problem_type", problem, PROBLEMS)
    if problem == "single_label_classification":
        return cross_entropy_tally(logits, labels.flatten()).mean(num_items)
    if labels.numel() != logits.numel():
        raise ValueError(
            f"labels have shape {shape_of(labels)}: {problem} with logits {tuple(logits.shape)} needs as many numbers."
        )
    logits, labels = logits.float(), labels.view_as(logits).float()
    if problem == "regression":
        total = functional.mse_loss(logits, labels, reduction="sum")
    else:
        total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return total / (labels.numel() if num_items is None else num_items)


def _problem(logits: Tensor, labels: Tensor) -> str:
    if logits.shape[-1] == 1:
        return "regression"
    is_class = not labels.is_floating_point() and labels.dtype != torch.bool
    return "single_label_classification" if is_class else "multi_label_classification"
