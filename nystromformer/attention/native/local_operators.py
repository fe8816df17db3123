"""The parts of Nyström attention with an exact near field as operators of PyTorch, like those of `thin_operators`.

Queries, keys and values are (l, c, d), the sequence first, in blocks of `block` tokens, of which the last may have
fewer. Each block sees itself, its neighbours, and the blocks `chosen` (c, blocks, k) for it, -1 where there is none.
`bias` (c, l or more) is that of each key.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nystromformer.attention.native.library import call, large_pages
from nystromformer.attention.native.thin_operators import columns_backward, in_rows, padded, register

_NONE = (0, 0, 0, 0)


def _sequence(x: Tensor) -> tuple[int, ...]:
    """Where (l, c, width) begins, and its strides."""
    return x.data_ptr(), 0, x.stride(1), x.stride(0)


def _rows(x: Tensor) -> tuple[int, ...]:
    """The same for (c, rows, width)."""
    return x.data_ptr(), 0, x.stride(0), x.stride(1)


def _row(x: Tensor | None) -> tuple[int, ...]:
    """The same for (c, width)."""
    return _NONE if x is None else (x.data_ptr(), 0, x.stride(0), 0)


def column_sums(query: Tensor, lse: Tensor, key: Tensor, scale: float, places: int) -> Tensor:
    """Sums (c, places) of columns of softmax(scale·Q Kᵀ), whose rows have the log-sum-exps `lse` (c, r), for `query`
    (c, r, d) and `key` (l, c, d); zeros for places from l on."""
    query, lse, key = in_rows(query), in_rows(lse), in_rows(key)
    sums = lse.new_zeros(lse.shape[0], places)
    sizes = (*query.shape[:2], key.shape[0], query.shape[2])
    call("column_sums", query.dtype, scale, *sizes, *_rows(query), *_row(lse), *_sequence(key), *_row(sums))
    return sums


def moments(tokens: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Sums and sums of squares (c, blocks, d) over the blocks of `tokens` (l, c, d)."""
    tokens = in_rows(tokens)
    sums, squares = _moments_shapes(tokens, block)
    sizes = (*tokens.shape[:2], block, tokens.shape[2])
    call("moments", tokens.dtype, 0.0, *sizes, *_sequence(tokens), *_rows(sums), *_rows(squares))
    return sums, squares


def _moments_shapes(tokens: Tensor, block: int) -> tuple[Tensor, Tensor]:
    length, heads, width = tokens.shape
    shape = (heads, (length + block - 1) // block, width)
    return tokens.new_empty(shape), tokens.new_empty(shape)


def _keys(
    key: Tensor, value: Tensor, bias: Tensor, chosen: Tensor | None, block: int
) -> tuple[list[Tensor], tuple[int, ...], tuple[int, ...]]:
    """Tensors that must stay alive during a call, the sizes that it begins with, and where the keys are."""
    held = [in_rows(key), in_rows(value), in_rows(bias)]
    index = 0
    if chosen is not None:
        held.append(chosen.contiguous())
        index = held[-1].data_ptr()
    sizes = (*key.shape[:2], block, key.shape[2], value.shape[2], 0 if chosen is None else chosen.shape[2])
    return held, sizes, (*_sequence(held[0]), *_sequence(held[1]), *_row(held[2]), index)


def near(*given: Any) -> tuple[Tensor, Tensor]:
    """Attention of single queries (c, r, d), from `places` (c, r) of the sequence, to what their blocks see, and its
    log-sum-exp (c, r)."""
    query, places, key, value, bias, chosen, block, scale = given
    held, sizes, of_keys = _keys(key, value, bias, chosen, block)
    query, places = in_rows(query), places.contiguous()
    out, lse = _near_shapes(query, places, key, value)
    numbers = (*sizes, 0, *_rows(query), *of_keys, *_NONE * 3, *_rows(out), *_row(lse))
    call("near_forward", query.dtype, scale, *numbers, places.shape[1], places.data_ptr())
    del held
    return out, lse


def _near_shapes(query: Tensor, places: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(*query.shape[:2], value.shape[2]), query.new_empty(query.shape[:2])


def near_backward(grad: Tensor, grad_lse: Tensor | None, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. `given`: the tensors that `near` took, what it gave, and its two numbers."""
    key, value = given[2:4]
    return _near_gradients(grad, grad_lse, *given, into=(key.new_zeros(key.shape), value.new_zeros(value.shape)))


def _near_gradients(
    grad: Tensor, grad_lse: Tensor | None, *given: Any, into: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    query, places, key, value, bias, chosen, out, lse, block, scale = given
    held, sizes, of_keys = _keys(key, value, bias, chosen, block)
    query, places, out, lse, grad = in_rows(query), places.contiguous(), in_rows(out), in_rows(lse), in_rows(grad)
    grad_lse = None if grad_lse is None else in_rows(grad_lse)
    grads = (query.new_empty(query.shape), *into)
    numbers = (*sizes, 0, *_rows(query), *of_keys, *_NONE * 3, *_rows(out), *_row(lse))
    of_grads = (*_rows(grad), *_row(grad_lse), *_rows(grads[0]), *_sequence(grads[1]), *_sequence(grads[2]))
    call("near_backward", query.dtype, scale, *numbers, places.shape[1], places.data_ptr(), *of_grads)
    del held
    return grads


def _near_backward_shapes(
    grad: Tensor, grad_lse: Tensor | None, query: Tensor, places: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def local(*given: Any) -> tuple[Tensor, Tensor]:
    """Attention (l, c, e) of all queries to what their blocks see and to `far_key` and `far_value` (c, m, d) with
    `far_bias` (blocks, c, m), and its log-sum-exp (c, l)."""
    *tensors, block, scale = given
    out, lse = results = _local_shapes(*tensors)
    held, numbers = _local_numbers(block, *tensors + list(results))
    call("local_forward", out.dtype, scale, *numbers)
    del held
    return out, lse


def _local_numbers(
    block: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    chosen: Tensor | None,
    far_key: Tensor,
    far_value: Tensor,
    far_bias: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[list[Tensor], tuple[int, ...]]:
    held, sizes, of_keys = _keys(key, value, bias, chosen, block)
    query, far_key, far_value, far_bias, out, lse = map(in_rows, (query, far_key, far_value, far_bias, out, lse))
    held += [query, far_key, far_value, far_bias, out, lse]
    far = (*_rows(far_key), *_rows(far_value), far_bias.data_ptr(), far_bias.stride(0), far_bias.stride(1), 0)
    return held, (*sizes, far_key.shape[1], *_sequence(query), *of_keys, *far, *_sequence(out), *_row(lse))


def _local_shapes(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    length, heads = query.shape[:2]
    return large_pages(query.new_empty(length, heads, value.shape[2])), query.new_empty(heads, length)


def local_backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, far_key and far_value. `given`: the tensors that `local` took, what it gave, and
    its two numbers."""
    *tensors, block, scale = given
    held, numbers = _local_numbers(block, *tensors)
    grad, grads = in_rows(grad), _local_backward_shapes(grad, *tensors)
    grads[1].zero_()  # what several blocks see gets a sum
    grads[2].zero_()
    of_grads = (*_sequence(grad), *(i for x in grads[:3] for i in _sequence(x)), *_rows(grads[3]), *_rows(grads[4]))
    call("local_backward", grad.dtype, scale, *numbers, *of_grads)
    del held
    return grads


def _local_backward_shapes(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    query, key, value, _, _, far_key, far_value = given[:7]
    return tuple(large_pages(x.new_empty(x.shape)) for x in (query, key, value, far_key, far_value))


def far(key: Tensor, value: Tensor, *heavy: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Means (c, segments, d) over the segments of `key` and `value` without the heavy keys in `place` (c, k), where
    those are `real`, then the heavy keys; and for each block the log of how many keys each is, (blocks, c, m)."""
    far_key, far_value, bias = results = _far_shapes(key, value, *heavy)
    key, value = in_rows(key), in_rows(value)
    held, numbers = _far_numbers((key, value, far_key, far_value), *heavy)
    call("far_forward", key.dtype, 0.0, *numbers, bias.data_ptr())
    del held
    return results


def _far_shapes(key: Tensor, value: Tensor, *heavy: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, place, _, _, segments, _, blocks = heavy
    heads, m = key.shape[1], segments + place.shape[1]
    new = key.new_empty
    return new(heads, m, key.shape[2]), new(heads, m, value.shape[2]), new(blocks, heads, m)


def _far_numbers(tensors: tuple[Tensor, ...], *heavy: Any) -> tuple[list[Tensor], tuple[int, ...]]:
    key, value, far_key, far_value = tensors
    valid, place, real, chosen, segments, block, blocks = heavy
    held = [x.contiguous() for x in (valid, place, real)]
    addresses = [x.data_ptr() for x in held]
    if chosen is not None:
        held.append(chosen.contiguous())
    length, heads, width = key.shape
    sizes = (length, heads, heads // valid.shape[0], segments, place.shape[1], width, value.shape[2], block, blocks)
    seen = (0, *addresses, 0) if chosen is None else (chosen.shape[2], *addresses, held[-1].data_ptr())
    return held, (*sizes, *seen, *_sequence(key), *_sequence(value), *_rows(far_key), *_rows(far_value))


def far_backward(grad_key: Tensor, grad_value: Tensor, length: int, *heavy: Any) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values (length, c, d)."""
    grads = _far_backward_shapes(grad_key, grad_value, length)
    _far_gradients(grad_key, grad_value, *heavy, into=grads, adds=False)
    return grads


def _far_gradients(grad_key: Tensor, grad_value: Tensor, *heavy: Any, into: tuple[Tensor, Tensor], adds: bool) -> None:
    grad_key, grad_value = in_rows(grad_key), in_rows(grad_value)
    held, numbers = _far_numbers((*into, grad_key, grad_value), *heavy)
    call("far_backward", grad_key.dtype, 0.0, *numbers, int(adds))
    del held


def _far_backward_shapes(grad_key: Tensor, grad_value: Tensor, length: int, *_: Any) -> tuple[Tensor, Tensor]:
    first, second = (x.new_empty(length, x.shape[0], x.shape[2]) for x in (grad_key, grad_value))
    return first, second


def ridge(*given: Any) -> tuple[Tensor, ...]:
    """The values (c, m, e) that `nystrom_local.parts.corrected_values` gives and, where `keep`, what the backward
    needs: weights of far keys, the near share, what is left, and the Cholesky factor."""
    *tensors, ridge, _ = given
    results = _ridge_shapes(*given)
    held, numbers = _ridge_numbers(*tensors, *results)
    call("ridge_forward", results[0].dtype, ridge, *numbers)
    del held
    return results


def _ridge_shapes(*given: Any) -> tuple[Tensor, ...]:
    _, _, _, far_logits, far_value, _, keep = given
    heads, count, m = far_logits.shape
    mp, ep = padded(m), padded(far_value.shape[2])
    shapes = ((count, mp), (count,), (count, ep), (m, mp)) if keep else ((0, mp), (0,), (0, ep), (0, mp))
    return far_value.new_empty(far_value.shape), *(far_value.new_empty(heads, *shape) for shape in shapes)


def _ridge_numbers(
    exact: Tensor, near_out: Tensor, near_lse: Tensor, far_logits: Tensor, far_value: Tensor, W: Tensor, *kept: Tensor
) -> tuple[list[Tensor], tuple[int, ...]]:
    heads, count, m = far_logits.shape
    held = [*map(in_rows, (exact, near_out, near_lse, far_logits, far_value, W)), *kept]
    exact, near_out, near_lse, far_logits, far_value, W = held[:6]
    of_kept = _NONE * 4 if kept[1].numel() == 0 else (*_rows(kept[0]), *_row(kept[1]), *_rows(kept[2]), *_rows(kept[3]))
    tensors = (*_rows(exact), *_rows(near_out), *_row(near_lse), *_rows(far_logits), *_rows(far_value), *_rows(W))
    return held, (heads, count, m, far_value.shape[2], kept[0].shape[2], kept[2].shape[2], *tensors, *of_kept)


def ridge_backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Gradients of all five tensors that `ridge` took. `given`: these, what it gave, and its number."""
    *tensors, ridge = given
    held, numbers = _ridge_numbers(*tensors)
    grad, grads = in_rows(grad), _ridge_backward_shapes(grad, *tensors)
    exact, near_out, near_lse, logits, value = grads
    of_grads = (*_rows(exact), *_rows(near_out), *_row(near_lse), *_rows(logits), *_rows(value))
    call("ridge_backward", grad.dtype, ridge, *numbers, *_rows(grad), *of_grads)
    del held
    return grads


def _ridge_backward_shapes(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in given[:5])


@dataclass(frozen=True)
class Core:
    """What `fields_backward` needs of core rows, the queries that the values of the far field are fitted to."""

    query: Tensor  # (c, r, d)
    places: Tensor  # (c, r): where in the sequence they are
    head: Tensor  # (c, 1): 0, 1, …
    bias: Tensor  # (c, l or more): of each key where heavy keys are none
    exact: tuple[Tensor, Tensor]  # attention (c, r, e) to all keys, and its log-sum-exp (c, r)
    near: tuple[Tensor, Tensor]  # the same to the keys that their blocks see
    logits: Tensor  # (c, r, m): of the far field
    far_value: Tensor  # (c, m, e): its values before they were fitted
    kept: tuple[Tensor, ...]  # what `ridge` keeps
    heavy: tuple[Any, ...]  # what `far` takes but keys and values
    ridge: float


def fields_backward(grad: Tensor, core: Core, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value through all that was made of them: `given` is what `local_backward` takes.

    Each large gradient is made once, and added to where it lies.
    """
    _, key, value, bias, chosen, far_key, W, _, _, _, block, scale = given
    grad_query, grad_key, grad_value, grad_far_key, grad_W = local_backward(grad, *given)
    into = grad_key, grad_value
    of_fit = *core.near, core.logits, core.far_value, W, *core.kept
    of_exact, of_near, of_near_lse, of_logits, of_far_value = ridge_backward(grad_W, core.exact[0], *of_fit, core.ridge)
    of_core = torch.bmm(of_logits, far_key).mul_(scale)
    grad_far_key.baddbmm_(of_logits.mT, core.query, alpha=scale)
    _far_gradients(grad_far_key, of_far_value, *core.heavy, into=into, adds=True)
    keys = key, value, bias, chosen
    of_core += _near_gradients(
        of_near, of_near_lse, core.query, core.places, *keys, *core.near, block, scale, into=into
    )[0]
    exact, lse = (x[None] for x in core.exact)
    first, second, *sums = (x.transpose(0, 1)[None] for x in (key, value, *into))
    present = core.bias[None, :, None, : key.shape[0]]
    of_all_keys = core.query[None], first, second, present, exact, lse, scale, None, (sums[0], sums[1])
    of_core += columns_backward(of_exact[None], None, *of_all_keys)[0][0]
    grad_query.index_put_((core.places, core.head), of_core, accumulate=True)
    return grad_query, grad_key, grad_value


_KEYS = "Tensor key, Tensor value, Tensor bias, Tensor? chosen"
_FAR = "Tensor far_key, Tensor far_value, Tensor far_bias"
_BOTH = "int block, float scale"
_FIVE = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
register(
    "column_sums(Tensor query, Tensor lse, Tensor key, float scale, SymInt places) -> Tensor",
    column_sums,
    lambda query, lse, key, scale, places: lse.new_empty(lse.shape[0], places),
)
register("moments(Tensor tokens, int block) -> (Tensor, Tensor)", moments, _moments_shapes)
register(f"near(Tensor query, Tensor places, {_KEYS}, {_BOTH}) -> (Tensor, Tensor)", near, _near_shapes)
register(
    f"near_backward(Tensor grad, Tensor? grad_lse, Tensor query, Tensor places, {_KEYS}, Tensor out, Tensor lse, "
    f"{_BOTH}) -> (Tensor, Tensor, Tensor)",
    near_backward,
    _near_backward_shapes,
)
register(f"local(Tensor query, {_KEYS}, {_FAR}, {_BOTH}) -> (Tensor, Tensor)", local, _local_shapes)
register(
    f"local_backward(Tensor grad, Tensor query, {_KEYS}, {_FAR}, Tensor out, Tensor lse, {_BOTH}) -> {_FIVE}",
    local_backward,
    _local_backward_shapes,
)
_RIDGE = "Tensor exact, Tensor near_out, Tensor near_lse, Tensor far_logits, Tensor far_value"
register(f"ridge({_RIDGE}, float ridge, bool keep) -> {_FIVE}", ridge, _ridge_shapes)
register(
    f"ridge_backward(Tensor grad, {_RIDGE}, Tensor W, Tensor A, Tensor share, Tensor left, Tensor factor, float ridge) "
    f"-> {_FIVE}",
    ridge_backward,
    _ridge_backward_shapes,
)
_HEAVY = "Tensor valid, Tensor place, Tensor real, Tensor? chosen, int segments, int block, SymInt blocks"
register(f"far(Tensor key, Tensor value, {_HEAVY}) -> (Tensor, Tensor, Tensor)", far, _far_shapes)
register(
    f"far_backward(Tensor grad_key, Tensor grad_value, SymInt length, {_HEAVY}) -> (Tensor, Tensor)",
    far_backward,
    _far_backward_shapes,
)
