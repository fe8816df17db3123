"""An encoder over a million tokens, split over processes. Prints time, memory and bytes exchanged.

    torchrun --nproc-per-node 2 examples/million_tokens.py
    torchrun --nproc-per-node 2 examples/million_tokens.py --length 65536

The input means nothing: what counts here is that it fits, what it costs, and that the result is the same on any number
of processes.
"""

import argparse
import os
import resource
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from nystromformer import NystromformerConfig, NystromformerModel
from nystromformer.distributed import CommunicationError, count_traffic, sequence_parallel, shard_lengths

POSITIONS = 4096
"""Rows of the position table; tokens use them again and again, as models for long input start (paper, section 4)."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2**20, help="tokens of the whole sequence (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="hidden size (%(default)s)")
    parser.add_argument("--heads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--landmarks", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds to wait for another rank (%(default)s)")
    return parser.parse_args()


def run(options: argparse.Namespace) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # the same weights on every rank
    config = NystromformerConfig(
        vocab_size=1000,
        hidden_size=options.width,
        num_attention_heads=options.heads,
        num_hidden_layers=options.layers,
        intermediate_size=4 * options.width,
        hidden_act="gelu",
        max_position_embeddings=POSITIONS,
        num_landmarks=options.landmarks,
        conv_kernel_size=33,
        pad_token_id=None,
        pooling="mean",
    )
    model = NystromformerModel(config).eval().to(device)

    # Each rank makes, or loads, its own tokens only. Nobody ever holds the whole sequence.
    lengths = shard_lengths(options.length, ranks)
    start = sum(lengths[:rank])
    places = torch.arange(start, start + lengths[rank], device=device)[None]
    ids = places * 2_654_435_761 % 2**32 % config.vocab_size  # scattered, the same for any number of ranks
    positions = places % POSITIONS + config.position_offset

    if rank == 0:
        print(
            f"{options.length:,} tokens on {ranks} ranks, {options.layers} layers of width {options.width}", flush=True
        )
    dist.barrier()
    started, worked = time.perf_counter(), time.process_time()
    with torch.no_grad(), sequence_parallel(model), count_traffic() as traffic:
        out = model(input_ids=ids, position_ids=positions)
    took = f"{time.perf_counter() - started:.1f} s ({time.process_time() - worked:.1f} s of processor time)"
    report(out.pooler_output, lengths[rank], took, traffic.sent, options.layers)


def report(pooled: torch.Tensor, length: int, took: str, sent: dict[str, int], layers: int) -> None:
    """One rank after another."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    per_layer = sum(sent[purpose] for purpose in ("landmarks", "merge", "halo")) / layers
    other = sum(sent.values()) - per_layer * layers
    for turn in range(ranks):
        if turn == rank:
            # Linux counts the peak of resident memory in KiB
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            memory = torch.cuda.max_memory_allocated() if pooled.is_cuda else peak
            print(
                f"rank {rank}: {length:,} tokens in {took}, peak memory {memory / 2**30:.2f} GiB, sent "
                f"{per_layer / 1024:.1f} KiB a layer and {other / 1024:.1f} KiB besides; "
                f"pooled vector {pooled.norm():.6f} long",
                flush=True,
            )
        dist.barrier()


def main() -> None:
    options = arguments()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout))
        run(options)
    except (CommunicationError, ValueError) as error:
        sys.exit(f"million_tokens: {error}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
