"""Whatever is wrong with what a user gives, the answer is one line, exit code 2, and nothing that stays.

The table is in `tests/helpers/bad_inputs.py`. Every twelfth of its lines, and the first of each kind, is tried by
`make test`; the others by `make faults`.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from bad_inputs import COMMANDS, OWN_TABLE, VALID, BadInput, bad_inputs, options_of, write_inputs

from nystromformer.cli import main
from nystromformer.commands import Choice, Range

TABLE = bad_inputs()
FEWEST = 300
EVERY = 12


def sample(table: list[BadInput]) -> set[int]:
    kinds: dict[tuple[str, str], int] = {}
    for place, bad in enumerate(table):
        kinds.setdefault((bad.command, bad.what.split()[0]), place)
    return {*range(0, len(table), EVERY), *kinds.values()}


SAMPLE = sample(TABLE)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture
def here(inputs, tmp_path, monkeypatch) -> Path:
    """A folder with everything that the valid commands read, as the current one."""
    folder = tmp_path / "here"
    shutil.copytree(inputs, folder)
    os.mkfifo(folder / "pipe")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """All paths, with the content of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(bad, id=f"{place} {bad.name}", marks=[] if place in SAMPLE else [pytest.mark.faults])
        for place, bad in enumerate(TABLE)
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(bad, here, capfd):
    bad.spoil(here)
    before = tree(here)
    capfd.readouterr()
    code = main([bad.command, *bad.arguments])
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert code == 2, said
    lines = [line for line in said.splitlines() if line.startswith("nystromformer: ")]
    assert len(lines) == 1, said
    assert len(said.splitlines()) - bars(said) == 1, said
    assert len(lines[0]) < 2_500
    assert not bad.named or any(name.lower() in lines[0].lower() for name in bad.named), said
    assert tree(here) == before


def bars(said: str) -> int:
    """Lines of progress: what was being read when the fault was found."""
    reading = "tokenizing|tokenising|reading the corpus|training the tokenizer|listops examples"
    return len(re.findall(rf"^(?:{reading}).*$", said, re.MULTILINE))


def test_the_table_is_large_and_has_every_command():
    assert len(TABLE) >= FEWEST
    assert {bad.command for bad in TABLE} == set(COMMANDS) == set(VALID)


TAKES_LONG = ("demo",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.faults] if name in TAKES_LONG else []) for name in COMMANDS],
)
def test_what_is_valid_succeeds(command, here, capfd):
    """Otherwise each of its bad inputs would be refused for another reason."""
    assert main([command, *VALID[command]]) == 0, capfd.readouterr().err
    assert (here / "out").exists()


@pytest.mark.slow
def test_a_table_of_the_users_own_succeeds(here, capfd):
    assert main(["finetune", *OWN_TABLE]) == 0, capfd.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_numbers_and_names_say_what_they_take(command):
    """So that the table has their bad values: no option is a number without a range."""
    for option in options_of(command):
        is_number = "int" in option.kind or "float" in option.kind
        assert isinstance(option.check, Range) == is_number, f"{command} {option.shown}"
        assert option.check is None or isinstance(option.check, (Range, Choice))
