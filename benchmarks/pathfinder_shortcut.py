"""How far the distance between the two markers alone tells Pathfinder's label, by the length of the contours.

    python benchmarks/pathfinder_shortcut.py --out results/lra/shortcut

Ends of one contour can't be further apart than the contour is long, ends of two can. A model that scores no more than
the best threshold on that distance has followed no contour. The threshold is chosen on one half of the pictures and
scored on the other.
"""

import argparse
from pathlib import Path

import numpy as np

from nystromformer.data.lra.pathfinder import PathfinderSetOptions, random_picture
from nystromformer.files import write_text
from nystromformer.records import Recorder, new_job_folder
from nystromformer.report.table import Table

LENGTHS = (4, 6, 9, 14)
"""Paddles of a contour. Long Range Arena has 6, 9 and 14, and uses 14."""


def distances(contour: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Distances between markers, and labels, one half of them connected."""
    options = PathfinderSetOptions(contour_length=contour).pictures
    rng = np.random.default_rng([seed, contour])
    found = [random_picture(rng, bool(index % 2), options) for index in range(count)]
    return np.array([np.linalg.norm(np.subtract(*each.markers)) for each in found]), np.arange(count) % 2 == 1


def best_threshold(distance: np.ndarray, connected: np.ndarray) -> float:
    return max(distance, key=lambda most: ((distance <= most) == connected).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pathfinder-shortcut"))
    parser.add_argument("--count", type=int, default=2_000, help="pictures for each length")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    new_job_folder(options.out)
    recorder, rows = Recorder(options.out, job="pathfinder-shortcut", config={"count": options.count}, seed=0), []
    half = options.count // 2
    for contour in LENGTHS:
        distance, connected = distances(contour, options.count, options.seed)
        most = best_threshold(distance[:half], connected[:half])
        right = float(((distance[half:] <= most) == connected[half:]).mean())
        recorder.record("accuracy of a threshold on the distance", right, contour_length=contour, threshold=float(most))
        rows.append([contour, f"{most:.1f}", f"{100 * right:.1f}"])
    text = (
        Table(["paddles", "connected if at most so many pixels apart", "accuracy in percent"], rows).markdown() + "\n"
    )
    write_text(options.out / "table.md", text)
    print(text)


if __name__ == "__main__":
    main()
