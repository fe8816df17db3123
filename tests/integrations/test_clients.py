"""Libraries that others train and save models with: what they save comes back as it was, or says what is missing."""

import json
import subprocess
import sys
import warnings

import peft
import pytest
import torch
from encoders import TEXT
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import BertConfig, BertForSequenceClassification

import nystromformer
from nystromformer import (
    NystromformerConfig,
    NystromformerForSequenceClassification,
    add_skip_convolution,
    replace_attention,
)
from nystromformer.integrations.hf.adapters import FIELD

nystromformer.register()  # after PEFT was imported

OURS = {"num_landmarks": 8, "conv_kernel_size": 5, "pad_token_id": 0}
PAIRS = [
    ["The cat sat on the mat all day long.", "A cat rested on a mat."],
    ["Rain is expected in the north tomorrow.", "Tomorrow it will be wet up north."],
]


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    NystromformerForSequenceClassification(NystromformerConfig(**TEXT, **OURS)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def ids():
    return torch.randint(3, 50, (2, 100), generator=torch.Generator().manual_seed(1))


def trained(model, ids):
    """After one step; fails if something to train has no gradient."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model.train()(ids, labels=torch.tensor([0, 1])).loss.backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    optimizer.step()
    return model.eval()


def test_lora_knows_where_to_go(base):
    model = peft.get_peft_model(
        NystromformerForSequenceClassification.from_pretrained(base), peft.LoraConfig(task_type="SEQ_CLS")
    )
    adapted = {name.split(".lora_A")[0].split(".")[-1] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {"query", "value"}


def test_convolutions_that_peft_trains_are_used_saved_and_loaded(base, ids, tmp_path):
    adapter = peft.LoraConfig(task_type="SEQ_CLS", modules_to_save=["conv"])
    model = trained(peft.get_peft_model(NystromformerForSequenceClassification.from_pretrained(base), adapter), ids)
    kernels = [p for name, p in model.named_parameters() if "conv.modules_to_save" in name]
    assert len(kernels) == 2
    assert all(kernel.grad.abs().max() > 0 for kernel in kernels)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        NystromformerForSequenceClassification.from_pretrained(base), tmp_path / "adapter"
    ).eval()
    before = NystromformerForSequenceClassification.from_pretrained(base)
    assert torch.equal(again(ids).logits, model(ids).logits)
    with again.disable_adapter():
        assert torch.equal(again(ids).logits, before(ids).logits)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-5, rtol=0)


def test_convolutions_added_to_bert_are_trained_saved_and_loaded_by_peft(ids, tmp_path):
    model = BertForSequenceClassification(BertConfig(**TEXT, num_landmarks=8, attention_probs_dropout_prob=0.0))
    model.set_attn_implementation("nystrom")
    add_skip_convolution(model, 5).save_pretrained(tmp_path / "base")
    adapter = peft.LoraConfig(task_type="SEQ_CLS", modules_to_save=["skip_convolution"])
    model = trained(peft.get_peft_model(model, adapter), ids)
    model.save_pretrained(tmp_path / "adapter")
    again = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    assert again.config._attn_implementation == "nystrom"
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("way", ["configured", "replaced"])
def test_an_adapter_remembers_the_attention_it_was_trained_with(way, ids, tmp_path):
    BertForSequenceClassification(BertConfig(**TEXT, attention_probs_dropout_prob=0.0)).save_pretrained(tmp_path / "b")

    def base(attention):
        model = BertForSequenceClassification.from_pretrained(tmp_path / "b")
        if attention and way == "configured":
            model.config.attention_options = {"num_landmarks": 4}
            model.set_attn_implementation("nystrom")
        elif attention:
            replace_attention(model, "nystrom-4")
        return model

    model = trained(peft.get_peft_model(base(True), peft.LoraConfig(task_type="SEQ_CLS")), ids)
    model.save_pretrained(tmp_path / "adapter")
    told = "trained with attention 'nystrom' in 2 of its modules .num_landmarks=4.; this model has exact attention"
    with pytest.warns(UserWarning, match=told):
        exact = peft.PeftModel.from_pretrained(base(False), tmp_path / "adapter").eval()
    assert (exact(ids).logits - model(ids).logits).abs().max() > 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = peft.PeftModel.from_pretrained(base(True), tmp_path / "adapter").eval()
        again.save_pretrained(tmp_path / "again")
        peft.PeftModel.from_pretrained(base(True), tmp_path / "again")
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_an_adapter_of_transformers_own_methods_remembers_it_too(ids, tmp_path):
    BertForSequenceClassification(BertConfig(**TEXT, attention_probs_dropout_prob=0.0)).save_pretrained(tmp_path / "b")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "b", attn_implementation="nystrom")
    model.add_adapter(peft.LoraConfig(task_type="SEQ_CLS"))
    model.save_pretrained(tmp_path / "adapter")
    with pytest.warns(UserWarning, match="trained with attention 'nystrom' in 2 of its modules; this model has exact"):
        BertForSequenceClassification.from_pretrained(tmp_path / "b").load_adapter(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = BertForSequenceClassification.from_pretrained(tmp_path / "b", attn_implementation="nystrom")
        same.load_adapter(tmp_path / "adapter")


def test_an_adapter_of_exact_attention_says_nothing_of_ours(ids, tmp_path):
    model = BertForSequenceClassification(BertConfig(**TEXT, attention_probs_dropout_prob=0.0))
    peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    assert FIELD not in json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())


@pytest.mark.slow
def test_without_this_package_peft_says_that_it_ignores_the_attention(tmp_path):
    config = BertConfig(**TEXT, attention_probs_dropout_prob=0.0)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "base")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "base", attn_implementation="nystrom")
    peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    code = (
        "import sys; from peft import PeftModel; from transformers import BertForSequenceClassification as Bert\n"
        "PeftModel.from_pretrained(Bert.from_pretrained(sys.argv[1]), sys.argv[2])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "base"), str(tmp_path / "adapter")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Unexpected keyword arguments ['trained_with_attention'] for class LoraConfig" in done.stderr


@pytest.mark.slow
def test_sentence_transformers_trains_saves_and_loads_with_our_attention(minilm, tmp_path):
    model = SentenceTransformer(minilm, device="cpu", model_kwargs={"attn_implementation": "nystrom-local"})
    encoder = model[0].model
    encoder.config.attention_options = {"num_landmarks": 4, "block_size": 2, "heavy_keys": 1, "exact_below": None}
    loss = MultipleNegativesRankingLoss(model)
    columns = [model.preprocess(list(column)) for column in zip(*PAIRS, strict=True)]
    before = model.encode(PAIRS[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss(columns, None).backward()
    optimizer.step()
    after = model.encode(PAIRS[0])
    assert abs(after - before).max() > 1e-6
    model.save_pretrained(str(tmp_path))
    again = SentenceTransformer(str(tmp_path), device="cpu")
    assert again[0].model.config._attn_implementation == "nystrom-local"
    assert abs(again.encode(PAIRS[0]) - after).max() < 1e-6
    exact = SentenceTransformer(str(tmp_path), device="cpu", model_kwargs={"attn_implementation": "sdpa"})
    assert abs(exact.encode(PAIRS[0]) - after).max() > 1e-4
    code = "import sys; from sentence_transformers import SentenceTransformer; SentenceTransformer(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'Specified `attn_implementation="nystrom-local"` is not supported' in done.stderr
