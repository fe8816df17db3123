import subprocess
import sys

import pytest

from nystromformer.cli import main
from nystromformer.version import __version__


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_help_shows_an_example(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"nystromformer {command}" in capsys.readouterr().out


def test_an_unknown_command_is_refused_in_one_line(capsys):
    assert main(["benhc"]) == 2
    assert capsys.readouterr().err.strip() == "nystromformer: No such command 'benhc'. Did you mean 'bench'?"


def test_help_does_not_wait_for_torch():
    code = "import sys; import nystromformer.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
