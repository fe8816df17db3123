"""The near field of blocks is the dense one, seen in place by machine code of every instruction set, or in parts."""

import pytest
import torch
from drawn import draw

from nystromformer.attention.native import column_sums, library, moments
from nystromformer.attention.near_field import SeenInParts, SeenInPlace, Sequences, sees_in_place
from nystromformer.attention.nystrom_local_parts import ChosenBlocks, FarField, token_blocks

SIZES = [
    # tokens, block, width, width of values, far keys, chosen blocks
    (96, 32, 64, 64, 64, 0),
    (101, 8, 5, 3, 7, 2),
    (70, 33, 20, 40, 33, 1),
    (7, 4, 1, 1, 1, 0),
    (600, 16, 16, 16, 12, 3),
]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}
SCALE, HEADS, ROWS = 0.3, 3, 6
of_machine_code = pytest.mark.parametrize("instructions", ["avx512", "avx2", "baseline"], indirect=True)


class Input:
    """Random sequences, what stands for far keys, and places of rows that are asked for by themselves."""

    def __init__(self, n, s, d, e, m, k):
        self.size, self.g = s, -(-n // s)
        shapes = ((n, HEADS, d), (n, HEADS, d), (n, HEADS, e), (HEADS, m, d), (HEADS, m, e))
        self.leaves = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
        self.blocks = token_blocks(torch.empty(1, HEADS, n, 1, dtype=torch.float64), None, s)
        self.bias = draw(HEADS, self.g * s, seed=7)
        self.bias[:, n:] = -1e30
        self.far_bias = draw(self.g, HEADS, 1, m, seed=8)
        self.places = torch.randint(n, (HEADS, ROWS), generator=torch.Generator().manual_seed(9))
        self.chosen = self.choose(k) if k else None

    def choose(self, k):
        """Blocks two to the right and further, around the end; none of them for the first block."""
        block = torch.arange(self.g)[:, None]
        index = ((block + 2 + torch.arange(k)) % self.g).expand(HEADS, -1, -1)
        far = ((index - block).abs() > 1) & (block > 0)
        return ChosenBlocks(index, far)

    def seen(self):
        """(c, n, n): which keys each query sees as they are."""
        n = self.leaves[0].shape[0]
        block = torch.arange(n) // self.size
        seen = ((block[:, None] - block).abs() <= 1).expand(HEADS, n, n)
        if self.chosen is None:
            return seen
        index, real = self.chosen.index[:, block, :, None], self.chosen.real[:, block, :, None]  # (c n k 1)
        return seen | ((index == block) & real).any(2)

    def dense(self, query, key, value, far_key, far_value):
        n = query.shape[0]
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        far_bias = self.far_bias[torch.arange(n) // self.size, :, 0].transpose(0, 1)  # (c n m)
        hidden = torch.where(self.seen(), 0.0, -torch.inf) + self.bias[:, None, :n]
        logits = torch.cat((SCALE * query @ key.mT + hidden, SCALE * query @ far_key.mT + far_bias), dim=2)
        everything = torch.softmax(logits, 2) @ torch.cat((value, far_value), dim=1)
        head = torch.arange(HEADS)[:, None]
        of_rows = SCALE * query[head, self.places] @ key.mT + hidden[head, self.places]
        return everything.transpose(0, 1), torch.softmax(of_rows, 2) @ value, of_rows.logsumexp(2)

    def ours(self, query, key, value, far_key, far_value):
        s, dtype = self.size, query.dtype
        given = self.bias.to(dtype), self.chosen, self.blocks, SCALE
        if sees_in_place(self.blocks, query, key, value):
            near = SeenInPlace.of(Sequences(query, key, value, *given))
        else:
            fill = self.g * s - query.shape[0]
            pad = lambda x, before, after: torch.nn.functional.pad(x, (0, 0, 0, 0, before, after))
            padded = pad(query, 0, fill), pad(key, s, s + fill), pad(value, s, s + fill)
            near = SeenInParts.of(Sequences(*padded, *given))
        far = FarField(far_key, far_value, self.far_bias.to(dtype))
        return near.with_far(far, far_value)[: query.shape[0]], *near.of_rows(
            self.blocks.pick(query, self.places), self.places
        )


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_gradients_are_the_dense_ones(instructions, sizes, dtype):
    if library.instructions().startswith("none") and sizes[2] != sizes[3]:
        pytest.skip("PyTorch's kernel is given keys and values of equal width")
    given = Input(*sizes)
    upstream = [draw(*x.shape, seed=20 + i) for i, x in enumerate(given.dense(*given.leaves))]

    def results(function, leaves, upstream):
        leaves = [x.detach().requires_grad_() for x in leaves]
        outputs = function(*leaves)
        return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]

    expected = results(given.dense, given.leaves, upstream)
    found = results(given.ours, [x.to(dtype) for x in given.leaves], [x.to(dtype) for x in upstream])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=TOLERANCES[dtype] * theirs.abs().max().item())


def test_keys_in_the_layout_of_projections_are_read_where_they_lie(instructions):
    given = Input(101, 8, 6, 6, 7, 2)
    scattered = [x.repeat_interleave(2, 0)[::2] for x in given.leaves[:3]] + given.leaves[3:]
    for ours, theirs in zip(given.ours(*scattered), given.ours(*given.leaves), strict=True):
        assert torch.equal(ours, theirs)


@of_machine_code
def test_threads_change_no_bit(instructions):
    given = Input(600, 16, 16, 16, 12, 3)

    def results(threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaves = [x.float().requires_grad_() for x in given.leaves]
            outputs = given.ours(*leaves)
            return [*outputs, *torch.autograd.grad([x.square().sum() for x in outputs], leaves)]
        finally:
            torch.set_num_threads(before)

    assert all(map(torch.equal, results(1), results(3)))


@of_machine_code
@pytest.mark.parametrize("rows, keys, width", [(5, 100, 3), (64, 1100, 64), (1, 1, 1)])
def test_column_sums_are_those_of_the_softmax_matrix(instructions, rows, keys, width):
    query, key = draw(HEADS, rows, width), draw(keys, HEADS, width, seed=1)
    logits = SCALE * query @ key.transpose(0, 1).mT
    found = column_sums(query, logits.logsumexp(2), key, SCALE, keys + 3)
    torch.testing.assert_close(found[:, :keys], torch.softmax(logits, 2).sum(1), rtol=1e-12, atol=1e-14)
    assert torch.equal(found[:, keys:], torch.zeros(HEADS, 3, dtype=torch.float64))


@of_machine_code
@pytest.mark.parametrize("length, block, width", [(40, 8, 5), (301, 32, 64), (3, 7, 1)])
def test_moments_are_those_of_the_blocks(instructions, length, block, width):
    tokens = draw(length, HEADS, width)
    parts = tokens.split(block)
    for found, power in zip(moments(tokens, block), (1, 2), strict=True):
        expected = torch.stack([part.pow(power).sum(0) for part in parts], dim=1)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_wrong_number_stays_with_the_blocks_that_see_it(instructions):
    given = Input(101, 8, 6, 6, 7, 0)
    given.leaves[1][50, 0, 0] = torch.nan  # in block 6 of the first head
    everything = given.ours(*given.leaves)[0]
    wrong = everything.isnan().any(2)  # (n c)
    block = torch.arange(101) // 8
    assert torch.equal(wrong[:, 0], (block - 6).abs() <= 1)
    assert not wrong[:, 1:].any()
