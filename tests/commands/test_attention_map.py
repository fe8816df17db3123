"""`nystromformer attention-map` on the command line."""

import base64
import json

import pytest
import torch
from encoders import TEXT, build
from transformers import BertTokenizer, GPT2Config, GPT2Model, LongformerConfig, LongformerModel

from nystromformer import NystromformerConfig, NystromformerModel
from nystromformer.bench.attention_study import AttentionStudy
from nystromformer.cli import main
from nystromformer.commands.attention_map import chosen, load, read_examples, tokenize
from nystromformer.records import Recorder

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "birds"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small BERT with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    BertTokenizer(str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)
    build("bert").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(WORDS * 6) + "\n\nthe cat sat\n")
    return path


def records(out):
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


def test_writes_pictures_table_and_records(folder, text, tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["attention-map", "--model", str(folder), "--text", str(text), "--landmarks", "80,4", "--layer", "1"]
    assert main([*arguments, "--out", str(out)]) == 0
    assert "m = 4: matrix" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "records.jsonl", "table.md", "errors.png", "layer-1.png", "maps.json"}
    *found, layer, all_layers, maps = records(out)
    assert [record["value"] for record in (layer, all_layers, maps)] == ["layer-1.png", "errors.png", "maps.json"]
    assert layer["caption"].endswith("layer 1, exact attention and nystrom")
    assert len(found) == 2 * 2 * 2 * 4  # metrics, landmarks, layers, heads
    assert {"job", "config", "metric", "value", "seed", "versions", "machine", "layer", "head"} <= found[0].keys()
    errors = {m: [r["value"] for r in found if r["num_landmarks"] == m] for m in (4, 80)}
    assert min(errors[4]) > 0.01
    assert max(errors[80]) < 1e-5  # as many landmarks as tokens
    assert main([*arguments, "--out", str(out)]) == 2
    assert "holds the records of a job already" in capsys.readouterr().err


def test_sentences_count_alike_alone_and_in_a_batch(folder, text, tmp_path):
    def errors(examples):
        study = AttentionStudy([("nystrom", 3)])
        study.look_at(network, tokenizer, tokenize(network, tokenizer, examples, 512))
        study.measure(Recorder(tmp_path, job="test", config={}), lambda label: None)
        return torch.stack([study.matrix["nystrom", 3], study.output["nystrom", 3]])

    network, tokenizer = load(str(folder))
    first, second = examples = read_examples(text, sentences=True)
    assert len(read_examples(text, sentences=False)) == 1
    torch.testing.assert_close(errors(examples), (errors([first]) + errors([second])) / 2, atol=1e-4, rtol=1e-4)


def test_layers_and_heads_are_chosen_by_number_or_name():
    assert chosen("3,1", "--layer", 4, [0]) == [1, 3]
    assert chosen("all", "--layer", 3, [0]) == [0, 1, 2]
    assert chosen("auto", "--layer", 3, [0, 1, 2, 0]) == [0, 1, 2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "no/such/folder"], "no/such/folder: no such folder"),
        (["--text", "no/such/file"], "--text no/such/file: does not exist; give a file"),
        (["--landmarks", "0"], "--landmarks '0': must be whole numbers separated by commas, each from 1 to"),
        (["--landmarks", "many"], "--landmarks 'many': must be whole numbers"),
        (["--layer", "2"], "--layer '2': must be whole numbers separated by commas, each from 0 to 1"),
        (["--head", "1,9"], "--head '1,9': must be whole numbers separated by commas, each from 0 to 3"),
        (["--head", "first"], "--head 'first': must be whole numbers"),
        (["--attention", "nystrm"], "'--attention': 'nystrm': must be one of nystrom, nystrom-local"),
        (["--max-length", "2000"], "'--max-length': '2000': must be a whole number from 1 to 1,024"),
        (["--dtype", "int8"], "'--dtype': 'int8': must be one of"),
        (["--device", "toaster"], "device 'toaster': must be one of cpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(folder, text, arguments, message, tmp_path, capsys):
    out = tmp_path / "run"
    capsys.readouterr()
    common = ["attention-map", "--model", str(folder), "--text", str(text), "--out", str(out)]
    assert main([*common, *arguments]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nystromformer: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not out.exists()


@pytest.mark.parametrize("content", ["", " \n\n", b"\xff\xfe\x00"], ids=["empty", "blank", "binary"])
def test_text_that_is_none_is_refused(folder, content, tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["attention-map", "--model", str(folder), "--text", str(path), "--out", str(tmp_path / "run")]) == 2
    assert "holds no text" in (said := capsys.readouterr().err) or "must be UTF-8" in said


@pytest.mark.parametrize(
    "model, message",
    [
        (lambda: GPT2Model(GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=50)), "causal"),
        (lambda: LongformerModel(LongformerConfig(**TEXT, attention_window=4)), "never calls Transformers' attention"),
        (lambda: NystromformerModel(NystromformerConfig(**TEXT)), "is a Nyströmformer"),
    ],
    ids=["gpt2", "longformer", "nystromformer"],
)
def test_models_that_have_no_such_attention_are_refused(folder, text, model, message, tmp_path, capsys):
    model().save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text((folder / name).read_text())
    arguments = ["--model", str(tmp_path / "model"), "--text", str(text), "--out", str(tmp_path / "run")]
    assert main(["attention-map", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_weights_are_kept_for_the_report(folder, text, tmp_path):
    arguments = ["--model", str(folder), "--text", str(text), "--landmarks", "4", "--layer", "1", "--max-length", "30"]
    assert main(["attention-map", *arguments, "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "maps.json").read_text())
    assert kept["layers"] == [1]
    assert kept["names"] == ["exact", "nystrom, m = 4"]
    n = len(kept["words"])
    assert 3 < n <= 30
    levels = torch.frombuffer(bytearray(base64.b64decode(kept["levels"])), dtype=torch.uint8)
    exact = (levels.view(1, 2, kept["heads"], n, n)[0, 0].double() / 255) ** 2
    torch.testing.assert_close(exact.sum(dim=-1), torch.ones(kept["heads"], n).double(), rtol=0, atol=0.05)
