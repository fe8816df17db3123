"""Bad input: what was given, what is allowed, what to do."""

import pytest
import torch

from nystromformer import NystromAttention, nystrom_attention, nystrom_attention_weights

Q = torch.randn(2, 4, 10, 8)
MASK = torch.ones(2, 10, dtype=torch.bool)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"query": Q[0]}, ValueError, r"query has shape \(4, 10, 8\): must have 4 dimensions.*view"),
        ({"value": Q[:, :, :, 0]}, ValueError, r"value has shape \(2, 4, 10\): must have 4 dimensions"),
        ({"key": Q.numpy()}, TypeError, r"key is a ndarray: must be a torch.Tensor"),
        ({"key": Q[:, :2]}, ValueError, r"key has 2 examples and 2 heads, query has 2 and 4.*repeat"),
        ({"key": Q[:1]}, ValueError, r"key has 1 examples"),
        ({"key": Q[..., :4]}, ValueError, r"key has head size 4, query has 8: must be equal"),
        ({"value": Q[:, :, :7]}, ValueError, r"value has length 7, key has 10: must be equal"),
        ({"query": Q[:, :, :0]}, ValueError, r"length and head size must be at least 1"),
        ({"query": Q.long(), "key": Q.long(), "value": Q.long()}, TypeError, r"dtype torch.int64: must be float16"),
        ({"key": Q.double()}, TypeError, r"key is torch.float64, query is torch.float32: must be equal"),
        ({"mask": MASK.long()}, TypeError, r"mask has dtype torch.int64: must be torch.bool.*mask.bool\(\)"),
        ({"query_mask": MASK.float()}, TypeError, r"query_mask has dtype torch.float32: must be torch.bool"),
        ({"key_mask": MASK[:, :5]}, ValueError, r"key_mask has shape \(2, 5\): must be \(2, 10\)"),
        ({"key_mask": torch.ones(10, 10).bool()}, ValueError, r"must be \(2, 10\).*causal"),
        ({"mask": torch.ones(2, 1, 10, 10).bool()}, ValueError, r"must be \(2, 10\)"),
        ({"mask": MASK, "key_mask": MASK}, ValueError, r"key_mask was given beside mask.*give mask alone"),
        ({"mask": MASK, "query_mask": MASK}, ValueError, r"query_mask was given beside mask"),
        (
            {"mask": MASK, "query": Q[:, :, :6]},
            ValueError,
            r"6 queries and 10 keys.*give query_mask \(b, n\) and key_mask",
        ),
        ({"key_mask": MASK}, ValueError, r"key_mask was given alone.*for self-attention give mask="),
        ({"query_mask": MASK}, ValueError, r"query_mask was given alone.*all True where nothing is masked"),
        ({"key_mask": [True]}, TypeError, r"key_mask is a list"),
        ({"conv_weight": torch.ones(4, 4)}, ValueError, r"kernel size=4: must be odd.*use 3 or 5"),
        ({"conv_weight": torch.ones(3, 5)}, ValueError, r"conv_weight has shape \(3, 5\): must be \(4, k\)"),
        ({"conv_weight": torch.ones(4, 5, 1)}, ValueError, r"conv_weight has shape \(4, 5, 1\)"),
        ({"conv_weight": torch.ones(4, 5), "query": Q[:, :, :6]}, ValueError, r"6 queries and 10 keys.*leave conv"),
        ({"num_landmarks": 0}, ValueError, r"num_landmarks=0: must be at least 1; the paper uses 64"),
        ({"num_landmarks": 2.5}, TypeError, r"num_landmarks=2.5 is a float: must be a whole number"),
        ({"num_landmarks": True}, TypeError, r"num_landmarks=True is a bool"),
        ({"pinv_iterations": -1}, ValueError, r"pinv_iterations=-1: must be at least 0; the paper uses 6"),
        ({"pinv_scaling": "matrx"}, ValueError, r"pinv_scaling='matrx': must be one of 'matrix', 'batch'.*'matrix'\?"),
        (
            {"landmarks": "k-means"},
            ValueError,
            r"must be one of 'segment_means', 'kmeans', 'fps', 'grid'. Did you mean 'kmeans'\?",
        ),
        ({"pinv": "svd"}, ValueError, r"pinv='svd': must be one of 'iterative', 'exact'"),
        ({"scale": "half"}, TypeError, r"scale='half' is a str: must be a number"),
        ({"scale": float("nan")}, ValueError, r"scale=nan: must be finite"),
        ({"is_causal": True}, ValueError, r"is_causal=True: must be False.*scaled_dot_product_attention"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_operation(arguments, error, message):
    with pytest.raises(error, match=message):
        nystrom_attention(**({"query": Q, "key": Q, "value": Q} | arguments))


@pytest.mark.parametrize(
    "rows, error, message",
    [
        ([10], ValueError, r"rows=\[10\]: must lie between -10 and 9, for 10 queries"),
        ([-11], ValueError, r"must lie between"),
        ([], TypeError, r"one or more whole numbers"),
        ([0.5], TypeError, r"one or more whole numbers"),
        (0, TypeError, r"as rows=\[0\]"),
    ],
)
def test_rows_of_the_weights(rows, error, message):
    with pytest.raises(error, match=message):
        nystrom_attention_weights(Q, Q, rows)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"dim": 10, "num_heads": 4}, ValueError, r"dim=10 is not divisible by num_heads=4: change one, or give head"),
        ({"dim": 0}, ValueError, r"dim=0: must be at least 1"),
        ({"dim": 8, "num_heads": 0}, ValueError, r"num_heads=0"),
        ({"dim": 8, "head_dim": 0}, ValueError, r"head_dim=0"),
        ({"dim": 8, "conv_kernel_size": 4}, ValueError, r"conv_kernel_size=4: must be odd"),
        ({"dim": 8, "dropout": 1.0}, ValueError, r"dropout=1.0: must be at least 0 and below 1"),
        ({"dim": 8, "dropout": "no"}, TypeError, r"dropout='no' is a str"),
        ({"dim": 8, "num_landmarks": 0}, ValueError, r"num_landmarks=0"),
        ({"dim": 8, "pinv_iterations": "6"}, TypeError, r"pinv_iterations='6' is a str"),
    ],
    ids=str,
)
def test_layer_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        NystromAttention(**arguments)


def test_layer_input():
    layer, x = NystromAttention(8, num_heads=2), torch.randn(2, 10, 8)
    with pytest.raises(ValueError, match=r"x has shape \(10, 8\): must be \(batch, length, 8\)"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"context has shape \(2, 10, 4\)"):
        layer(x, context=x[..., :4])
    with pytest.raises(ValueError, match="context_mask was given without context"):
        layer(x, context_mask=MASK)
    with pytest.raises(TypeError, match="mask has dtype torch.float32: must be torch.bool"):
        layer(x, mask=MASK.float())
    with pytest.raises(TypeError, match="x is a ndarray"):
        layer(x.numpy())
