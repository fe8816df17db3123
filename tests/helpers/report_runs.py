"""Runs of every kind that the report knows, made of records alone."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from nystromformer.records import Recorder

SHARED = {"batch": 1, "heads": 12, "head_dim": 64, "backward": False}


def write_bench(folder: Path, lengths=(4096, 8192), our_peak: float = 50e6, **changes: object) -> Path:
    recorder = Recorder(folder, job="bench", config={"budget": 9.0}, seed=3)
    for length in lengths:
        scale = length / 8192
        measured = (("standard", 1.5 * scale**2, 25e6 * scale), ("nystrom-64", 0.05 * scale, our_peak * scale))
        for attention, seconds, peak in measured:
            details = SHARED | {"attention": attention, "length": length} | changes
            recorder.record("peak_memory", int(peak), skipped="", failure="", **details)
            recorder.record("time", seconds, minimum=seconds, **details)
    return folder


def write_lra(folder: Path, attention: str = "nystrom-64", task: str = "listops", seed: int = 0, **changes) -> Path:
    config = {"task": task, "attention": attention, "preset": "mini", "batch_size": 32, "max_length": 256}
    recorder = Recorder(folder, job="lra", config=config | {"legacy": [], "settings": {}} | changes, seed=seed)
    recorder.record("dev_accuracy", 0.3, step=100)
    details = {"step": 600, "best_step": 100, "examples_seen": 19_200, "train_examples": 20_000, "test_examples": 2_000}
    recorder.record("test_accuracy", 0.36, majority=0.17, **details)
    return folder


def write_pretraining(folder: Path, end: bool = True, **changes: object) -> Path:
    config = {"attention": "linear", "from": None, "size": "mini", "batch_size": 16, "max_length": 512, "seed": 0}
    recorder = Recorder(folder, job="pretrain", config=config | changes, seed=0)
    for step in (10, 20):
        details = {"step": step, "seconds": step * 60.0, "tokens": step * 1000}
        recorder.record("dev_mlm_accuracy", step / 100, **details)
        recorder.record("dev_sop_accuracy", 0.5 + step / 100, **details)
        recorder.record("train_loss", 3.0, step=step)
    if end:
        result = {"step": 20, "seconds": 1200.0, "tokens": 2_000_000, "tokens_per_second": 1666.7, "parameters": 10**7}
        recorder.record("mlm_accuracy", 0.2, sop_accuracy=0.7, **result)
    return folder


def write_finetuning(folder: Path, attention: str = "nystrom-64", seed: int = 1) -> Path:
    config = {
        "task": "sst2", "model": "MiniLM", "preset": "mini", "attention": attention, "search": False, "settings": {},
        "batch_size": 32, "learning_rate": 3e-5, "max_length": 128, "epochs": 2.0,
    }  # fmt: skip
    scores = {"dev": {"accuracy": 0.91}}
    details = {"name": "accuracy", "part": "dev", "scores": scores, "dev_score": 0.91, "mean_length": 25.3, "step": 400}
    recorder = Recorder(folder, job="finetune", config=config, seed=seed)
    recorder.record("score", 0.91, train_examples=6_400, scored_examples={"dev": 872}, **details)
    return folder


def write_distillation(folder: Path, attention: str = "nystrom-64") -> Path:
    config = {
        "model": "models/MiniLM", "attention": attention, "layers": [attention] * 2, "stages": ["layers", "model"],
        "preset": "mini", "batch_size": 4, "max_length": 512, "settings": {},
    }  # fmt: skip
    recorder = Recorder(folder, job="distill", config=config, seed=0)
    for step, cosine in ((10, 0.91), (20, 0.96)):
        recorder.record("dev_cosine", cosine, step=step, core_seconds=60.0 * step)
    close = {"cosine": 0.96, "worst": 0.93, "top_1": 0.9, "top_10": 0.85, "examples": 100, "errors": [0.1, 0.2]}
    parts = {"held-out": close | {"untrained": {"cosine": 0.9, "worst": 0.8}}}
    result = {"stages": {"layers": 10, "model": 10}, "speed": {"exact": 0.2, "ours": 0.1, "length": 512}}
    recorder.record("cosine", 0.96, step=20, core_seconds=1200.0, parts=parts, **result)
    return folder


def maps(words: list[str]) -> dict[str, object]:
    """Weights of two layers and two heads: each token attends to itself in the first head, to the first in others."""
    n = len(words)
    own = bytes(255 * (query == key) for query in range(n) for key in range(n))
    first = bytes(255 * (key == 0) for _ in range(n) for key in range(n))
    levels = base64.b64encode((own + first) * 4).decode()
    return {"words": words, "layers": [0, 5], "heads": 2, "names": ["exact", "nystrom, m = 64"], "levels": levels}


def write_attention_map(
    folder: Path, picture: str = "layer-0.png", words: Sequence[str] = ("the", "cat", "sat")
) -> Path:
    config = {"model": "models/MiniLM", "text": "article.txt", "landmarks": [64]}
    recorder = Recorder(folder, job="attention-map", config=config, seed=0)
    for layer, head, value in ((0, 0, 0.2), (0, 1, 0.4), (1, 0, 0.5)):
        recorder.record("matrix_error", value, attention="nystrom", num_landmarks=64, layer=layer, head=head)
    recorder.record("picture", picture, caption="Layer 0, exact attention and nystrom")
    Image.new("RGB", (1200, 300), "purple").save(folder / picture)
    recorder.record("maps", "maps.json", caption="Weights of the first tokens")
    (folder / "maps.json").write_text(json.dumps(maps(list(words))), encoding="utf-8")
    return folder


def write_demo(folder: Path) -> Path:
    """What a demo records besides times of calls and attention maps."""
    recorder = Recorder(folder, job="demo", config={"out": "runs/demo"}, seed=0)
    for question, same in (("How are landmarks chosen?", 1.0), ("What is lost?", 0.0)):
        found = {"exact": "how-it-works › Landmarks", "ours": "how-it-works › Landmarks" if same else "fidelity"}
        recorder.record("answer", same, question=question, exact_score=0.5, our_score=0.4, **found)
    recorder.record("cosine", 0.99, worst=0.97, passages=38, attention="nystrom-local-64")
    for attention, seconds, cosine in (("standard", 9.0, 1.0), ("nystrom-local-64", 3.0, 0.99)):
        times = {"minimum": seconds, "maximum": 1.2 * seconds, "repeats": 3}
        recorder.record("document", 1.1 * seconds, attention=attention, tokens=8192, cosine=cosine, **times)
    for attention, seconds, steps, value in (("nystrom-32", 0.4, 100, 1.0), ("standard", 8.0, 5, 0.5)):
        shared = {"attention": attention, "tiles": 8192, "batch": 4, "steps": steps}
        recorder.record("step", 1.1 * seconds, minimum=seconds, maximum=2 * seconds, **shared)
        recorder.record("accuracy", value, slides=16, trained=40.0, **shared)
        recorder.record("tile_precision", value, slides=16, trained=40.0, **shared)
    Image.new("RGB", (1600, 400), "purple").save(folder / "slide.png")
    recorder.record("picture", "slide.png", caption="A slide, and where the classifier looks")
    return folder


def write_all(folder: Path) -> Path:
    """One run, or two, of every kind."""
    write_bench(folder / "bench")
    for attention in ("nystrom-64", "standard"):
        write_lra(folder / "lra" / attention, attention)
        write_pretraining(folder / "pretrain" / attention, attention=attention)
        write_finetuning(folder / "finetune" / attention, attention)
    write_distillation(folder / "distill")
    write_attention_map(folder / "attention-map")
    return folder
