"""What the attention of our own models is given: they have projections of their own, not Transformers' interface."""

import torch
from torch import Tensor, nn

from nystromformer.integrations.interface_calls import AttentionCall
from nystromformer.models.base import NystromformerPreTrainedModel
from nystromformer.models.encoder.self_attention import NystromformerSelfAttention


def own_calls(model: NystromformerPreTrainedModel, **inputs: Tensor) -> list[AttentionCall]:
    """The calls of all layers in one forward of `model`, with the attention that it has.

    >>> from nystromformer.models import NystromformerConfig, NystromformerModel
    >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 8}
    >>> calls = own_calls(NystromformerModel(NystromformerConfig(**sizes)), input_ids=torch.tensor([[5, 6, 7]]))
    >>> [tuple(call.key.shape) for call in calls]
    [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)]
    """
    calls: list[AttentionCall] = []

    def keep(module: nn.Module, given: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> None:
        query, key, value, mask = given
        calls.append(AttentionCall(module, query, key, value, mask, mask, radius=None, scale=None))

    layers = [module for module in model.modules() if isinstance(module, NystromformerSelfAttention)]
    hooks = [layer.attention.register_forward_pre_hook(keep) for layer in layers]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls
