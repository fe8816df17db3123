"""What came out of pretraining runs, from records: accuracies, what was spent on them, and how fast it went."""

from collections.abc import Iterable
from pathlib import Path

from nystromformer.records import results, table_markdown

HEADER = (
    "attention", "start", "masked words", "sentence order", "steps", "batch × length", "tokens", "training time",
    "tokens/s", "parameters",
)  # fmt: skip
Record = dict[str, object]


def pretraining_table(records: Iterable[Record]) -> str:
    """One row for each finished run: validation accuracies, steps, tokens and time."""
    rows = [_row(record) for record in results(records, "pretrain")]
    return table_markdown(HEADER, rows) + "\n" if rows else "No finished run.\n"


def _row(record: Record) -> list[str]:
    config, order = record["config"], record["sop_accuracy"]
    return [
        config["attention"],
        f"from {Path(config['from']).name}" if config["from"] else f"from scratch, {config['size']}",
        f"{record['value']:.1%}",
        "–" if order is None else f"{order:.1%}",
        f"{record['step']:,}",
        f"{config['batch_size']} × {config['max_length']}",
        f"{record['tokens'] / 1e6:,.2f} M",
        f"{record['seconds'] / 60:,.1f} min",
        f"{record['tokens_per_second']:,.0f}",
        f"{record['parameters'] / 1e6:,.1f} M",
    ]
