"""ONNX: one graph of the true Nyström branch for every batch and length, run by onnxruntime."""

import onnxruntime
import pytest
import torch

from nystromformer import NystromformerForMaskedLM


@pytest.mark.slow
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
