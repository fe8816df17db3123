"""Canaries: each row of docs/private-surfaces.md still is what we rely on. A failure says which row, and what to do."""

import copy
import ctypes
import inspect
from pathlib import Path

import peft
import pytest
import torch
import transformers
import typer
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertModel, PreTrainedModel, Trainer, initialization, masking_utils
from transformers.utils import hub

from nystromformer.bench.measure import Kernels
from nystromformer.integrations.sdpa import Redirect

PAGE = (Path(__file__).parents[1] / "docs/private-surfaces.md").read_text(encoding="utf-8")
TRAINER = {
    "_get_train_sampler": ["train_dataset"],
    "_get_eval_sampler": ["eval_dataset"],
    "_get_dataloader": ["dataset", "description", "batch_size", "sampler_fn", "is_training", "dataloader_key"],
    "_determine_best_metric": ["metrics", "trial"],
    "_load_best_model": [],
    "_save_checkpoint": ["model", "trial"],
    "_save": ["output_dir", "state_dict"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_save_rng_state": ["output_dir"],
    "_load_rng_state": ["checkpoint"],
    "_get_num_items_in_batch": ["batch_samples", "device"],
}
MODEL = {
    "post_init": [],
    "set_attn_implementation": ["attn_implementation", "allow_all_kernels"],
    "_initialize_weights": ["module", "is_custom_code"],
    "_init_weights": ["module"],
}


PEFT = {
    "save_pretrained": (peft.PeftModel, "save_directory"),
    "load_adapter": (peft.PeftModel, "model_id"),
    "to_dict": (peft.config.PeftConfigMixin, None),
    "from_peft_type": (peft.config.PeftConfigMixin, "kwargs"),
}


def parameters(function):
    names = inspect.signature(inspect.unwrap(function)).parameters
    return [name for name in names if name not in ("self", "cls")]


def tiny_bert():
    config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9)
    return BertModel(config)


def broken(row):
    return f"docs/private-surfaces.md, row {row!r}: the library has changed; its last column says what to do"


def test_the_cpu_kernel_returns_the_log_sum_exp():
    query, key, value = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=0.5)
    logits = 0.5 * query @ key.mT
    row = "aten._scaled_dot_product_flash_attention_for_cpu"
    torch.testing.assert_close(out, logits.softmax(-1) @ value, msg=lambda text: f"{broken(row)}\n{text}")
    torch.testing.assert_close(lse, logits.logsumexp(-1), msg=lambda text: f"{broken(row)}\n{text}")


def test_its_backward_takes_the_output_only_for_its_product_with_the_gradient():
    query, key, value, grad = torch.randn(4, 1, 2, 8, 4, dtype=torch.float64)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=0.5)
    D = (grad * out).sum(-1, keepdim=True)
    stand_in = grad * D / (grad * grad).sum(-1, keepdim=True)  # another vector with the same product
    for ours, theirs in zip(
        backward(grad, query, key, value, stand_in, lse, 0.0, False, scale=0.5),
        backward(grad, query, key, value, out, lse, 0.0, False, scale=0.5),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{broken('its backward')}\n{text}")


def test_torch_loads_its_threads_for_all():
    assert hasattr(ctypes.CDLL(None), "GOMP_parallel"), broken("its OpenMP runtime is loaded for all")


def test_torch_tells_whether_a_transform_of_functions_is_active():
    active, seen = torch._C._are_functorch_transforms_active, []
    torch.func.vmap(lambda x: seen.append(active()) or x)(torch.zeros(2))
    assert (active(), seen) == (False, [True]), broken("torch._C._are_functorch_transforms_active")


def test_torch_shows_each_kernel_that_is_dispatched():
    with Kernels() as kernels:
        torch.zeros(2, 3).T.exp()
    expected = ["aten.zeros.default", "aten.exp.default"]
    assert kernels.names == expected, broken("torch.utils._python_dispatch.TorchDispatchMode")


def test_a_models_attention_is_looked_up_by_its_configuration():
    called = []

    def attention(module, query, key, value, *args, **kwargs):
        called.append(module)
        return query.transpose(1, 2), None

    transformers.AttentionInterface.register("canary", attention)
    transformers.AttentionMaskInterface.register("canary", lambda **_: None)
    model = tiny_bert()
    model.config._attn_implementation = "canary"
    model(torch.tensor([[1, 2]]))
    assert called == [model.encoder.layer[0].attention.self], broken("config._attn_implementation")


def test_modules_name_the_interface_in_their_code():
    module = tiny_bert().encoder.layer[0].attention.self
    code = inspect.unwrap(type(module).forward).__code__
    assert "ALL_ATTENTION_FUNCTIONS" in code.co_names, broken("ALL_ATTENTION_FUNCTIONS")


def test_a_windows_radius_is_in_the_closure_of_its_mask():
    overlay = masking_utils.sliding_window_bidirectional_overlay(7)
    row = broken("masking_utils.and_masks")
    assert [cell.cell_contents for cell in overlay.__closure__] == [7], row
    both = masking_utils.and_masks(overlay, masking_utils.bidirectional_mask_function)
    assert both.__code__ is masking_utils.and_masks().__code__, row
    assert both.__closure__[0].cell_contents == (overlay, masking_utils.bidirectional_mask_function), row


@pytest.mark.parametrize("name", MODEL)
def test_methods_of_models_that_we_extend(name):
    assert parameters(getattr(PreTrainedModel, name)) == MODEL[name], broken("PreTrainedModel")


@pytest.mark.parametrize("name", PEFT)
def test_methods_of_peft_that_we_extend(name):
    owner, first = PEFT[name]
    assert next(iter(parameters(getattr(owner, name))), None) == first, broken(name)


def test_declarations_of_model_classes():
    from transformers import BertForMaskedLM

    row = broken("_tied_weights_keys")
    assert isinstance(BertForMaskedLM._tied_weights_keys, dict), row
    for name in ("_keys_to_ignore_on_load_unexpected", "_no_split_modules"):
        assert hasattr(PreTrainedModel, name), row
    assert callable(initialization.zeros_), row
    assert callable(initialization.copy_), row


@pytest.mark.parametrize("name", TRAINER)
def test_methods_of_trainer_that_we_override(name):
    assert parameters(getattr(Trainer, name)) == TRAINER[name], broken("Trainer")


def test_a_missing_file_can_be_asked_for(tmp_path):
    found = hub.cached_file(str(tmp_path), "x.json", _raise_exceptions_for_missing_entries=False)
    assert found is None, broken("cached_file")


def test_usage_errors_have_a_base_class_with_a_message():
    base = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
    assert typer.BadParameter("x").format_message(), broken("Typer")
    assert issubclass(typer.BadParameter, base), broken("Typer")


def test_the_page_names_what_the_canaries_watch():
    for name in [*TRAINER, *MODEL, *PEFT, "_scaled_dot_product_flash_attention_for_cpu", "ALL_ATTENTION_FUNCTIONS"]:
        assert name in PAGE, name


def test_a_view_of_a_configuration_names_another_attention():
    config = tiny_bert().config
    view = copy.copy(config)
    view._attn_implementation_internal = "canary"
    row = "_attn_implementation_internal"
    assert (view._attn_implementation, config._attn_implementation) == ("canary", "sdpa"), broken(row)


@torch.no_grad()
def test_a_hook_leads_an_encoder_layer_off_its_fast_path():
    called = []
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), num_layers=1).eval()
    x = torch.randn(1, 5, 8)
    encoder.layers[0].self_attn.forward = lambda *args, **kwargs: called.append("forward")
    encoder(x)
    assert not called, "the fast path calls the module now, and needs no turning off"
    encoder.layers[0].self_attn.register_forward_pre_hook(lambda module, inputs: called.append("hook"))
    with pytest.raises(TypeError):  # of the forward above, which returns nothing
        encoder(x)
    assert called == ["hook", "forward"], broken("a hook inside `nn.TransformerEncoderLayer`")
    assert encoder.use_nested_tensor is True, broken("use_nested_tensor")


def test_what_multihead_attention_calls():
    ours, theirs = (parameters(function) for function in (Redirect.multi_head, functional.multi_head_attention_forward))
    assert ours == theirs, broken("functional.multi_head_attention_forward")
