"""ONNX: one graph of the approximating branches for every batch and length, run by onnxruntime."""

import onnxruntime
import pytest
import torch

from nystromformer import NystromformerForMaskedLM
from nystromformer.attention.nystrom_local import near_field
from nystromformer.attention.nystrom_local.operation import nystrom_local_attention


@pytest.mark.slow(seconds=15)
@pytest.mark.filterwarnings("ignore")
def test_the_exported_model_gives_the_same_logits_at_any_length(small, lively, ids, tmp_path):
    model = lively(NystromformerForMaskedLM(small(num_hidden_layers=1)))
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=128)
    axes = {0: batch, 1: length}
    file = tmp_path / "model.onnx"
    torch.onnx.export(
        model,
        (ids(2, 50), torch.arange(50) < torch.tensor([[50], [33]])),
        file,
        dynamo=True,
        verbose=False,
        input_names=["input_ids", "attention_mask"],
        output_names=["logits"],
        dynamic_shapes={"input_ids": axes, "attention_mask": axes},
    )
    session = onnxruntime.InferenceSession(file)
    exact = lively(NystromformerForMaskedLM(small(num_hidden_layers=1, num_landmarks=128)))
    # fewer tokens than the 8 landmarks, as many, one more, not divisible, divisible
    for b, n in [(1, 1), (3, 5), (2, 8), (2, 9), (3, 41), (1, 64), (2, 128)]:
        x = ids(b, n, seed=n)
        for mask in (torch.ones(b, n), torch.arange(n) <= torch.arange(b)[:, None] * n // b, torch.rand(b, n) < 0.7):
            mask = mask.bool()
            mask[:, -1] = True
            (logits,) = session.run(None, {"input_ids": x.numpy(), "attention_mask": mask.numpy()})
            expected = model(x, attention_mask=mask).logits
            torch.testing.assert_close(torch.from_numpy(logits)[mask], expected[mask], rtol=1e-3, atol=1e-3)
    whole = torch.ones(2, 128, dtype=torch.bool)
    assert (exact(x, attention_mask=whole).logits - model(x, attention_mask=whole).logits).abs().max() > 0.1


class NystromLocal(torch.nn.Module):
    """Without chosen blocks and with them, in one graph. Coarse, so that few tokens are approximated."""

    def forward(self, *inputs):
        sizes = {"num_landmarks": 8, "block_size": 4, "core_rows": 16}
        return tuple(nystrom_local_attention(*inputs, **sizes, chosen_blocks=number) for number in (0, 2))


def heads(batch, length, seed):
    return tuple(torch.randn(3, batch, 2, length, 8, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.slow(seconds=35)
@pytest.mark.filterwarnings("ignore")
def test_the_exported_nystrom_local_gives_the_same_at_any_length(tmp_path, monkeypatch):
    monkeypatch.setattr(near_field, "MOST_CANDIDATES", 32)  # fewer than the longest has blocks
    attention, file = NystromLocal(), tmp_path / "attention.onnx"
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=4096)
    axes, names = {0: batch, 2: length}, ["query", "key", "value", "mask"]
    example = (*heads(2, 50, seed=0), torch.arange(50) < torch.tensor([[50], [33]]))
    torch.onnx.export(
        attention,
        example,
        file,
        dynamo=True,
        verbose=False,
        input_names=names,
        output_names=["out", "out_with_chosen_blocks"],
        dynamic_shapes=((axes, axes, axes, {0: batch, 1: length}),),
    )
    session = onnxruntime.InferenceSession(file)
    for b, n in [(1, 1), (3, 7), (2, 41), (1, 64), (2, 300)]:
        inputs = heads(b, n, seed=n)
        for mask in (torch.ones(b, n), torch.arange(n) <= torch.arange(b)[:, None] * n // b, torch.rand(b, n) < 0.7):
            mask = mask.bool()
            given = (*inputs, mask)
            outs = session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})
            for out, expected in zip(outs, attention(*given), strict=True):
                # rounding alone: over 60 masks the largest difference was 2.3e-5
                torch.testing.assert_close(torch.from_numpy(out), expected, rtol=0, atol=5e-5)
    exact = torch.nn.functional.scaled_dot_product_attention(*inputs)
    plain, with_chosen = attention(*inputs, torch.ones(b, n).bool())
    assert (plain - exact).abs().max() > 1e-2, "it is an approximation"
    assert (with_chosen - plain).abs().max() > 1e-2, "chosen blocks change it"
