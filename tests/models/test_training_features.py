"""Gradient checkpointing, torch.compile, mixed precision: the same results."""

import pytest
import torch

from nystromformer import NystromformerForMaskedLM, NystromformerForSequenceClassification, NystromformerModel
from nystromformer.models import preset_config


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("attention", ["nystrom-8", "reformer", "standard"])
def test_checkpointing_gives_the_same_gradients(attention, use_reentrant, small, ids):
    x, mask = ids(2, 40), torch.arange(40) < torch.tensor([[40], [31]])
    torch.manual_seed(0)
    model = NystromformerForMaskedLM(small(attention=attention, hidden_dropout_prob=0.1)).train()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            assert model.is_gradient_checkpointing
        model.zero_grad()
        torch.manual_seed(1)  # dropout and hashes
        model(x, attention_mask=mask, labels=x).loss.backward()
        results.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.slow
def test_compiles_as_one_graph_for_all_lengths(small, lively, ids):
    torch._dynamo.reset()
    model = lively(NystromformerForSequenceClassification(small(num_hidden_layers=1)))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for length in (40, 61):
        x, mask = ids(2, length), torch.arange(length) < torch.tensor([[length], [31]])
        expected, got = (each(x, attention_mask=mask, labels=torch.tensor([0, 1])) for each in (model, compiled))
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.loss, expected.loss, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_compiled_training_step_gives_the_same_gradients(small, ids):
    torch._dynamo.reset()
    model, x = NystromformerForMaskedLM(small(num_hidden_layers=1)), ids(2, 40)
    labels = torch.where(x % 7 == 0, x, -100)
    model(x, labels=labels).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(x, labels=labels).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_finite_and_close(dtype, small, lively, ids):
    model, x = lively(NystromformerForMaskedLM(small())), ids(2, 100)
    mask = torch.arange(100) < torch.tensor([[100], [77]])
    labels = torch.where((x % 7 == 0) & mask, x, -100)
    expected = model(x, attention_mask=mask, labels=labels).loss
    with torch.autocast("cpu", dtype=dtype):
        loss = model(x, attention_mask=mask, labels=labels).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert abs(loss - expected) < 0.05 * expected
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_model_in_bfloat16_runs(small, ids):
    model = NystromformerModel(small()).bfloat16()
    out = model(ids(2, 40), attention_mask=torch.arange(40) < torch.tensor([[40], [31]]))
    assert out.last_hidden_state.dtype == torch.bfloat16
    assert out.last_hidden_state.isfinite().all()


def test_linear_layers_of_lra_start_as_pytorch_starts_them():
    torch.manual_seed(0)
    ours = NystromformerModel(preset_config("lra", vocab_size=32, max_position_embeddings=512))
    weight, positions = ours.encoder.layer[0].intermediate.dense.weight, ours.embeddings.position_embeddings.weight
    assert weight.abs().max() <= 64**-0.5
    assert weight.std().item() == pytest.approx(64**-0.5 / 3**0.5, rel=0.05)
    assert positions.std().item() == pytest.approx(0.02, rel=0.05)
