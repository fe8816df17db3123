"""The command `nystromformer`, also as `python -m nystromformer`: without the extra `cli` it says what to install."""

import sys

from nystromformer.errors import missing_package, refuse


def entry() -> None:
    try:
        from nystromformer.cli import entry as run
    except ModuleNotFoundError as error:
        sys.exit(refuse(missing_package(error, "cli")))
    run()


if __name__ == "__main__":
    entry()
