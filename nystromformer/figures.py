"""Figures that the same records give byte for byte."""

import io
from pathlib import Path

from matplotlib import pyplot
from matplotlib.figure import Figure

from nystromformer.files import write_bytes

UNDATED: dict[str, dict[str, None]] = {".png": {}, ".svg": {"Date": None}}
"""Formats, and what Matplotlib would write into them of the time of drawing."""


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write `path`.png and `path`.svg, close the figure and return both paths. One figure is always the same bytes."""
    for suffix, metadata in UNDATED.items():
        content = io.BytesIO()
        with pyplot.rc_context({"svg.hashsalt": path.name}):
            figure.savefig(content, format=suffix[1:], dpi=150, metadata=metadata)
        write_bytes(path.with_suffix(suffix), content.getvalue())
    pyplot.close(figure)
    return [path.with_suffix(suffix) for suffix in UNDATED]
