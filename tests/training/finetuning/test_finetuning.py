"""What fine-tuning is made of: scores, batches, models with another attention, predictions in order."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from glue_files import sentence
from small_bert import write_bert

import nystromformer
from nystromformer.attention import SkipConvolution
from nystromformer.data.glue import Texts
from nystromformer.models.conversion import convert_model
from nystromformer.report.table import tables_markdown
from nystromformer.report.tables import best_results, finetune_tables
from nystromformer.training.finetuning.data import tokenize
from nystromformer.training.finetuning.models import Source, load_classifier
from nystromformer.training.finetuning.sweep import predictions
from nystromformer.training.shared.callbacks import scores
from nystromformer.training.trainer import LongestFirst

LABELS = ("0", "1")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    """Its weights are large enough for attention to matter."""
    nystromformer.register()
    return Source(name=str(write_bert(tmp_path_factory.mktemp("models") / "bert", initializer_range=0.5)))


@pytest.fixture(scope="module")
def texts() -> Texts:
    firsts = ["the good film " * (1 + 3 * (i % 4)) + sentence(i) for i in range(12)]
    return Texts(firsts, [sentence(i + 1) for i in range(12)], np.arange(12) % 2)


def classifier(
    source: Source, attention: str, max_length: int = 64, conv_kernel_size: int | None = None
) -> torch.nn.Module:
    torch.manual_seed(3)
    options = {"max_length": max_length, "conv_kernel_size": conv_kernel_size}
    return load_classifier(source, attention=attention, labels=LABELS, **options).eval()


def test_scores_are_those_of_their_formulas():
    labels, found = np.array([1, 1, 1, 0, 0, 0, 1, 0]), np.array([1, 0, 1, 0, 1, 0, 1, 0])
    tp, fp, fn, tn = 3, 1, 1, 3
    expected = {
        "accuracy": (tp + tn) / 8,
        "f1": 2 * tp / (2 * tp + fp + fn),
        "matthews": (tp * tn - fp * fn) / ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5,
    }
    assert scores(tuple(expected), labels, found) == pytest.approx(expected)
    numbers, guesses = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 4.0, 9.0, 16.0])
    assert scores(("spearman",), numbers, guesses)["spearman"] == pytest.approx(1)
    assert scores(("pearson",), numbers, guesses)["pearson"] == pytest.approx(np.corrcoef(numbers, guesses)[0, 1])


@pytest.mark.parametrize("name", ["pearson", "spearman", "matthews", "f1"])
def test_a_constant_guess_scores_zero_and_never_nan(name):
    labels = np.array([0, 1, 1, 0]) if name in ("matthews", "f1") else np.array([0.0, 1.0, 2.0, 3.0])
    assert scores((name,), labels, np.zeros_like(labels)) == {name: 0.0}


def test_batches_are_padded_to_their_longest_and_say_what_is_padding(source, texts):
    examples = tokenize(texts, source.tokenizer(), 64, with_types=True)
    short, long = int(examples.lengths.argmin()), int(examples.lengths.argmax())
    batch = examples.batch([short, long])
    assert batch["input_ids"].shape == (2, examples.lengths.max())
    assert batch["attention_mask"].sum(dim=1).tolist() == examples.lengths[[short, long]].tolist()
    assert batch["input_ids"][0, examples.lengths[short] :].eq(0).all()
    assert batch["token_type_ids"].max() == 1
    assert batch["labels"].tolist() == texts.labels[[short, long]].tolist()
    assert tokenize(texts, source.tokenizer(), 16, with_types=False).lengths.max() == 16


@pytest.mark.parametrize("attention", ["standard", "nystrom-4", "nystrom-local-4", "longformer-9"])
@torch.no_grad()
def test_an_example_has_the_same_logits_alone_and_in_a_padded_batch(source, texts, attention):
    model, examples = classifier(source, attention), tokenize(texts, source.tokenizer(), 64, with_types=True)
    together = model(**examples.batch(range(12))).logits
    for position in range(4):
        alone = model(**examples.batch([position])).logits[0]
        torch.testing.assert_close(alone, together[position], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_nystrom_is_exact_for_short_texts_and_approximates_long_ones(source, texts):
    batch = tokenize(texts, source.tokenizer(), 64, with_types=True).batch(range(12))
    exact, same, other = (
        classifier(source, attention)(**batch).logits for attention in ("standard", "nystrom-64", "nystrom-4")
    )
    torch.testing.assert_close(exact, same, atol=1e-5, rtol=1e-5)
    assert (exact - other).abs().max() > 1e-2


@pytest.mark.parametrize("attention", ["standard", "nystrom-4", "longformer-9"])
@torch.no_grad()
def test_a_longer_model_computes_the_same_for_short_texts(source, texts, attention):
    batch = tokenize(texts, source.tokenizer(), 64, with_types=True).batch(range(12))
    short, long = (classifier(source, attention, length)(**batch).logits for length in (64, 200))
    torch.testing.assert_close(short, long)


@pytest.mark.parametrize("attention", ["nystrom-4", "nystrom-local-4"])
@pytest.mark.parametrize("max_length", [64, 200])
@torch.no_grad()
def test_a_convolution_starts_at_zero_in_a_model_of_transformers(source, texts, attention, max_length):
    batch = tokenize(texts, source.tokenizer(), 64, with_types=True).batch(range(12))
    without, with_conv = (classifier(source, attention, max_length, size) for size in (None, 5))
    torch.testing.assert_close(with_conv(**batch).logits, without(**batch).logits)
    for model in (without, with_conv):
        assert type(model) is transformers.BertForSequenceClassification
        assert model.config._attn_implementation == attention.removesuffix("-4")
    added = {name: p for name, p in with_conv.named_parameters() if name not in dict(without.named_parameters())}
    assert [tuple(p.shape) for p in added.values()] == [(2, 1, 5, 1)] * 2, "one in each layer"
    next(iter(added.values())).normal_()
    assert (with_conv(**batch).logits - without(**batch).logits).abs().max() > 1e-2, "it is used"


def test_a_saved_convolution_is_kept_and_another_refused(source, tmp_path):
    model = classifier(source, "nystrom-4", conv_kernel_size=5)
    weight = model.bert.encoder.layer[0].attention.self.skip_convolution.weight
    torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path)
    saved = Source(name=str(tmp_path))
    assert saved.conv_kernel_size("nystrom-local-8") == 5
    assert saved.conv_kernel_size("standard") is None
    again = classifier(saved, "nystrom-local-8")
    assert torch.equal(again.bert.encoder.layer[0].attention.self.skip_convolution.weight, weight)
    for given in (0, 7):
        with pytest.raises(ValueError, match=f"--conv-kernel-size {given}: .* was saved with convolutions of 5"):
            saved.conv_kernel_size("nystrom-4", given)


def test_our_own_models_keep_change_or_drop_their_convolution(source, tmp_path):
    bert = classifier(source, "standard")
    convert_model(bert, attention="nystrom-4", conv_kernel_size=5).model.save_pretrained(tmp_path)
    own = Source(name=str(tmp_path))
    for given, expected in ((None, 5), (7, 7), (0, None)):
        assert own.conv_kernel_size("nystrom-8", given) == expected
        model = classifier(own, "nystrom-8", conv_kernel_size=given)
        sizes = [module.weight.shape[2] for module in model.modules() if isinstance(module, SkipConvolution)]
        assert sizes == ([expected] * 2 if expected else [])
    assert own.conv_kernel_size("linear") is None


def test_predictions_come_in_the_order_of_the_part(source, texts):
    part = tokenize(texts, source.tokenizer(), 64, with_types=False)
    order = LongestFirst(part.lengths).order
    trainer = SimpleNamespace(predict=lambda part, metric_key_prefix: SimpleNamespace(predictions=order.copy()))
    assert predictions(trainer, part).tolist() == list(range(12))


def markdown_of(records: list[dict]) -> str:
    return tables_markdown(finetune_tables(records))


def record(task: str, attention: str, value: float, seed: int = 0, **changes: object) -> dict[str, object]:
    config = {"task": task, "model": "m", "attention": attention, "preset": "paper", "max_length": 512, "settings": {},
              "search": False, "batch_size": 32, "learning_rate": 3e-5, "epochs": 4.0} | changes  # fmt: skip
    dev = {"mnli": "dev_matched"}.get(task, "dev")
    found = {dev: {"accuracy": value}} | ({"dev_mismatched": {"accuracy": value + 0.01}} if task == "mnli" else {})
    return {"job": "finetune", "metric": "score", "value": value, "seed": seed, "config": config, "name": "accuracy",
            "part": dev, "dev_score": value, "scores": found, "step": 9, "train_examples": 1000, "mean_length": 20.5,
            "scored_examples": {dev: 100}}  # fmt: skip


def test_the_table_has_the_papers_beside_ours():
    table = markdown_of(
        [
            record("imdb", "nystrom-64", 0.92, max_length=1024),
            record("imdb", "nystrom-64", 0.91),
            record("mnli", "nystrom-64", 0.8),
            record("mnli", "standard", 0.7, seed=1),
            record("mnli", "standard", 0.8, seed=2),
        ]
    )
    lines = table.splitlines()
    assert "| attention | mnli accuracy | mnli-mm accuracy | imdb accuracy | imdb-1024 accuracy |" in lines
    assert "| nystrom-64 | 80.00 (80.90) | 81.00 (82.20) | 91.00 (93.20) | 92.00 (93.00) |" in lines
    assert "| standard | 75.00 ± 7.07 (82.40) | 76.00 ± 7.07 (82.40) | – (93.30) | – |" in lines
    assert markdown_of([]) == "No finished run.\n"


def test_the_table_keeps_runs_with_and_without_a_convolution_apart():
    with_conv = [record("imdb", "nystrom-64", value, seed, conv_kernel_size=33) for seed, value in ((1, 0.9), (2, 0.8))]
    old = record("imdb", "nystrom-64", 0.7)  # a record that does not know of convolutions
    without = record("imdb", "nystrom-64", 0.6, seed=1, conv_kernel_size=None) | {"parameters": 22_713_986}
    lines = markdown_of([*with_conv, old, without]).splitlines()
    assert "| nystrom-64 + conv 33 | 85.00 ± 7.07 (93.20) |" in lines
    assert "| nystrom-64 | 65.00 ± 7.07 (93.20) |" in lines
    assert sum("| nystrom-64 + conv 33 | – |" in line for line in lines) == 1
    assert sum("| nystrom-64 | – |" in line for line in lines) == 1
    assert sum("| nystrom-64 | 22,713,986 |" in line for line in lines) == 1
    searched = [record("mrpc", "nystrom-64", 0.8, search=True, conv_kernel_size=size) for size in (None, 33)]
    assert len(best_results(searched)) == 2, "the best of each, not of both"


@pytest.mark.parametrize("changes", [{"epochs": 2.0}, {"train_examples": 1000}, {"steps": 9}])
def test_a_shortened_run_is_not_called_the_papers(changes):
    assert "less training than the paper's" not in markdown_of([record("mrpc", "standard", 0.8)])
    shortened = [record("mrpc", "standard", 0.8), record("sst2", "standard", 0.9, **changes)]
    assert "preset `paper` with less training than the paper's" in markdown_of(shortened)
