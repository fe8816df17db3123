"""What is measured while a model trains, and how it is told: scores, time, progress shown, records, curves."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import TrainerCallback, TrainerState
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalPrediction

from nystromformer.progress import Bar, duration
from nystromformer.records import Recorder
from nystromformer.training.shared.interrupts import check_room_for_a_thread

DETAILS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
"""What an evaluation tells of itself, not of the model."""


def _correlation(measure: Callable) -> Callable[[np.ndarray, np.ndarray], float]:
    def score(labels: np.ndarray, predictions: np.ndarray) -> float:
        # undefined where either is constant or there is one example; it tells nothing then, and NaN is never the best
        if len(labels) < 2 or np.ptp(labels) == 0 or np.ptp(predictions) == 0:
            return 0.0
        value = float(measure(labels, predictions)[0])
        return value if math.isfinite(value) else 0.0

    return score


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": lambda labels, predictions: float(accuracy_score(labels, predictions)),
    "f1": lambda labels, predictions: float(f1_score(labels, predictions, zero_division=0.0)),
    "matthews": lambda labels, predictions: float(matthews_corrcoef(labels, predictions)),
    "pearson": _correlation(pearsonr),
    "spearman": _correlation(spearmanr),
}
"""score(labels, predictions) by name, from scikit-learn and SciPy; more is better. F1 is that of class 1."""


def scores(names: tuple[str, ...], labels: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    """
    >>> scores(("f1", "accuracy"), np.array([1, 1, 0, 1]), np.array([1, 0, 0, 1]))
    {'f1': 0.8, 'accuracy': 0.75}
    """
    return {name: METRICS[name](labels, predictions) for name in names}


def metric_function(names: tuple[str, ...]) -> Callable[[EvalPrediction], dict[str, float]]:
    """For HF Trainer."""
    return lambda prediction: scores(names, prediction.label_ids, prediction.predictions)


class Clock(TrainerCallback, ExportableState):
    """The time spent in training steps, loading included; evaluations and checkpoints are not counted.

    Checkpoints keep it, so that a resumed run counts on.
    """

    def __init__(self) -> None:
        self.seconds, self.mark = 0.0, 0.0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seconds": self.seconds}}

    def noted(self) -> dict[str, float]:
        """What records say of it."""
        return {"seconds": round(self.seconds, 3)}

    def seconds_of(self, state: TrainerState) -> float:
        """The time that a checkpoint has noted, 0 at the start of a run."""
        return state.stateful_callbacks.get(type(self).__name__, Clock().state())["attributes"]["seconds"]

    def on_train_begin(self, args, state, control, **_: Any) -> None:
        self.seconds = self.seconds_of(state)
        self.mark = time.perf_counter()

    def on_step_end(self, args, state, control, **_: Any) -> None:
        now = time.perf_counter()
        self.seconds, self.mark = self.seconds + now - self.mark, now

    def on_evaluate(self, args, state, control, **_: Any) -> None:
        self.mark = time.perf_counter()

    def on_save(self, args, state, control, **_: Any) -> None:
        self.mark = time.perf_counter()


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


class EvaluateAtEnd(TrainerCallback):
    """The last step is evaluated, too, where it is no multiple of the interval."""

    def on_step_end(self, args, state, control, **_: Any) -> None:
        control.should_evaluate |= state.global_step >= state.max_steps


class RecordTokens(Record):
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
    shown = [EvaluateAtEnd(), ShowTokens(title, clock), RecordTokens(recorder, clock), Curves(out)]
    return [clock, *shown]
