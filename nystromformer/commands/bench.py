"""`nystromformer bench`: the paper's efficiency table, measured here."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nystromformer.commands import Device, Dtype, new_folder, number, seed_of, whole_number
from nystromformer.errors import UserError, user_input


def bench(
    lengths: Annotated[str, typer.Option(help="Sequence lengths, up to 1048576 for the linear attentions.")] = (
        "512,1024,2048,4096,8192"
    ),
    attention: Annotated[str, typer.Option(help="Attentions by name, or `all`; `dense` keeps the n×n matrix.")] = "all",
    batch: Annotated[int, whole_number("Examples in the input.", most=65_536)] = 1,
    heads: Annotated[int, whole_number("Heads.", most=1_024)] = 12,
    head_dim: Annotated[int, whole_number("Width of a head.", most=4_096)] = 64,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward together.")] = False,
    masked: Annotated[bool, typer.Option("--masked", help="An eighth of each example is padding.")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="Also other packages' Nyström attention.")] = False,
    budget: Annotated[float, number("Seconds of timing for each length.", 0.01, 86_400)] = 15.0,
    cell_limit: Annotated[float, number("Skip calls that would take longer, in seconds.", 0.01, 86_400)] = 60.0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    seed: Annotated[int, seed_of("the input")] = 0,
    out: Annotated[Path, new_folder("Folder for records, tables and plots.")] = Path("runs/bench"),
) -> None:
    """Time and peak memory of attentions over sequence lengths, beside the paper's table.

    Example: `nystromformer bench --lengths 1024,4096 --attention standard,nystrom-64 --peers`
    """
    given = {name: value for name, value in locals().items() if name not in ("attention", "peers", "out")}
    from nystromformer.bench.cases import available_peers, default_attentions, parse_lengths
    from nystromformer.bench.run import BenchOptions, run_bench
    from nystromformer.checks import parse_names
    from nystromformer.files import write_text
    from nystromformer.progress import steps_bar
    from nystromformer.records import Recorder, new_job_folder, read_records, write_config
    from nystromformer.report.efficiency import efficiency_tables, measured
    from nystromformer.report.figures import draw_efficiency
    from nystromformer.report.table import print_tables, tables_markdown

    with user_input():
        names = default_attentions() if attention == "all" else list(parse_names("--attention", attention))
        if peers:
            reasons = available_peers()
            missing = [f"{peer} ({reason})" for peer, reason in reasons.items() if reason]
            if missing:
                raise UserError(f"--peers: {', '.join(missing)}.")
            names += [peer for peer in reasons if peer not in names]
        options = BenchOptions(**given | {"lengths": parse_lengths(lengths), "attentions": names})
        new_job_folder(out)
    config = asdict(options)
    write_config(out, config)
    recorder = Recorder(out, job="bench", config=config, seed=seed)
    with steps_bar(len(options.lengths) * (len(names) + 1)) as step:
        run_bench(options, recorder, step)
    records = list(read_records(out))
    tables = efficiency_tables(records)
    write_text(out / "table.md", tables_markdown(tables))
    for name, drawing in draw_efficiency(measured(records)).items():
        drawing.save(out / name)
    print_tables(tables)
    typer.echo(f"Records, tables and plots: {out}")
