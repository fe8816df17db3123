"""Parts that need no process: who lends rows to whom, what torch alone is enough for."""

import ast
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nystromformer import distributed
from nystromformer.distributed.collectives import _Halo

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6).map(tuple)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 9))
def test_every_row_of_a_halo_is_borrowed_once_and_lent_as_it_is_borrowed(lengths, width):
    whole = list(range(sum(lengths)))
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    halos = [_Halo(width, lengths, rank) for rank in range(len(lengths))]
    for rank, (halo, start, length) in enumerate(zip(halos, starts, lengths, strict=True)):
        surroundings = [None] * (2 * width)
        for peer, places in halo.borrowed.items():
            own = whole[starts[peer] : starts[peer] + lengths[peer]]
            lent = own[halos[peer].lent[rank]]
            assert surroundings[places] == [None] * len(lent)
            surroundings[places] = lent
        wanted = [*range(start - width, start), *range(start + length, start + length + width)]
        assert surroundings == [i if length and 0 <= i < len(whole) else None for i in wanted]
        assert halo.lent.keys() == {peer for peer, other in enumerate(halos) if rank in other.borrowed}


def test_only_encoders_need_more_than_torch():
    """`nystromformer.models` brings transformers: one file imports it, and only where it is called for."""
    for path in Path(distributed.__file__).parent.glob("*.py"):
        if path.name == "encoder.py":
            continue
        for node in ast.parse(path.read_text()).body:
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            assert not module.startswith(("nystromformer.models", "nystromformer.distributed.encoder")), path.name
