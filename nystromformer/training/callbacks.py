"""Callbacks of training: progress shown, losses and metrics recorded, curves drawn."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from nystromformer.progress import Bar, duration
from nystromformer.records import Recorder
from nystromformer.training.shortages import check_room_for_a_thread

DETAILS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
"""What an evaluation tells of itself, not of the model."""


class ShowProgress(TrainerCallback):
    """On the first process only. Where the output is no terminal, the lines remain."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title = title
        self.console = console or Console(stderr=True)
        self.bar: Bar | None = None
        self.steps = self.evaluation = TaskID(0)
        self.started, self.first_step = 0.0, 0

    def on_train_begin(self, args, state, control, **_: Any) -> None:
        if state.is_world_process_zero:
            self.started, self.first_step = time.monotonic(), state.global_step
            self._show(state)

    def _show(self, state) -> None:
        self.bar = Bar(
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
        )
        self.steps = self.bar.add_task(self.title, total=state.max_steps, completed=state.global_step, speed="")
        self.evaluation = self.bar.add_task("evaluation", total=None, visible=False, speed="")
        self.bar.start()

    def on_step_end(self, args, state, control, **_: Any) -> None:
        if self.bar is not None:
            speed = f"{self._speed(state.global_step):.2f} steps/s"
            self.bar.update(self.steps, completed=state.global_step, speed=speed, refresh=True)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **_: Any) -> None:
        if self.bar is None and state.is_world_process_zero:  # the final test, after training
            self._show(state)
        if self.bar is not None:
            self.bar.update(self.evaluation, total=len(eval_dataloader), advance=1, visible=True, refresh=True)

    def on_evaluate(self, args, state, control, metrics=None, **_: Any) -> None:
        if self.bar is None:
            return
        self.bar.reset(self.evaluation, visible=False)
        found = ", ".join(
            f"{name.removeprefix('eval_')} {value:.4g}"
            for name, value in (metrics or {}).items()
            if name.startswith("eval_") and not name.endswith(("runtime", "per_second", "time"))
        )
        speed = self._speed(state.global_step)
        left = (state.max_steps - state.global_step) / speed if speed else 0.0
        self.console.print(
            f"{self.title}: step {state.global_step:,} of {state.max_steps:,}, {found} "
            f"({speed:.2f} steps/s, {duration(left)} left)",
            highlight=False,
            soft_wrap=True,
        )

    def on_predict(self, args, state, control, metrics=None, **_: Any) -> None:
        self._hide()

    def on_train_end(self, args, state, control, **_: Any) -> None:
        self._hide()

    def _hide(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _speed(self, step: int) -> float:
        return (step - self.first_step) / max(time.monotonic() - self.started, 1e-9)


class Record(TrainerCallback):
    """One record for each training loss and each metric of an evaluation, with its step."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_log(self, args, state, control, logs=None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in (logs or {}):
            self.recorder.record("train_loss", logs["loss"], step=state.global_step)

    def on_evaluate(self, args, state, control, metrics=None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        for name, value in (metrics or {}).items():
            name = name.removeprefix("eval_")
            if name not in (*DETAILS, "epoch"):
                self.recorder.record(f"dev_{name}", value, step=state.global_step)


class Curves(TensorBoardCallback):
    """TensorBoard's files in `out/tensorboard`. A resumed run hides what the killed one had after its checkpoint."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.folder = out / "tensorboard"

    def on_train_begin(self, args, state, control, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            check_room_for_a_thread()
            self.tb_writer = self._SummaryWriter(log_dir=str(self.folder), purge_step=state.global_step + 1)
        super().on_train_begin(args, state, control, **kwargs)
