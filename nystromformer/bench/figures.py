"""Figures as files, for people (PNG) and for pages (SVG)."""

import io
from pathlib import Path

from matplotlib import pyplot
from matplotlib.figure import Figure

from nystromformer.records import write_bytes


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write `path`.png and `path`.svg, close the figure, and return both paths."""
    paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for each in paths:
        content = io.BytesIO()
        figure.savefig(content, format=each.suffix[1:], dpi=150)
        write_bytes(each, content.getvalue())
    pyplot.close(figure)
    return paths
