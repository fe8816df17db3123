"""Transformers' own Nyströmformer as an oracle, in both directions, through files that `save_pretrained` writes."""

import pytest
import torch
import transformers
from encoders import SMALL_NYSTROMFORMER
from safetensors.torch import load_file

import nystromformer

SMALL = SMALL_NYSTROMFORMER | {"segment_means_seq_len": 64}
HEADS = [
    "NystromformerModel",
    "NystromformerForMaskedLM",
    "NystromformerForSequenceClassification",
    "NystromformerForTokenClassification",
    "NystromformerForQuestionAnswering",
    "NystromformerForMultipleChoice",
]


def their_checkpoint(folder, lively, head="NystromformerForMaskedLM", **changes):
    """A checkpoint made by Transformers, of its own random weights."""
    config = transformers.NystromformerConfig(**SMALL | changes)
    model = lively(getattr(transformers, head)(config))
    model.save_pretrained(folder)
    return model


def outputs(model, ids):
    return [x for x in model(ids).to_tuple() if torch.is_tensor(x)]


@pytest.mark.parametrize("head", HEADS)
def test_with_as_many_landmarks_as_tokens_it_equals_their_dense_branch(head, lively, ids, tmp_path):
    their_checkpoint(tmp_path, lively, head)
    # Transformers runs dense attention where the two lengths agree
    theirs = getattr(transformers, head).from_pretrained(tmp_path, segment_means_seq_len=8)
    ours = getattr(nystromformer, head).from_pretrained(tmp_path, num_landmarks=64)
    x = ids(3, 50)
    x = x[None] if head == "NystromformerForMultipleChoice" else x
    for a, b in zip(outputs(ours, x), outputs(theirs, x), strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"conv_kernel_size": 65}, {"hidden_act": "gelu", "layer_norm_eps": 1e-12}])
def test_with_scaling_over_the_batch_it_equals_their_nystrom_branch(changes, lively, ids, tmp_path):
    theirs = their_checkpoint(tmp_path, lively, **changes)
    ours = nystromformer.NystromformerForMaskedLM.from_pretrained(tmp_path, pinv_scaling="batch")
    x, types = ids(3, 64), ids(3, 64) % 2
    expected = theirs(x, token_type_ids=types).logits
    torch.testing.assert_close(ours(x, token_type_ids=types).logits, expected, rtol=0, atol=1e-4)
    exact = nystromformer.NystromformerForMaskedLM.from_pretrained(tmp_path, num_landmarks=64)
    assert (exact(x, token_type_ids=types).logits - expected).abs().max() > 1e-2, "the branch made no difference"


def test_checkpoints_have_the_hubs_names(small, tmp_path):
    nystromformer.NystromformerForMaskedLM(small(num_hidden_layers=1)).save_pretrained(tmp_path)
    layer = "nystromformer.encoder.layer.0."
    expected = {
        *(f"nystromformer.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")),
        f"{layer}attention.self.conv.weight",
        "cls.predictions.bias",
    }
    dense = [f"{layer}attention.self.{name}" for name in ("query", "key", "value")]
    dense += [layer + name for name in ("attention.output.dense", "intermediate.dense", "output.dense")]
    norms = [layer + name for name in ("attention.output.LayerNorm", "output.LayerNorm")]
    others = [
        "nystromformer.embeddings.LayerNorm",
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
    ]
    expected |= {f"{name}.{part}" for name in dense + norms + others for part in ("weight", "bias")}
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == expected  # tied weights are saved once
    assert saved[f"{layer}attention.self.conv.weight"].shape == (4, 1, 5, 1)
    assert saved["nystromformer.embeddings.position_embeddings.weight"].shape == (130, 32)


@pytest.mark.parametrize("head", HEADS)
def test_transformers_loads_our_checkpoints_if_told_to(head, small, lively, ids, tmp_path):
    ours = lively(getattr(nystromformer, head)(small(pinv_scaling="batch", segment_means_seq_len=64)))
    ours.save_pretrained(tmp_path)
    load = getattr(transformers, head).from_pretrained
    with pytest.raises(ValueError, match=r"nystromformer-torch: import nystromformer; nystromformer.register\(\)"):
        load(tmp_path)  # what it computes is another model's output, but for the settings chosen here
    theirs, info = load(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    x = ids(2, 64)
    x = x[None] if head == "NystromformerForMultipleChoice" else x
    for a, b in zip(outputs(ours, x), outputs(theirs, x), strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
