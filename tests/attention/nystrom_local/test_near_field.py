"""The near field of blocks is the dense one, seen in place by machine code of every instruction set, or in parts; and
the far blocks that are chosen are those that matter."""

import pytest
import torch
from drawn import draw, qkv
from torch.nn.functional import normalize, scaled_dot_product_attention

from nystromformer.attention import nystrom_local_attention
from nystromformer.attention.native import column_sums, library, moments
from nystromformer.attention.nystrom_local import near_field
from nystromformer.attention.nystrom_local.near_field import SeenInParts, SeenInPlace, Sequences, sees_in_place
from nystromformer.attention.nystrom_local.parts import ChosenBlocks, FarField, token_blocks

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


def test_threads_change_no_bit(machine_code):
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


@pytest.mark.parametrize("rows, keys, width", [(5, 100, 3), (64, 1100, 64), (1, 1, 1)])
def test_column_sums_are_those_of_the_softmax_matrix(machine_code, rows, keys, width):
    query, key = draw(HEADS, rows, width), draw(keys, HEADS, width, seed=1)
    logits = SCALE * query @ key.transpose(0, 1).mT
    found = column_sums(query, logits.logsumexp(2), key, SCALE, keys + 3)
    torch.testing.assert_close(found[:, :keys], torch.softmax(logits, 2).sum(1), rtol=1e-12, atol=1e-14)
    assert torch.equal(found[:, keys:], torch.zeros(HEADS, 3, dtype=torch.float64))


@pytest.mark.parametrize("length, block, width", [(40, 8, 5), (301, 32, 64), (3, 7, 1)])
def test_moments_are_those_of_the_blocks(machine_code, length, block, width):
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


def looking_far(n=256, d=16, block=16):
    """Each block of queries looks at one other block of keys, half the sequence away."""
    generator = torch.Generator().manual_seed(0)
    of_block = normalize(torch.randn(n // block, d, generator=generator, dtype=torch.float64), dim=1)
    key = 4 * of_block.repeat_interleave(block, 0) + 0.3 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    query = key.roll(n // 2, 0) * 1.5
    value = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return [x[None, None] for x in (query, key, value)]


def error(tensors, **options):
    exact = scaled_dot_product_attention(*tensors)
    out = nystrom_local_attention(*tensors, num_landmarks=16, block_size=16, core_rows=16, **options)
    return ((out - exact).norm() / exact.norm()).item()


def test_a_far_block_that_is_looked_for_is_found():
    tensors = looking_far()
    assert error(tensors, chosen_blocks=1) < 0.1 < 0.3 < error(tensors, chosen_blocks=0)


def test_with_many_blocks_those_that_core_rows_look_at_are_compared(monkeypatch):
    """As many candidates as blocks change nothing; with fewer, results stay finite and of the same shape."""
    tensors = qkv(2, 2, 130, d=4)
    mask = torch.arange(130) < torch.tensor([[130], [90]])
    sizes = {"num_landmarks": 8, "block_size": 4, "core_rows": 8, "chosen_blocks": 3}
    expected = nystrom_local_attention(*tensors, mask, **sizes)
    monkeypatch.setattr(near_field, "MOST_CANDIDATES", 32)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = nystrom_local_attention(*leaves, mask, **sizes)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(x.isfinite().all() for x in (out, *grads))
    alone = nystrom_local_attention(*(x[1:, :, :90] for x in tensors), **sizes)
    torch.testing.assert_close(out[1:, :, :90], alone)
    torch.testing.assert_close(expected[1:, :, :90], alone)


def test_a_block_that_all_look_at_stays_among_few_candidates(monkeypatch):
    query, key, value = looking_far()
    query = key[:, :, 80:81] * 1.5 + 0.1 * query  # all look at the keys of one block
    all_compared = error((query, key, value), chosen_blocks=1)
    monkeypatch.setattr(near_field, "MOST_CANDIDATES", 2)
    assert error((query, key, value), chosen_blocks=1) == pytest.approx(all_compared, abs=0.02)
