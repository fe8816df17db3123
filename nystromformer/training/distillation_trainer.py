"""HF Trainer for distillation: a rate for each stage and group of weights, and held-out texts while it goes."""

import time
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import EvalLoopOutput

from nystromformer.training.callbacks import Clock
from nystromformer.training.distillation_model import LAYERS, MODEL, Distillation, stage_rates, stage_scheduler
from nystromformer.training.fidelity import closeness, read_texts
from nystromformer.training.trainer import ExactTrainer


class DistillationTrainer(ExactTrainer):
    """`stage_steps` says how many steps each stage has, `layers_rate` the highest rate of the first."""

    def __init__(self, *args: Any, stage_steps: dict[str, int], layers_rate: float, warmup: float, **kwargs: Any):
        self.stage_steps, self.warmup = stage_steps, warmup
        self.layers_rate = layers_rate
        self.exact: Tensor | None = None
        super().__init__(*args, scheduler=self._scheduler, **kwargs)
        self.add_callback(Stages(self))

    @property
    def distillation(self) -> Distillation:
        return self.accelerator.unwrap_model(self.model)

    @property
    def rates(self) -> dict[str, float]:
        return {LAYERS: self.layers_rate, MODEL: self.args.learning_rate}

    def create_optimizer(self, model: Any = None) -> Optimizer:
        if self.optimizer is None:
            made, options = self.get_optimizer_cls_and_kwargs(self.args, self.distillation.student)
            options |= {"lr": 1.0, "weight_decay": self.args.weight_decay}
            self.optimizer: Any = made(self.distillation.parameter_groups(), **options)
        return self.optimizer

    def _scheduler(self, optimizer: Optimizer, steps: int) -> Any:
        return stage_scheduler(optimizer, self.stage_steps, self.rates, self.warmup)

    def stage_at(self, step: int) -> str:
        return stage_rates(step, self.stage_steps, self.rates, self.warmup)[0]

    def evaluation_loop(
        self, dataloader: Any, description: str, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> EvalLoopOutput:
        """How closely the student follows on the held-out windows; each process looks at all of them."""
        ours, windows = self.distillation, dataloader.dataset
        common = {"batch_size": self.args.eval_batch_size, "device": self.args.device}
        pooling = ours.pooling or "mean"
        if self.exact is None:
            self.exact = read_texts(ours.teacher, windows, pooling, **common).embeddings
        self.callback_handler.eval_dataloader = dataloader

        def step(_: str) -> None:
            self.control: Any = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

        reading = read_texts(ours.student, windows, pooling, ours.teacher, step=step, **common)
        found = closeness(self.exact, reading.embeddings) | {"error": reading.errors[-1]}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items() if name != "top_10"}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(windows))


class Stages(TrainerCallback):
    """Says which stage begins. Its gradients are of another size, so that the optimizer forgets those before."""

    def __init__(self, trainer: DistillationTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args, state, control, optimizer=None, **_: Any) -> None:
        stage = self.trainer.stage_at(state.global_step)
        self.trainer.distillation.stage = stage
        if state.global_step and stage != self.trainer.stage_at(state.global_step - 1):
            optimizer.state.clear()


class CoreClock(Clock):
    """Counts the processor's time, too: on a machine with other work that is what a budget means."""

    def __init__(self) -> None:
        super().__init__()
        self.core_seconds, self.core_mark = 0.0, 0.0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seconds": self.seconds, "core_seconds": self.core_seconds}}

    def noted(self) -> dict[str, float]:
        return super().noted() | {"core_seconds": round(self.core_seconds, 3)}

    def read(self, state: TrainerState) -> None:
        """What a checkpoint has noted, for a run that trains no more."""
        noted = state.stateful_callbacks.get(type(self).__name__, CoreClock().state())["attributes"]
        self.seconds, self.core_seconds = noted["seconds"], noted["core_seconds"]

    def on_train_begin(self, args, state, control, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.read(state)
        self.core_mark = time.process_time()

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        now = time.process_time()
        self.core_seconds, self.core_mark = self.core_seconds + now - self.core_mark, now

    def on_evaluate(self, args, state, control, **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        self.core_mark = time.process_time()

    def on_save(self, args, state, control, **kwargs: Any) -> None:
        super().on_save(args, state, control, **kwargs)
        self.core_mark = time.process_time()
