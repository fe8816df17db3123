"""Every training command on several processes, replicated, sharded and with accumulation: the same as one process."""

from pathlib import Path

import pytest
from corpora import texts, write_json_lines, write_vocabulary
from forked import COMMAND, launch
from glue_files import sentence, write_official
from safetensors.torch import load_file
from small_bert import write_bert

from nystromformer.data.lra.listops import ListOpsOptions, generate
from nystromformer.records import read_records

WITHOUT_DROPOUT = f"""
from torch.nn import Dropout
from nystromformer.models import encoder

Dropout.forward = encoder.Dropout.forward = lambda self, input: input
{COMMAND}
"""
"""Its random numbers would be others in other processes."""
SHARDED = ["--set", "fsdp=full_shard"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Small data for each of the commands, and a small BERT."""
    folder = tmp_path_factory.mktemp("shared")
    generate(folder / "listops", ListOpsOptions(min_tokens=16, max_tokens=64, train=24, dev=6, test=10), workers=1)
    write_official(folder / "glue")
    write_bert(folder / "bert")
    write_json_lines(folder / "corpus.jsonl", texts(60))
    write_json_lines(folder / "long.jsonl", [" ".join(map(sentence, range(start, start + 9))) for start in range(40)])
    write_vocabulary(folder)
    return folder


COMMANDS = {
    "lra": ["lra", "listops", "--data", "listops", "--preset", "smoke", "--attention", "nystrom-16"],
    "finetune": ["finetune", "sst2", "--model", "bert", "--data", "glue", "--preset", "smoke", "--batch-size", "4",
                 "--attention", "nystrom-4", "--steps", "4"],
    "pretrain": ["pretrain", "--corpus", "corpus.jsonl", "--tokenizer", "vocab.txt", "--preset", "smoke", "--size",
                 "tiny", "--workers", "1", "--batch-size", "8", "--steps", "3", "--set", "dataloader_num_workers=0"],
    "distill": ["distill", "--model", "bert", "--corpus", "long.jsonl", "--attention", "nystrom-4", "--preset",
                "smoke", "--batch-size", "4", "--held-out-share", "0.3"],
}  # fmt: skip


def trained(folder: Path, processes: int, out: str, arguments: list[str]) -> Path:
    done = launch(WITHOUT_DROPOUT, [*arguments, "--out", out], folder, processes)
    assert done.codes == [0] * processes, done.err
    return folder / out


def values(run: Path) -> list[tuple[str, int, float]]:
    """What was recorded, times and speeds aside. A second process that writes would double it."""
    return [
        (record["metric"], record["step"], record["value"])
        for record in read_records(run)
        if record.get("unit") is None and "second" not in record["metric"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_processes_and_accumulation_train_as_one(name, folder):
    ways: dict[str, tuple[int, list[str]]] = {"replicated": (2, [])}
    if name != "distill":  # whose teacher stays whole beside the student
        ways["sharded"] = (2, SHARDED)
    if name != "pretrain":  # which accumulates by an option of its own
        ways["accumulated"] = (1, ["--set", "gradient_accumulation_steps=2"])
    one = trained(folder, 1, f"{name}-one", COMMANDS[name])
    weights = load_file(one / "model" / "model.safetensors")
    for way, (processes, settings) in ways.items():
        other = trained(folder, processes, f"{name}-{way}", [*COMMANDS[name], *settings])
        expected, found = values(one), values(other)
        assert [each[:2] for each in found] == [each[:2] for each in expected], way
        assert [each[2] for each in found] == pytest.approx([each[2] for each in expected], rel=1e-4, abs=1e-5), way
        same = load_file(other / "model" / "model.safetensors")
        assert weights.keys() == same.keys()
        for key, tensor in weights.items():
            assert (same[key] - tensor).abs().max().item() < 5e-5, (way, key)
