"""Sequences split over processes: Nyström attention, layers and whole encoders, equal to those of one process.

In a program that `torchrun --nproc-per-node 2 program.py` starts:

    torch.distributed.init_process_group("gloo")             # "nccl" on GPUs
    with sequence_parallel(model):
        out = model(**split_sequence(batch))                 # each rank computes its own tokens
    hidden = gather_sequence(out.last_hidden_state)          # where one wants them all

Layers and the operation need torch alone; encoders are those of `nystromformer.models`.
"""

from nystromformer.distributed.attention import sequence_parallel_nystrom_attention
from nystromformer.distributed.collectives import CommunicationError, Traffic, count_traffic
from nystromformer.distributed.layout import Layout, gather_sequence, shard_lengths, share_layouts, split_sequence
from nystromformer.distributed.parallel import SequenceParallel, reduce_gradients, sequence_parallel

__all__ = [
    "CommunicationError",
    "Layout",
    "SequenceParallel",
    "Traffic",
    "count_traffic",
    "gather_sequence",
    "reduce_gradients",
    "sequence_parallel",
    "sequence_parallel_nystrom_attention",
    "shard_lengths",
    "share_layouts",
    "split_sequence",
]
