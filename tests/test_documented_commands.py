"""Every command that the README, the guides and `--help` show, page by page, in a folder with what they name.

- Those in `RUN` are executed as they stand, with options after them that make them short: the last value of an option
  counts.
- Of the other jobs that train, everything is executed up to the work itself: all options and names are checked.
- The rest, with those in `PARSED`, goes through the command line's parser: a wrong name, option or type fails.
- Scripts must exist and have the options; targets of `make` must exist; `torchrun` reads its own options.

Nothing is left out: a line of another program fails until it is named here.
"""

import re
from importlib import metadata

import pytest
from documented_commands import (
    PAGES,
    ROOT,
    commands,
    help_examples,
    make_targets,
    mentions,
    options_of,
    parse,
    script_options,
    shell_commands,
    split,
    write_stand_ins,
)

from nystromformer.cli import UsageError, main

RUN = {
    "nystromformer attention-map --model path/to/encoder --text article.txt --landmarks 16,64,256 --out runs/map": "",
    "nystromformer convert path/to/bert runs/long-bert --max-length 4096": "",
    "nystromformer convert path/to/bert runs/own": "",
    "nystromformer lra listops --packed 33000 --preset mini --out runs/listops-packed": "--preset smoke",
    "nystromformer finetune sst2,rte --model DIR --data glue/ --preset mini --out runs/two": "--preset smoke",
    "nystromformer lra listops --attention nystrom-64 --preset mini --out runs/listops": "--preset smoke",
    "nystromformer lra pathfinder --self-pretrain 3000 --conv-kernel-size 65 --preset hour --out runs/pathfinder": (
        "--preset smoke --self-pretrain 2"
    ),
    "nystromformer lra pathfinder --from runs/pathfinder --seeds 1,2,3 --conv-kernel-size 65 --preset hour "
    "--out runs/seeds": "--preset smoke --seeds 1",
    "nystromformer lra-data pathfinder --contour-length 6 --count 100000 --out data/short": "--count 40",
    "nystromformer lra pathfinder --preset hour --data data/short --out runs/short": "--preset smoke",
    "nystromformer lra pathfinder --preset hour --after runs/short --out runs/long": "--preset smoke",
    "nystromformer lra-data listops --out data/listops --train 96000 --seed 0": "--preset smoke --train 16",
    "nystromformer lra-data pathfinder --out data/pathfinder --count 200000 --preview pictures.png": "--count 20",
    "nystromformer pretrain --corpus wiki.parquet --corpus books/ --tokenizer train --preset mini --out runs/nystrom": (
        "--preset smoke --workers 1"
    ),
    "nystromformer pretrain --corpus wiki.parquet --corpus books/ --tokenizer train --preset mini --attention standard "
    "--out runs/standard --beside runs/nystrom": "--preset smoke --workers 1",
    "nystromformer bench --lengths 1024,4096 --attention standard,nystrom-64 --peers": (
        "--lengths 64 --heads 2 --budget 0.1"
    ),
    "nystromformer finetune custom --model DIR --data reviews.csv --text-column review --label-column stars": (
        "--preset smoke"
    ),
    "nystromformer bench --peers --out runs/bench": (
        "--lengths 64 --attention standard,nystrom-64 --heads 2 --budget 0.1"
    ),
    "nystromformer lra listops --preset mini --out runs/listops": "--preset smoke",
    "nystromformer distill --model path/to/MiniLM --corpus wiki.parquet --preset mini --out runs/minilm": (
        "--preset smoke --attention nystrom-8"
    ),
    "nystromformer report runs/bench runs/listops --out runs/report": "",
    "nystromformer report runs/bench runs/lra --out runs/report": "",
}
PARSED = {
    "nystromformer pretrain --corpus wikimedia/wikipedia:20231101.en --tokenizer bert-base-uncased/vocab.txt "
    "--size base --preset paper": "the corpus is on the Hub",
}
WORK = {
    "demo": "nystromformer.demo.run.run_demo",  # tests/commands/test_demo.py runs it
    "lra": "nystromformer.training.sweep.run_sweep",
    "pretrain": "nystromformer.training.pretraining.pretrain",
    "finetune": "nystromformer.training.sweep.run_sweep",
    "distill": "nystromformer.training.distillation.run.distill",
}
"""Jobs that check all their options before this function does the work."""
NOT_OURS = ("git clone", "cd ")


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_stand_ins(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if shell_commands(page)], ids=lambda page: page.name)
def test_commands_of_a_page_work(page, stand_ins, monkeypatch, capfd):
    for command in shell_commands(page):
        check(command, monkeypatch, capfd)


@pytest.mark.slow
def test_examples_in_the_help_work(stand_ins, monkeypatch, capfd):
    for command in help_examples():
        check(command, monkeypatch, capfd)


def check(command, monkeypatch, capfd):
    """Run, check or parse one command, and fail with its text."""
    program, *arguments = split(command)
    if program == "nystromformer":
        how = check_ours(command, arguments, monkeypatch, capfd)
    elif program == "torchrun":
        how = check_torchrun(arguments, monkeypatch, capfd)
    elif program == "python":
        how = check_script(arguments)
    elif program == "make":
        assert set(arguments) <= make_targets(), f"{command}: no such target"
        how = "a target"
    elif program == "pip":
        how = check_pip(arguments)
    else:
        assert command.startswith(NOT_OURS), f"{command}: say in this file what is to be done with it"
        how = "not ours"
    print(f"{how}: {command}")


def check_ours(command, arguments, monkeypatch, capfd):
    if command in RUN:
        return run([*arguments, *split(RUN[command])], command, capfd)
    if arguments[0] not in WORK or command in PARSED:
        parse(arguments)
        return "parsed"
    with monkeypatch.context() as patch:
        started = []
        patch.setattr(WORK[arguments[0]], lambda options, say: started.append(options))
        run(arguments, command, capfd)
    assert len(started) == 1
    return "checked up to the work"


def run(arguments, command, capfd):
    code = main(arguments)
    captured = capfd.readouterr()
    assert code == 0, f"{command}: {captured.err}"
    return "executed"


def check_torchrun(arguments, monkeypatch, capfd):
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(arguments)
    if given.training_script == "nystromformer":
        behind = given.training_script_args
        return f"under torchrun {check_ours(' '.join(['nystromformer', *behind]), behind, monkeypatch, capfd)}"
    if given.training_script == "program.py":
        return "the reader's own program"
    return check_script([given.training_script, *given.training_script_args])


def check_script(arguments):
    script, *options = arguments
    assert (ROOT / script).is_file(), f"{script}: no such file"
    unknown = {option.split("=")[0] for option in options if option.startswith("--")} - script_options(ROOT / script)
    assert not unknown, f"{script}: has no {', '.join(unknown)}"
    return "a script with these options"


def check_pip(arguments):
    """The checkout, or the distribution that is installed, with extras that it has; nothing else."""
    name, extras = re.fullmatch(r"install (?:--editable )?([\w.-]+)(?:\[([\w,]+)\])?", " ".join(arguments)).groups("")
    ours = metadata.metadata("nystromformer-torch")
    assert name in (".", ours["Name"]), f"{name}: another package than {ours['Name']}"
    assert set(filter(None, extras.split(","))) <= set(ours.get_all("Provides-Extra")), f"{extras}: no such extra"
    return "an extra of ours"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_mentioned_in_the_text_exist(page):
    for mention in mentions(page.read_text(encoding="utf-8")):
        name, *arguments = mention.split()
        assert name == "COMMAND" or name in commands(), f"nystromformer {mention}: no such command"
        options = {argument.split("=")[0] for argument in arguments if argument.startswith("--")} - {"--help"}
        if name in commands():
            assert options <= options_of(commands()[name]), f"nystromformer {mention}: no such option"


def test_the_tables_name_documented_commands_only():
    documented = {command for page in PAGES for command in shell_commands(page)} | set(help_examples())
    assert RUN.keys() <= documented, "remove what is no longer documented"
    assert PARSED.keys() <= documented


def test_each_job_has_one_command_that_is_executed():
    executed = {split(command)[1] for command in RUN} | {"demo"}
    assert executed == commands().keys()


@pytest.mark.parametrize(
    "command",
    [
        "nystromformer lar listops",
        "nystromformer lra listops --atention nystrom-64",
        "nystromformer lra listops --attention nystrm-64",
        "nystromformer lra listops --steps many",
        "nystromformer finetune sst3 --model DIR",
        "nystromformer convert path/to/bert",
        "torchrun --nprocs 4 nystromformer lra text",
        "torchrun --nproc-per-node 4 nystromformer lra txt",
        "python benchmarks/absent.py",
        "python benchmarks/fidelity.py --modle path/to/MiniLM",
        "make dmeo",
        "pip install nystromformer",
        "pip install .[modles]",
    ],
)
def test_a_wrong_command_would_be_found(command, stand_ins, monkeypatch, capfd):
    with pytest.raises((AssertionError, SystemExit, UsageError)):
        check(command, monkeypatch, capfd)
