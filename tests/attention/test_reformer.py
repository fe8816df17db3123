"""Reformer against Transformers' LSH attention with the same hash directions, and against dense evaluations."""

import pytest
import torch
from torch.nn import functional
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from nystromformer.attention.reformer import (
    NUM_DIRECTIONS,
    ReformerAttention,
    angular_hash,
    hash_factors,
    hash_order,
    reformer_attention,
)

HEADS, DIM, SEED = 2, 8, 5


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


def rotations(num_hashes=2, seed=0, directions=NUM_DIRECTIONS):
    return random(num_hashes, HEADS, DIM, directions, seed=seed).detach()


def split_heads(x):
    return x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


def transformers_lsh(chunk, num_hashes, num_buckets=None):
    config = ReformerConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        attention_head_size=DIM,
        lsh_attn_chunk_length=chunk,
        num_hashes=num_hashes,
        num_buckets=num_buckets,
        hash_seed=SEED,
        is_decoder=False,
        lsh_attention_probs_dropout_prob=0.0,
        max_position_embeddings=4096,
    )
    return LSHSelfAttention(config).double().eval()


def transformers_rotations(num_hashes, num_buckets):
    """The directions that Transformers draws at `hash_seed`, in our layout, with unused ones added."""
    torch.manual_seed(SEED)
    drawn = torch.randn(HEADS, DIM, num_hashes, num_buckets // 2, dtype=torch.float64)
    return functional.pad(drawn.permute(2, 0, 1, 3), (0, NUM_DIRECTIONS - num_buckets // 2), value=100.0)


def compare_with_transformers(layer, directions, length, chunk, mask=None):
    x = random(2, length, HEADS * DIM)
    expected = layer(x, None if mask is None else mask.long()).hidden_states
    query, value = split_heads(layer.query_key(x)), split_heads(layer.value(x))
    ours = (
        reformer_attention(query, query, value, mask, rotations=directions, bucket_size=chunk)
        .transpose(1, 2)
        .flatten(2)
    )
    rows = torch.ones(2, length, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(ours[rows], expected[rows], rtol=0, atol=1e-10)
    weight = random(*x.shape, seed=1).detach() * rows.unsqueeze(-1)
    leaves = [x, layer.query_key.weight, layer.value.weight]
    for mine, theirs in zip(
        torch.autograd.grad(ours, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length, num_buckets", [(32, 4), (64, 8), (240, 16), (256, 32)])
def test_equals_transformers_with_the_same_directions_in_one_round(length, num_buckets):
    layer = transformers_lsh(chunk=16, num_hashes=1)
    compare_with_transformers(layer, transformers_rotations(1, num_buckets), length, chunk=16)
    assert layer.num_buckets == num_buckets  # the number that Transformers chose; ours is the same without being told


@pytest.mark.parametrize("num_hashes", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 9, 16])
def test_equals_transformers_where_one_chunk_holds_all(length, num_hashes):
    compare_with_transformers(transformers_lsh(16, num_hashes), rotations(num_hashes), length, chunk=16)


@pytest.mark.parametrize("num_hashes", [1, 2])
def test_equals_transformers_where_one_chunk_holds_all_with_padding(num_hashes):
    mask = torch.arange(13) < torch.tensor([[13], [6]])
    compare_with_transformers(transformers_lsh(16, num_hashes), rotations(num_hashes), 13, 16, mask)


def shared_qk_logits(query):
    """q . k with k of unit length; a token sees itself only when it is alone."""
    key = query * (query.square().mean(-1, keepdim=True) + 1e-6).rsqrt() / DIM**0.5
    logits = query @ key.mT
    return logits.masked_fill(torch.eye(len(query), dtype=torch.bool), -1e5)


@pytest.mark.parametrize("num_hashes", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32])
def test_up_to_two_chunks_are_exact_shared_qk_attention(length, num_hashes):
    query, value = random(1, HEADS, length, DIM), random(1, HEADS, length, DIM, seed=1)
    out = reformer_attention(query, query, value, rotations=rotations(num_hashes), bucket_size=16)
    for h in range(HEADS):
        expected = shared_qk_logits(query[0, h]).softmax(-1) @ value[0, h]
        torch.testing.assert_close(out[0, h], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_hashes", [1, 2, 4])
@pytest.mark.parametrize("length", [33, 100, 128])
def test_equals_a_dense_evaluation_of_all_rounds(length, num_hashes):
    size = 8
    query, value = random(2, HEADS, length, DIM), random(2, HEADS, length, DIM, seed=1)
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(2)) < 0.7
    directions = rotations(num_hashes)
    out = reformer_attention(query, query, value, mask, rotations=directions, bucket_size=size)
    counts = mask.sum(1)
    orders = [hash_order(query, each, mask, counts, size) for each in directions]
    for b in range(2):
        for h in range(HEADS):
            logits = shared_qk_logits(query[b, h])
            numerator = total = 0
            for order in orders:
                chunks = order[b, h, : counts[b]].split(size)
                seen = torch.zeros(length, length, dtype=torch.bool)
                for i, chunk in enumerate(chunks):
                    seen[chunk.unsqueeze(1), torch.cat((chunks[i - 1], chunk))] = True
                weights = logits.masked_fill(~seen, -torch.inf).exp()
                numerator, total = numerator + weights @ value[b, h], total + weights.sum(-1, keepdim=True)
            rows = mask[b]
            torch.testing.assert_close(out[b, h, rows], (numerator / total)[rows], rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_buckets", [2, 16, 128])
def test_hashes_into_the_buckets_of_transformers(num_buckets):
    layer, vectors = transformers_lsh(16, 1, num_buckets), random(2, HEADS, 50, DIM)
    expected = layer._hash_vectors(vectors, 1, None)
    rotated = vectors @ transformers_rotations(1, num_buckets)[0]
    buckets = torch.full((2,), num_buckets)
    assert torch.equal(angular_hash(rotated, torch.zeros_like(buckets), buckets), expected)


def test_many_buckets_are_the_product_of_two_hashes_as_in_transformers():
    layer, vectors = transformers_lsh(16, 1, [16, 32]), random(2, HEADS, 200, DIM)
    expected = layer._hash_vectors(vectors, 1, None)
    rotated = vectors @ transformers_rotations(1, 16 + 32)[0]
    first, second = torch.tensor([16, 16]), torch.tensor([32, 32])
    ours = angular_hash(rotated, torch.zeros_like(first), first) + 16 * angular_hash(rotated, first // 2, second)
    assert torch.equal(ours, expected)


def test_long_inputs_use_both_hashes():
    length, size = 1040, 8  # 260 buckets wanted, 256 = 16 · 16 taken
    assert [x.item() for x in hash_factors(torch.tensor(length), size)] == [16, 16]
    query, directions = random(1, HEADS, length, DIM), rotations(1)[0]
    order = hash_order(query, directions, torch.ones(1, length, dtype=torch.bool), torch.tensor([length]), size)
    rotated, sixteen = query @ directions, torch.tensor([16])
    bucket = angular_hash(rotated, sixteen - 16, sixteen) + 16 * angular_hash(rotated, sixteen // 2, sixteen)
    assert bucket.unique().numel() > 150
    assert (bucket.gather(-1, order).diff() >= 0).all()


def test_hash_statistics():
    """Near vectors share a bucket often, far ones rarely, opposite ones never; a vector's length plays no part."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (functional.normalize(torch.randn(1, 1, 20000, DIM, generator=generator), dim=-1) for _ in "ab")
    directions, buckets = torch.randn(1, DIM, NUM_DIRECTIONS, generator=generator), torch.tensor([16])
    bucket = lambda y: angular_hash(y @ directions, torch.zeros_like(buckets), buckets)
    share = [(bucket(x) == bucket(x + c * noise)).float().mean().item() for c in (0.0, 0.1, 0.3, 1.0, 100.0)]
    assert share[0] == 1.0
    assert share == sorted(share, reverse=True)
    assert share[1] > 0.85
    assert abs(share[-1] - 1 / 16) < 0.02
    assert torch.equal(bucket(x), bucket(8 * x))  # a power of 2: no rounding that could decide between near buckets
    assert not (bucket(x) == bucket(-x)).any()
    assert torch.bincount(bucket(x).flatten(), minlength=16).min() > 20000 / 16 / 4


def test_gradients_pass_gradcheck_with_fixed_directions():
    query, value = random(2, HEADS, 21, DIM), random(2, HEADS, 21, DIM, seed=1)
    mask = torch.arange(21).expand(2, -1) != 4
    attend = lambda query, value: reformer_attention(query, query, value, mask, rotations=rotations(), bucket_size=4)
    assert torch.autograd.gradcheck(attend, (query, value), fast_mode=True)


def test_more_rounds_come_closer_to_full_attention():
    query, value = random(4, HEADS, 256, DIM).detach() * 3, random(4, HEADS, 256, DIM, seed=1).detach()
    full = reformer_attention(query, query, value, rotations=rotations(1), bucket_size=256)
    errors = [
        (reformer_attention(query, query, value, rotations=rotations(rounds), bucket_size=16) - full).norm().item()
        for rounds in (1, 4, 16)
    ]
    assert errors == sorted(errors, reverse=True)


def test_each_forward_draws_new_directions():
    qkv = [random(1, HEADS, 300, DIM, seed=seed).detach() for seed in range(3)]
    attention = ReformerAttention(HEADS, DIM, bucket_size=16).eval()
    assert not torch.equal(attention(*qkv), attention(*qkv))


@pytest.mark.parametrize("option", ["num_hashes", "bucket_size"])
def test_bad_options_are_refused(option):
    with pytest.raises(ValueError, match=f"{option}=0: must be at least 1"):
        ReformerAttention(HEADS, DIM, **{option: 0})
