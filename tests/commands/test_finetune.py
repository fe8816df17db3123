"""`nystromformer finetune` on the command line."""

import json
import re
from pathlib import Path

import pytest
import transformers
from forked import COMMAND, launch
from glue_files import sentence, write_imdb, write_official
from safetensors.torch import load_file
from small_bert import SIZES, write_bert, write_tokenizer
from training_runs import KillAt, Killed

from nystromformer import NystromformerForSequenceClassification
from nystromformer.cli import main
from nystromformer.data.glue import TASKS
from nystromformer.records import read_records
from nystromformer.report.table import tables_markdown
from nystromformer.report.tables import best_results, finetune_tables
from nystromformer.training.shared.recipes import SEARCH_BATCH_SIZES, SEARCH_LEARNING_RATES


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_official(folder / "glue")
    write_imdb(folder / "imdb")
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "bert")


def run(*arguments: object) -> int:
    return main(["finetune", *map(str, arguments)])


def smoke(task: str, model: Path, data: Path, out: Path, *more: object) -> int:
    return run(task, "--model", model, "--data", data, "--out", out, "--preset", "smoke", *more)


def scores_of(out: Path) -> list[dict]:
    folders = sorted(path.parent for path in out.rglob("records.jsonl"))
    return [record for record in read_records(*folders) if record["metric"] == "score"]


def markdown_of(records: list[dict]) -> str:
    return tables_markdown(finetune_tables(records))


def refusal(capsys, *arguments: object) -> str:
    """The one line on stderr that a command is refused with."""
    assert run(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nystromformer: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    "task", [task if task == "sst2" else pytest.param(task, marks=pytest.mark.slow) for task in TASKS]
)
def test_each_task_is_trained_scored_and_predicted(task, bert, data, tmp_path):
    assert smoke(task, bert, data, tmp_path / "run", "--predict", "--steps", 2) == 0
    (record,) = scores_of(tmp_path / "run")
    assert record["name"] == TASKS[task].metrics[0]
    assert set(record["scores"][record["part"]]) == set(TASKS[task].metrics)
    assert record["part"] == ("test" if task == "imdb" else next(iter(TASKS[task].dev)))
    assert record["scored_examples"][record["part"]] == 8
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    written = sorted(path.name for path in (tmp_path / "run").glob("predictions/*"))
    expected = {"imdb": [], "mnli": ["MNLI-m.tsv", "MNLI-mm.tsv"]}
    assert written == expected.get(task, [f"{TASKS[task].title}.tsv"])
    for name in written:
        header, *rows = (tmp_path / "run" / "predictions" / name).read_text().splitlines()
        assert header == "index\tprediction"
        index, values = zip(*(row.split("\t") for row in rows), strict=True)
        assert index == ("0", "1", "2", "3", "4")
        labels = TASKS[task].labels
        assert all(value in labels if labels else 0 <= float(value) <= 5 for value in values)


@pytest.mark.slow
def test_standard_and_nystrom_in_one_sweep_with_one_table(bert, data, tmp_path, capsys):
    out = tmp_path / "sweep"
    assert smoke("sst2", bert, data, out, "--attention", "standard,nystrom-4", "--seeds", "1,2", "--steps", 2) == 0
    assert len(scores_of(out)) == 4
    table = (out / "table.md").read_text()
    assert "sst2 accuracy" in capsys.readouterr().out
    assert "| attention | sst2 accuracy |" in table
    assert any(line.startswith("| standard |") and "± " in line and "(90.00)" in line for line in table.splitlines())
    assert any(line.startswith("| nystrom-4 |") and "(91.40)" in line for line in table.splitlines())


@pytest.mark.slow
def test_runs_with_and_without_a_convolution_stand_apart(bert, data, tmp_path):
    out, options = tmp_path / "sweep", ("--attention", "nystrom-4,nystrom-local-4", "--steps", 2)
    with_conv = (*options, "--conv-kernel-size", 5)
    assert smoke("sst2", bert, data, out, *options) == 0
    assert smoke("sst2", bert, data, out, *with_conv) == 0
    folders = sorted(path.name for path in (out / "sst2").iterdir())
    assert folders == ["nystrom-4", "nystrom-4-conv-5", "nystrom-local-4", "nystrom-local-4-conv-5"]
    found = scores_of(out)
    parameters = {(r["config"]["attention"], r["config"]["conv_kernel_size"]): r["parameters"] for r in found}
    taps = SIZES["num_hidden_layers"] * SIZES["num_attention_heads"] * 5
    for attention in ("nystrom-4", "nystrom-local-4"):
        assert parameters[attention, 5] == parameters[attention, None] + taps
    assert parameters["nystrom-4", None] == parameters["nystrom-local-4", None], "both by the same door"
    table = markdown_of(found)
    for name in ("nystrom-4", "nystrom-4 + conv 5", "nystrom-local-4", "nystrom-local-4 + conv 5"):
        assert re.search(rf"^\| {re.escape(name)} \| [\d.]+ ", table, re.MULTILINE), name
    assert f"| nystrom-4 + conv 5 | {parameters['nystrom-4', 5]:,} |" in table
    state = load_file(out / "sst2" / "nystrom-4-conv-5" / "seed-0" / "model" / "model.safetensors")
    assert any(tensor.any() for name, tensor in state.items() if "skip_convolution" in name), "it is trained"
    before = (out / "table.md").read_text()
    assert smoke("sst2", bert, data, out, *with_conv, "--resume") == 0
    assert (out / "table.md").read_text() == before


@pytest.mark.slow
def test_a_run_with_a_convolution_is_not_resumed_without_it(bert, data, tmp_path, capsys):
    options = ("sst2", "--model", bert, "--data", data, "--out", tmp_path, "--preset", "smoke", "--steps", 1)
    assert run(*options, "--attention", "nystrom-4", "--conv-kernel-size", 5) == 0
    line = refusal(capsys, *options, "--attention", "nystrom-4", "--resume")
    assert "--resume with conv_kernel_size=None" in line
    assert "says 5" in line


@pytest.mark.slow
def test_other_attentions_convert_the_model(bert, data, tmp_path):
    assert smoke("rte", bert, data, tmp_path / "run", "--attention", "linear", "--max-length", 100) == 0
    model = NystromformerForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert model.config.attention == "linear"
    assert model.config.max_position_embeddings == 100
    assert model.config.id2label == {0: "entailment", 1: "not_entailment"}
    again = tmp_path / "again"
    assert smoke("rte", tmp_path / "run" / "model", data, again, "--attention", "nystrom-8", "--steps", 1) == 0
    assert NystromformerForSequenceClassification.from_pretrained(again / "model").config.num_landmarks == 8


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["standard", "nystrom-8"])
def test_positions_are_tiled_for_long_documents(bert, data, tmp_path, attention):
    assert smoke("imdb", bert, data, tmp_path, "--attention", attention, "--max-length", 150, "--steps", 1) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (bert, tmp_path / "model"))
    table = after["bert.embeddings.position_embeddings.weight"]
    assert table.shape[0] == 150
    short = before["embeddings.position_embeddings.weight"]
    assert (table[64:128] - short).abs().max() < 1e-3, "one step away from the table it repeats"


@pytest.mark.slow
def test_the_search_takes_the_best_on_the_development_part(bert, data, tmp_path, monkeypatch):
    assert SEARCH_BATCH_SIZES == (8, 16, 32), "the paper's"
    assert SEARCH_LEARNING_RATES == (2e-5, 3e-5, 4e-5, 5e-5)
    monkeypatch.setattr("nystromformer.training.finetuning.sweep.SEARCH_BATCH_SIZES", (4, 8))
    monkeypatch.setattr("nystromformer.training.finetuning.sweep.SEARCH_LEARNING_RATES", (2e-5, 5e-5))
    assert smoke("mrpc", bert, data, tmp_path, "--search", "--steps", 1) == 0
    found = scores_of(tmp_path)
    assert {(r["config"]["batch_size"], r["config"]["learning_rate"]) for r in found} == {
        (batch, rate) for batch in (4, 8) for rate in (2e-5, 5e-5)
    }
    (best,) = best_results(found)
    assert best["dev_score"] == max(record["dev_score"] for record in found)
    assert "best of a search" in markdown_of(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [(), ("--patience", 1), ("--attention", "nystrom-local-4", "--conv-kernel-size", 5)],
    ids=["whole", "stopped-early", "with-convolution"],
)
def test_a_killed_run_goes_on_to_the_same_weights(bert, data, tmp_path, monkeypatch, more):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = ("--steps", 14, "--learning-rate", 1e-3, *more)
    assert smoke("sst2", bert, data, whole, *options) == 0
    with monkeypatch.context() as patch:
        patch.setattr("nystromformer.training.sweep.ShowProgress", lambda _: KillAt(3))
        with pytest.raises(Killed):
            smoke("sst2", bert, data, killed, *options)
    assert smoke("sst2", bert, data, killed, *options) == 2, "needs --resume"
    assert smoke("sst2", bert, data, killed, *options, "--resume") == 0
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (whole, killed)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    (one,), (other,) = scores_of(whole), scores_of(killed)
    assert (one["value"], one["step"], one["best_step"]) == (other["value"], other["step"], other["best_step"])
    assert (one["step"] < 14) == ("--patience" in more)


@pytest.mark.slow
def test_packed_batches_train_our_own_models_and_others_are_refused(bert, data, tmp_path, capsys):
    own = tmp_path / "own"
    assert main(["convert", str(bert), str(own)]) == 0
    assert smoke("sst2", own, data, tmp_path / "run", "--packed", 64) == 0
    (found,) = scores_of(tmp_path / "run")
    assert found["config"]["packed"] == 64
    assert "64 tokens" in markdown_of([found])
    message = refusal(
        capsys, "sst2", "--model", bert, "--data", data, "--out", tmp_path / "no", "--preset", "smoke", "--packed", 64
    )
    assert "its own head pools a whole row of tokens" in message
    assert "nystromformer convert" in message
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_a_run_killed_after_it_stopped_early_takes_no_further_step(bert, data, tmp_path, monkeypatch):
    def killed(*_):
        raise Killed

    options = ("--steps", 14, "--learning-rate", 1e-3, "--patience", 1)
    with monkeypatch.context() as patch:
        patch.setattr("nystromformer.training.finetuning.sweep.score_parts", killed)
        with pytest.raises(Killed):
            smoke("sst2", bert, data, tmp_path, *options)
    last = max(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    assert smoke("sst2", bert, data, tmp_path, *options, "--resume") == 0
    assert scores_of(tmp_path)[0]["step"] == last < 14


@pytest.mark.slow
def test_a_finished_run_is_left_alone(bert, data, tmp_path):
    assert smoke("wnli", bert, data, tmp_path, "--steps", 1) == 0
    before = (tmp_path / "records.jsonl").read_text()
    assert smoke("wnli", bert, data, tmp_path, "--steps", 1, "--resume") == 0
    assert (tmp_path / "records.jsonl").read_text() == before
    assert smoke("wnli", bert, data, tmp_path, "--steps", 2, "--resume") == 2


def test_your_own_files(bert, tmp_path):
    rows = [{"review": sentence(i), "stars": i % 3} for i in range(30)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.csv").write_text("review\nthe good film\nthe bad film\n")
    columns = ("--text-column", "review", "--label-column", "stars", "--predict")
    assert smoke("custom", bert, tmp_path, tmp_path / "run", *columns) == 0
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["id2label"] == {
        "0": "0",
        "1": "1",
        "2": "2",
    }
    assert len((tmp_path / "run" / "predictions" / "test.tsv").read_text().splitlines()) == 3


@pytest.mark.slow
def test_it_learns_what_can_be_learnt(bert, data, tmp_path):
    options = ("--steps", 90, "--learning-rate", 3e-3, "--train-examples", 24, "--attention", "nystrom-4")
    evaluations = ("--set", "eval_steps=45", "--set", "save_steps=45")
    assert smoke("sst2", bert, data, tmp_path, *options, *evaluations) == 0
    assert scores_of(tmp_path)[0]["value"] == 1.0


def test_bad_input_is_one_line_that_names_the_remedy(bert, data, tmp_path, capsys):
    three, out = write_bert(tmp_path / "three", labels=3), tmp_path / "out"
    common = ("--data", data, "--out", out, "--preset", "smoke")
    (tmp_path / "a.csv").write_text("review,label\ngood,1\n,0\n")
    own = ("custom", "--model", bert, "--out", out, "--data", tmp_path / "a.csv")
    for arguments, message in (
        (("sst3", "--model", bert, *common), "TASK='sst3': must be one of"),
        (("sst2", "--model", three, *common), "its head has 3 outputs, the task needs 2 labels (0, 1); .*--new-head"),
        (("stsb", "--model", three, *common), "its head has 3 outputs, the task needs one number"),
        (("sst2", "--model", tmp_path / "no", *common), "no such folder"),
        (("sst2", "--model", bert, *common, "--attention", "nystrm"), "Did you mean 'nystrom'"),
        (
            ("sst2", "--model", bert, *common, "--attention", "standard,nystrom-8", "--conv-kernel-size", 33),
            "--conv-kernel-size 33: standard takes no convolution, only nystrom, nystrom-local do",
        ),
        (
            ("sst2", "--model", bert, *common, "--attention", "nystrom-8", "--conv-kernel-size", 4),
            "--conv-kernel-size=4: must be odd",
        ),
        (("sst2", "--model", bert, *common, "--seeds", "a"), "--seeds 'a': must be whole numbers"),
        (("sst2", "--model", bert, *common, "--search", "--batch-size", 8), "leave out --batch-size"),
        (("sst2", "--model", bert, *common, "--text-column", "x"), "the columns of other tasks are known"),
        (("custom", "--model", bert, *common), "needs --text-column"),
        ((*own, "--text-column", "review"), "a.csv, line 3: the text in column review is empty; .*remove the row"),
        ((*own, "--text-column", "text"), r"columns review, label; must have text, label .*--text-column"),
        (("sst2", "--model", bert, *common, "--max-length", 0), "'--max-length': '0': must be a whole number"),
        (("sst2", "--model", bert, *common, "--set", "learning_rate=x"), "--set learning_rate=x"),
    ):
        assert re.search(message.replace("(0, 1)", r"\(0, 1\)"), refusal(capsys, *arguments)), arguments
        assert not out.exists(), "nothing half-written"


@pytest.mark.slow
def test_a_head_for_other_labels_is_replaced_on_request(data, tmp_path):
    three = write_bert(tmp_path / "three", labels=3)
    assert smoke("sst2", three, data, tmp_path / "run", "--new-head", "--steps", 1) == 0
    assert load_file(tmp_path / "run" / "model" / "model.safetensors")["classifier.weight"].shape[0] == 2


@pytest.mark.slow
def test_encoders_of_other_types_take_nystrom_and_refuse_the_rest(data, tmp_path, capsys):
    folder = tmp_path / "electra"
    sizes = SIZES | {"embedding_size": 16}
    transformers.ElectraModel(transformers.ElectraConfig(**sizes)).save_pretrained(folder)
    common = ("--data", data, "--preset", "smoke", "--steps", 1)
    assert "has no tokenizer" in refusal(capsys, "sst2", "--model", folder, "--out", tmp_path / "a", *common)
    write_tokenizer(folder)
    assert run("sst2", "--model", folder, "--out", tmp_path / "b", "--attention", "nystrom-4", *common) == 0
    line = refusal(capsys, "sst2", "--model", folder, "--out", tmp_path / "c", "--attention", "linear", *common)
    assert "which can only have standard, nystrom and nystrom-local" in line
    local = ("--attention", "nystrom-local-4", "--conv-kernel-size", 5)
    assert run("sst2", "--model", folder, "--out", tmp_path / "d", *local, *common) == 0
    line = refusal(capsys, "sst2", "--model", folder, "--out", tmp_path / "c", *common, "--max-length", 1024)
    assert "can't be tiled" in line


def test_help_shows_an_example(capsys):
    assert run("--help") == 0
    assert "nystromformer finetune mrpc" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_score_the_whole_part(bert, data, tmp_path):
    options = ["finetune", "sst2", "--model", bert, "--data", data, "--out", "run", "--preset", "smoke"]
    done = launch(COMMAND, [*options, "--predict", "--dev-examples", "7"], tmp_path, processes=2)
    assert done.codes == [0, 0], done.err
    (record,) = scores_of(tmp_path / "run")
    assert record["scored_examples"] == {"dev": 7}
    assert len((tmp_path / "run" / "predictions" / "SST-2.tsv").read_text().splitlines()) == 6
