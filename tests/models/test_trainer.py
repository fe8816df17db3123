"""HF Trainer: accumulated gradients equal those of one large batch, with two losses and two denominators."""

import pytest
import torch
import transformers

from nystromformer import NystromformerForPreTraining, NystromformerForSequenceClassification


def examples(count, length=24):
    """Examples with very different numbers of masked tokens, some of them no sentence pair."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        x = torch.randint(5, 100, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < (0.05 if i < count // 2 else 0.6), x, -100)
        order = torch.tensor([0, 1, -100][i % 3] if i < count // 2 else i % 2)
        made.append({"input_ids": x, "labels": labels, "sentence_order_label": order})
    return made


class CountingTrainer(transformers.Trainer):
    """What a pretraining job adds: both counts of an optimizer step."""

    def _get_num_items_in_batch(self, batch_samples, device):
        return NystromformerForPreTraining.count_items(batch_samples).to(device)


def trained(trainer_class, model, data, folder, accumulation, **options):
    """The weights after one step of SGD, so that their change is the gradient."""
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=1, per_device_train_batch_size=len(data) // accumulation,
        gradient_accumulation_steps=accumulation, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant",
        max_grad_norm=0.0, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = trainer_class(model=model, args=arguments, train_dataset=data)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
    result = trainer.train()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, result.training_loss


def difference(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_two_objectives_accumulate_to_one_large_batch(small, tmp_path):
    data, results = examples(12), {}
    for accumulation in (1, 4):
        torch.manual_seed(0)
        model = NystromformerForPreTraining(small(add_pooler=True))
        results[accumulation] = trained(CountingTrainer, model, data, tmp_path, accumulation)
    assert difference(results[1][0], results[4][0]) < 1e-6
    assert results[4][1] == pytest.approx(results[1][1], abs=1e-5)


def test_with_trainers_own_count_the_weights_of_all_batches_add_up(small):
    """Without a count of pairs each batch's SOP mean counts by its share of the masked tokens."""
    torch.manual_seed(0)
    model = NystromformerForPreTraining(small()).eval()
    batches = [transformers.default_data_collator(examples(12)[i : i + 3]) for i in range(0, 12, 3)]
    count = sum((batch["labels"] != -100).sum() for batch in batches)
    outs = [model(**batch, num_items_in_batch=count) for batch in batches]
    share = [out.mlm_count / count for out in outs]
    expected = sum(out.mlm_loss_sum for out in outs) / count
    expected = expected + sum(
        s * out.sop_loss_sum / out.sop_count.clamp(min=1) for s, out in zip(share, outs, strict=True)
    )
    torch.testing.assert_close(sum(out.loss for out in outs), expected)
    assert float(sum(share)) == pytest.approx(1)


@pytest.mark.parametrize("label_type", [float, int], ids=["regression", "classes"])
def test_sequence_labels_accumulate_to_one_large_batch(label_type, small, tmp_path):
    data = [
        {"input_ids": e["input_ids"], "labels": torch.tensor(label_type(i % 3))} for i, e in enumerate(examples(12))
    ]
    results = []
    for accumulation in (1, 3):
        torch.manual_seed(0)
        model = NystromformerForSequenceClassification(small(num_labels=1 if label_type is float else 3))
        results.append(trained(transformers.Trainer, model, data, tmp_path, accumulation)[0])
    assert difference(*results) < 1e-6


def test_evaluation_gives_sums_to_make_exact_accuracies_of(small, tmp_path):
    data, seen = examples(10), {}
    model = NystromformerForPreTraining(small(add_pooler=True)).eval()
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, per_device_eval_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True
    )

    def metrics(prediction):
        order_logits, *sums = prediction.predictions
        names = ("mlm_loss_sum", "mlm_count", "mlm_correct", "sop_loss_sum", "sop_count", "sop_correct")
        seen.update(zip(names, (part.sum() for part in sums), strict=True), pairs=len(order_logits))
        return {}

    transformers.Trainer(model=model, args=arguments, eval_dataset=data, compute_metrics=metrics).evaluate()
    whole = model(**transformers.default_data_collator(data))
    for name in ("mlm_loss_sum", "mlm_count", "mlm_correct", "sop_loss_sum", "sop_count", "sop_correct"):
        assert seen[name] == pytest.approx(float(getattr(whole, name)), rel=1e-5)
    assert seen["pairs"] == 10
