"""`add_skip_convolution`: the paper's trainable convolution of the values, added to a model that was made without."""

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from nystromformer.attention import SkipConvolution
from nystromformer.checks import check_odd
from nystromformer.integrations.hf.layer_attentions import is_exact_layer, is_listed
from nystromformer.integrations.hf.modules import interface_modules, number_of_heads
from nystromformer.integrations.offered import OFFERED

ATTRIBUTE = "skip_convolution"
"""The name under which modules, and so state dicts, hold the convolution."""

FIELD = "skip_convolution_kernel_size"
"""Where the configuration records it, so that a saved model is built with its convolutions again."""

DEFAULT_SIZE = 33


class AddedSkipConvolution(SkipConvolution):
    """Starts at zero: a pretrained model begins as it was, and learns what to add."""

    def reset_parameters(self) -> None:
        init.zeros_(self.weight)  # leaves alone what was loaded from a checkpoint


def add_skip_convolution(model: PreTrainedModel, kernel_size: int | None = None) -> PreTrainedModel:
    """Add a trainable convolution over the values, as in the paper, to every self-attention of `model`; returns it.

    It starts at zero, so the model's output stays what it was until it is trained. `save_pretrained` saves it;
    `from_pretrained(folder, attn_implementation="nystrom")` brings it back once `nystromformer.register()` was called.
    Add it before the optimizer is made. A second call changes nothing.

    Args:
        model: an encoder of Transformers with attn_implementation="nystrom".
        kernel_size: odd; 33 by default, as in the paper's BERT models.

    >>> import nystromformer
    >>> from transformers import BertConfig, BertModel
    >>> nystromformer.register()
    >>> config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    >>> config._attn_implementation = "nystrom"
    >>> model = add_skip_convolution(BertModel(config))
    >>> model.encoder.layer[0].attention.self.skip_convolution
    AddedSkipConvolution(num_heads=2, kernel_size=33)
    """
    if kernel_size is not None:
        check_odd("kernel_size", kernel_size)
    modules = [module for module in interface_modules(model) if takes_convolution(module)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no self-attention that calls Transformers' attention interface.")
    for module in modules:
        if (used := module.config._attn_implementation) not in OFFERED:
            raise ValueError(
                f"attn_implementation={used!r}: must be one of {', '.join(OFFERED)}, since others would not use the "
                f"convolution; call nystromformer.register() and model.set_attn_implementation('nystrom') first."
            )
        recorded = getattr(module.config, FIELD, None)
        if kernel_size is not None and recorded is not None and recorded != kernel_size:
            raise ValueError(
                f"kernel_size={kernel_size}: the model has convolutions of {recorded} already; leave kernel_size out."
            )
        if recorded is not None and not hasattr(module, ATTRIBUTE):
            raise_missing(module)
    for module in modules:
        if getattr(module.config, FIELD, None) is None:
            setattr(module.config, FIELD, DEFAULT_SIZE if kernel_size is None else kernel_size)
    attach_recorded(model)
    return model


def attach_recorded(model: nn.Module) -> None:
    """Build the convolutions that the configuration records, before weights are loaded into them."""
    for module in interface_modules(model):
        size = getattr(module.config, FIELD, None)
        if size is not None and takes_convolution(module) and not hasattr(module, ATTRIBUTE):
            convolution = AddedSkipConvolution(number_of_heads(module), size)
            example = next((p for p in module.parameters() if p.is_floating_point()), None)
            setattr(module, ATTRIBUTE, convolution if example is None else convolution.to(example))


def takes_convolution(module: nn.Module) -> bool:
    """Causal modules are refused when they run; in cross-attention values are not at the queries' places; a layer that
    keeps exact attention has nothing to make up for."""
    return is_listed(module) and not is_exact_layer(module)


def convolution_kernel(module: nn.Module) -> Tensor | None:
    """The kernel (h, 1, k, 1) to use for an attention module, None if it has no convolution."""
    convolution = getattr(module, ATTRIBUTE, None)
    if convolution is None:
        if getattr(module.config, FIELD, None) is not None and takes_convolution(module):
            raise_missing(module)
        return None
    return convolution.weight


def raise_missing(module: nn.Module) -> None:
    raise ValueError(
        f"{type(module).__name__} lacks the convolution that its configuration records ({FIELD}): the model was loaded "
        f"for another attention, which leaves it out; call nystromformer.register(), then load it with "
        f'from_pretrained(folder, attn_implementation="nystrom").'
    )
