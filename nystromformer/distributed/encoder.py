"""The encoder of `nystromformer.models` on a shard of its sequence. Needs transformers.

Nothing in the models knows of this: hooks around `NystromformerModel` give its tokens the positions that they have in
the whole sequence, and replace the pooled vector by that of the whole sequence.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from nystromformer.attention.base import attentions_in
from nystromformer.attention.shared.common import at_least_float32
from nystromformer.distributed.attention import sequence_parallel_nystrom_attention
from nystromformer.distributed.collectives import agree, sum_over_ranks
from nystromformer.distributed.layout import Layout, share_layouts
from nystromformer.models import NystromformerForQuestionAnswering, NystromformerModel
from nystromformer.models.encoder import token_mask


def pool_over_ranks(
    hidden: Tensor, mask: Tensor | None, layout: Layout, pooling: str, group: ProcessGroup | None
) -> Tensor:
    """The first real token ("cls") or the mean of the real tokens ("mean") of the whole sequence: (b, d) on every rank.

    `hidden` (b, n, d) is this rank's shard; an empty one comes as one masked row.
    """
    if pooling == "mean":
        present = hidden if mask is None else torch.where(mask[..., None], hidden, hidden.new_zeros(()))
        share = present.sum(dim=1, dtype=at_least_float32(hidden.dtype)) / layout.valid.clamp(min=1)[:, None]
        return sum_over_ranks(share, group, "pooling").to(hidden.dtype)
    if mask is None:
        first, here = torch.zeros_like(layout.valid), layout.before == 0
    else:
        first, here = mask.long().argmax(dim=1), (layout.before == 0) & mask.any(dim=1)
    if layout.start == 0 and layout.length > 0:
        here = here | (layout.valid == 0)  # of nothing but padding the very first token is taken, as in one process
    row = hidden.gather(1, first[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
    return sum_over_ranks(torch.where(here[:, None], row, hidden.new_zeros(())), group, "pooling")


PER_TOKEN = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")


def encoders_of(module: nn.Module) -> list[NystromformerModel]:
    """The encoders inside `module`; models are refused that would silently do something else on shards."""
    encoders = [part for part in module.modules() if isinstance(part, NystromformerModel)]
    for encoder in encoders:
        if encoder.config.output_attentions:
            raise ValueError(
                "output_attentions=True in the model's configuration: must be False where a sequence is split over "
                "ranks, since no rank sees whole attention matrices."
            )
        if getattr(encoder.config, "pooled_length", None) is not None:
            raise ValueError(
                f"pooled_length={encoder.config.pooled_length}: must be None where a sequence is split over ranks, "
                f"since a rank does not count the tokens of the others."
            )
        for attention in attentions_in(encoder):
            if not attention.splits_over_ranks:
                raise ValueError(
                    f"{attention.name} can't attend over a sequence that is split over ranks: must be nystrom; build "
                    f"the model with attention='nystrom'."
                )
    if any(isinstance(part, NystromformerForQuestionAnswering) for part in module.modules()):
        raise ValueError(
            "NystromformerForQuestionAnswering compares all tokens of a sequence in one softmax, and a rank has only "
            "its own: give model.nystromformer instead, and gather its output with gather_sequence."
        )
    return encoders


class ShardedEncoder:
    """Hooks that let one `NystromformerModel` run on this rank's shard. Undone by `remove`."""

    def __init__(self, encoder: NystromformerModel, group: ProcessGroup | None, check: bool) -> None:
        self.group, self.check = group, check
        self.layout: Layout | None = None
        self.mask: Tensor | None = None
        self.wants_dict = True
        self.attentions = list(attentions_in(encoder))
        for attention in self.attentions:
            attention.operation = self.attend
        self.handles = [
            encoder.register_forward_pre_hook(self.before, with_kwargs=True),
            encoder.register_forward_hook(self.after),
        ]

    def remove(self) -> None:
        for attention in self.attentions:
            del attention.operation  # the class's own is there again
        for handle in self.handles:
            handle.remove()

    def attend(self, *args: Any, **options: Any) -> Tensor:
        """The operation of all layers: their sequence is laid out as `before` found it."""
        assert self.layout is not None  # `before` has set it
        layouts = self.layout, self.layout
        return sequence_parallel_nystrom_attention(*args, **options, group=self.group, layouts=layouts, check=False)

    def before(self, encoder: NystromformerModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        given = dict(zip(inspect.signature(encoder.forward).parameters, args, strict=False)) | kwargs
        wants_dict = given.pop("return_dict", None)
        self.wants_dict = bool(encoder.config.return_dict if wants_dict is None else wants_dict)
        try:
            batch, length, device = self._checked(given)
        except (TypeError, ValueError) as error:
            if self.check:  # the others wait for this rank's facts: they get its error
                agree(error, (0,), self.group, encoder.device)
            raise
        facts = self._facts(encoder, given) if self.check else None
        (self.layout,) = share_layouts([(length, self.mask)], batch, facts, self.group, device)
        if self.layout.total == 0:
            raise ValueError("the shards of all ranks are empty: at least one must have a token.")
        if given.get("position_ids") is None:
            encoder.embeddings.check_length(self.layout.total)
            first = encoder.embeddings.offset + self.layout.start
            given["position_ids"] = torch.arange(first, first + length, device=device)[None]
        if length == 0:
            self._fill(given, batch, device)
        return (), given | {"return_dict": True}

    def after(self, encoder: NystromformerModel, args: tuple, output: Any) -> Any:
        assert self.layout is not None  # `before` has set it
        pooling = encoder.config.pooling
        pooled = pool_over_ranks(output.last_hidden_state, self.mask, self.layout, pooling, self.group)
        output.pooler_output = pooled if encoder.pooler is None else encoder.pooler(pooled)
        if self.layout.length == 0:
            output.last_hidden_state = output.last_hidden_state[:, :0]
            if output.hidden_states is not None:
                output.hidden_states = tuple(hidden[:, :0] for hidden in output.hidden_states)
        return output if self.wants_dict else output.to_tuple()

    def _checked(self, given: dict[str, Any]) -> tuple[int, int, torch.device]:
        """Batch, length and device of this rank's tokens; sets its mask. What is wrong on all ranks, all will say."""
        inputs = [given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None]
        if len(inputs) != 1 or inputs[0].dim() < 2:
            raise ValueError(
                f"{len(inputs)} of input_ids and inputs_embeds were given: give one of them, (batch, length) or "
                f"(batch, length, hidden size)."
            )
        if given.get("output_attentions"):
            raise ValueError(
                "output_attentions=True: must be False where a sequence is split over ranks, since no rank sees whole "
                "attention matrices."
            )
        batch, length = inputs[0].shape[:2]
        self.mask = token_mask(given.get("attention_mask"), batch, length)
        return batch, length, inputs[0].device

    def _facts(self, encoder: NystromformerModel, given: dict[str, Any]) -> dict[str, Any]:
        """What must be the same on all ranks. A mask need not: a rank may have nothing to mask."""
        embeds = given.get("inputs_embeds")
        tokens = {name: given[name] for name in PER_TOKEN if given.get(name) is not None and name != "attention_mask"}
        return {
            **{f"{name}'s batch and width": (len(x), *x.shape[2:]) for name, x in tokens.items()},
            "dtype": str(encoder.dtype),
            "autocast": torch.is_autocast_enabled(encoder.device.type),
            "training": encoder.training,
            "gradients": torch.is_grad_enabled(),
            "parameters with gradient": sum(parameter.requires_grad for parameter in encoder.parameters()),
            "embeddings with gradient": embeds is not None and embeds.requires_grad,
        }

    def _fill(self, given: dict[str, Any], batch: int, device: torch.device) -> None:
        """One masked token for a rank that has none, so that it takes part in all collectives."""
        for name in PER_TOKEN:
            if isinstance(given.get(name), Tensor):
                x = given[name]
                given[name] = functional.pad(x, (0, 0, 0, 1) if x.dim() == 3 else (0, 1))
        given["attention_mask"] = self.mask = torch.zeros(batch, 1, dtype=torch.bool, device=device)
