"""Draws how `nystrom-local` sees each key from each query, for docs/nystrom-local.md.

python benchmarks/nystrom_local_picture.py docs/nystrom-local.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

LENGTH, BLOCK, SEGMENTS, CORE_ROWS = 96, 8, 10, 12
HEAVY = [0, 37, 71]
COLORS = {
    "near: as it is": "#1f5fa8",
    "heavy: as it is, for all queries": "#c2402d",
    "far: through the mean of its segment": "#e9e4d6",
    "the next segment": "#d3cbb5",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path

    place = torch.arange(LENGTH)
    block, segment = place // BLOCK, place * SEGMENTS // LENGTH
    kinds = (2 + segment % 2).expand(LENGTH, -1).clone()
    kinds[(block[:, None] - block).abs() <= 1] = 0
    kinds[:, HEAVY] = 1

    figure, panel = pyplot.subplots(figsize=(7.6, 4.6), layout="constrained")
    panel.imshow(kinds, cmap=ListedColormap(list(COLORS.values())), interpolation="nearest")
    rows = (2 * torch.arange(CORE_ROWS) + 1) * LENGTH // (2 * CORE_ROWS)
    core = panel.scatter([-3] * CORE_ROWS, rows, marker=">", s=16, color="black", clip_on=False)
    panel.set_xlim(-5, LENGTH - 0.5)
    panel.set_xlabel("keys")
    panel.set_ylabel("queries")
    panel.set_xticks([])
    panel.set_yticks([])
    for side in panel.spines.values():
        side.set_visible(False)
    patches = [Patch(color=color, label=label) for label, color in COLORS.items()]
    core.set_label("core rows: known exactly")
    figure.legend(handles=[*patches, core], frameon=False, loc="outside right center", fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
