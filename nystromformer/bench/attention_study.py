"""What `nystromformer attention-map` does: capture a model's attention, measure the approximation, draw both.

`study.take` what a model's attention is given, then `study.write` errors and pictures into the folder of a run.
"""

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import LogNorm
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from nystromformer.files import write_bytes, write_text
from nystromformer.integrations.hf.attention_interface import AttentionCall
from nystromformer.integrations.probe import approximate_map, exact_map, head_errors, record_calls
from nystromformer.progress import steps_bar
from nystromformer.records import Recorder, write_config
from nystromformer.report.table import Table, tables_markdown

EXACT, MAPS = "exact", "maps.json"
Kind = tuple[str, int]
LONGEST_WORDS = 40
"""Sequences of up to so many tokens have them written along the axes; of longer ones, so many can be looked at."""

CAPTION = (
    "Matrix: ‖Ŝ − S‖ / ‖S‖ of attention matrices in the Frobenius norm. Output: ‖Ŝ V − S V‖ / ‖S V‖. Means over "
    "examples; each layer is given what it gets in the model as it is."
)


@dataclass
class AttentionStudy:
    """Exact attention of a model against others, given as pairs such as ("nystrom", 64): name and landmarks."""

    kinds: list[Kind]
    calls: list[list[AttentionCall]] = field(default_factory=list)
    """For each batch, those of all layers."""
    words: list[str] = field(default_factory=list)
    """The tokens of the first example, which is the one that is drawn."""
    title: str = ""
    matrix: dict[Kind, Tensor] = field(default_factory=dict)
    """Errors (layers, heads)."""
    output: dict[Kind, Tensor] = field(default_factory=dict)
    maps: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By drawn layer and name: weights (heads, queries, keys) of the first tokens of the first example."""

    @property
    def layers(self) -> int:
        return len(self.calls[0])

    @property
    def heads(self) -> int:
        return self.calls[0][0].query.shape[1]

    def look_at(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batches: list[BatchEncoding]) -> None:
        """Run the model with its own, exact attention and keep what each layer is given."""
        ids, real = batches[0]["input_ids"][0], batches[0]["attention_mask"][0].bool()
        words = tokenizer.convert_ids_to_tokens(ids[real])
        self.take([record_calls(model, **batch)[0] for batch in batches], words, type(model).__name__)

    def take(self, calls: list[list[AttentionCall]], words: list[str], name: str) -> None:
        """The calls of all layers for each batch, the tokens of the first example, and what to call the model."""
        self.calls, self.words, self.title = calls, words, f"{name}, {len(words)} tokens"

    def write(
        self, out: Path, config: dict[str, Any], seed: int, layers: Sequence[int], heads: Sequence[int] | None = None
    ) -> None:
        """Configuration, records, table and pictures of a run, with a progress bar."""
        write_config(out, config)
        recorder = Recorder(out, job="attention-map", config=config, seed=seed)
        with steps_bar(self.layers + len(layers)) as step:
            self.measure(recorder, step)
            for name, caption in self.draw(out, layers, heads, step).items():
                recorder.record("picture", name, caption=caption)
            write_text(out / MAPS, json.dumps(self.maps_as_data(), ensure_ascii=False))
            caption = f"{self.title}: weights among the first {min(len(self.words), LONGEST_WORDS)} tokens"
            recorder.record("maps", MAPS, caption=caption)
        write_text(out / "table.md", tables_markdown([self.table()]))

    def measure(self, recorder: Recorder, step: Callable[[str], None]) -> None:
        """Errors of every layer and head, recorded."""
        by_layer: dict[Kind, list[tuple[Tensor, Tensor]]] = {kind: [] for kind in self.kinds}
        for layer in range(self.layers):
            step(f"layer {layer}: errors")
            for name, m in self.kinds:
                errors = [head_errors(calls[layer], f"{name}-{m}") for calls in self.calls]
                matrix, output = (
                    torch.cat([getattr(error, name) for error in errors]).mean(dim=0).cpu()
                    for name in ("matrix", "output")
                )  # (h,)
                by_layer[name, m].append((matrix, output))
                for head in range(self.heads):
                    place = {"attention": name, "num_landmarks": m, "layer": layer, "head": head}
                    recorder.record("matrix_error", matrix[head].item(), **place)
                    recorder.record("output_error", output[head].item(), **place)
        self.matrix = {kind: torch.stack([matrix for matrix, _ in pairs]) for kind, pairs in by_layer.items()}
        self.output = {kind: torch.stack([output for _, output in pairs]) for kind, pairs in by_layer.items()}

    def draw(
        self, out: Path, layers: Sequence[int], heads: Sequence[int] | None, step: Callable[[str], None]
    ) -> dict[str, str]:
        """`layer-N.png` for each of `layers`, for the first example, and `errors.png`: files with their captions."""
        captions = {}
        for layer in layers:
            step(f"layer {layer}: picture")
            call = first_example(self.calls[0][layer], len(self.words))
            maps = {EXACT: exact_map(call)[0].float().cpu()}
            for name, m in self.kinds:
                maps[label(name, m)] = approximate_map(call, f"{name}-{m}")[0].float().cpu()
            self.maps[layer] = {name: weights[:, :LONGEST_WORDS, :LONGEST_WORDS] for name, weights in maps.items()}
            errors = {
                name: torch.linalg.matrix_norm(approximation - maps[EXACT]) / torch.linalg.matrix_norm(maps[EXACT])
                for name, approximation in maps.items()
                if name != EXACT
            }
            middle = self.kinds[len(self.kinds) // 2]
            rows = typical_heads(self.matrix[middle][layer]) if heads is None else heads
            title = f"{self.title}: layer {layer}"
            draw_maps(out / f"layer-{layer}.png", title, maps, rows, errors, self.words)
            captions[f"layer-{layer}.png"] = f"{title}, exact attention and {self.names}"
        title = f"{self.title}: relative error of attention matrices"
        draw_errors(out / "errors.png", title, {label(*kind): matrix for kind, matrix in self.matrix.items()})
        return captions | {"errors.png": title}

    def maps_as_data(self) -> dict[str, Any]:
        """What was drawn as numbers, for the report: 255 times the root of each weight, by layer, name and head."""
        names = list(next(iter(self.maps.values()), {}))
        weights = [torch.stack([maps[name] for name in names]) for maps in self.maps.values()]
        levels = (255 * torch.stack(weights).clamp(0, 1).sqrt()).round().to(torch.uint8) if weights else torch.empty(0)
        return {
            "words": self.words[:LONGEST_WORDS],
            "layers": list(self.maps),
            "heads": self.heads,
            "names": names,
            "levels": base64.b64encode(levels.contiguous().numpy().tobytes()).decode(),
        }

    @property
    def names(self) -> str:
        return " and ".join(dict.fromkeys(name for name, _ in self.kinds))

    def table(self) -> Table:
        """Means over the heads of each layer, and over all."""
        header = ["layer", *(f"{label(*kind)}: {error}" for kind in self.kinds for error in ("matrix", "output"))]
        means = [errors[kind].mean(dim=1) for kind in self.kinds for errors in (self.matrix, self.output)]
        rows = [[layer, *(f"{mean[layer]:.3f}" for mean in means)] for layer in range(self.layers)]
        rows.append(["all", *(f"{mean.mean():.3f}" for mean in means)])
        title = f"{self.title}: errors of {self.names}, mean over heads"
        return Table(header, rows, highlight={self.layers}, title=title, note=CAPTION)


def label(name: str, m: int) -> str:
    return f"{name}, m = {m}"


def first_example(call: AttentionCall, length: int) -> AttentionCall:
    """The first example of a batch without its padding, which gives the same alone."""
    if call.key_mask is None:
        keep = torch.arange(length, device=call.query.device)
    else:
        keep = call.key_mask[0].nonzero().flatten()
    query, key, value = (x[:1, :, keep] for x in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value, query_mask=None, key_mask=None)


def typical_heads(errors: Tensor) -> list[int]:
    """The heads with the least, the median and the largest error.

    >>> typical_heads(torch.tensor([0.5, 0.1, 0.3, 0.2]))
    [1, 2, 0]
    """
    order = errors.argsort().tolist()
    return list(dict.fromkeys([order[0], order[len(order) // 2], order[-1]]))


def draw_maps(
    path: Path,
    title: str,
    maps: dict[str, Tensor],
    heads: Sequence[int],
    errors: dict[str, Tensor],
    words: Sequence[str],
) -> None:
    """A row for each of `heads`, a column for each entry of `maps` (h, n, n), the exact one first.

    All matrices of a row share their colors, which grow with the logarithm of the weight. They begin where a tenth of
    the head's exact weights lie below, within two decades: most weights are small, and would all be black.
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
        even = 1 / len(words)
        least = min(max(exact.flatten().quantile(0.1).item(), 1e-3 * even), 0.1 * even)
        norm = LogNorm(least, max(exact.flatten().quantile(0.999).item(), 2 * even), clip=True)
        for column, (name, matrices) in enumerate(maps.items()):
            panel = axes[row, column]
            image = panel.imshow(matrices[head].clamp(min=norm.vmin), cmap="magma", norm=norm, interpolation="nearest")
            label = f"error {errors[name][head]:.2f}" if name in errors else ""
            panel.set_title(f"{name}\n{label}" if row == 0 else label, fontsize=9)
            _label_axes(panel, words)
            _leave_a_margin(panel, len(words))
            panel.tick_params(bottom=row == len(heads) - 1, left=column == 0)  # others would cross the title below
        axes[row, 0].set_ylabel(f"head {head}\nquery", fontsize=9)
        figure.colorbar(image, ax=axes[row, :].tolist(), pad=0.01, aspect=28).ax.tick_params(labelsize=7)
    for panel in axes[-1]:
        panel.set_xlabel("key", fontsize=9)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def draw_errors(path: Path, title: str, errors: dict[str, Tensor]) -> None:
    """Errors (layers, heads) for each entry of `errors`, written into their cells. Colors end at 1, the error of 0."""
    layers, heads = next(iter(errors.values())).shape
    size = (max(0.36 * heads, 2.2) * len(errors) + 1.6, 0.36 * layers + 1.4)  # room for titles above few heads
    figure, axes = pyplot.subplots(1, len(errors), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for panel, (name, values) in zip(axes[0], errors.items(), strict=True):
        image = panel.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for layer in range(layers):
            for head in range(heads):
                value = values[layer, head].item()
                color = "black" if value > 0.6 else "white"
                panel.text(head, layer, f"{value:.2f}", color=color, fontsize=5.5, ha="center", va="center")
        panel.set_title(f"{name}: mean {values.mean():.2f}", fontsize=9)
        panel.set_xticks(range(heads), range(heads), fontsize=7)
        panel.set_xlabel("head", fontsize=9)
    axes[0, 0].set_yticks(range(layers), range(layers), fontsize=7)
    axes[0, 0].set_ylabel("layer", fontsize=9)
    figure.colorbar(image, ax=axes[0].tolist(), pad=0.01, extend="max").ax.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def _label_axes(panel: pyplot.Axes, words: Sequence[str]) -> None:
    if len(words) <= LONGEST_WORDS:
        panel.set_xticks(range(len(words)), words, rotation=90, fontsize=6)
        panel.set_yticks(range(len(words)), words, fontsize=6)
    else:
        panel.tick_params(labelsize=7)


def _leave_a_margin(panel: pyplot.Axes, length: int) -> None:
    """The first and the last token get much attention, and their lines would vanish behind the frame."""
    panel.set_facecolor("gray")
    panel.spines[:].set_visible(False)
    first, last = -0.5 - 0.02 * length, length - 0.5 + 0.02 * length
    panel.set(xlim=(first, last), ylim=(last, first))


def _save(figure: pyplot.Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, dpi=100, bbox_inches="tight")
    pyplot.close(figure)
    write_bytes(path, content.getvalue())
