"""What it saves to meet the vocabulary at masked tokens only, each figure a ratio from one run.

    python benchmarks/mlm_head.py --out results/bench/mlm_head

Forward and backward of the masked-language-model head of BERT-base (width 768, 30,000 words) and of a whole training
step of the BERT-small preset, batch 2 × 512, 15 % of the tokens masked: all logits, then the loss at masked tokens,
against `NystromformerForMaskedLM`. Interleaved repeats in this process. Memory is counted, not measured: elements of
the logits, which training keeps in several copies.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nystromformer import NystromformerForMaskedLM
from nystromformer.bench.measure import interleaved_times
from nystromformer.files import write_text
from nystromformer.models import preset_config
from nystromformer.records import Recorder, new_job_folder
from nystromformer.report.table import Table

BATCH, LENGTH, SHARE = 2, 512, 0.15


def inputs(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Token ids and MLM labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocabulary, (BATCH, LENGTH), generator=generator)
    return ids, torch.where(torch.rand(ids.shape, generator=generator) < SHARE, ids, -100)


def head_runs() -> dict[str, Callable[[], None]]:
    """The head alone."""
    config = preset_config("bert-base")
    model = NystromformerForMaskedLM(preset_config("bert-base", num_hidden_layers=1))
    head, (_, labels) = model.cls.predictions, inputs(config.vocab_size)
    hidden = torch.randn(BATCH, LENGTH, config.hidden_size, requires_grad=True)

    def everywhere() -> None:
        functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten()).backward()

    def masked_only() -> None:
        head.tally(hidden, labels).mean().backward()

    return {"everywhere": everywhere, "masked only": masked_only}


def step_runs() -> dict[str, Callable[[], None]]:
    """Forward and backward of a whole model."""
    model = NystromformerForMaskedLM(preset_config("bert-small")).train()
    ids, labels = inputs(model.config.vocab_size)

    def everywhere() -> None:
        functional.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten()).backward()

    def masked_only() -> None:
        model(ids, labels=labels).loss.backward()

    return {"everywhere": everywhere, "masked only": masked_only}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/mlm_head"))
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of timing for each figure")
    options = parser.parse_args()
    new_job_folder(options.out)
    config = {"budget": options.budget, "batch": BATCH, "length": LENGTH, "masked": SHARE}
    recorder, rows = Recorder(options.out, job="mlm_head", config=config, seed=0), []
    for name, runs in {"BERT-base head": head_runs(), "BERT-small step": step_runs()}.items():
        times = interleaved_times(runs, budget=options.budget)
        everywhere, masked = times["everywhere"], times["masked only"]
        ratio, by_minimum = everywhere.median / masked.median, everywhere.minimum / masked.minimum
        recorder.record(
            "speedup", ratio, figure=name, minimum=by_minimum, seconds={k: t.median for k, t in times.items()}
        )
        rows.append([name, f"{everywhere.median:.3f} s", f"{masked.median:.3f} s", f"{ratio:.2f}", f"{by_minimum:.2f}"])
    _, labels = inputs(30000)
    share = float((labels != -100).float().mean())
    recorder.record("logits_share", share, figure="elements of the logits")
    table = Table(["forward + backward", "everywhere", "masked only", "by medians", "by minima"], rows).markdown()
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    text = f"{table}\n\nLogits: {share:.1%} of the elements. {threads}; `python benchmarks/mlm_head.py`\n"
    write_text(options.out / "table.md", text)
    print(text)


if __name__ == "__main__":
    main()
