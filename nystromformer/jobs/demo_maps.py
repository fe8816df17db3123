"""Attention maps of the demo's trained models: what `attention-map` draws, for models of our own."""

from pathlib import Path

import numpy as np

from nystromformer.attention import nystrom_attention
from nystromformer.data.lra import Splits
from nystromformer.data.lra.examples import FIRST_TOKEN, PADDING
from nystromformer.data.lra.listops_trees import TOKENS
from nystromformer.integrations.own_calls import own_calls
from nystromformer.jobs.attention_study import AttentionStudy
from nystromformer.models.lra import NystromformerForLongRangeArena
from nystromformer.training.run import MODEL

LANDMARKS = [16, 32, 64]
EXAMPLES = 8
"""Test examples of middle length, over which errors are averaged; the first is drawn."""


def write_maps(out: Path, run: Path, attention: str, splits: Splits, seed: int) -> None:
    """Exact and Nyström attention of the queries and keys in the model of a finished run."""
    model = NystromformerForLongRangeArena.from_pretrained(run / MODEL).eval()
    by_length = np.argsort(splits.test.lengths, kind="stable")
    middle = max(0, (len(by_length) - EXAMPLES) // 2)
    chosen = by_length[middle : middle + EXAMPLES]
    inputs = {name: value for name, value in splits.test.batch(chosen).items() if name != "labels"}
    words = [TOKENS[token - FIRST_TOKEN] for token in inputs["input_ids"][0].tolist() if token != PADDING]
    study = AttentionStudy(nystrom_attention, "nystrom", LANDMARKS)
    study.take([own_calls(model, **inputs)], words, f"ListOps model trained with {attention}")
    config = {
        "model": f"ListOps, trained with {attention}",
        "landmarks": LANDMARKS,
        "attention": "nystrom",
        "examples": len(chosen),
    }
    study.write(out, config, seed, layers=range(study.layers))
