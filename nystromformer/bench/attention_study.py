"""What `nystromformer attention-map` does: capture a model's attention, measure the approximation, draw both.

`study.take` what a model's attention is given, then `study.write` errors and pictures into the folder of a run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from nystromformer.bench.attention_pictures import draw_errors, draw_maps
from nystromformer.files import write_text
from nystromformer.integrations.attention_interface import AttentionCall
from nystromformer.integrations.probe import approximate_map, exact_map, head_errors, record_calls
from nystromformer.progress import steps_bar
from nystromformer.records import Recorder, table_markdown, write_config

EXACT = "exact"

CAPTION = (
    "Matrix: ‖Ŝ − S‖ / ‖S‖ of attention matrices in the Frobenius norm. Output: ‖Ŝ V − S V‖ / ‖S V‖. Means over "
    "examples; each layer is given what it gets in the model as it is."
)


@dataclass
class AttentionStudy:
    """Exact attention of a model against `operation` with some numbers of landmarks."""

    operation: Callable[..., Tensor]
    name: str
    landmarks: list[int]
    calls: list[list[AttentionCall]] = field(default_factory=list)
    """For each batch, those of all layers."""
    words: list[str] = field(default_factory=list)
    """The tokens of the first example, which is the one that is drawn."""
    title: str = ""
    matrix: dict[int, Tensor] = field(default_factory=dict)
    """By number of landmarks: errors (layers, heads)."""
    output: dict[int, Tensor] = field(default_factory=dict)

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
        self, out: Path, config: dict[str, object], seed: int, layers: Sequence[int], heads: Sequence[int] | None = None
    ) -> None:
        """Configuration, records, table and pictures of a run, with a progress bar."""
        write_config(out, config)
        recorder = Recorder(out, job="attention-map", config=config, seed=seed)
        with steps_bar(self.layers + len(layers)) as step:
            self.measure(recorder, step)
            for name, caption in self.draw(out, layers, heads, step).items():
                recorder.record("picture", name, caption=caption)
        write_text(out / "table.md", self.markdown())

    def measure(self, recorder: Recorder, step: Callable[[str], None]) -> None:
        """Errors of every layer and head, recorded."""
        by_layer: dict[int, list[tuple[Tensor, Tensor]]] = {m: [] for m in self.landmarks}
        for layer in range(self.layers):
            step(f"layer {layer}: errors")
            for m in self.landmarks:
                errors = [head_errors(calls[layer], self.operation, m) for calls in self.calls]
                matrix, output = (
                    torch.cat([getattr(error, name) for error in errors]).mean(dim=0).cpu()
                    for name in ("matrix", "output")
                )  # (h,)
                by_layer[m].append((matrix, output))
                for head in range(self.heads):
                    place = {"attention": self.name, "num_landmarks": m, "layer": layer, "head": head}
                    recorder.record("matrix_error", matrix[head].item(), **place)
                    recorder.record("output_error", output[head].item(), **place)
        self.matrix = {m: torch.stack([matrix for matrix, _ in pairs]) for m, pairs in by_layer.items()}
        self.output = {m: torch.stack([output for _, output in pairs]) for m, pairs in by_layer.items()}

    def draw(
        self, out: Path, layers: Sequence[int], heads: Sequence[int] | None, step: Callable[[str], None]
    ) -> dict[str, str]:
        """`layer-N.png` for each of `layers`, for the first example, and `errors.png`: files with their captions."""
        captions = {}
        for layer in layers:
            step(f"layer {layer}: picture")
            call = first_example(self.calls[0][layer], len(self.words))
            maps = {EXACT: exact_map(call)[0].float().cpu()}
            for m in self.landmarks:
                maps[self.label(m)] = approximate_map(call, self.operation, m)[0].float().cpu()
            errors = {
                name: torch.linalg.matrix_norm(approximation - maps[EXACT]) / torch.linalg.matrix_norm(maps[EXACT])
                for name, approximation in maps.items()
                if name != EXACT
            }
            rows = (
                typical_heads(self.matrix[self.landmarks[len(self.landmarks) // 2]][layer]) if heads is None else heads
            )
            title = f"{self.title}: layer {layer}"
            draw_maps(out / f"layer-{layer}.png", title, maps, rows, errors, self.words)
            captions[f"layer-{layer}.png"] = f"{title}, exact attention and {self.name}"
        title = f"{self.title}: relative error of attention matrices"
        draw_errors(out / "errors.png", title, {self.label(m): matrix for m, matrix in self.matrix.items()})
        return captions | {"errors.png": title}

    def label(self, m: int) -> str:
        return f"{self.name}, m = {m}"

    def rows(self) -> list[list[str]]:
        rows = []
        for layer in [*range(self.layers), None]:
            means = [
                (errors[m].mean() if layer is None else errors[m][layer].mean()).item()
                for m in self.landmarks
                for errors in (self.matrix, self.output)
            ]
            rows.append(["all" if layer is None else str(layer), *(f"{mean:.3f}" for mean in means)])
        return rows

    def header(self) -> list[str]:
        return ["layer", *(f"m = {m}: {kind}" for m in self.landmarks for kind in ("matrix", "output"))]

    def markdown(self) -> str:
        return f"# {self.title}: errors of {self.name}\n\n{table_markdown(self.header(), self.rows())}\n\n{CAPTION}\n"

    def print(self) -> None:
        table = Table(title=f"{self.title}: errors of {self.name}, mean over heads", title_justify="left")
        for name in self.header():
            table.add_column(name, justify="right")
        for row in self.rows():
            table.add_row(*row, style="bold" if row[0] == "all" else None)
        console = Console()
        console.print(table)
        console.print(CAPTION, style="dim", highlight=False)


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
