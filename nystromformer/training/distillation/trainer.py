"""HF Trainer for distillation, and the folder that it leaves.

Each stage and group of weights has a rate, and held-out texts are looked at while it goes. Beside the weights of the
distilled model stand a model card and the files of sentence-transformers.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import cached_file

from nystromformer.report.table import Table
from nystromformer.training.distillation.fidelity import closeness, read_texts
from nystromformer.training.distillation.model import LAYERS, MODEL, Distillation, stage_rates, stage_scheduler
from nystromformer.training.shared.callbacks import Clock
from nystromformer.training.trainer import ExactTrainer

MODULES = "modules.json"
LENGTH = "sentence_bert_config.json"
BESIDE = ("config.json", "model.safetensors")
"""What a module of sentence-transformers has in its folder."""
POOLING = {"cls": "first", "mean": "mean"}

CARD = """---
library_name: transformers
tags:
- nystromformer
- linear-attention
- distillation
---

# {title}

{name} with attention of linear cost in {linear} of its {count} layers, distilled from itself with exact attention by
`nystromformer distill`: it is meant to give the same embeddings and hidden states, at lengths where exact attention is
slow.

- Attention by layer: {layers}
- Longest input: {max_length:,} tokens
- Trained on {tokens:,} tokens of {corpora} in {steps:,} steps ({stages}); {minutes:.1f} minutes of one core
- Speed of one forward at {speed_length:,} tokens: {speed:.2f} times that of exact attention ({milliseconds})

How closely it follows, on held-out texts:

{table}

Cosine: of the pooled embedding to that of exact attention. Top 1, top 10: how far each text's nearest neighbors among
the others are the same. Untrained: the same attention in the original weights.

## Use

```python
import nystromformer
from transformers import AutoModel, AutoTokenizer

nystromformer.register()  # before loading: without it Transformers refuses the folder
model, tokenizer = AutoModel.from_pretrained("."), AutoTokenizer.from_pretrained(".")
```
{sentences}
The license is that of {name}.
"""

SENTENCES = """
It is a model of sentence-transformers, too: `SentenceTransformer(".")` after `nystromformer.register()`.
"""


class DistillationTrainer(ExactTrainer):
    """`stage_steps` says how many steps each stage has, `layers_rate` the highest rate of the first.

    Saves the student as an ordinary folder; the last one has its card.
    """

    card: str | None = None

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

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        if self.card is not None:
            source = self.distillation.teacher.name_or_path
            write_sentence_files(source, folder, self.train_dataset.max_length)
            (folder / "README.md").write_text(self.card, encoding="utf-8")


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


def found_file(source: str, name: str) -> Path | None:
    """A file of a model's folder or Hub id."""
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def sentence_modules(source: str) -> list[dict[str, Any]]:
    """The modules of an encoder of sentences, as sentence-transformers lists them; none for other models."""
    path = found_file(source, MODULES)
    return [] if path is None else json.loads(path.read_text(encoding="utf-8"))


def pooling_of(source: str) -> str | None:
    """How an encoder of sentences pools: "mean" or "first"; None for other models, and for other ways."""
    for module in sentence_modules(source):
        path = found_file(source, f"{module['path']}/config.json") if module["type"].endswith("Pooling") else None
        if path is not None:
            config = json.loads(path.read_text(encoding="utf-8"))
            modes = {name: config.get(f"pooling_mode_{name}_token{'' if name == 'cls' else 's'}") for name in POOLING}
            named = config.get("pooling_mode")
            return next((ours for name, ours in POOLING.items() if modes[name] or named == name), None)
    return None


def write_sentence_files(source: str, folder: Path, max_length: int) -> None:
    """Make `folder` a model of sentence-transformers, as its source is one, that cuts texts at `max_length`."""
    modules = sentence_modules(source)
    if not modules:
        return
    names = [MODULES, "config_sentence_transformers.json"]
    names += [f"{module['path']}/{name}" for module in modules if module["path"] for name in BESIDE]
    for name in names:
        if (path := found_file(source, name)) is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
    path = found_file(source, LENGTH)
    settings = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    (folder / LENGTH).write_text(json.dumps(settings | {"max_seq_length": max_length}, indent=2) + "\n")


def model_card(config: dict[str, Any], result: dict[str, Any], table: Table, is_sentence_encoder: bool) -> str:
    """The text of `README.md`, from what a run was asked for and what its last record says."""
    layers, speed = config["layers"], result["speed"]
    name = Path(config["model"]).name
    linear = [layer for layer in layers if layer != "standard"]
    return CARD.format(
        title=f"{name}, {', '.join(dict.fromkeys(linear))}",
        name=name,
        linear=len(linear),
        count=len(layers),
        layers=", ".join(layers),
        max_length=config["max_length"],
        tokens=result["tokens"],
        corpora=", ".join(result["corpora"]),
        steps=result["step"],
        stages=" and ".join(f"{count:,} of stage {stage}" for stage, count in result["stages"].items()),
        minutes=result["core_seconds"] / 60,
        speed=speed["exact"] / speed["ours"],
        speed_length=speed["length"],
        milliseconds=f"{1e3 * speed['ours']:.0f} against {1e3 * speed['exact']:.0f} ms, batch 1",
        table=table.markdown(),
        sentences=SENTENCES if is_sentence_encoder else "",
    )
