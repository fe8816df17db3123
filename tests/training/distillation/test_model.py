"""Distillation as a module and as a function: what is trained, what it is measured by, what is refused."""

import copy

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import nystromformer
from nystromformer.integrations.hf.layer_attentions import set_layers
from nystromformer.training.distillation.model import LAYERS, MODEL, Distillation, distill, hidden_states

OPTIONS = {"exact_below": None}


@pytest.fixture
def teacher():
    nystromformer.register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
    config = BertConfig(**sizes, vocab_size=50, max_position_embeddings=64, initializer_range=0.4)
    return BertModel(config, add_pooling_layer=False)


@pytest.fixture
def student(teacher):
    return set_layers(copy.deepcopy(teacher), ["nystrom-4", "nystrom-4"], OPTIONS)


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(40) < torch.tensor([[40], [29]])
    return [{"input_ids": torch.randint(1, 50, (2, 40), generator=generator), "attention_mask": mask}] * count


@pytest.mark.parametrize("stage", [LAYERS, MODEL])
def test_a_stage_brings_the_student_closer(stage, teacher, student):
    losses = distill(teacher, student, batches(30), stages=[stage], learning_rate=1e-2, layers_rate=1e-2)
    assert losses[-1] < 0.6 * losses[0]


def test_the_loss_of_layers_is_zero_for_exact_attention(teacher, student):
    """With more landmarks than tokens nothing is approximated."""
    exact = set_layers(copy.deepcopy(teacher), ["nystrom-64", "nystrom-64"], OPTIONS)
    (batch,) = batches(1)
    assert Distillation(teacher, exact).layers_loss(batch).item() < 1e-10
    assert Distillation(teacher, student).layers_loss(batch).item() > 1e-3
    assert Distillation(teacher, exact, "mean").model_loss(batch).item() < 1e-6


def test_padding_does_not_count(teacher, student):
    (batch,) = batches(1)
    changed = dict(batch, input_ids=batch["input_ids"].masked_fill(~batch["attention_mask"], 7))
    distillation = Distillation(teacher, student, "mean")
    for loss in (distillation.layers_loss, distillation.model_loss):
        torch.testing.assert_close(loss(batch), loss(changed))


def test_the_first_stage_trains_attention_alone_and_the_second_no_embedding(teacher, student):
    student = nystromformer.add_skip_convolution(student, 3)
    distillation = Distillation(teacher, student)
    distillation.parameter_groups()
    (batch,) = batches(1)
    for stage in (LAYERS, MODEL):
        distillation.stage = stage
        student.zero_grad()
        distillation(**batch)["loss"].backward()
        trained = {name for name, p in student.named_parameters() if p.grad is not None and p.grad.any()}
        assert any("skip_convolution" in name for name in trained)
        if stage == LAYERS:
            assert all(".attention.self." in name for name in trained)
        else:
            assert any("intermediate" in name for name in trained)
            assert not any("embeddings.word" in name for name in trained)


def test_the_teacher_is_no_part_of_what_is_saved_and_never_changes(teacher, student):
    before = copy.deepcopy(teacher.state_dict())
    distillation = Distillation(teacher, student)
    assert distillation.state_dict().keys() == student.state_dict().keys()
    assert not distillation.train().student.training
    distill(teacher, student, batches(2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


def test_a_layer_that_stays_exact_is_not_trained_by_itself(teacher):
    student = set_layers(copy.deepcopy(teacher), ["standard", "nystrom-4"], OPTIONS)
    distillation = Distillation(teacher, student)
    assert [ours for _, ours in distillation.pairs] == [student.encoder.layer[1].attention.self]


def test_any_module_of_pytorch_can_be_distilled():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, dropout=0.0, batch_first=True)
    teacher = nn.TransformerEncoder(layer, num_layers=2)
    student = copy.deepcopy(teacher)
    nystromformer.replace_attention(student, "nystrom-4", exact_below=None)
    inputs = [3 * torch.randn(2, 40, 8)] * 20
    losses = distill(teacher, student, inputs, learning_rate=1e-2, layers_rate=1e-2)
    assert losses[19] < losses[0]
    assert losses[-1] < losses[20]
    assert len(hidden_states(teacher, inputs[0])) == 1


def test_what_cannot_be_distilled_is_refused(teacher, student):
    with pytest.raises(ValueError, match="linear cost already"):
        distill(student, copy.deepcopy(student), batches())
    with pytest.raises(ValueError, match="no attention of the student"):
        distill(teacher, copy.deepcopy(teacher), batches())
    with pytest.raises(ValueError, match="must be a copy"):
        distill(teacher, nn.Linear(2, 2), batches())
    mixer = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Sequential has no attention to replace: it mixes tokens in another way"):
        distill(mixer, copy.deepcopy(mixer), [torch.zeros(1, 2)])
    with pytest.raises(ValueError, match="0 batches"):
        distill(teacher, student, [])
    with pytest.raises(ValueError, match="stages='layer'"):
        distill(teacher, student, batches(), stages=["layer"])
    with pytest.raises(ValueError, match="pooling='max'"):
        distill(teacher, student, batches(), pooling="max")
