"""The command `pretrain`, as people type it."""

import json
import shutil
import signal
import time

import pytest
import torch
from corpora import VOCABULARY, texts, write_json_lines, write_vocabulary
from forked import COMMAND, start
from safetensors.torch import load_file
from training_runs import Killed
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from nystromformer import NystromformerForPreTraining
from nystromformer.cli import main
from nystromformer.records import read_records
from nystromformer.report.figures import pretraining_runs
from nystromformer.training.shared.callbacks import Clock


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder with a corpus, a vocabulary and a small BERT."""
    folder = tmp_path_factory.mktemp("shared")
    write_json_lines(folder / "a.jsonl", texts(60))
    (folder / "b.txt").write_text("\n\n".join(texts(20, seed=1)))
    vocabulary = write_vocabulary(folder)
    bert = BertConfig(vocab_size=len(VOCABULARY), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                      intermediate_size=32, max_position_embeddings=64, pad_token_id=0)  # fmt: skip
    BertForMaskedLM(bert).save_pretrained(folder / "bert")
    shutil.copy(vocabulary, folder / "bert" / "vocab.txt")
    return folder


@pytest.fixture
def command(shared, tmp_path):
    """The arguments of a short run."""

    def arguments(*more, out="run", tokenizer=shared / "vocab.txt"):
        given = ["pretrain", "--corpus", shared / "a.jsonl", "--preset", "smoke", "--size", "tiny", "--workers", 1]
        given += ["--tokenizer", tokenizer, "--out", tmp_path / out, "--cache", shared / "cache"]
        return [str(each) for each in (*given, "--set", "dataloader_num_workers=0", *more)]

    return arguments


def refusal(capsys, arguments):
    """The one line on stderr that a command is refused with."""
    assert main([str(each) for each in arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nystromformer: ")]
    assert len(lines) == 1
    return lines[0]


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def assert_same_weights(one, other):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_from_raw_text_to_model_records_and_curves(command, shared, tmp_path, capsys):
    arguments = command("--corpus", shared / "b.txt", tokenizer="train")
    assert main(arguments) == 0
    out = tmp_path / "run"
    printed = capsys.readouterr()
    assert "80 documents" in printed.out
    assert "of the masked words right" in printed.out
    assert "tokens/s)" in printed.out
    assert "step 6 of 6, mlm_accuracy" in printed.err
    records = list(read_records(out))
    assert [r["step"] for r in records if r["metric"] == "dev_sop_accuracy"] == [3, 6]
    assert records[-1]["metric"] == "mlm_accuracy"
    assert records[-1]["corpus_documents"] == 80
    assert records[-1]["config"]["attention"] == "nystrom-64"
    for name in ("accuracy_steps", "accuracy_time"):
        assert (out / f"{name}.png").stat().st_size > 10_000
        assert "<svg" in (out / f"{name}.svg").read_text()[:1000]
    assert list((out / "tensorboard").iterdir())
    assert not list(out.glob("*checkpoint*"))
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model = NystromformerForPreTraining.from_pretrained(out / "model").eval()
    assert model(**tokenizer("Stone river.", "Bread.", return_tensors="pt")).seq_relationship_logits.shape == (1, 2)

    assert "holds a run already: resume it with --resume" in refusal(capsys, arguments)
    assert main([*arguments, "--resume"]) == 0, "a finished run is left alone"
    assert len(list(read_records(out))) == len(records)
    assert "--resume with steps=7" in refusal(capsys, [*arguments, "--resume", "--steps", "7"])


@pytest.mark.slow
def test_runs_are_drawn_together(command, tmp_path):
    assert main(command("--attention", "standard", "--steps", "2", out="standard")) == 0
    assert main(command("--attention", "linear", "--steps", "2", "--beside", tmp_path / "standard")) == 0
    drawn = (tmp_path / "run" / "accuracy_time.svg").read_text()
    assert ">standard<" in drawn
    assert ">linear<" in drawn


@pytest.mark.slow
def test_starting_from_a_standard_model(command, shared, tmp_path, capsys):
    given = command("--from", shared / "bert")
    position = given.index("--size")
    given = given[:position] + given[position + 2 :]
    without = given.index("--tokenizer")
    given = given[:without] + given[without + 2 :]
    assert main(given) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["from"], config["size"]) == (str(shared / "bert"), None)
    assert [run.label for run in pretraining_runs(read_records(tmp_path / "run"))] == ["nystrom-64, from bert"]
    assert NystromformerForPreTraining.from_pretrained(tmp_path / "run" / "model").config.hidden_size == 16

    given[given.index("--out") + 1] = str(tmp_path / "other")
    assert "has positions for 64 tokens; lengthen it with" in refusal(capsys, [*given, "--max-length", "128"])
    assert "the weights belong to their own tokenizer" in refusal(capsys, [*given, "--tokenizer", "train"])
    assert "the model has a size already" in refusal(capsys, [*given, "--size", "tiny"])
    assert not (tmp_path / "other").exists()


def test_bad_input_is_one_line_and_writes_nothing(command, shared, tmp_path, capsys):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "empty.txt").write_text("\n \n")
    (bad / "binary.txt").write_bytes(b"\x89PNG\r\n\x00\xff")
    (bad / "one.txt").write_text("A single document.")
    (bad / "picture.png").write_bytes(b"\x89PNG")
    no_mask = tmp_path / "no-mask"
    no_mask.mkdir()
    write_vocabulary(no_mask, [token for token in VOCABULARY if token != "[MASK]"])

    def with_corpus(name):
        arguments = command()
        arguments[arguments.index("--corpus") + 1] = str(bad / name)
        return arguments

    cases = {
        "the corpus is empty: no document with text in": with_corpus("empty.txt"),
        "binary.txt, line 1: not text in UTF-8": with_corpus("binary.txt"),
        "picture.png: its name must end with one of": with_corpus("picture.png"),
        "none.txt: no such file or folder, and no Hub id": with_corpus("none.txt"),
        "1 documents, and none of them fell to the": with_corpus("one.txt"),
        "has no mask token; masked language modeling": command(tokenizer=no_mask / "vocab.txt"),
        "nobody/nothing: can't be read": command(tokenizer="nobody/nothing"),
        "no --tokenizer: give": command(tokenizer=""),
        "--vocab-size 3: must be at least 6": command("--vocab-size", 3, tokenizer="train"),
        "'--max-length': '4': must be a whole number from 8": command("--max-length", 4),
        "'--steps': '0': must be a whole number from 1": command("--steps", 0),
        "'--seed': '-1': must be a whole number from 0": command("--seed", -1),
        "'--validation-share'": command("--validation-share", 1),
        "'--preset'": command("--preset", "fast"),
        "'--size'": command("--size", "large"),
        "Did you mean 'nystrom'": command("--attention", "nystrm"),
        "'--documents': 'page': must be one of": command("--documents", "page"),
        "'body'; name one with --text-column": command("--text-column", "body"),
        "--set lr=1: must be name=value for a field": command("--set", "lr=1"),
        "--dtype float16: needs a GPU": command("--dtype", "float16", "--device", "cpu"),
        "holds no records of a pretraining run": command("--beside", bad),
        "--batch-size 5: must be": command("--batch-size", 5, "--set", "gradient_accumulation_steps=2"),
    }
    for message, arguments in cases.items():
        assert message in refusal(capsys, arguments)
        assert not (tmp_path / "run").exists(), message
    for folder in (tmp_path, shared / "cache"):
        assert not list(folder.glob(".*unfinished*"))


@pytest.mark.slow
def test_a_damaged_shard_stops_a_run_and_costs_nothing(command, shared, tmp_path, capsys, monkeypatch):
    cache = tmp_path / "cache"
    more = ("--cache", cache)
    assert main(command(*more, out="whole")) == 0
    on_step_end = Clock.on_step_end

    def killed(self, args, state, control, **kwargs):
        on_step_end(self, args, state, control, **kwargs)
        if state.global_step == 5:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Clock, "on_step_end", killed)
        with pytest.raises(Killed):
            main(command(*more))
    (shard,) = cache.glob("corpus-*/shard-*.arrow")
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    message = refusal(capsys, command("--resume", *more))
    assert "shard-00000.arrow: damaged" in message
    assert "remove the folder" in message
    shutil.rmtree(shard.parent)
    assert main(command("--resume", *more)) == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_a_full_disk_ends_a_run_that_can_go_on(command, tmp_path, capsys, monkeypatch):
    def no_space(self, metric, value, **details):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nystromformer.records.Recorder.record", no_space)
        message = "No space left on device; what is written is whole: when there is room, resume with --resume"
        assert message in refusal(capsys, command())
    assert main(command("--resume")) == 0


@pytest.mark.slow(seconds=16)
def test_a_killed_process_goes_on_to_the_same_weights(command, tmp_path):
    """A real SIGKILL, wherever it hits, with loading processes."""
    more = ("--steps", 12, "--set", "dataloader_num_workers=2")
    assert main(command(*more, out="whole")) == 0
    arguments = command(*more)
    (process,) = start(COMMAND, arguments, tmp_path)
    try:
        for _ in range(6000):
            if list((tmp_path / "run").glob("checkpoint-[4-9]")) or not process.is_alive():
                break
            time.sleep(0.05)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "run" / "model").exists()
    assert main([*arguments, "--resume"]) == 0
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


def test_help_shows_an_example(capsys):
    assert main(["pretrain", "--help"]) == 0
    assert "--tokenizer train --preset mini" in " ".join(capsys.readouterr().out.split())
