"""Whole encoders and layers on shards: the same programs for one process and for ranks."""

import importlib.util
import io
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nystromformer import (
    NystromAttention,
    NystromformerConfig,
    NystromformerForMaskedLM,
    NystromformerForPreTraining,
    NystromformerForSequenceClassification,
    NystromformerModel,
)
from nystromformer.distributed import gather_sequence, reduce_gradients, sequence_parallel, split_sequence

LENGTH = 75
SPLITS = {"even": None, "uneven": (40, 8, 27), "empty-shard": (30, 0, 45)}
TRAINED = ("uneven", "empty-shard")


def config(**changes: object) -> NystromformerConfig:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 32, "num_landmarks": 8, "conv_kernel_size": 9, "max_position_embeddings": 100}
    return NystromformerConfig(**sizes | {"hidden_dropout_prob": 0.0, "num_labels": 3} | changes)


def batch() -> dict[str, Tensor]:
    """Padding on the left, on the right and in between; the second example starts on the second rank."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(3, LENGTH, generator=generator) < 0.8
    mask[0], mask[1, :42], mask[2, 50:] = True, False, False
    ids = torch.randint(3, 50, (3, LENGTH), generator=generator)
    types = torch.randint(0, 2, (3, LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": types}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


ENCODERS: dict[str, dict[str, object]] = {
    "cls": {},
    "mean-pooling-pre-norm": {"pooling": "mean", "norm": "pre"},
    "pooler": {"add_pooler": True},
    "rotary-positions": {"positions": "rotary"},
    "no-token-exceeds-the-landmarks": {"num_landmarks": 90, "pooling": "mean"},
}


def encode(model: NystromformerModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    out = model(**inputs, output_hidden_states=True)
    as_tuple = model(**inputs, return_dict=False)
    return {
        "last_hidden_state": out.last_hidden_state,
        "embeddings": out.hidden_states[0],
        "pooler_output": out.pooler_output,
        "tuple_pooler_output": as_tuple[1],
    }


def sequence_loss(
    inputs: dict[str, Tensor], checkpointing: bool = False, ddp: bool = False, **changes: object
) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = built(lambda: NystromformerForSequenceClassification(config(**changes))).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    called = DistributedDataParallel(model) if ddp else model
    return model, lambda: called(**inputs, labels=torch.tensor([0, 2, 1])).loss


def token_loss(inputs: dict[str, Tensor], count: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = built(lambda: NystromformerForMaskedLM(config()))
    return model.train(), lambda: model(**inputs, num_items_in_batch=count).loss


def both_losses(inputs: dict[str, Tensor], counts: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = built(lambda: NystromformerForPreTraining(config(add_pooler=True)))
    labels = {"sentence_order_label": torch.tensor([0, 1, 1])}
    return model.train(), lambda: model(**inputs, **labels, num_items_in_batch=counts).loss


def with_labels(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    chosen = (torch.arange(LENGTH) % 5 == 0) & inputs["attention_mask"].bool()
    return inputs | {"labels": torch.where(chosen, inputs["input_ids"], -100)}


def trained(model: nn.Module, loss: Callable[[], Tensor], reduction: str | None) -> dict[str, Tensor]:
    """The loss, and the weights after two steps. `reduction` of the gradients over ranks: "mean", "sum", or "ddp" where
    DistributedDataParallel does it; None for one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    with nullcontext() if reduction is None else sequence_parallel(model):
        for _ in range(2):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            if reduction in ("mean", "sum"):
                reduce_gradients(model, reduction=reduction)
            optimizer.step()
            losses.append(value.detach())
    return {"losses": torch.stack(losses)} | {name: x.detach() for name, x in model.named_parameters()}


def trainings(ranks: int, split: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Training runs whose result must be the same on any number of ranks."""
    inputs, labeled = split(batch()), split(with_labels(batch()))
    count = int((with_labels(batch())["labels"] != -100).sum())
    replicated, own = (None, None) if ranks == 1 else ("mean", "sum")
    pairs = torch.tensor([count, 3 * ranks], dtype=torch.float64)  # each rank has the loss of all pairs
    parallel = sequence_loss(inputs, ddp=ranks > 1)
    return {
        "sequence-loss": trained(*sequence_loss(inputs), replicated),
        "distributed-data-parallel": trained(*parallel, None if ranks == 1 else "ddp"),
        "sequence-loss-mean-pooling": trained(*sequence_loss(inputs, pooling="mean"), replicated),
        "gradient-checkpointing": trained(*sequence_loss(inputs, checkpointing=True), replicated),
        "token-loss": trained(*token_loss(labeled, count), own),
        "token-and-sequence-loss": trained(*both_losses(labeled, pairs), own),
    }


def layer_and_input() -> tuple[NystromAttention, Tensor, Tensor]:
    layer = built(lambda: NystromAttention(16, num_heads=2, num_landmarks=8, conv_kernel_size=9))
    return layer, torch.randn(3, LENGTH, 16, dtype=torch.float64), batch()["attention_mask"].bool()


def on_ranks() -> dict[str, dict[str, object]]:
    """Everything on three ranks; what belongs to tokens is gathered."""
    found: dict[str, dict[str, object]] = {}
    for split, lengths in SPLITS.items():
        shard = lambda x, lengths=lengths: split_sequence(x, lengths=lengths)
        for name, changes in ENCODERS.items():
            model = built(lambda changes=changes: NystromformerModel(config(**changes))).eval()
            with torch.no_grad(), sequence_parallel(model):
                out = encode(model, shard(batch()))
            gathered = {key: x if "pooler" in key else gather_sequence(x) for key, x in out.items()}
            found[f"{split}-{name}"] = gathered
        layer, x, mask = layer_and_input()
        with sequence_parallel(layer):
            part = shard(x).requires_grad_()
            out = gather_sequence(layer(part, shard(mask)))
        (out.square().sum() / dist.get_world_size()).backward()  # every rank has the whole loss
        found[f"{split}-layer"] = {"out": out.detach(), "grad": gather_sequence(part.grad)}
        if split in TRAINED:
            found |= {f"{split}-{name}": run for name, run in trainings(3, shard).items()}
    model = built(lambda: NystromformerModel(config())).eval()
    with sequence_parallel(model):
        pass
    found["removed"] = encode(model, batch())  # each rank alone
    return found


def million_tokens(length: int) -> str:
    """What examples/million_tokens.py prints on this rank."""
    path = Path(__file__).parents[2] / "examples/million_tokens.py"
    specification = importlib.util.spec_from_file_location("million_tokens", path)
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    with redirect_stdout(io.StringIO()) as printed:
        example.run(Namespace(length=length, width=32, heads=2, layers=2, landmarks=16))
    return printed.getvalue()


def in_one_process() -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, changes in ENCODERS.items():
        model = built(lambda changes=changes: NystromformerModel(config(**changes))).eval()
        with torch.no_grad():
            found[name] = encode(model, batch())
    layer, x, mask = layer_and_input()
    out = layer(x.requires_grad_(), mask)
    out.square().sum().backward()
    found["layer"] = {"out": out.detach(), "grad": x.grad}
    return found | trainings(1, lambda x: x)
