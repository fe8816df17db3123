"""Does a converted model compute what its source computes?"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nystromformer.attention import Attention
from nystromformer.attention.nystrom import NystromSelfAttention

LENGTH = 16


@torch.no_grad()
def largest_difference(source: PreTrainedModel, model: PreTrainedModel, seed: int = 0) -> float | None:
    """The largest difference of the last hidden states on a few random tokens, as many as keep the attention exact.

    None where the attention of either model approximates input of any length.
    """
    lengths = [exact_length(module) for each in (source, model) for module in each.modules()]
    length = min([LENGTH, *(length for length in lengths if length is not None)])
    if length == 0:
        return None
    generator = torch.Generator().manual_seed(seed)
    # ids from the upper half of the vocabulary: special tokens, padding among them, have small numbers
    size = source.config.vocab_size
    ids = torch.randint(size // 2, size, (2, length), generator=generator)
    return float((hidden_states(source, ids) - hidden_states(model, ids)).abs().max())


def exact_length(module: torch.nn.Module) -> int | None:
    """The longest input for which an attention is exact; None for what is no attention of ours or always exact."""
    if isinstance(module, NystromSelfAttention):
        return module.options.num_landmarks
    return 0 if isinstance(module, Attention) and not module.exact else None


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model.base_model(input_ids=ids).last_hidden_state.float()
