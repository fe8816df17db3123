"""No tensor of n×m elements is kept or made on a rank, and no copy of the shard for the convolution's surroundings."""

import pytest
import torch
import torch.distributed as dist
from largest_tensor import Largest, saved_sizes

from nystromformer.distributed import attention, sequence_parallel_nystrom_attention

HEADS, LENGTH, WIDTH, LANDMARKS = 2, 16384, 8, 64
SHARD = HEADS * LENGTH * WIDTH  # elements of one of query, key and value
MATRIX = HEADS * LENGTH * LANDMARKS


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "in-pieces"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_nothing_of_n_by_m_elements_is_made_or_saved(one_rank, monkeypatch, masked, fused):
    if not fused:
        monkeypatch.setattr(attention, "FUSED_DEVICES", ())
        monkeypatch.setattr(attention, "KEYS_AT_ONCE", 128)
    tensors = [torch.randn(1, HEADS, LENGTH, WIDTH).requires_grad_() for _ in range(3)]
    kernel = torch.randn(HEADS, 33).requires_grad_()
    mask = torch.arange(LENGTH)[None] < LENGTH - 100 if masked else None
    with Largest() as largest:
        with saved_sizes() as saved:
            out = sequence_parallel_nystrom_attention(*tensors, mask, num_landmarks=LANDMARKS, conv_weight=kernel)
        out.sum().backward()
    assert max(saved) <= SHARD
    assert SHARD <= largest.elements < MATRIX
