"""The script that distills Whisper's encoder: a whole run on a small model, and what it says of it."""

import importlib
import json
import shutil

import pytest
import torch
from small_articles import BENCHMARKS, run_script
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import WhisperConfig, WhisperForConditionalGeneration

WORDS = ["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>", "a", "b", "c"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("distill_speech")


@pytest.fixture
def small_whisper(monkeypatch):
    """In place of the wheel's."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    wheel = importlib.import_module("whisper_wheel")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "vocab_size": len(WORDS), "init_std": 0.2}
    sizes |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 1}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **ids)).eval()
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    monkeypatch.setattr(wheel, "load_whisper", lambda folder: wheel.Whisper(model, tokenizer, [4], [0]))


def test_closeness_counts_equal_transcripts_and_looks_at_frames_where_somebody_speaks(script):
    encoded = torch.randn(2, 100, 4, generator=torch.Generator().manual_seed(0))
    other = encoded.clone()
    other[:, 50:] *= -1  # after the first second
    spoken = [script.Spoken("a b", "en-us", None, seconds=1.0)] * 2
    exact, ours = script.Heard(encoded, ["a b", "a c"]), script.Heard(other, ["a b", "a d"])
    found = script.closeness(exact, ours, spoken)
    assert found["speech"] == pytest.approx(1, abs=1e-5)
    assert found["cosine"] == pytest.approx(0, abs=1e-5)
    assert (found["same"], found["sentences"], found["words_changed"]) == (1, 2, 0.25)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_a_student_is_nearer_to_its_teacher_than_before(small_whisper, tmp_path, monkeypatch):
    out = tmp_path / "out"
    given = ("--model", tmp_path, "--sentences", 1, "--only", "nystrom-64", "--out", out)
    run_script(monkeypatch, "distill_speech.py", *given)
    (record,) = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert record["config"]["steps"] == 12  # six voices, two stages
    assert record["after"]["cosine"] > record["before"]["cosine"]
    assert record["value"] == record["after"]["cosine"]
    text = (out / "table.md").read_text()
    assert f"{record['value']:.4f}" in text
    run_script(monkeypatch, "distill_speech.py", *given)  # done already: nothing is added
    assert len((out / "records.jsonl").read_text().splitlines()) == 1
