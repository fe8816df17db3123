"""HF Trainer for two objectives at once, with batches that are functions of (seed, epoch, index)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from nystromformer.models import NystromformerForPreTraining
from nystromformer.models.heads import IGNORED
from nystromformer.records import Recorder
from nystromformer.training.callbacks import DETAILS, Clock, Curves, Record, ShowProgress
from nystromformer.training.trainer import ExactTrainer, GroupedByLength, LongestFirst

SUMS = ("mlm_loss_sum", "mlm_count", "mlm_correct", "sop_loss_sum", "sop_count", "sop_correct")


class Keys(Sampler[tuple[int, int]]):
    """The order of an epoch as the keys of its examples: (epoch, index)."""

    def __init__(self, order: GroupedByLength) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.order.epoch
        return ((epoch, index) for index in self.order)


class PretrainingTrainer(ExactTrainer):
    """Each objective is divided by its own count, over all micro-batches and processes of a step."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return Keys(super()._get_train_sampler(train_dataset))

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        counts = NystromformerForPreTraining.count_items(batch_samples).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.reduce(counts, reduction="sum")
        return counts

    @torch.no_grad()
    def evaluation_loop(
        self, dataloader: Any, description: str, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> EvalLoopOutput:
        """Exact accuracies and losses on the validation examples, each of them seen by one process once."""
        examples = dataloader.dataset
        order = list(LongestFirst(examples.lengths))
        rank, world, size = self.args.process_index, self.args.world_size, self.args.eval_batch_size
        share = order[rank::world]
        self.model.eval()
        self.callback_handler.eval_dataloader = dataloader
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.args.device)
        for start in range(0, -(-len(order) // world), size):
            batch = examples.batch(share[start : start + size] or order[:1])
            if start >= len(share):  # a process that has no more goes along, since sharded models need all of them
                batch["labels"].fill_(IGNORED)
                batch["sentence_order_label"].fill_(IGNORED)
            out = self.model(**self._prepare_inputs(batch))
            sums += torch.stack([out[name].double() for name in SUMS])
            self.control: Any = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        metrics = means(self.accelerator.reduce(sums, reduction="sum").tolist())
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(order))


def means(sums: list[float]) -> dict[str, float]:
    """Accuracies and losses from the sums over all examples. An objective without any item is left out.

    >>> means([6.0, 3.0, 1.0, 0.0, 0.0, 0.0])
    {'mlm_accuracy': 0.3333333333333333, 'mlm_loss': 2.0, 'loss': 2.0}
    """
    found: dict[str, float] = {}
    for name, (loss, count, correct) in {"mlm": sums[:3], "sop": sums[3:]}.items():
        if count:
            found |= {f"{name}_accuracy": correct / count, f"{name}_loss": loss / count}
    return found | {"loss": sum(value for name, value in found.items() if name.endswith("_loss"))}


class EvaluateAtEnd(TrainerCallback):
    """The last step is evaluated, too, where it is no multiple of the interval."""

    def on_step_end(self, args, state, control, **_: Any) -> None:
        control.should_evaluate |= state.global_step >= state.max_steps


class RecordPretraining(Record):
    """Records with the training time and the tokens before each measurement, and the speed since the one before."""

    def __init__(self, recorder, clock: Clock) -> None:
        super().__init__(recorder)
        self.clock, self.before = clock, (0.0, 0)

    def on_train_begin(self, args, state, control, **_: Any) -> None:
        self.before = self.clock.seconds, state.num_input_tokens_seen

    def on_evaluate(self, args, state, control, metrics=None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        seconds, tokens = self.clock.seconds, state.num_input_tokens_seen
        details = {"step": state.global_step, **self.clock.noted(), "tokens": tokens}
        for name, value in (metrics or {}).items():
            name = name.removeprefix("eval_")
            if name not in (*DETAILS, "epoch", "num_input_tokens_seen"):
                self.recorder.record(f"dev_{name}", value, **details)
        if tokens > self.before[1]:
            speed = (tokens - self.before[1]) / (seconds - self.before[0])
            self.recorder.record("tokens_per_second", round(speed, 1), **details)
        self.before = seconds, tokens


class ShowTokens(ShowProgress):
    """The progress of a run with its tokens per second."""

    def __init__(self, title: str, clock: Clock) -> None:
        super().__init__(title)
        self.clock, self.before = clock, (0.0, 0)

    def on_train_begin(self, args, state, control, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.before = self.clock.seconds, state.num_input_tokens_seen

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        if self.bar is not None and self.clock.seconds > self.before[0]:
            tokens = (state.num_input_tokens_seen - self.before[1]) / (self.clock.seconds - self.before[0])
            speed = f"{self._speed(state.global_step):.2f} steps/s, {tokens:,.0f} tokens/s"
            self.bar.update(self.steps, speed=speed)


def callbacks_of(out: Path, title: str, recorder: Recorder, clock: Clock) -> list[TrainerCallback]:
    """What a run that is evaluated every so many steps shows, records and draws."""
    shown = [EvaluateAtEnd(), ShowTokens(title, clock), RecordPretraining(recorder, clock), Curves(out)]
    return [clock, *shown]
