"""`ExactTrainer`: Hugging Face's Trainer with an order of examples and checkpoints that make resuming exact."""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState, PrinterCallback
from transformers.utils.logging import disable_progress_bar

from nystromformer.records import CONFIG, RECORDS, write_config
from nystromformer.training.checkpoints import (
    TRAINER_STATE,
    checkpoint_folder,
    keep_only,
    last_checkpoint,
    load_generators,
    load_state,
    remove_unfinished,
    save_generators,
    save_state,
    steps_saved,
    trainer_state,
    unfinished_folder,
)

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


STATE = "training_state.safetensors"


class EpochSetter(TrainerCallback):
    """Tells the order of examples which epoch begins.

    Trainer does so too, but not through all the wrappers that a distributed run resumed within an epoch has.
    """

    def __init__(self, trainer: "ExactTrainer") -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **_: object) -> None:
        steps = max(1, -(-len(train_dataloader) // args.gradient_accumulation_steps))
        if self.trainer.order is not None:
            self.trainer.order.set_epoch(state.global_step // steps)


class ExactTrainer(Trainer):
    """Trainer for data sets with `lengths`.

    - Batches are grouped by length; which examples they hold is a function of (seed, epoch) alone.
    - A checkpoint is written aside and renamed, so it is whole or absent, as safetensors and JSON without pickle. The
      last two and the best one are kept. Where the disk has no room for one, training goes on.
    - `scheduler(optimizer, steps)` may make the schedule of the learning rate.
    """

    def __init__(
        self, *args: object, scheduler: Callable[[Optimizer, int], LRScheduler] | None = None, **kwargs: object
    ) -> None:
        self.order: GroupedByLength | None = None
        self.make_scheduler = scheduler
        super().__init__(*args, **kwargs)
        # Trainer takes any model with **kwargs for one that divides its loss by `num_items_in_batch`. Transformers'
        # classifiers do not, and their gradients would grow with processes and accumulation steps.
        self.model_accepts_loss_kwargs = getattr(
            self.accelerator.unwrap_model(self.model), "accepts_loss_kwargs", False
        )
        disable_progress_bar()  # of each file that is written: the run has its own
        self.remove_callback(PrinterCallback)
        self.add_callback(EpochSetter(self))

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        # Consecutive batches go to different processes and accumulation steps: all of a step have similar lengths.
        together = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        self.order = GroupedByLength(dataset.lengths, together, self.args.data_seed)
        return self.order

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler:
        return LongestFirst(eval_dataset.lengths)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        if self.make_scheduler is not None and self.lr_scheduler is None:
            self.lr_scheduler = self.make_scheduler(optimizer or self.optimizer, num_training_steps)
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

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        out, step = Path(self.args.output_dir), self.state.global_step
        aside, final = unfinished_folder(out, step), checkpoint_folder(out, step)
        self.store_flos()
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(checkpoint_folder(out, self.state.best_global_step))
        if self.args.should_save:
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        problem = self._write_checkpoint(aside)
        if self._on_any_process(problem is not None):
            shutil.rmtree(aside, ignore_errors=True)
            warnings.warn(f"{final} can't be written ({problem}): training goes on without it.", stacklevel=2)
        elif self.args.should_save:
            shutil.rmtree(final, ignore_errors=True)  # of a run that went further and was resumed from before
            os.replace(aside, final)
            before = [each for each in steps_saved(out) if each < step]
            keep_only(out, {step, *before[-1:], self.state.best_global_step})
        self.accelerator.wait_for_everyone()

    def _write_checkpoint(self, folder: Path) -> Exception | None:
        """Write this process's part. Returns the error of a disk that is full or gone."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.save_model(str(folder), _internal_call=True)
            self._save_optimizer_and_scheduler(str(folder))
            self._save_rng_state(str(folder))
            if self.args.should_save:
                for callback in (*self.callback_handler.callbacks, self.control):
                    if isinstance(callback, ExportableState):
                        self.state.stateful_callbacks[type(callback).__name__] = callback.state()
                self.state.save_to_json(str(folder / TRAINER_STATE))
        except (OSError, SafetensorError) as error:
            return error
        return None

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
        save_generators(self._generators(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_generators(self._generators(checkpoint))

    def _generators(self, folder: str) -> Path:
        return Path(folder) / f"generators_{self.args.process_index}.safetensors"


MODEL = "model"
"""The subfolder with the model of a finished run."""


def check_folder(out: Path, config: dict[str, object], resume: bool) -> None:
    """Raise `ValueError` for a folder that holds a run which is not to be resumed, or another one."""
    path = out / CONFIG
    if not resume and (path.exists() or (out / RECORDS).exists() or steps_saved(out)):
        raise ValueError(f"{out} holds a run already: go on with --resume, or give another --out.")
    if not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(config))
    for name in now:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"--resume with {name}={now.get(name)!r}: {path} says {before.get(name)!r}; a resumed run must keep "
                f"its settings. Give the same, or another --out."
            )


def prepare_folder(out: Path, config: dict[str, object], resume: bool) -> None:
    """Check the folder and note the configuration of the run in it."""
    check_folder(out, config, resume)
    remove_unfinished(out)
    if not (out / CONFIG).exists():
        write_config(out, config)


def train(trainer: ExactTrainer) -> None:
    """Train from the last checkpoint of the run's folder to the end.

    The model is then the best one on the dev set or, where the run names no metric for that, the last one.
    """
    out = Path(trainer.args.output_dir)
    checkpoint = last_checkpoint(out)
    if checkpoint is not None and trainer_state(checkpoint)["global_step"] >= trainer.args.max_steps:
        # Killed after the last step. Trainer would take one step more.
        trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        if trainer.state.best_global_step and trainer.args.load_best_model_at_end:
            checkpoint = checkpoint_folder(out, trainer.state.best_global_step)
        load_model(trainer.model, checkpoint / "model.safetensors")
        return
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))


def finish(trainer: ExactTrainer) -> None:
    """Keep the model as `out/model`, whole or absent; checkpoints are no longer needed."""
    out = Path(trainer.args.output_dir)
    if trainer.args.should_save:
        aside = out / f".{MODEL}"
        shutil.rmtree(aside, ignore_errors=True)
        trainer._save(str(aside))
        shutil.rmtree(out / MODEL, ignore_errors=True)
        os.replace(aside, out / MODEL)
        keep_only(out, set())
    trainer.accelerator.wait_for_everyone()
