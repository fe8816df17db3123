"""Attention matrices and their errors as pictures."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.colors import PowerNorm
from torch import Tensor

matplotlib.use("Agg")


LONGEST_WORDS = 40
"""Sequences of up to so many tokens have them written along the axes."""


def draw_maps(
    path: Path,
    title: str,
    maps: dict[str, Tensor],
    heads: Sequence[int],
    errors: dict[str, Tensor],
    words: Sequence[str],
) -> None:
    """A row for each of `heads`, a column for each entry of `maps` (h, n, n), the exact one first.

    All matrices of a row share their colours, which grow with the square root of the weight: most weights are small.
    """
    size = 2.5 if len(words) > LONGEST_WORDS else 3.4
    figure, axes = pyplot.subplots(
        len(heads),
        len(maps),
        figsize=(size * len(maps) + 0.9, size * len(heads) + 0.9),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for row, head in enumerate(heads):
        exact = next(iter(maps.values()))[head]
        norm = PowerNorm(0.5, vmin=0, vmax=exact.flatten().quantile(0.999).clamp(min=1e-6).item(), clip=True)
        for column, (name, matrices) in enumerate(maps.items()):
            panel = axes[row, column]
            image = panel.imshow(matrices[head].clamp(min=0), cmap="magma", norm=norm, interpolation="nearest")
            label = f"error {errors[name][head]:.2f}" if name in errors else ""
            panel.set_title(f"{name}\n{label}" if row == 0 else label, fontsize=9)
            label_axes(panel, words)
            leave_a_margin(panel, len(words))
        axes[row, 0].set_ylabel(f"head {head}\nquery", fontsize=9)
        figure.colorbar(image, ax=axes[row, :].tolist(), pad=0.01, aspect=28).ax.tick_params(labelsize=7)
    for panel in axes[-1]:
        panel.set_xlabel("key", fontsize=9)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def draw_errors(path: Path, title: str, errors: dict[str, Tensor]) -> None:
    """Errors (layers, heads) for each entry of `errors`, written into their cells. Colours end at 1, the error of 0."""
    layers, heads = next(iter(errors.values())).shape
    size = (max(0.36 * heads, 2.2) * len(errors) + 1.6, 0.36 * layers + 1.4)  # room for titles above few heads
    figure, axes = pyplot.subplots(1, len(errors), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for panel, (name, values) in zip(axes[0], errors.items(), strict=True):
        image = panel.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for layer in range(layers):
            for head in range(heads):
                value = values[layer, head].item()
                colour = "black" if value > 0.6 else "white"
                panel.text(head, layer, f"{value:.2f}", color=colour, fontsize=5.5, ha="center", va="center")
        panel.set_title(f"{name}: mean {values.mean():.2f}", fontsize=9)
        panel.set_xticks(range(heads), range(heads), fontsize=7)
        panel.set_xlabel("head", fontsize=9)
    axes[0, 0].set_yticks(range(layers), range(layers), fontsize=7)
    axes[0, 0].set_ylabel("layer", fontsize=9)
    figure.colorbar(image, ax=axes[0].tolist(), pad=0.01, extend="max").ax.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def label_axes(panel: pyplot.Axes, words: Sequence[str]) -> None:
    if len(words) <= LONGEST_WORDS:
        panel.set_xticks(range(len(words)), words, rotation=90, fontsize=6)
        panel.set_yticks(range(len(words)), words, fontsize=6)
    else:
        panel.tick_params(labelsize=7)


def leave_a_margin(panel: pyplot.Axes, length: int) -> None:
    """The first and the last token get much attention, and their lines would vanish behind the frame."""
    panel.set_facecolor("grey")
    panel.spines[:].set_visible(False)
    first, last = -0.5 - 0.02 * length, length - 0.5 + 0.02 * length
    panel.set(xlim=(first, last), ylim=(last, first))


def save(figure: pyplot.Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
