"""Every training command under `torchrun`, replicated and sharded, and with accumulation: the same as one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import texts, write_json_lines, write_vocabulary
from glue_files import write_official
from safetensors.torch import load_file
from small_bert import write_bert

from nystromformer.data.lra.listops import ListOpsOptions, generate
from nystromformer.records import read_records

SCRIPT = """
from torch.nn import Dropout
from nystromformer.cli import entry

Dropout.forward = lambda self, input: input  # its random numbers would be others in other processes
from nystromformer.models import encoder
encoder.Dropout.forward = Dropout.forward
entry()
"""
SHARDED = ["--set", "fsdp=full_shard"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Small data for each of the commands, a small BERT, and the script that runs them."""
    folder = tmp_path_factory.mktemp("shared")
    generate(folder / "listops", ListOpsOptions(min_tokens=16, max_tokens=64, train=24, dev=6, test=10), workers=1)
    write_official(folder / "glue")
    write_bert(folder / "bert")
    write_json_lines(folder / "corpus.jsonl", texts(60))
    write_vocabulary(folder)
    (folder / "run.py").write_text(SCRIPT)
    return folder


COMMANDS = {
    "lra": ["lra", "listops", "--data", "listops", "--preset", "smoke", "--attention", "nystrom-16"],
    "finetune": ["finetune", "sst2", "--model", "bert", "--data", "glue", "--preset", "smoke", "--batch-size", "4",
                 "--attention", "nystrom-4", "--steps", "4"],
    "pretrain": ["pretrain", "--corpus", "corpus.jsonl", "--tokenizer", "vocab.txt", "--preset", "smoke", "--size",
                 "tiny", "--workers", "1", "--batch-size", "8", "--steps", "3", "--set", "dataloader_num_workers=0"],
}  # fmt: skip


def launch(folder: Path, processes: int, out: str, arguments: list[str]) -> Path:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *(torchrun if processes > 1 else []), "run.py", *arguments, "--out", out],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
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
    ways: dict[str, tuple[int, list[str]]] = {"replicated": (2, []), "sharded": (2, SHARDED)}
    if name != "pretrain":  # which accumulates by an option of its own
        ways["accumulated"] = (1, ["--set", "gradient_accumulation_steps=2"])
    one = launch(folder, 1, f"{name}-one", COMMANDS[name])
    weights = load_file(one / "model" / "model.safetensors")
    for way, (processes, settings) in ways.items():
        other = launch(folder, processes, f"{name}-{way}", [*COMMANDS[name], *settings])
        expected, found = values(one), values(other)
        assert [each[:2] for each in found] == [each[:2] for each in expected], way
        assert [each[2] for each in found] == pytest.approx([each[2] for each in expected], rel=1e-4, abs=1e-5), way
        same = load_file(other / "model" / "model.safetensors")
        assert weights.keys() == same.keys()
        for key, tensor in weights.items():
            assert (same[key] - tensor).abs().max().item() < 5e-5, (way, key)
