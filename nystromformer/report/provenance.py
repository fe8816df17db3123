"""What made a figure: the command, the seeds, the budget, the machine and the versions of its runs."""

from collections.abc import Iterable

Record = dict[str, object]


def provenance(records: Iterable[Record]) -> tuple[str, ...]:
    """One line for each command on each machine, with all its seeds and budgets.

    >>> machine = {"processor": "a processor", "cores": 4, "threads": 2}
    >>> record = {"job": "bench", "command": "bench --seed 3", "seed": 3, "machine": machine, "config": {"budget": 9.0}}
    >>> provenance([record, record | {"seed": 4}])
    ('`bench --seed 3`: seeds 3, 4; 9 s of timing a length; a processor, 2 of 4 cores',)
    """
    runs: dict[tuple[str, str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for record in records:
        versions = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
        key = (record.get("command", record["job"]), machine_text(record.get("machine", {})), versions)
        seeds, budgets = runs.setdefault(key, ({}, {}))
        seeds[str(record.get("seed"))] = None
        budgets[budget_text(record)] = None
    lines = []
    for (command, machine, versions), (seeds, budgets) in runs.items():
        seeds = [seed for seed in seeds if seed != "None"]
        parts = [f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}" if seeds else "no seed", *budgets]
        lines.append(f"`{command}`: " + "; ".join(part for part in [*parts, machine, versions] if part))
    return tuple(lines)


def budget_text(record: Record) -> str:
    """What a run was given: steps of so many examples, or seconds of timing.

    >>> budget_text({"step": 600, "config": {"task": "listops", "batch_size": 32, "max_length": 256}})
    'listops: 600 steps of 32 × 256 tokens'
    """
    config = record.get("config", {})
    task = f"{config['task']}: " if "task" in config else ""
    if "step" in record and "batch_size" in config:
        length = f" × {config['max_length']:,} tokens" if "max_length" in config else ""
        return f"{task}{record['step']:,} steps of {config['batch_size']}{length}"
    if "budget" in config:
        return f"{config['budget']:g} s of timing a length"
    if "landmarks" in config:
        return f"{config.get('examples', 1)} examples" if config.get("examples", 1) > 1 else ""
    return ""


def machine_text(machine: dict[str, object]) -> str:
    if not machine:
        return ""
    return f"{machine.get('gpu', machine['processor'])}, {machine['threads']} of {machine['cores']} cores"
