"""Mask functions of Transformers: padding and windows are read, all else is refused."""

import pytest
import torch
from transformers import masking_utils

from nystromformer.integrations.hf.masks import WindowMask, padding_mask, window_radius


def test_windows_are_read_from_the_mask_functions_of_transformers():
    assert window_radius(masking_utils.bidirectional_mask_function) is None
    assert window_radius(masking_utils.sliding_window_bidirectional_mask_function(64)) == 64
    tail = (masking_utils.bidirectional_mask_function,) * 2
    for other in (
        masking_utils.causal_mask_function,
        masking_utils.sliding_window_causal_mask_function(64),
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
    ):
        with pytest.raises(ValueError, match="causal mask was asked for"):
            window_radius(other)
    for other in (masking_utils.or_masks(*tail), masking_utils.and_masks(*tail), lambda b, h, q, k: q >= k):
        with pytest.raises(ValueError, match="must be full bidirectional attention or a bidirectional sliding window"):
            window_radius(other)


def test_continuing_from_a_cache_is_refused():
    with pytest.raises(ValueError, match="past_key_values hold earlier tokens"):
        padding_mask(mask_function=masking_utils.bidirectional_mask_function, kv_length=9, q_offset=8)


def test_a_window_travels_with_its_mask():
    mask = WindowMask(3, torch.ones(1, 4, dtype=torch.bool))
    moved = mask.to("cpu", non_blocking=True)
    assert moved.radius == 3
    assert moved.tokens.equal(mask.tokens)
    assert WindowMask(3, None).to("cpu") == WindowMask(3, None)
