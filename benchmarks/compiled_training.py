"""What `torch.compile` costs when a model is trained on inputs of changing length: seconds of each step.

    python benchmarks/compiled_training.py --out results/bench/compiled

A classifier of two layers, Nyström attention, default backend. The first step compiles for its length, the first step
of another length for all lengths; what is compiled later is seen here, too. Caches of earlier runs are not used.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from nystromformer import NystromformerConfig, NystromformerForSequenceClassification
from nystromformer.files import write_text
from nystromformer.records import Recorder, command, new_job_folder
from nystromformer.report.table import Table

LENGTHS = (512, 512, 700, 700, 900, 1100, 600)


def measure(recorder: Recorder) -> None:
    torch.manual_seed(0)
    config = NystromformerConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, max_position_embeddings=2048
    )
    model = NystromformerForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model)
    rows = []
    for length in LENGTHS:
        inputs = torch.randint(5, 1000, (4, length))
        start = time.perf_counter()
        compiled(input_ids=inputs, labels=torch.tensor([0, 1, 1, 0])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        recorder.record("step", seconds, length=length, unit="s")
        rows.append([f"{length:,}", f"{seconds:.1f}"])
        print(*rows[-1])
    table = Table(["tokens", "seconds of the step"], rows).markdown()
    write_text(recorder.folder / "table.md", f"{table}\n\n{torch.get_num_threads()} threads; `{command()}`\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/compiled"))
    options = parser.parse_args()
    new_job_folder(options.out)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        measure(Recorder(options.out, job="compiled_training", config={"lengths": list(LENGTHS)}))


if __name__ == "__main__":
    main()
