"""`nystromformer lra` and `lra-data` on the command line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from training_runs import Killed

from nystromformer.attention.registry import ATTENTIONS as REGISTRY
from nystromformer.attention.registry import parse_attention_name
from nystromformer.cli import main
from nystromformer.data.lra import TASKS
from nystromformer.data.lra.listops import ListOpsOptions
from nystromformer.data.lra.listops import generate as generate_listops
from nystromformer.data.lra.pathfinder import PathfinderSetOptions
from nystromformer.data.lra.pathfinder import generate as generate_pathfinder
from nystromformer.records import read_records
from nystromformer.training.lra import ATTENTIONS, Legacy, read_splits
from nystromformer.training.shared.recipes import LRA_RECIPES


def encoded(pixels: np.ndarray) -> bytes:
    import io

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """All five tasks in their public layouts, tiny."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    generate_listops(folder / "listops", ListOpsOptions(min_tokens=16, max_tokens=64, train=24, dev=6, test=10))
    generate_pathfinder(folder / "pathfinder", PathfinderSetOptions(count=30), workers=1)
    pictures = [{"bytes": encoded(rng.integers(0, 256, (32, 32), dtype=np.uint8)), "path": ""} for _ in range(30)]
    texts = [f"{'good' if index % 2 else 'bad'} film number {index} " * (1 + index % 3) for index in range(30)]
    for name, column, values in (("cifar10", "img", pictures), ("imdb", "text", texts)):
        for part in ("train", "test"):
            path = folder / name / "plain_text" / f"{part}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pa.table({column: values, "label": [index % 2 for index in range(30)]}), path)
    (folder / "aan").mkdir()
    for part in ("train", "eval", "test"):
        rows = [f"{index % 2}\ta\tb\tfirst paper {index}\tsecond paper {index} cites\n" for index in range(12)]
        (folder / "aan" / f"new_aan_pairs.{part}.tsv").write_text("".join(rows))
    return folder


def run(*arguments: object) -> int:
    return main(["lra", *map(str, arguments)])


def smoke(task: str, data: Path, out: Path, *more: object) -> int:
    return run(task, "--preset", "smoke", "--data", data, "--out", out, *more)


def results(out: Path) -> list[dict]:
    return [record for path in sorted(out.rglob("records.jsonl")) for record in read_records(path.parent)
            if record["metric"] == "test_accuracy"]  # fmt: skip


@pytest.mark.parametrize(
    "task", [task if task == "listops" else pytest.param(task, marks=pytest.mark.slow) for task in TASKS]
)
def test_each_task_trains_and_is_tested_on_the_whole_test_set(task, data, tmp_path):
    out = tmp_path / "run"
    assert smoke(task, data, out) == 0
    names = {path.name for path in out.iterdir()} - {".lock"}
    assert names == {"config.json", "records.jsonl", "model", "tensorboard", "table.md"}
    assert not list(out.rglob("*.pt")) + list(out.rglob("*.bin")) + list(out.rglob("*.pth")), "no pickle"
    (record,) = results(out)
    sizes = {"listops": 10, "text": 10, "retrieval": 10, "image": 10, "pathfinder": 3}
    assert record["test_examples"] == sizes[task], "which the batch of 4 does not divide"
    assert (record["value"] * sizes[task]) == pytest.approx(round(record["value"] * sizes[task]))
    assert record["step"] == 4
    assert record["examples_seen"] == 16
    assert {"job", "config", "seed", "versions", "machine"} <= record.keys()
    metrics = [record["metric"] for record in read_records(out)]
    assert metrics.count("dev_accuracy") == 2
    assert "train_loss" in metrics


@pytest.mark.slow
def test_the_grid_is_resumed_where_it_stopped_and_makes_the_table(data, tmp_path, capsys):
    out = tmp_path / "grid"
    arguments = ("listops,text", data, out, "--attention", "standard,nystrom-8", "--seeds", "1,2")
    assert smoke(*arguments) == 0
    assert len(results(out)) == 8
    table = (out / "table.md").read_text()
    assert "most frequent class" in capsys.readouterr().out
    header, _, standard, nystrom, majority = table.splitlines()[2:7]
    assert header == "| attention | listops | text | average |"
    assert standard.count("±") == 2
    assert "(65.52)" in nystrom
    assert "(37.15)" not in nystrom, "expressions of 16 to 64 tokens are another task than the paper's"
    assert "(58.95)" not in nystrom
    assert majority.startswith("| most frequent class")
    assert "| listops | 4 | 4 | 16 | 16 | 10 | 128 | 16 to 64 tokens | standard, nystrom-8 | 1, 2 |" in table
    finished = out / "text" / "standard" / "seed-1" / "records.jsonl"
    before = finished.read_bytes()
    assert smoke(*arguments) == 2
    assert "holds a run already: resume it with --resume" in capsys.readouterr().err
    shutil.rmtree(out / "listops" / "nystrom-8" / "seed-2")
    assert smoke(*arguments, "--resume") == 0
    assert len(results(out)) == 8
    assert (out / "text" / "standard" / "seed-1" / "records.jsonl").read_bytes() == before, (
        "finished ones are left alone"
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--normalize-pooled"]], ids=["plain", "with statistics of batches"])
def test_a_killed_run_goes_on_and_its_records_tell_each_step_once(more, data, tmp_path, monkeypatch):
    from nystromformer.training.trainer import ExactTrainer

    for out in ("whole", "killed"):
        arguments = ("listops", data, tmp_path / out, "--steps", "7", "--set", "eval_steps=2", "--set", "save_steps=4")
        arguments += tuple(more)
        if out == "killed":
            with monkeypatch.context() as patch:
                patch.setattr(ExactTrainer, "training_step", killed_at(7, ExactTrainer.training_step))
                with pytest.raises(Killed):
                    smoke(*arguments)
            assert [record["step"] for record in read_records(tmp_path / out)][-1] == 6
            assert smoke(*arguments, "--resume") == 0
        else:
            assert smoke(*arguments) == 0
    found = [
        [(record["metric"], record["step"], record["value"]) for record in read_records(tmp_path / out)
         if record["metric"] != "train_loss"]
        for out in ("whole", "killed")
    ]  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["listops", "retrieval"])
def test_packed_batches_have_so_many_tokens_and_are_noted(task, data, tmp_path):
    assert smoke(task, data, tmp_path / "run", "--packed", 200) == 0
    (record,) = results(tmp_path / "run")
    assert record["config"]["packed"] == 200
    assert 4 * 150 <= record["tokens"] <= 4 * 250
    assert "200 tokens" in (tmp_path / "run" / "table.md").read_text()


def killed_at(call, training_step):
    calls = []

    def step(self, *arguments, **keywords):
        calls.append(1)
        if len(calls) == call:
            raise Killed
        return training_step(self, *arguments, **keywords)

    return step


@pytest.mark.slow
def test_a_picture_is_one_from_the_start_and_it_is_noted(data, tmp_path):
    options = ["--embedding-start", "picture", "--normalize-pooled", "--dropout", 0, "--max-length", 1024]
    assert smoke("pathfinder", data, tmp_path / "run", *options, "--self-pretrain", 2) == 0
    (result,) = results(tmp_path / "run")
    noted = {"embedding_start": "picture", "normalize_pooled": True, "dropout": 0}
    assert {name: result["config"][name] for name in noted} == noted
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert {**config, "dropout": config["hidden_dropout_prob"]}.items() >= noted.items()
    assert smoke("pathfinder", data, tmp_path / "other", "--from", tmp_path / "run", "--max-length", 1024) == 2
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report")]) == 0
    assert "near gray levels and pixels begin alike" in (tmp_path / "report/report.md").read_text()


@pytest.mark.slow
def test_a_resumed_run_must_be_the_same_run(data, tmp_path, capsys):
    assert smoke("listops", data, tmp_path / "run") == 0
    assert smoke("listops", data, tmp_path / "run", "--resume", "--steps", "9") == 2
    assert "--resume with steps=9" in capsys.readouterr().err
    assert smoke("listops", data, tmp_path / "run", "--resume", "--seed", "1") == 2
    assert "--resume with seed=1" in capsys.readouterr().err
    generate_listops(tmp_path / "other", ListOpsOptions(min_tokens=16, max_tokens=64, train=24, dev=6, test=10, seed=5))
    records = tmp_path / "run" / "records.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:-1]))  # as if killed before the test
    assert smoke("listops", tmp_path / "other", tmp_path / "run", "--resume") == 2
    assert "--resume with data=" in capsys.readouterr().err
    assert smoke("listops", data, tmp_path / "run", "--resume") == 0


def test_data_is_made_where_none_is_given(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("listops", "--preset", "smoke", "--out", "run") == 0
    assert "making data/lra/listops-smoke" in capsys.readouterr().out
    described = tmp_path / "data" / "lra" / "listops-smoke" / "dataset.json"
    described.write_text(described.read_text().replace('"max_tokens": 64', '"max_tokens": 99'))
    assert run("listops", "--preset", "smoke", "--out", "again") == 2
    assert "was made with max_tokens=99, but 64 is wanted" in capsys.readouterr().err
    assert run("retrieval", "--preset", "smoke", "--out", "other") == 2
    assert "retrieval: no --data given; take new_aan_pairs.{train,eval,test}.tsv" in capsys.readouterr().err


LEGACY = ["padding-id", "pooling", "text-length", "dev-is-test", "no-seed", "one-cycle", "drop-last"]


@pytest.mark.slow
def test_every_released_departure_is_a_switch_and_noted(data, tmp_path):
    assert smoke("text", data, tmp_path / "all", "--legacy") == 0
    (record,) = results(tmp_path / "all")
    assert record["config"]["legacy"] == [name.replace("-", "_") for name in LEGACY]
    assert record["test_examples"] == 8, "two batches of 4 out of 10"
    assert record["seed"] != 0
    assert smoke("text", data, tmp_path / "one", "--legacy-pooling") == 0
    (record,) = results(tmp_path / "one")
    assert record["config"]["legacy"] == ["pooling"]
    config = json.loads((tmp_path / "one" / "model" / "config.json").read_text())
    assert config["pooled_length"] == 128


def test_released_departures_change_the_data_as_described(data):
    recipe = LRA_RECIPES["paper"]["image"]
    black = read_splits("pathfinder", data / "pathfinder", recipe, Legacy(padding_id=True)).test.batch([0])
    right = read_splits("pathfinder", data / "pathfinder", recipe, Legacy()).test.batch([0])
    assert torch.equal(black["attention_mask"], right["input_ids"] != 1), "black pixels vanish"
    assert "attention_mask" not in right
    long = LRA_RECIPES["paper"]["text"]
    both = [read_splits("text", data / "imdb", long, Legacy(dev_is_test=switch)) for switch in (True, False)]
    assert [len(splits.train) for splits in both] == [30, 27]


BAD = [
    (["listop"], "TASK='listop': must be one of 'listops'"),
    (["listops", "--attention", "nystrm-64"], "Did you mean 'nystrom'"),
    (["listops", "--attention", "standard,"], "must be names separated by commas"),
    (
        ["listops", "--preset", "papr"],
        "Invalid value for '--preset': 'papr': must be one of paper, hour, mini, smoke. Did you mean 'paper'?",
    ),
    (["listops", "--seeds", "1,x"], "--seeds '1,x': must be whole numbers"),
    (["listops", "--seeds", "-1"], "each from 0 to 4,294,967,295"),
    (["listops", "--steps", "0"], "'--steps': '0': must be a whole number from 1 to"),
    (["listops", "--batch-size", "0"], "'--batch-size': '0': must be a whole number from 1 to"),
    (["listops", "--max-length", "0"], "'--max-length': '0': must be a whole number from 1 to"),
    (["listops", "--device", "toaster"], "'--device': 'toaster': must be one of auto, cpu, cuda"),
    (["listops", "--dtype", "int8"], "'--dtype': 'int8': must be one of float32"),
    (["listops", "--dtype", "float16", "--device", "cpu"], "--dtype float16: needs a GPU"),
    (["listops", "--attention-dropout", "1.5"], "'--attention-dropout': '1.5': must be a number from 0 to 0.99"),
    (["listops", "--dropout", "1"], "'--dropout': '1': must be a number from 0 to 0.99"),
    (["listops", "--embedding-start", "wave"], "'--embedding-start': 'wave': must be one of random, picture"),
    (
        ["listops", "--embedding-start", "picture"],
        "--embedding-start picture with listops of 128 tokens: must be image with 1,024 tokens or pathfinder",
    ),
    (["image", "--embedding-start", "picture"], "--embedding-start picture with image of 128 tokens: must be image"),
    (["listops", "--set", "learning_rat=1"], "Did you mean 'learning_rate'"),
    (["listops", "--set", "learning_rate=fast"], "--set learning_rate=fast: argument --learning_rate"),
    (["listops", "--set", "seed=1"], "--set seed=1: use --seed instead"),
    (["listops", "--set", "save_steps=3", "--set", "eval_steps=2"], "not a round multiple of 2"),
    (["listops", "--data", "nowhere/at/all"], "nowhere/at/all: no such folder"),
    (["listops", "--legacy-no-seed", "--resume"], "--legacy-no-seed with --resume"),
    (["listops", "--packed", "20"], "--packed 20: must be at least"),
    (["listops", "--packed", "500", "--self-pretrain", "2"], "--packed with --self-pretrain"),
    (["listops", "--packed", "500", "--legacy-padding-id"], "--packed with --legacy-padding-id"),
    (["listops", "--legacy-drop-last", "--batch-size", "32"], "make no full batch of 32"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, data, tmp_path, capsys):
    out = tmp_path / "run"
    defaults = [] if "--data" in arguments else ["--data", data]
    defaults += [] if "--preset" in arguments else ["--preset", "smoke"]
    assert run(*arguments, *defaults, "--out", out) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("nystromformer: ")
    assert len(captured.err.strip().splitlines()) == 1
    assert not out.exists()


def test_damaged_data_is_named_and_nothing_is_written(data, tmp_path, capsys):
    copy = tmp_path / "aan"
    shutil.copytree(data / "aan", copy)
    with open(copy / "new_aan_pairs.test.tsv", "a") as file:
        file.write("3\ta\tb\ttext\ttext\n")
    assert smoke("retrieval", copy, tmp_path / "run") == 2
    captured = capsys.readouterr()
    assert "new_aan_pairs.test.tsv, line 13: label '3'; must be 0 to 1" in captured.err
    assert not (tmp_path / "run").exists()


def test_an_unreachable_hub_is_one_line(tmp_path, capsys, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    assert run("text", "--preset", "smoke", "--out", tmp_path / "run") == 2
    assert "stanfordnlp/imdb: no such folder, and as a data set of the Hub it can't be had" in capsys.readouterr().err
    assert main(["lra-data", "image", "--out", str(tmp_path / "image")]) == 2
    assert "uoft-cs/cifar10" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_data_is_generated_by_command(tmp_path, capsys):
    sizes = ["--train", "30", "--dev", "5", "--test", "5", "--min-tokens", "8", "--max-tokens", "32", "--seed", "4"]
    assert main(["lra-data", "listops", "--out", str(tmp_path / "listops"), *sizes]) == 0
    described = json.loads((tmp_path / "listops" / "dataset.json").read_text())
    assert described["examples"] == {"train": 30, "dev": 5, "test": 5}
    assert described["options"]["seed"] == 4
    pathfinder = ["--count", "20", "--preview", str(tmp_path / "sheet.png"), "--workers", "1"]
    assert main(["lra-data", "pathfinder", "--out", str(tmp_path / "pathfinder"), *pathfinder]) == 0
    assert Image.open(tmp_path / "sheet.png").size == (1152, 1152)
    assert len(list((tmp_path / "pathfinder").rglob("*.png"))) == 20


BAD_DATA = [
    (["nothing"], "TASK='nothing': must be one of"),
    (["listops"], "--out is missing"),
    (["listops", "--count", "5"], "--count: belongs to pathfinder"),
    (["pathfinder", "--min-tokens", "5"], "--min-tokens: belongs to listops"),
    (["pathfinder", "--count", "5"], "count=5: must be even"),
    (["listops", "--preview", "x.png"], "--preview: belongs to pathfinder"),
    (["listops", "--workers", "0"], "'--workers': '0': must be a whole number from 1 to"),
    (["listops", "--min-tokens", "50", "--max-tokens", "51"], "must be larger by 2 at least"),
    (["retrieval"], "retrieval is not on the Hub: take new_aan_pairs"),
]


@pytest.mark.parametrize("arguments, message", BAD_DATA, ids=[" ".join(arguments) for arguments, _ in BAD_DATA])
def test_bad_requests_for_data_are_one_line(arguments, message, tmp_path, capsys):
    out = [] if arguments == ["listops"] else ["--out", str(tmp_path / "set")]
    assert main(["lra-data", *arguments, *out]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_every_attention_of_the_paper_and_of_the_registry_trains(data, tmp_path):
    """`all` is the columns of the paper's table; what else the registry holds is asked for by name."""
    columns = {parse_attention_name(name)[0] for name in ATTENTIONS}
    others = [name for name, attention in REGISTRY.items() if attention not in columns]
    assert others == ["nystrom-local", "agent"]
    for names, asked in ((ATTENTIONS, "all"), (others, ",".join(others))):
        out = tmp_path / asked
        assert smoke("listops", data, out, "--attention", asked, "--steps", "2") == 0
        assert {record["config"]["attention"] for record in results(out)} == set(names)


@pytest.mark.slow(seconds=20)
def test_runs_under_torchrun_unchanged(data, tmp_path):
    script = Path(sys.executable).with_name("nystromformer")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    arguments = ["lra", "listops", "--preset", "smoke", "--data", str(data), "--out", str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (record,) = results(tmp_path / "run")
    assert record["test_examples"] == 10
    assert record["config"]["processes"] == 2
    assert record["examples_seen"] == 16
    assert done.stdout.count("test examples right") == 1, "only the first process speaks"
