"""What the sum of two position vectors tells of Pathfinder's label, by how the table of positions begins.

    python benchmarks/pathfinder_positions.py --out results/lra/positions

A mean over tokens can tell how far apart the markers are only by what their positions add to it. Here nothing else is
in it: the vectors of the two markers' pixels in the table that a model begins with are added up, normalized, and the
arena's classifier (64 → 128 → 2) learns labels from them. The table itself stays as it begins. How much a threshold on
the distance would tell is in `pathfinder_shortcut.py`.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nystromformer.data.lra.pathfinder import PathfinderSetOptions, random_picture
from nystromformer.files import write_text
from nystromformer.models.lra import EMBEDDING_STARTS, NystromformerForLongRangeArena, lra_config
from nystromformer.records import Recorder, new_job_folder
from nystromformer.report.table import Table

SIDE, BATCH, TEST = 32, 32, 4_000
LOOKS = (250, 500, 1_000, 2_000, 4_000)
"""Steps after which the classifier is tested."""


def marked_pixels(contour: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The pixels of both markers (count, 2), and labels, one half of them connected."""
    options, rng = PathfinderSetOptions(contour_length=contour).pictures, np.random.default_rng([seed, contour])
    found = [random_picture(rng, bool(index % 2), options) for index in range(count)]
    places = np.array([picture.markers for picture in found]).clip(0, SIDE - 1).round().astype(int)  # (count 2 2)
    return torch.from_numpy(places[..., 0] * SIDE + places[..., 1]), torch.arange(count) % 2


def position_table(start: str, seed: int) -> Tensor:
    torch.manual_seed(seed)
    config = lra_config(embedding_start=start, vocab_size=257, max_position_embeddings=SIDE**2, num_labels=2)
    return NystromformerForLongRangeArena(config).get_position_embeddings().weight.detach()


def accuracies(features: Tensor, labels: Tensor, seed: int) -> list[float]:
    """Of a classifier that learns from all but the last `TEST`, on these, after so many steps as `LOOKS` says."""
    torch.manual_seed(seed)
    features = (features - features.mean(dim=0)) / features.std(dim=0)
    classifier = nn.Sequential(nn.Linear(features.shape[1], 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer, scores = torch.optim.Adam(classifier.parameters(), lr=1e-3), []
    for step in range(1, LOOKS[-1] + 1):
        chosen = torch.randint(len(features) - TEST, (BATCH,))
        loss = nn.functional.cross_entropy(classifier(features[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in LOOKS:
            with torch.no_grad():
                told = classifier(features[-TEST:]).argmax(dim=1)
            scores.append((told == labels[-TEST:]).float().mean().item())
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pathfinder-positions"))
    parser.add_argument("--contour-length", type=int, default=6)
    parser.add_argument("--count", type=int, default=44_000, help=f"pictures, of which {TEST:,} are for the test")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    new_job_folder(options.out)
    config = {"count": options.count, "contour_length": options.contour_length}
    recorder = Recorder(options.out, job="pathfinder-positions", config=config, seed=options.seed)
    pixels, labels = marked_pixels(options.contour_length, options.count, options.seed)
    rows = []
    for start in EMBEDDING_STARTS:
        scores = accuracies(position_table(start, options.seed)[pixels].sum(dim=1), labels, options.seed)
        for step, score in zip(LOOKS, scores, strict=True):
            recorder.record("accuracy", score, embedding_start=start, step=step)
        rows.append([start, *(f"{100 * score:.1f}" for score in scores)])
    text = Table(["positions begin", *(f"{step:,} steps" for step in LOOKS)], rows).markdown() + "\n"
    write_text(options.out / "table.md", text)
    print(text)


if __name__ == "__main__":
    main()
