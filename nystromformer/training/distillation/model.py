"""Distillation: a student with attention of linear cost learns to do what its teacher does with exact attention.

Two stages. `layers`: each attention of the student is given what the teacher's own attention is given, and learns what
that makes of it; nothing passes through the rest of the model. `model`: the student runs by itself, end to end, and
learns the teacher's hidden states and, for encoders of sentences, its embedding.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from nystromformer.attention import SkipConvolution
from nystromformer.checks import check_choice
from nystromformer.integrations.hf.attention_interface import FUNCTIONS, exact_attention
from nystromformer.integrations.hf.layer_attentions import is_exact_layer
from nystromformer.integrations.hf.modules import calls_interface, has_attention, interface_modules
from nystromformer.integrations.offered import replacement_of
from nystromformer.integrations.probe import swap_attention
from nystromformer.integrations.replace import attentions_of
from nystromformer.models.encoder import NystromformerSelfAttention

LAYERS, MODEL = STAGES = ("layers", "model")

POOLINGS = ("mean", "first")
"""How an encoder of sentences makes one vector of its tokens'."""

CONVOLUTION_RATES = {LAYERS: 30.0, MODEL: 10.0}
"""Times the rate of other weights in each stage: convolutions start at zero."""

EMBEDDING_WEIGHT = 4.0
"""Of an embedding's distance beside the error of hidden states, which is some times larger."""

Batch = Mapping[str, Any] | Tensor
"""What the models are called with: keywords, or one tensor. `attention_mask` (b, n) says which tokens count."""


class Distillation(nn.Module):
    """Teacher and student as one module whose `forward` is the loss of the current stage.

    What it saves and loads is the student. Neither of them ever drops anything out.
    """

    def __init__(self, teacher: nn.Module, student: nn.Module, pooling: str | None = None) -> None:
        super().__init__()
        if pooling is not None:
            check_choice("pooling", pooling, POOLINGS)
        self.student: Any = student
        self.pooling, self.stage = pooling, LAYERS
        self._teacher = (teacher.eval().requires_grad_(False),)  # no part of what is trained and saved
        self.pairs = matched_attentions(teacher, student)
        self.eval()

    @property
    def teacher(self) -> Any:
        return self._teacher[0]

    def train(self, mode: bool = True) -> "Distillation":
        """Dropout would be noise that the teacher does not have: always evaluation mode."""
        return super().train(False)

    def _apply(self, *args: Any, **kwargs: Any) -> "Distillation":
        self.teacher._apply(*args, **kwargs)
        return super()._apply(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.student.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.student.load_state_dict(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        self.student.save_pretrained(*args, **kwargs)

    def forward(self, *inputs: Tensor, **named: Any) -> dict[str, Tensor]:
        batch = inputs[0] if inputs else named
        return {"loss": self.layers_loss(batch) if self.stage == LAYERS else self.model_loss(batch)}

    def layers_loss(self, batch: Batch) -> Tensor:
        """Mean over the student's attentions of linear cost of their error for what the teacher's are given."""
        mask = token_mask_of(batch)
        errors = [
            squared_error(_first(ours(*args, **kwargs)), out, mask)
            for ours, args, kwargs, out in self.teacher_calls(batch)
        ]
        return torch.stack(errors).mean()

    def teacher_calls(self, batch: Batch) -> Iterator[tuple[nn.Module, tuple, dict[str, Any], Tensor]]:
        """(attention of the student, arguments and result of the teacher's) for each call in one forward of it."""
        calls: list[tuple[nn.Module, tuple, dict[str, Any], Tensor]] = []

        def keep(ours: nn.Module) -> Any:
            return lambda _, args, kwargs, out: calls.append((ours, args, kwargs, _first(out)))

        hooks = [theirs.register_forward_hook(keep(ours), with_kwargs=True) for theirs, ours in self.pairs]
        # the masks that a module of Transformers is given depend on its attention: here they are as the student's
        through_interface = next(interface_modules(self.teacher), None) is not None
        teacher: Any = self.teacher
        try:
            with torch.no_grad(), swap_attention(teacher, exact_attention) if through_interface else nullcontext():
                call(teacher, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return iter(calls)

    def model_loss(self, batch: Batch) -> Tensor:
        """Mean over layers of the error of the student's hidden states, and the distance of its embedding."""
        mask = token_mask_of(batch)
        with torch.no_grad():
            theirs = hidden_states(self.teacher, batch)
        ours = hidden_states(self.student, batch)
        errors = [squared_error(one, other, mask) for one, other in zip(ours, theirs, strict=True)]
        loss = torch.stack(errors).mean()
        if self.pooling is None:
            return loss
        cosine = (embedding(ours[-1], mask, self.pooling) * embedding(theirs[-1], mask, self.pooling)).sum(dim=-1)
        return loss + EMBEDDING_WEIGHT * (1 - cosine).mean()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Three groups for an optimizer: projections of attention, convolutions, everything else but embeddings."""
        within = {id(p) for _, ours in self.pairs for p in ours.parameters()}
        convolutions = {
            id(p) for part in self.student.modules() if isinstance(part, SkipConvolution) for p in part.parameters()
        }
        tables = {id(p) for part in self.student.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
        groups: dict[str, list[nn.Parameter]] = {"projections": [], "convolutions": [], "others": []}
        for parameter in self.student.parameters():
            if id(parameter) in convolutions:
                groups["convolutions"].append(parameter)
            elif id(parameter) in within:
                groups["projections"].append(parameter)
            elif id(parameter) not in tables:
                groups["others"].append(parameter)
            parameter.requires_grad_(id(parameter) not in tables)
        return [{"params": parameters, "name": name} for name, parameters in groups.items()]


def matched_attentions(teacher: nn.Module, student: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """The attentions of both, in order, where the student's has linear cost."""
    theirs, ours = attentions_of(teacher), attentions_of(student)
    if len(theirs) != len(ours):
        raise ValueError(
            f"the teacher has {len(theirs)} attentions, the student {len(ours)}: the student must be a copy of it."
        )
    own = any(isinstance(part, NystromformerSelfAttention) for part in teacher.modules())
    if own or any(map(is_linear, theirs.values())):
        raise ValueError(
            "the teacher has attention of linear cost already: give the model with exact attention that it came from."
        )
    pairs = [(a, b) for a, b in zip(theirs.values(), ours.values(), strict=True) if is_linear(b)]
    if not theirs and not has_attention(teacher):
        raise ValueError(
            f"{type(teacher).__name__} has no attention to replace: it mixes tokens in another way, and nothing can be "
            f"distilled."
        )
    if not pairs:
        raise ValueError(
            "no attention of the student has linear cost: call nystromformer.replace_attention(student, "
            '"nystrom-local-64") before.'
        )
    return pairs


def is_linear(module: Any) -> bool:
    """Whether an attention module was given one of linear cost, by `replace_attention` or by its configuration."""
    if (record := replacement_of(module)) is not None and record.choice is not None:
        return True
    configured = calls_interface(type(module)) and module.config._attn_implementation in FUNCTIONS
    return configured and not is_exact_layer(module)


def call(model: nn.Module, batch: Batch, **options: Any) -> Any:
    return model(**batch, **options) if isinstance(batch, Mapping) else model(batch, **options)


def hidden_states(model: nn.Module, batch: Batch) -> Sequence[Tensor]:
    """After each layer (b, n, d), the output last; of a model that does not tell, the output alone."""
    if not isinstance(model, PreTrainedModel):
        return [_first(call(model, batch))]
    output = call(model, batch, output_hidden_states=True)
    states = list(output.hidden_states[1:])
    return states if states and states[-1] is output.last_hidden_state else [*states, output.last_hidden_state]


def token_mask_of(batch: Batch) -> Tensor | None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return None if mask is None or mask.dim() != 2 else mask.bool()


def embedding(states: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """One vector of length 1 for each example, (b, d) from (b, n, d).

    >>> embedding(torch.tensor([[[3.0, 4.0], [9.0, 9.0]]]), torch.tensor([[True, False]]), "mean")
    tensor([[0.6000, 0.8000]])
    """
    if pooling == "first":
        pooled = states[:, 0]
    elif mask is None:
        pooled = states.mean(dim=1)
    else:
        kept = mask[..., None].to(states.dtype)
        pooled = (states * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)
    return functional.normalize(pooled.float(), dim=-1)


def squared_error(ours: Tensor, theirs: Tensor, mask: Tensor | None) -> Tensor:
    """‖ours − theirs‖² / ‖theirs‖² over the valid tokens of each example (b, n, d), mean over examples.

    >>> ours, theirs = torch.tensor([[[2.0], [9.0]], [[1.0], [3.0]]]), torch.ones(2, 2, 1)
    >>> squared_error(ours, theirs, torch.tensor([[True, False], [True, True]]))  # of 1 / 1 and 4 / 2
    tensor(1.5000)
    """
    kept: Any = 1.0 if mask is None else mask[..., None]
    difference, theirs = (ours.float() - theirs.float()) * kept, theirs.float() * kept
    squares = [each.square().flatten(1).sum(dim=1) for each in (difference, theirs)]
    return (squares[0] / squares[1].clamp(min=torch.finfo(torch.float32).tiny)).mean()


def stage_rates(step: int, steps: Mapping[str, int], rates: Mapping[str, float], warmup: float) -> tuple[str, float]:
    """The stage of a step and its learning rate, which rises and falls linearly within each stage.

    >>> stage_rates(0, {"layers": 4, "model": 4}, {"layers": 1.0, "model": 0.1}, warmup=0.5)
    ('layers', 0.5)
    >>> stage_rates(7, {"layers": 4, "model": 4}, {"layers": 1.0, "model": 0.1}, warmup=0.5)
    ('model', 0.03333333333333333)
    """
    for stage, count in steps.items():
        if step < count or stage == list(steps)[-1]:
            rising = max(1, round(warmup * count))
            factor = min((step + 1) / rising, (count - step) / max(1, count - rising + 1))
            return stage, rates[stage] * max(factor, 0.0)
        step -= count
    raise AssertionError("no stage")


def stage_scheduler(
    optimizer: torch.optim.Optimizer, steps: Mapping[str, int], rates: Mapping[str, float], warmup: float
) -> LambdaLR:
    """The learning rate of each group of `Distillation.parameter_groups`, for optimizers made with a rate of 1."""

    def rate_of(name: str) -> Any:
        def rate_at(step: int) -> float:
            stage, rate = stage_rates(step, steps, rates, warmup)
            return rate * CONVOLUTION_RATES[stage] if name == "convolutions" else rate

        return rate_at

    return LambdaLR(optimizer, [rate_of(group["name"]) for group in optimizer.param_groups])


def distill(
    teacher: nn.Module,
    student: nn.Module,
    batches: Iterable[Batch],
    *,
    stages: Sequence[str] = STAGES,
    pooling: str | None = None,
    learning_rate: float = 3e-5,
    layers_rate: float = 5e-4,
    warmup: float = 0.1,
) -> list[float]:
    """Let `student`, a copy of `teacher` with attention of linear cost, learn to follow it; returns the losses.

    For encoders of any kind of input: text, speech, pictures. Batches are gone through once in each stage, a step for
    each; `nystromformer distill` does the same for texts, with checkpoints, records and an evaluation.

    Args:
        teacher: with exact attention. It is left as it is, but for gradients, which it needs none of.
        student: as `copy.deepcopy(teacher)` after `replace_attention(student, "nystrom-local-64")`. Trained in place.
        batches: what both are called with, a dict of keywords or a tensor; `attention_mask` says which tokens count.
        stages: "layers", "model" or both.
        pooling: "mean" or "first" for encoders whose pooled embedding is what counts.
        learning_rate: the highest of the stage "model".
        layers_rate: the highest of the stage "layers".
        warmup: the share of a stage's steps in which its rate rises.

    >>> import copy, nystromformer
    >>> layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, batch_first=True)
    >>> teacher = nn.TransformerEncoder(layer, num_layers=2)
    >>> student = copy.deepcopy(teacher)
    >>> names = nystromformer.replace_attention(student, "nystrom-8", exact_below=None)
    >>> losses = distill(teacher, student, [torch.randn(2, 40, 8) for _ in range(3)])
    >>> len(losses)
    6
    """
    for stage in stages:
        check_choice("stages", stage, STAGES)
    kept, training = list(batches), student.training
    if not kept or not stages:
        raise ValueError(f"{len(kept)} batches and {len(stages)} stages: give at least one of each.")
    distillation = Distillation(teacher, student, pooling)
    groups = distillation.parameter_groups()
    losses = []
    for stage, rate in ((LAYERS, layers_rate), (MODEL, learning_rate)):
        if stage not in stages:
            continue
        distillation.stage = stage
        optimizer = torch.optim.AdamW([dict(group) for group in groups], lr=1.0, betas=BETAS, weight_decay=0.0)
        scheduler = stage_scheduler(optimizer, {stage: len(kept)}, {stage: rate}, warmup)
        for batch in kept:
            loss = distillation(**batch)["loss"] if isinstance(batch, Mapping) else distillation(batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    student.train(training)
    return losses


BETAS = (0.9, 0.98)
"""Of AdamW: stages are short, and the second moment must forget within them."""


def _first(output: Any) -> Tensor:
    """Modules give their result alone, first in a tuple, or as `last_hidden_state`."""
    if isinstance(output, tuple):
        return output[0]
    return getattr(output, "last_hidden_state", output)
