"""Where `nystrom-local` helps and where it can't: attention of known make, against exact attention. Half a minute.

    python benchmarks/nystrom_local_limits.py --out results/nystrom-local/limits

Each query puts a given share of its weight on one token and spreads the rest. That token is a neighbor, one that all
queries share, a far one where the next query looks at the next token, or any one, drawn for each query. And queries and
keys without any order: normal noise, with logits that spread more and more. The figure is ‖Ŝ V − S V‖ / ‖S V‖, with
values that are noise, mean over heads.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from nystromformer.attention import longformer_attention, nystrom_attention, nystrom_local_attention
from nystromformer.files import write_text
from nystromformer.integrations.probe import relative_error
from nystromformer.records import Recorder, new_job_folder, read_records, write_config
from nystromformer.report.table import Table

HEADS, LENGTH, WIDTH = 8, 1024, 64
NEIGHBOR, SHARED = 5, 300
SHARES = (0.1, 0.5, 0.9)
SPREADS = (0.5, 1.0, 2.0, 4.0, 8.0)
ATTENTIONS = {
    "nystrom-64": nystrom_attention,
    "nystrom-local-64": nystrom_local_attention,
    "nystrom-local-64, ridge 0.1": partial(nystrom_local_attention, ridge=0.1),
    "nystrom-local-64, 3 chosen": partial(nystrom_local_attention, chosen_blocks=3),
    "[CLS] global + longformer-257": lambda *tensors: longformer_attention(*tensors, window=257, global_tokens=1),
    "mean of values": lambda query, key, value: value.mean(2, keepdim=True).expand_as(value),
}


def looking_at(target: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries and keys (1, h, n, d) where query i puts about `share` of its weight on key `target[i]`."""
    key = normalize(torch.randn(1, HEADS, LENGTH, WIDTH, generator=generator), dim=3)
    # a logit of a beside n − 1 that are 0 gets the weight eᵃ / (eᵃ + n − 1)
    logit = torch.logit(torch.tensor(share)) + torch.tensor(LENGTH - 1.0).log()
    own = torch.randn(key.shape, generator=generator)  # no two queries alike: logits move by about 1
    return logit * WIDTH**0.5 * key[:, :, target] + WIDTH**0.5 * own, key


def cases(generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor]]:
    place = torch.arange(LENGTH)
    targets = {
        "a neighbor": (place + NEIGHBOR).clamp(max=LENGTH - 1),
        "one token that all look at": torch.full_like(place, SHARED),
        "a far token of its own": (place + LENGTH // 2) % LENGTH,
    }
    for kind, target in targets.items():
        for share in SHARES:
            yield f"{100 * share:.0f} % on {kind}", *looking_at(target, share, generator)
    for spread in SPREADS:
        query, key = torch.randn(2, 1, HEADS, LENGTH, WIDTH, generator=generator) * spread**0.5
        yield f"noise, logits of deviation {spread:g}", query, key
    for share in SHARES:
        anywhere = torch.randperm(LENGTH, generator=generator)
        yield f"{100 * share:.0f} % on a token drawn for it", *looking_at(anywhere, share, generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/nystrom-local-limits"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        new_job_folder(options.out)
    except ValueError as error:
        parser.error(str(error))
    config = {"heads": HEADS, "length": LENGTH, "width": WIDTH}
    write_config(options.out, config)
    recorder = Recorder(options.out, job="nystrom_local_limits", config=config, seed=options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    for case, query, key in cases(generator):
        value = torch.randn(query.shape, generator=generator)
        exact = scaled_dot_product_attention(query, key, value)
        for name, attend in ATTENTIONS.items():
            error = relative_error(attend(query, key, value), exact).mean().item()
            recorder.record("output_error", error, case=case, attention=name)
    records = list(read_records(options.out))
    errors = {(r["case"], r["attention"]): r["value"] for r in records}
    rows = [
        [case, *(f"{errors[case, name]:.2f}" for name in ATTENTIONS)] for case in dict.fromkeys(c for c, _ in errors)
    ]
    table = Table(["a query's weight", *ATTENTIONS], rows).markdown()
    write_text(options.out / "table.md", table + "\n")
    print(table)


if __name__ == "__main__":
    main()
