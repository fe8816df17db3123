"""Ranks compare what they were given before they exchange any data: collectives of unlike tensors hang or mix them."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch.distributed import ProcessGroup

from nystromformer.distributed.collectives import gather, rank_and_size

TEXT_BYTES = 4096
"""Room for what one rank was given, when ranks differ and must be told how."""
ERROR_LENGTH = TEXT_BYTES // 8
PURPOSE = "agreement"


def agree(
    facts: Mapping[str, object] | Exception,
    numbers: Sequence[int],
    group: ProcessGroup | None,
    device: torch.device | str,
) -> list[list[int]]:
    """Refuse on every rank unless all have the same `facts`; give back the `numbers` of each rank.

    A rank that must refuse its own input passes the error instead: it is raised there, and the others learn of it
    instead of waiting. Costs one gathering of 8 bytes and the numbers.
    """
    refused = isinstance(facts, Exception)
    text = json.dumps({"refused": str(facts)[:ERROR_LENGTH]} if refused else dict(facts))
    rows = gather(torch.tensor([_digest(text), *numbers], device=device), group, PURPOSE).tolist()
    if any(row[0] != rows[0][0] for row in rows):
        raise _disagreement(facts, text, group, device)
    if refused:
        raise facts
    return [row[1:] for row in rows]


def differences(given: Sequence[Mapping[str, object]]) -> str:
    """What ranks do not have in common, by rank.

    >>> differences([{"batch": 2, "heads": 8}, {"batch": 3, "heads": 8}])
    'batch is 2 on rank 0 and 3 on rank 1'
    """
    names = {name: None for facts in given for name in facts}  # in order
    unlike = []
    for name in names:
        values = [facts.get(name) for facts in given]
        first = [rank for rank, value in enumerate(values) if value not in values[:rank]]  # one rank for each value
        if len(first) > 1:
            unlike.append(f"{name} is " + " and ".join(f"{values[rank]} on rank {rank}" for rank in first))
    return "; ".join(unlike)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _disagreement(
    facts: Mapping[str, object] | Exception, text: str, group: ProcessGroup | None, device: torch.device | str
) -> Exception:
    """Tell all ranks all that was given, and make the error of this one."""
    assert len(text.encode()) <= TEXT_BYTES
    encoded = torch.tensor(list(text.encode().ljust(TEXT_BYTES)), dtype=torch.uint8, device=device)
    given = [json.loads(bytes(row)) for row in gather(encoded, group, PURPOSE).tolist()]
    if isinstance(facts, Exception):
        return facts
    for rank, other in enumerate(given):
        if "refused" in other:
            return ValueError(f"rank {rank} of {rank_and_size(group)[1]} refused its input: {other['refused']}")
    return ValueError(
        f"the ranks do not agree: {differences(given)}. Only the length of a shard may differ from rank to rank; give "
        f"all ranks the same of everything else."
    )
