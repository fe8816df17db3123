"""The command `nystromformer`. Each subcommand is one file in `commands/`."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import typer

from nystromformer import __version__
from nystromformer.commands.attention_map import attention_map
from nystromformer.commands.bench import bench
from nystromformer.commands.convert import convert
from nystromformer.commands.demo import demo
from nystromformer.commands.distill import distill
from nystromformer.commands.finetune import finetune
from nystromformer.commands.lra import lra
from nystromformer.commands.lra_data import lra_data
from nystromformer.commands.pretrain import pretrain
from nystromformer.commands.report import report
from nystromformer.errors import Stopped, UserError, is_missing_package, missing_package, refuse, report_fault

# Typer carries its own copy of click in newer versions: the class that its errors have in common is found through one.
UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="nystromformer",
    help="Self-attention in linear time and memory: compare it, train with it, put it into models you have.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
EXPECTED = (UsageError, UserError, Stopped, typer.Abort, typer.Exit)
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Compare": (demo, bench, attention_map, report),
    "Train": (lra, lra_data, pretrain, finetune),
    "Take over": (convert, distill),
}


class Fault(Exception):
    """An error that no command expects, and the folder where the command writes."""

    def __init__(self, error: Exception, folder: Path | None) -> None:
        super().__init__(str(error))
        self.error, self.folder = error, folder


def _with_folder(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose unexpected errors know where it writes."""

    @wraps(command)
    def run(**options: Any) -> None:
        try:
            command(**options)
        except EXPECTED:
            raise
        except Exception as error:
            if is_missing_package(error):
                raise
            raise Fault(error, options.get("out")) from error

    return run


for panel, jobs in COMMANDS.items():
    for job in jobs:
        app.command(rich_help_panel=panel)(_with_folder(job))


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: bool = typer.Option(False, "--version", help="Show the version and leave.", callback=_show_version),
) -> None:
    pass


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Bad input is one line on stderr and exit code 2, an unexpected error one line and 1."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return app(arguments, standalone_mode=False) or 0
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return 2
        return refuse(error.format_message())
    except UserError as error:
        return refuse(str(error))
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(stopped, file=sys.stderr)
        _leave_process_group()  # all processes have agreed to stop
        return stopped.code
    except ModuleNotFoundError as error:
        return refuse(missing_package(error, "train", "cli"))
    except (typer.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        return 130
    except Fault as fault:
        return report_fault(fault.error, fault.folder)


def entry() -> None:
    signal.signal(signal.SIGTERM, partial(_terminated, os.getpid()))
    code = main()
    if code == 0:
        _leave_process_group()
    sys.exit(code)


def _terminated(process: int, *_: Any) -> None:
    """End on SIGTERM as on Ctrl-C: what is unfinished is removed, and the terminal left as it was."""
    if os.getpid() != process:  # a worker, which its parent ends
        os._exit(143)
    print("stopped", file=sys.stderr)
    sys.exit(143)


def _leave_process_group() -> None:
    """Under `torchrun`: threads of gloo that outlive the interpreter abort a process that has succeeded.

    Only after success: a process that failed while others wait for it must end at once, not wait for them.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
