"""The command `nystromformer`. Each subcommand is one file in `jobs/`."""

import os
import sys

import click
import typer

from nystromformer.errors import UserError
from nystromformer.jobs.demo import demo
from nystromformer.version import __version__

app = typer.Typer(
    name="nystromformer",
    help="Self-attention in linear time and memory: compare it, train with it, put it into models you have.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command()(demo)


@app.callback()
def common(
    version: bool = typer.Option(False, "--version", help="Show the version and leave.", is_eager=True),
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Bad input is one line on stderr and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return app(arguments, standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        return _refuse(error.format_message())
    except UserError as error:
        return _refuse(str(error))
    except (click.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        return 130


def _refuse(message: str) -> int:
    print("nystromformer: " + " ".join(message.split()), file=sys.stderr)
    return 2


def entry() -> None:
    sys.exit(main())
