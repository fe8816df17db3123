"""The command `distill`, as people type it."""

import json
import shutil

import pytest
import torch
from corpora import VOCABULARY, texts, write_json_lines, write_vocabulary
from safetensors.torch import load_file
from training_runs import Killed
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizer,
    FNetConfig,
    FNetModel,
    GPT2Config,
    GPT2Model,
)

from nystromformer.cli import main
from nystromformer.files import damage_of
from nystromformer.models import NystromformerConfig, NystromformerModel
from nystromformer.records import read_records
from nystromformer.training.distillation.fidelity import Candidate
from nystromformer.training.distillation.trainer import Stages
from nystromformer.training.finetuning.models import Source, load_classifier

POOLING = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A corpus, another to judge by, and a small encoder of sentences."""
    folder = tmp_path_factory.mktemp("shared")
    write_json_lines(folder / "a.jsonl", texts(60))
    write_json_lines(folder / "b.jsonl", texts(20, seed=3))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(**sizes, vocab_size=len(VOCABULARY), max_position_embeddings=64, initializer_range=0.3)
    BertModel(config).save_pretrained(folder / "bert")
    tokenizer = BertTokenizer(str(write_vocabulary(folder)), model_max_length=64)
    tokenizer.save_pretrained(folder / "bert")
    shutil.copytree(folder / "bert", folder / "sentences")
    (folder / "sentences" / "1_Pooling").mkdir()
    (folder / "sentences" / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    (folder / "sentences" / "modules.json").write_text(json.dumps(MODULES))
    return folder


@pytest.fixture
def command(shared, tmp_path, monkeypatch):
    """The arguments of a short run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def arguments(*more, model="bert", out="run"):
        given = ["distill", "--model", shared / model, "--corpus", shared / "a.jsonl", "--preset", "smoke"]
        given += ["--attention", "nystrom-8", "--device", "cpu", "--out", tmp_path / out]
        return [str(each) for each in (*given, *more)]

    return arguments


def refusal(capsys, arguments):
    """The one line on stderr that a command is refused with."""
    assert main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nystromformer: ")]
    assert len(lines) == 1
    return lines[0]


def output(folder, ids):
    with torch.no_grad():
        return AutoModel.from_pretrained(folder).eval()(ids).last_hidden_state


def test_from_an_encoder_of_sentences_to_one_that_follows_it(command, shared, tmp_path, capsys):
    assert main(command("--judge", shared / "b.jsonl", model="sentences")) == 0
    said, out = capsys.readouterr().out, tmp_path / "run"
    assert "8 windows of text to train on, 6 held out; nystrom-8, nystrom-8" in said
    assert "times as fast at 48 tokens" in said
    records = list(read_records(out))
    assert [r["step"] for r in records if r["metric"] == "dev_cosine"] == [2, 4]
    (result,) = [r for r in records if r["metric"] == "cosine"]
    assert result["stages"] == {"layers": 2, "model": 2}
    assert list(result["parts"]) == ["held out", "b.jsonl"]
    for part in result["parts"].values():
        assert {"cosine", "worst", "top_1", "top_10", "errors", "untrained"} <= part.keys()
        assert len(part["errors"]) == 2
    assert {"table.md", "cosine.png", "sensitivity.json", "model", "tensorboard"} <= {p.name for p in out.iterdir()}
    model = out / "model"
    assert damage_of(model) is None
    card = (model / "README.md").read_text(encoding="utf-8")
    assert "Attention by layer: nystrom-8, nystrom-8" in card
    assert f"{result['value']:.4f}" in card
    assert json.loads((model / "sentence_bert_config.json").read_text()) == {"max_seq_length": 48}
    assert json.loads((model / "modules.json").read_text()) == MODULES
    assert json.loads((model / "1_Pooling" / "config.json").read_text()) == POOLING
    assert AutoTokenizer.from_pretrained(model).cls_token == "[CLS]"
    config = AutoModel.from_pretrained(model).config
    assert config.attention_layers == ["nystrom-8", "nystrom-8"]
    assert config._attn_implementation == "nystrom"
    ids = torch.randint(5, len(VOCABULARY), (1, 40))
    assert not torch.allclose(output(model, ids), output(shared / "bert", ids), atol=1e-4)
    assert main(["report", str(out), "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "Distillation" in page
    assert "b.jsonl" in page
    assert main(command("--judge", shared / "b.jsonl", "--resume", model="sentences")) == 0  # finished: nothing is done


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_killed_run_resumes_to_the_same_weights(step, command, tmp_path, monkeypatch):
    """Before, at and after the change of stage, which forgets the optimizer's state."""
    more = ("--steps", "4", "--eval-every", "1", "--layers-share", "0.5")
    assert main(command(*more, out="whole")) == 0
    begin = Stages.on_step_begin

    def killed(self, args, state, control, **kwargs):
        if state.global_step == step:
            raise Killed
        begin(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Stages, "on_step_begin", killed)
        with pytest.raises(Killed):
            main(command(*more))
    assert main(command(*more, "--resume")) == 0
    whole, resumed = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    values = [
        [(r["metric"], r.get("step"), r["value"]) for r in read_records(tmp_path / name) if "second" not in r["metric"]]
        for name in ("whole", "run")
    ]
    assert values[0] == values[1]


@pytest.mark.slow
def test_a_budget_chooses_layers_and_a_saved_model_keeps_them(command, tmp_path, monkeypatch):
    def measured(teacher, batches, names, *_):
        assert names == ["standard", "nystrom-8", "nystrom-local-8"]
        figures = [[(0.0, 3.0), (0.5, 1.0), (0.1, 2.0)], [(0.0, 3.0), (0.7, 1.0), (0.6, 2.0)]]
        return [{n: Candidate(n, *each) for n, each in zip(names, layer, strict=True)} for layer in figures]

    with monkeypatch.context() as patch:
        patch.setattr("nystromformer.training.distillation.run.measure_sensitivity", measured)
        assert main(command("--budget", "error=0.2", "--stages", "layers", "--steps", "2")) == 0
    config = AutoModel.from_pretrained(tmp_path / "run" / "model").config
    assert config.attention_layers == ["nystrom-local-8", "standard"]
    (result,) = [r for r in read_records(tmp_path / "run") if r["metric"] == "cosine"]
    assert result["config"]["layers"] == config.attention_layers
    assert result["stages"] == {"layers": 2}
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert [name for name in weights if "skip_convolution" in name] == [
        "encoder.layer.0.attention.self.skip_convolution.weight"
    ]


@pytest.mark.slow
def test_a_distilled_model_is_fine_tuned_with_the_attentions_it_has(command, tmp_path):
    assert main(command("--stages", "layers", "--steps", "1", "--layers", "1")) == 0
    source = Source(name=str(tmp_path / "run" / "model"))
    assert source.attention == "nystrom-8"
    common = {"max_length": 48, "labels": ("no", "yes")}
    saved = load_classifier(source, attention="nystrom-8", **common)
    assert saved.config.attention_layers == ["standard", "nystrom-8"]
    other = load_classifier(source, attention="nystrom-local-4", **common)
    assert other.config.attention_layers is None
    assert other.config._attn_implementation == "nystrom-local"
    exact = load_classifier(source, attention="standard", **common)
    assert exact.config._attn_implementation == "sdpa"


@pytest.mark.slow
@pytest.mark.parametrize("attention, kept", [("nystrom-local-8", 2), ("nystrom-8", None)])
def test_chosen_blocks_are_saved_where_an_attention_has_them(attention, kept, command, tmp_path):
    more = ("--attention", attention, "--chosen-blocks", "2", "--stages", "layers", "--steps", "1")
    assert main(command(*more)) == 0
    model = AutoModel.from_pretrained(tmp_path / "run" / "model")
    assert model.config.attention_options.get("chosen_blocks") == kept
    assert model.config.attention_options["exact_below"] == 24


@pytest.mark.slow
def test_a_longer_model_than_the_teacher(command, tmp_path, shared):
    write_json_lines(tmp_path / "long.jsonl", texts(30, sentences=60))
    more = ("--corpus", tmp_path / "long.jsonl", "--max-length", "100", "--steps", "2", "--conv-kernel-size", "0")
    assert main(command(*more, "--layers", "1")) == 0
    model = AutoModel.from_pretrained(tmp_path / "run" / "model")
    assert model.config.max_position_embeddings == AutoTokenizer.from_pretrained(model.name_or_path).model_max_length
    assert model.config.max_position_embeddings == 100
    assert model.config.attention_layers == ["standard", "nystrom-8"]
    table = model.embeddings.position_embeddings.weight
    assert torch.equal(table[64:], table[:36])
    assert model(torch.randint(5, 20, (1, 100))).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    "more, told",
    [
        (["--max-length", "5000"], "--max-length 5000: none of the documents"),
        (["--attention", "standard"], "can't be put into a model"),
        (["--attention", "linformer-8"], "can't be put into a model"),
        (["--budget", "0.1"], "--budget 0.1: must be"),
        (["--budget", "error=1e-9"], "exact attention would stay in all layers"),
        (["--budget", "speed=1000"], "--budget speed=1000"),
        (["--budget", "error=1", "--layers", "0"], "leave out --layers"),
        (["--layers", "2"], "--layers '2'"),
        (["--stages", "layer"], "--stages='layer'"),
        (["--steps", "1"], "--steps 1: 2 stages"),
        (["--chosen-blocks", "-1"], "--chosen-blocks"),
        (["--conv-kernel-size", "4"], "--conv-kernel-size=4: must be odd"),
        (["--judge", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(more, told, command, tmp_path, capsys):
    assert told in refusal(capsys, command(*more))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_teachers_that_are_linear_or_out_of_reach_are_refused(command, shared, tmp_path, capsys):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    made = {
        "own": NystromformerModel(NystromformerConfig(**sizes, vocab_size=len(VOCABULARY))),
        "exact": NystromformerModel(NystromformerConfig(**sizes, vocab_size=len(VOCABULARY), attention="standard")),
        "gpt": GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=len(VOCABULARY), pad_token_id=0)),
    }
    made["fnet"] = FNetModel(FNetConfig(hidden_size=16, num_hidden_layers=1, vocab_size=len(VOCABULARY)))
    for name, model in made.items():
        model.save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(shared / "bert").save_pretrained(tmp_path / name)
    assert main(command("--stages", "layers", "--steps", "1", out="distilled")) == 0
    for name, told in {
        "own": "linear attention already (nystrom",
        "distilled/model": "linear attention already (nystrom-8)",
        "exact": "nystromformer convert",
        "gpt": "GPT2Model has causal attention only",
        "fnet": "FNetModel has no attention to replace: it mixes tokens in another way",
    }.items():
        assert told in refusal(capsys, command(model=tmp_path / name))
        assert not (tmp_path / "run").exists()
