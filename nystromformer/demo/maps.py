"""The paper's figure on real text: attention matrices of MiniLM's heads, exact and approximated."""

from pathlib import Path

from nystromformer.bench.attention_study import AttentionStudy
from nystromformer.demo.search import Encoder

KINDS = [("nystrom", 64), ("nystrom-local", 64)]


def draw_attention_maps(out: Path, encoder: Encoder, title: str, text: str, tokens: int, seed: int) -> None:
    batch = encoder.tokenizer([text], truncation=True, max_length=tokens, return_tensors="pt")
    study = AttentionStudy(KINDS)
    study.look_at(encoder.model, encoder.tokenizer, [batch])
    config = {"model": "MiniLM-L6", "text": title, "kinds": [f"{name}-{m}" for name, m in KINDS]}
    study.write(out, config, seed, layers=sorted({0, study.layers // 2, study.layers - 1}))
