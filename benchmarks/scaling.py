"""One encoder layer on a sequence that is split over ranks: time, processor time, memory and bytes.

    torchrun --nproc-per-node 2 benchmarks/scaling.py --out runs/scaling-2

Processor time is the figure to compare where ranks share cores: it counts what a rank itself did, its threads for
sending included, however long it had to wait for a core. Read runs of 1, 2 and 3 ranks together with docs/scaling.md.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from nystromformer import NystromformerConfig, NystromformerModel
from nystromformer.distributed import count_traffic, sequence_parallel, shard_lengths
from nystromformer.records import Recorder, new_job_folder

WARM_UP = 2


@dataclass(frozen=True)
class Cost:
    """Of one call: medians and minima over repeats, in seconds; bytes sent; rise of the peak of resident memory."""

    wall: float
    least_wall: float
    processor: float
    least_processor: float
    sent: int
    memory: int


def measured(run: Callable[[], None], repeats: int) -> Cost:
    for _ in range(WARM_UP):
        run()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew
    held = resident("VmRSS")
    walls, processors = [], []
    with count_traffic() as traffic:
        for _ in range(repeats):
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            run()
            walls.append(time.perf_counter() - wall)
            processors.append(time.process_time() - processor)
    return Cost(
        statistics.median(walls),
        min(walls),
        statistics.median(processors),
        min(processors),
        traffic.total // repeats,
        resident("VmHWM") - held,
    )


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def layer(options: argparse.Namespace) -> NystromformerModel:
    torch.manual_seed(0)
    config = NystromformerConfig(
        vocab_size=1000,
        hidden_size=options.width,
        num_attention_heads=options.heads,
        num_hidden_layers=1,
        intermediate_size=4 * options.width,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        max_position_embeddings=max(options.lengths),
        num_landmarks=options.landmarks,
        conv_kernel_size=33,
        pooling="mean",
    )
    return NystromformerModel(config)


def layer_costs(model: NystromformerModel, length: int, repeats: int) -> dict[str, Cost]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    embeds = torch.randn(1, shard_lengths(length, ranks)[rank], model.config.hidden_size)

    def forward() -> None:
        with torch.no_grad():
            model(inputs_embeds=embeds)

    def both() -> None:
        model.zero_grad()
        model(inputs_embeds=embeds).last_hidden_state.sum().backward()

    return {"forward": measured(forward, repeats), "forward + backward": measured(both, repeats)}


def message_costs(repeats: int) -> dict[str, float]:
    """Seconds of one sum over ranks, by its size in bytes."""
    costs = {}
    for size in (4, 2**16, 2**20):
        x = torch.zeros(size // 4)
        walls = []
        for _ in range(10 * repeats):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(x)
            walls.append(time.perf_counter() - started)
        costs[str(size)] = statistics.median(walls)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser.add_argument("--lengths", type=numbers, default=[16384, 65536], help="tokens of the whole sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--landmarks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    recorder = None
    if rank == 0:
        new_job_folder(options.out)
        config = {"ranks": ranks, "width": options.width, "heads": options.heads, "landmarks": options.landmarks}
        recorder = Recorder(options.out, job="scaling", config=config, seed=0)
    model = layer(options)
    with sequence_parallel(model):
        for length in options.lengths:
            for what, cost in layer_costs(model, length, options.repeats).items():
                if recorder is not None:
                    recorder.record(what, vars(cost), length=length)
                    figures = f"{1e3 * cost.wall:.1f} ms, {1e3 * cost.processor:.1f} ms of processor time"
                    least = f"least {1e3 * cost.least_wall:.1f}, {1e3 * cost.least_processor:.1f}"
                    sizes = f"{cost.memory / 2**20:.0f} MiB, {cost.sent:,} bytes sent"
                    print(f"{ranks} ranks, {length:,} tokens, {what}: {figures} ({least}), {sizes}", flush=True)
    for size, seconds in message_costs(options.repeats).items():
        if recorder is not None:
            recorder.record("sum over ranks", seconds, bytes=int(size))
            print(f"{ranks} ranks, sum of {size} bytes over ranks: {1e3 * seconds:.2f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
