"""The command `convert`, as people type it."""

import json

import pytest
import torch
import transformers

from nystromformer import NystromformerForMaskedLM
from nystromformer.cli import main

SIZES = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
         "max_position_embeddings": 32, "pad_token_id": 0}  # fmt: skip
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "long", "short", "text", "words", "with", "many", "few"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def bert(tmp_path):
    """A folder with a small BERT and its tokenizer."""
    folder = tmp_path / "bert"
    torch.manual_seed(0)
    transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).save_pretrained(folder)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt"), model_max_length=32).save_pretrained(folder)
    return folder


def refusal(capsys, *arguments):
    """The one line on stderr that a command is refused with."""
    assert main([str(argument) for argument in arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nystromformer: ")]
    assert len(lines) == 1
    return lines[0]


def test_there_and_back(bert, tmp_path, capsys):
    there, back = tmp_path / "runs" / "there", tmp_path / "back"
    assert main(["convert", str(bert), str(there), "--max-length", "100"]) == 0
    printed = capsys.readouterr().out
    for expected in (
        "32 positions tiled to 100",
        "new",
        "zero: no effect",
        "NystromformerForMaskedLM",
        "tokenizer came along",
    ):
        assert expected in " ".join(printed.split())
    model = NystromformerForMaskedLM.from_pretrained(there)
    assert model.config.max_position_embeddings == 100
    tokenizer = transformers.AutoTokenizer.from_pretrained(there)
    assert tokenizer.model_max_length == 100
    assert tokenizer("long text").input_ids == [2, 5, 7, 3]

    assert main(["convert", str(there), str(back), "--to", "bert", "--max-length", "32"]) == 0
    assert "BERT has no skip convolution" in " ".join(capsys.readouterr().out.split())
    theirs = transformers.BertForMaskedLM.from_pretrained(bert)
    again, ids = transformers.BertForMaskedLM.from_pretrained(back), torch.randint(5, 12, (2, 20))
    torch.testing.assert_close(again(ids).logits, theirs(ids).logits)
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "bert", "runs", "vocab.txt"], (
        "something was left"
    )


def test_own_models_can_be_lengthened_and_stored_smaller(bert, tmp_path):
    assert (
        main(["convert", str(bert), str(tmp_path / "a"), "--attention", "nystrom-16", "--conv-kernel-size", "0"]) == 0
    )
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--max-length", "64", "--dtype", "bfloat16"]) == 0
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["attention"], config["dtype"]) == (64, "nystrom-16", "bfloat16")
    assert config["conv_kernel_size"] == 0


def test_a_model_without_tokenizer_converts_too(bert, tmp_path, capsys):
    for path in bert.glob("*token*"):
        path.unlink()
    assert main(["convert", str(bert), str(tmp_path / "out")]) == 0
    assert "No tokenizer was copied" in capsys.readouterr().out


def test_bad_input_is_one_line_and_writes_nothing(bert, tmp_path, capsys):
    out = tmp_path / "out"
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((bert / "config.json").read_text())
    (pickled / "pytorch_model.bin").write_bytes(b"anything")
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = {
        "no folder, and no model that can be fetched from the Hub": ("nobody/nothing", out),
        "no such folder": (tmp_path / "missing", out),
        "has no config.json": (empty, out),
        "pytorch_model.bin but no model.safetensors": (pickled, out),
        "exists already: give another DST": (bert, empty),
        "'--to': 'brt': must be one of": (bert, out, "--to", "brt"),
        "--to bert needs a Nyströmformer": (bert, out, "--to", "bert"),
        "drop --attention": (bert, out, "--to", "bert", "--attention", "standard"),
        "'--dtype': 'int8': must be one of": (bert, out, "--dtype", "int8"),
        "'--max-length': '0': must be a whole number from 1": (bert, out, "--max-length", "0"),
        "Did you mean 'nystrom'": (bert, out, "--attention", "nystrm"),
        "must be odd": (bert, out, "--conv-kernel-size", "4"),
    }
    for message, arguments in cases.items():
        assert message in refusal(capsys, "convert", *arguments)
        assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert", "empty", "pickled", "vocab.txt"]


def test_damaged_weights_are_refused(bert, tmp_path, capsys):
    weights = bert / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "can't be read" in refusal(capsys, "convert", bert, tmp_path / "out")
    from safetensors.torch import load, save_file

    tensors = load(whole)
    del tensors["bert.encoder.layer.0.output.dense.bias"]
    save_file(tensors, weights, {"format": "pt"})
    message = refusal(capsys, "convert", bert, tmp_path / "out")
    assert "lacks weights of BertForMaskedLM" in message
    assert "bert.encoder.layer.0.output.dense.bias" in message
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    assert "in other shapes: bert.embeddings.LayerNorm.bias" in refusal(capsys, "convert", bert, tmp_path / "out")
    (bert / "config.json").write_text("{")
    assert "not a valid JSON file" in refusal(capsys, "convert", bert, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_help_shows_an_example(capsys):
    assert main(["convert", "--help"]) == 0
    assert "--max-length 4096" in " ".join(capsys.readouterr().out.split())
