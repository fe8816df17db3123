"""`ExactTrainer`: Hugging Face's Trainer with an order of examples and checkpoints that make resuming exact."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, PrinterCallback
from transformers.utils.logging import disable_progress_bar

from nystromformer.errors import UserError
from nystromformer.files import UNFINISHED, install, seal
from nystromformer.training.run import (
    TRAINER_STATE,
    checkpoint_folder,
    damage_of_checkpoint,
    generators_state,
    keep_only,
    load_state,
    save_state,
    set_generators,
    steps_saved,
)
from nystromformer.training.shared.callbacks import Clock
from nystromformer.training.shared.interrupts import leave_to_their_parent
from nystromformer.training.shared.packing import PackedBatches, PackedOrder, packed_order

STATE = "training_state.safetensors"
"""Optimizer, schedule and gradient scaler."""

POOL = 50
"""Batches whose examples are sorted by length together: enough to save padding, few enough to keep chance."""


def grouped_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """All examples, so that each `batch_size` of them in a row have about the same length.

    Examples are shuffled, sorted by length within pools of some batches, and the batches shuffled. A smaller last
    batch stays last.

    >>> grouped_order(np.array([9, 1, 8, 2, 1]), batch_size=2, seed=0, epoch=0)
    array([4, 1, 3, 2, 0])
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    pool = POOL * batch_size
    for start in range(0, len(order), pool):
        part = order[start : start + pool]
        order[start : start + pool] = part[np.argsort(lengths[part], kind="stable")]
    full = len(order) // batch_size * batch_size
    batches = order[:full].reshape(-1, batch_size)
    return np.concatenate((rng.permutation(batches).flatten(), order[full:]))


class GroupedByLength(Sampler[int]):
    """`grouped_order` of the epoch that was set last."""

    def __init__(self, lengths: np.ndarray, batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = np.asarray(lengths), batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(grouped_order(self.lengths, self.batch_size, self.seed, self.epoch).tolist())


class Keys(Sampler[tuple[int, int]]):
    """The order of an epoch as the keys of its examples: (epoch, index)."""

    def __init__(self, order: GroupedByLength) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.order.epoch
        return ((epoch, index) for index in self.order)


class LongestFirst(Sampler[int]):
    """For evaluation: little padding, and if memory does not suffice, that shows at once."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.order = np.argsort(-np.asarray(lengths), kind="stable")

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.tolist())


def examples_seen(steps: int, batch_size: int, examples: int) -> int:
    """How many examples `steps` batches hold, the smaller last batch of each epoch counted as it is.

    >>> examples_seen(7, batch_size=4, examples=10)
    24
    """
    per_epoch = -(-examples // batch_size)
    epochs, rest = divmod(steps, per_epoch)
    return epochs * examples + min(rest * batch_size, examples)


def tokens_seen(steps: int, batch_size: int, lengths: np.ndarray, tokens: np.ndarray, seed: int) -> int:
    """How many tokens `steps` batches of a run hold, of examples with so many `tokens`, grouped by their `lengths`.

    >>> lengths = np.array([9, 1, 8, 2, 1])
    >>> tokens_seen(3, 2, lengths, lengths, seed=0), tokens_seen(4, 2, lengths, lengths, seed=0)
    (21, 31)
    """
    epochs, rest = divmod(steps, -(-len(lengths) // batch_size))
    begun = grouped_order(lengths, batch_size, seed, epochs)[: rest * batch_size]
    return int(epochs * tokens.sum() + tokens[begun].sum())


class EpochSetter(TrainerCallback):
    """Tells the order of examples which epoch begins.

    Trainer does so too, but not through all the wrappers that a distributed run resumed within an epoch has.
    """

    def __init__(self, trainer: "ExactTrainer") -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **_: Any) -> None:
        steps = max(1, -(-len(train_dataloader) // args.gradient_accumulation_steps))
        if self.trainer.order is not None:
            self.trainer.order.set_epoch(state.global_step // steps)


class ExactTrainer(Trainer):
    """Trainer for data sets with `lengths`.

    - Batches are grouped by length, or packed with about `packed` tokens per step where that is given; which examples
      they hold is a function of (seed, epoch) alone.
    - A checkpoint is whole or absent and carries checksums, as safetensors and JSON without pickle. The last two and
      the best one are kept. Where the disk has no room for one, training continues, unless it is the best one.
    - `scheduler(optimizer, steps)` may make the schedule of the learning rate.
    """

    train_dataset: Any

    def __init__(
        self,
        *args: Any,
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        packed: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.order: GroupedByLength | PackedOrder | None = None
        self.make_scheduler = scheduler
        super().__init__(*args, **kwargs)
        self.packing: PackedOrder | None = None
        if packed is not None:
            self.packing = packed_order(self.train_dataset, packed, self.args)
            self.train_dataset = PackedBatches(self.train_dataset)
        # Trainer takes any model with **kwargs for one that divides its loss by `num_items_in_batch`. Transformers'
        # classifiers do not, and their gradients would grow with processes and accumulation steps.
        self.model_accepts_loss_kwargs = getattr(
            self.accelerator.unwrap_model(self.model), "accepts_loss_kwargs", False
        )
        disable_progress_bar()  # of each file that is written: the run has its own
        self.remove_callback(PrinterCallback)
        self.add_callback(EpochSetter(self))

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.packing is not None:
            self.order = self.packing
            return self.order
        dataset = self.train_dataset if train_dataset is None else train_dataset
        # Consecutive batches go to different processes and accumulation steps: all of a step have similar lengths.
        together = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        self.order = GroupedByLength(dataset.lengths, together, self.args.data_seed)
        return self.order

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        loader = super()._get_dataloader(*args, **kwargs)
        leave_to_their_parent(loader)
        return loader

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler:
        return LongestFirst(eval_dataset.lengths)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        if self.make_scheduler is not None and getattr(self, "lr_scheduler", None) is None:
            self.lr_scheduler: Any = self.make_scheduler(optimizer or self.optimizer, num_training_steps)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        is_best = super()._determine_best_metric(metrics, trial)
        # Evaluations may be more frequent than checkpoints, and the best model is to be had in the end.
        self.control.should_save |= is_best
        return is_best

    @property
    def _shards_its_state(self) -> bool:
        """FSDP and DeepSpeed write their own distributed checkpoints."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _load_best_model(self) -> None:
        best = checkpoint_folder(Path(self.args.output_dir), self.state.best_global_step)
        if (damage := damage_of_checkpoint(best)) is not None:
            raise UserError(f"{best}, the best model, is lost ({damage}): --resume trains from before it.")
        super()._load_best_model()

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        out, step = Path(self.args.output_dir), self.state.global_step
        final = checkpoint_folder(out, step)
        aside = final.with_name(f".{final.name}.all{UNFINISHED}")  # all processes write there
        self.store_flos()
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(checkpoint_folder(out, self.state.best_global_step))
        if self.args.should_save:
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        problem = self._problem_of(self._write_checkpoint, aside)
        if not self._on_any_process(problem is not None) and self.args.should_save:
            problem = self._problem_of(self._install_checkpoint, aside, final)
        if self._on_any_process(problem is not None):
            shutil.rmtree(aside, ignore_errors=True)
            reason = problem or "by another process"
            if step == self.state.best_global_step and self.args.load_best_model_at_end:
                raise UserError(f"{final}, the best model, can't be written ({reason}): make room, then --resume.")
            warnings.warn(f"{final} can't be written ({reason}): training continues without it.", stacklevel=2)

    def _problem_of(self, write: Callable[..., None], *paths: Path) -> Exception | None:
        """The error of a disk that is full or gone."""
        try:
            write(*paths)
        except (OSError, SafetensorError) as error:
            return error
        return None

    def _write_checkpoint(self, folder: Path) -> None:
        """This process's part."""
        folder.mkdir(parents=True, exist_ok=True)
        self.save_model(str(folder), _internal_call=True)
        self._save_optimizer_and_scheduler(str(folder))
        self._save_rng_state(str(folder))
        if self.args.should_save:
            for callback in (*self.callback_handler.callbacks, self.control):
                if isinstance(callback, ExportableState):
                    self.state.stateful_callbacks[type(callback).__name__] = callback.state()
            self.state.save_to_json(str(folder / TRAINER_STATE))

    def _install_checkpoint(self, aside: Path, final: Path) -> None:
        """Once all processes have written their parts."""
        seal(aside)
        install(aside, final)  # one of its name is of a run that went further and was resumed from before
        before = [each for each in steps_saved(final.parent) if each < self.state.global_step]
        keep_only(final.parent, {self.state.global_step, *before[-1:], self.state.best_global_step})

    def _on_any_process(self, flag: bool) -> bool:
        counted = torch.tensor(float(flag), device=self.args.device)
        return bool(self.accelerator.reduce(counted, reduction="sum") > 0)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        self.accelerator.unwrap_model(self.model).save_pretrained(folder, state_dict=state_dict)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        (folder / "training_args.json").write_text(self.args.to_json_string() + "\n", encoding="utf-8")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._shards_its_state:
            super()._save_optimizer_and_scheduler(output_dir)
            super()._save_scaler(output_dir)
        elif self.args.should_save:
            scaler = getattr(self.accelerator, "scaler", None)
            state = {
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.lr_scheduler.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
            }
            save_state(Path(output_dir) / STATE, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._shards_its_state:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = load_state(Path(checkpoint) / STATE)
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["scheduler"])
        if state["scaler"] is not None and getattr(self.accelerator, "scaler", None) is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def _save_rng_state(self, output_dir: str) -> None:
        """What each process has for itself: its random generators, and its loss since the last one that was logged."""
        loss = {"sum": self._tr_loss, "since": self._globalstep_last_logged, "total": self._total_loss_scalar}
        save_state(self._own_state(output_dir), {"generators": generators_state(), "loss": loss})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = load_state(self._own_state(checkpoint))
        set_generators(state["generators"])
        self._tr_loss = state["loss"]["sum"].to(self.args.device)
        self._globalstep_last_logged = state["loss"]["since"]
        self._total_loss_scalar = state["loss"]["total"]

    def _own_state(self, folder: str) -> Path:
        return Path(folder) / f"process_{self.args.process_index}.safetensors"


def cost(trainer: ExactTrainer, train: Any, batch_size: int) -> dict[str, Any]:
    """The tokens of `train` that were trained on, and the time for that alone, by the run's `Clock`."""
    steps = trainer.state.global_step
    if trainer.packing is None:
        tokens = tokens_seen(steps, batch_size, train.lengths, train.tokens, trainer.args.data_seed)
    else:
        _, tokens = trainer.packing.seen(steps)
    clock = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Clock))
    seconds = clock.seconds or clock.seconds_of(trainer.state)  # one killed after its last step does not train any more
    speed = round(tokens / max(seconds, 1e-9), 1)
    return {"tokens": tokens, "seconds": round(seconds, 3), "tokens_per_second": speed}
