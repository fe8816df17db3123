"""Self-pretraining on Long Range Arena: masked tokens of a task's own training inputs, before the task itself.

Amos et al. (ICLR 2024) found that it is what ordinary transformers lack there. The encoder is the task's, with any
attention and the same positions; its training is a run in a folder of its own, inside that of the run it serves.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalPrediction

from nystromformer.data.lra import TASKS, Splits, as_is
from nystromformer.data.lra.examples import MaskedExamples
from nystromformer.models.lra import NystromformerForMaskedTokens, lra_config
from nystromformer.training.shared.callbacks import Clock
from nystromformer.training.shared.recipes import LRA_OPTIMIZER, LraRecipe
from nystromformer.training.sweep import Cell
from nystromformer.training.trainer import ExactTrainer, Keys, cost

FOLDER = "self-pretraining"
"""Its place in the folder of the run that it serves."""

WARMUP = 0.1
"""Of its steps."""

DEV_EXAMPLES = 500
"""At most so many are masked and asked in an evaluation."""


@dataclass(frozen=True, kw_only=True)
class SelfPretrainingRecipe(LraRecipe):
    """How the encoder of a task learns to tell masked tokens. The last model is kept."""

    masked: float
    """The share of tokens that is masked."""

    @classmethod
    def before(cls, recipe: LraRecipe, masked: float) -> "SelfPretrainingRecipe":
        """Of the run that `recipe` trains: the same model, data, batch and learning rate."""
        assert recipe.self_pretrain
        same = {field.name: getattr(recipe, field.name) for field in fields(recipe)} | {"self_pretrain": None}
        return cls(**same, masked=masked).changed(steps=recipe.self_pretrain, warmup=WARMUP)

    def arguments(self) -> dict[str, Any]:
        return self.schedule(self.steps, self.eval_every) | LRA_OPTIMIZER


class MaskedTrainer(ExactTrainer):
    """Which tokens are masked depends on the epoch, so examples are asked for by (epoch, index)."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return Keys(super()._get_train_sampler(train_dataset))


def masked_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of masked tokens that were told, over all examples."""
    correct, masked = (np.sum(counts) for counts in prediction.predictions)
    return {"masked_accuracy": float(correct / max(masked, 1))}


@dataclass(frozen=True, kw_only=True)
class SelfPretraining(Cell[Splits]):
    """One task, attention and seed, before the task itself."""

    job = "self-pretrain"
    recipe: SelfPretrainingRecipe

    @property
    def variant(self) -> str:
        return f"{self.attention} masked tokens"

    def defaults(self, data: Splits | None) -> dict[str, Any]:
        return self.recipe.arguments()

    def trainer(self, data: Splits, arguments: TrainingArguments, callbacks: list[TrainerCallback]) -> ExactTrainer:
        dev, fields = data.dev.some(DEV_EXAMPLES), self.recipe.model_fields(TASKS[self.task])
        model = NystromformerForMaskedTokens(lra_config(attention=self.attention, **fields))
        inputs = MaskedExamples(data.train, self.recipe.masked, self.seed)
        model.start_at(inputs.frequencies(model.config.vocab_size))
        return MaskedTrainer(
            model=model,
            args=arguments,
            data_collator=as_is,
            train_dataset=inputs,
            eval_dataset=MaskedExamples(dev, self.recipe.masked, self.seed),
            compute_metrics=masked_accuracy,
            callbacks=[Clock(), *callbacks],
        )

    def score(self, trainer: ExactTrainer, data: Splits) -> tuple[float, dict[str, Any]]:
        """On masked tokens of the development part."""
        metrics = trainer.predict(trainer.eval_dataset, metric_key_prefix="dev").metrics
        details = {"dev_loss": metrics["dev_loss"], "dev_examples": len(trainer.eval_dataset)}
        return metrics["dev_masked_accuracy"], details | cost(trainer, data.train, self.recipe.batch_size)
