"""`add_skip_convolution`: starts as nothing, learns, and comes back from a saved model."""

import pytest
import torch
from encoders import build, switch, tokens, vit
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel

from nystromformer import add_skip_convolution
from nystromformer.attention import skip_convolution
from nystromformer.integrations.hf import attention_interface


def convolutions(model):
    return {name: p for name, p in model.named_parameters() if "skip_convolution" in name}


@pytest.fixture
def masked_lm():
    torch.manual_seed(0)
    model = BertForMaskedLM(build("bert").config).eval()
    return switch(model, 8)


def test_a_model_stays_what_it_was_until_trained(masked_lm):
    ids = tokens()
    before = masked_lm(ids).logits
    assert add_skip_convolution(masked_lm) is masked_lm
    assert torch.equal(masked_lm(ids).logits, before)
    assert list(convolutions(masked_lm)) == [
        f"bert.encoder.layer.{i}.attention.self.skip_convolution.weight" for i in range(2)
    ]
    assert masked_lm.config.skip_convolution_kernel_size == 33


def test_gradients_reach_the_kernels_and_change_the_output(masked_lm):
    ids = tokens()
    add_skip_convolution(masked_lm, kernel_size=5)
    before = masked_lm(ids).logits
    masked_lm(ids, labels=ids).loss.backward()
    for kernel in convolutions(masked_lm).values():
        assert kernel.shape == (4, 1, 5, 1)
        assert kernel.grad.abs().min() > 0
        kernel.data -= kernel.grad
    assert (masked_lm(ids).logits - before).abs().max() > 1e-4


def test_it_adds_the_convolved_values_and_keeps_padding_out():
    model, ids = build("bert"), tokens()
    switch(model, 100)
    add_skip_convolution(model, 3)
    module, x = model.encoder.layer[0].attention.self, torch.randn(2, 4, 30, 8)
    torch.nn.init.normal_(module.skip_convolution.weight)
    mask = torch.arange(30) < torch.tensor([[30], [20]])
    forward = attention_interface.FUNCTIONS["nystrom"]
    out, weights = forward(module, x, x, x, mask, output_attentions=True)
    value = x * mask[:, None, :, None]
    expected = (weights @ value + skip_convolution(value, module.skip_convolution.weight)) * mask[:, None, :, None]
    torch.testing.assert_close(out, expected.transpose(1, 2))
    assert model(ids).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("name", ["modernbert", "distilbert", "electra", "vit"])
def test_every_attention_of_other_encoders_gets_one(name):
    model = switch(vit() if name == "vit" else build(name), 8)
    assert len(convolutions(add_skip_convolution(model))) == 2
    with torch.no_grad():
        (model(torch.randn(1, 3, 48, 48)) if name == "vit" else model(tokens())).last_hidden_state.sum()


def test_trained_kernels_come_back_with_the_model(masked_lm, tmp_path):
    ids = tokens()
    add_skip_convolution(masked_lm, 5)
    for kernel in convolutions(masked_lm).values():
        torch.nn.init.normal_(kernel)
    masked_lm.save_pretrained(tmp_path)
    loaded, info = BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="nystrom", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    add_skip_convolution(loaded)  # changes nothing
    torch.testing.assert_close(loaded.eval()(ids).logits, masked_lm(ids).logits)
    encoder = AutoModel.from_pretrained(tmp_path, attn_implementation="nystrom", dtype=torch.bfloat16)
    for kernel, trained in zip(convolutions(encoder).values(), convolutions(masked_lm).values(), strict=True):
        torch.testing.assert_close(kernel, trained.bfloat16())


def test_a_model_loaded_without_its_kernels_is_refused(masked_lm, tmp_path):
    add_skip_convolution(masked_lm, 5).save_pretrained(tmp_path)
    loaded = BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    loaded(tokens())  # Transformers reported the kernels as unused
    loaded.set_attn_implementation("nystrom")
    for use in (lambda: loaded(tokens()), lambda: add_skip_convolution(loaded)):
        with pytest.raises(ValueError, match="lacks the convolution that its configuration records"):
            use()


def test_kernels_that_a_checkpoint_lacks_start_at_zero(tmp_path):
    build("bert").save_pretrained(tmp_path)
    config = BertConfig.from_pretrained(tmp_path)
    config.skip_convolution_kernel_size = 7
    model = BertModel.from_pretrained(tmp_path, config=config, attn_implementation="nystrom")
    assert [kernel.abs().max().item() for kernel in convolutions(model).values()] == [0, 0]


def test_it_refuses_what_would_have_no_effect(masked_lm):
    with pytest.raises(ValueError, match="attn_implementation='sdpa': must be one of nystrom"):
        add_skip_convolution(build("bert"))
    with pytest.raises(ValueError, match="kernel_size=4: must be odd"):
        add_skip_convolution(masked_lm, 4)
    add_skip_convolution(masked_lm, 5)
    with pytest.raises(ValueError, match="has convolutions of 5 already"):
        add_skip_convolution(masked_lm, 7)
    with pytest.warns(UserWarning, match="not used by this attention"):
        masked_lm.set_attn_implementation("sdpa")
