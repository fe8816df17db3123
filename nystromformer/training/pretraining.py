"""One pretraining run in a folder of its own."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from transformers import PreTrainedTokenizerFast, TrainingArguments

from nystromformer.data.corpus.build import Corpus
from nystromformer.data.corpus.examples import PretrainingExamples
from nystromformer.data.lra import as_is
from nystromformer.models import NystromformerForPreTraining
from nystromformer.records import RESULTS, Recorder, result_in
from nystromformer.training.arguments import processes, training_arguments
from nystromformer.training.pretraining_recipes import PretrainingRecipe
from nystromformer.training.pretraining_trainer import (
    Clock,
    EvaluateAtEnd,
    PretrainingTrainer,
    RecordPretraining,
    ShowTokens,
)
from nystromformer.training.recording import Curves
from nystromformer.training.run import finish, prepare_folder, train


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Everything that decides what comes out, but for the corpus and the tokenizer."""

    preset: str
    recipe: PretrainingRecipe
    attention: str
    source: str | None
    """The model whose weights it starts from; None is from scratch."""
    seed: int
    validation_share: float
    settings: dict[str, object]
    """Fields of `TrainingArguments` that the user has set."""
    dtype: str

    def config(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
        """As it is noted in the folder and in each record."""
        recipe = {name: value for name, value in vars(self.recipe).items() if name != "vocab_size"}
        recipe["size"] = self.recipe.size if self.source is None else None
        return {
            "preset": self.preset,
            "attention": self.attention,
            "from": self.source,
            **recipe,
            "seed": self.seed,
            "validation_share": self.validation_share,
            "corpus": corpus.digest,
            "tokenizer": sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16],
            "settings": self.settings,
            "dtype": self.dtype,
            "processes": processes(),
        }

    def arguments(self, out: Path, device: str) -> TrainingArguments:
        recipe = self.recipe
        if recipe.batch_size < 1 or recipe.batch_size % processes():
            raise ValueError(
                f"--batch-size {recipe.batch_size}: must be at least 1 and divisible by {processes()} processes."
            )
        return training_arguments(
            out,
            batch_size=recipe.batch_size,
            seed=self.seed,
            device=device,
            dtype=self.dtype,
            defaults=recipe.arguments(),
            settings={"gradient_accumulation_steps": recipe.accumulation(processes()), **self.settings},
        )


def run_pretraining(
    run: Pretraining,
    model: NystromformerForPreTraining,
    tokenizer: PreTrainedTokenizerFast,
    train_examples: PretrainingExamples,
    validation: PretrainingExamples,
    out: Path,
    arguments: TrainingArguments,
    resume: bool,
) -> dict[str, object]:
    """Train to the end and keep the last model. Returns the last record."""
    corpus = train_examples.corpus
    config = run.config(corpus, tokenizer)
    with arguments.main_process_first():  # the others find the folder as it shall be
        prepare_folder(out, config, resume or not arguments.should_save)
    if (done := result_in(out)) is not None:
        return done
    recorder, clock = Recorder(out, job="pretrain", config=config, seed=run.seed), Clock()
    title = f"{run.recipe.size} {run.attention}" if run.source is None else f"{Path(run.source).name} {run.attention}"
    trainer = PretrainingTrainer(
        model=model,
        args=arguments,
        data_collator=as_is,
        train_dataset=train_examples,
        eval_dataset=validation.some(run.recipe.eval_examples),
        processing_class=tokenizer,
        callbacks=[
            clock,
            EvaluateAtEnd(),
            ShowTokens(title, clock),
            RecordPretraining(recorder, clock),
            Curves(out),
        ],
    )
    train(trainer)
    finish(trainer)
    if arguments.should_save:
        state = trainer.state
        metrics = next(entry for entry in reversed(state.log_history) if "eval_mlm_accuracy" in entry)
        seconds = clock.seconds or clock.seconds_of(state)  # a run killed after its last step does not train any more
        recorder.record(
            RESULTS["pretrain"],
            metrics["eval_mlm_accuracy"],
            step=state.global_step,
            sop_accuracy=metrics.get("eval_sop_accuracy"),
            seconds=round(seconds, 3),
            tokens=state.num_input_tokens_seen,
            tokens_per_second=round(state.num_input_tokens_seen / max(seconds, 1e-9), 1),
            validation_examples=len(trainer.eval_dataset),
            train_examples=len(train_examples),
            corpus_documents=corpus.documents,
            corpus_tokens=corpus.tokens,
            parameters=trainer.model.num_parameters(),
        )
    trainer.accelerator.wait_for_everyone()
    return result_in(out)
