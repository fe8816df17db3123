"""What a piece of code imports, in a process of its own."""

import subprocess
import sys


def imported_by(code: str, *names: str) -> set[str]:
    """Those of the packages `names` that are loaded once `code` has run."""
    ask = f"{code}; import sys; print(*({set(names)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return set(done.stdout.split())
