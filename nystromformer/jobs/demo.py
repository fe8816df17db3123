"""`nystromformer demo`: exact and Nyström attention side by side."""

from pathlib import Path
from typing import Annotated

import typer

from nystromformer.errors import user_input

LENGTHS = (512, 1024, 2048, 4096)
SMOOTH = 64


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the records.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of the input.")] = 0,
) -> None:
    """Compare exact and Nyström attention in time, memory and error, in about a minute.

    Example: `nystromformer demo --out runs/demo`
    """
    from rich.console import Console
    from rich.table import Table

    from nystromformer.bench.run import BenchOptions, options_as_config, run_bench
    from nystromformer.bench.show import progress_bar
    from nystromformer.bench.table import Cell, cells
    from nystromformer.records import Recorder, new_job_folder, read_records, write_config

    options = BenchOptions(lengths=list(LENGTHS), attentions=["standard", "dense", "nystrom-64"], budget=3.0, seed=seed)
    with user_input():
        new_job_folder(out)
    config = options_as_config(options)
    write_config(out, config)
    recorder = Recorder(out, job="demo", config=config, seed=seed)
    with progress_bar(len(LENGTHS) * 5) as step:
        run_bench(options, recorder, step)
        errors = {}
        for length in LENGTHS:
            step(f"n = {length:,}: error")
            errors[length] = attention_error(length, seed)
            recorder.record("relative_error", errors[length], attention="nystrom-64", length=length, smooth=SMOOTH)

    table = Table(title="Exact attention and Nyström attention with 64 landmarks (12 heads × 64)", title_justify="left")
    for name in ("n", "exact", "Nyström", "faster", "exact, n×n matrix", "Nyström memory", "error"):
        table.add_column(name, justify="right")
    measured = cells(read_records(out))
    for length in LENGTHS:
        exact, dense, ours = (measured[name].get(length, Cell()) for name in ("standard", "dense", "nystrom-64"))
        table.add_row(
            f"{length:,}",
            f"{exact.seconds * 1e3:,.1f} ms",
            f"{ours.seconds * 1e3:,.1f} ms",
            f"{exact.seconds / ours.seconds:.1f}×",
            f"{dense.bytes / 1e6:,.0f} MB" if dense.bytes else dense.reason,
            f"{ours.bytes / 1e6:,.0f} MB",
            f"{errors[length]:.1%}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"Error: ‖Nyström − exact‖ / ‖exact‖ on queries and keys that change slowly along the sequence (a moving "
        f"average of {SMOOTH} random ones), without the skip convolution.\nMemory: peak of one call above its inputs. "
        f"Records: {out}",
        style="dim",
        highlight=False,
    )


def attention_error(length: int, seed: int) -> float:
    """Relative error of Nyström-64 on sequences that change slowly, as those of trained models do."""
    import torch
    from torch.nn import functional

    from nystromformer.attention import nystrom_attention

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(3, 12 * 64, length + SMOOTH - 1, generator=generator)
    smooth = functional.avg_pool1d(noise, SMOOTH, stride=1) * SMOOTH**0.5  # unit variance again
    query, key, value = (x.view(1, 12, 64, length).mT for x in smooth)
    exact = functional.scaled_dot_product_attention(query, key, value)
    return ((nystrom_attention(query, key, value) - exact).norm() / exact.norm()).item()
