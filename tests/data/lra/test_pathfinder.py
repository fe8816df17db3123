"""Pathfinder: labels that are certain, balance, seeds, and readers that say what is wrong."""

import numpy as np
import pytest
from PIL import Image

from nystromformer.data.lra.pathfinder import (
    DIFFICULTY,
    PathfinderOptions,
    PathfinderSetOptions,
    distances_to_lines,
    draw,
    generate,
    picture_number,
    preview,
    random_picture,
    read,
)

OPTIONS = PathfinderOptions()
PICTURES = [random_picture(np.random.default_rng([7, index]), index % 2 == 0, OPTIONS) for index in range(20)]


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Between two paddles, by points close together on both."""
    share = np.linspace(0, 1, 41)[:, None]
    points = [(1 - share) * paddle[0] + share * paddle[1] for paddle in (one, other)]
    return np.linalg.norm(points[0][:, None] - points[1], axis=-1).min()


def connected_by_gaps(picture, gap: float) -> bool:
    """Whether steps of at most `gap` lead from one marker to the other, over paddles of whatever contour."""
    paddles = list(np.concatenate(picture.contours))
    reached = [index for index, paddle in enumerate(paddles) if touches(picture.markers[0], paddle)]
    waiting = list(reached)
    while waiting:
        current = paddles[waiting.pop()]
        for index, paddle in enumerate(paddles):
            if index not in reached and distance(current, paddle) <= gap:
                reached.append(index)
                waiting.append(index)
    return any(touches(picture.markers[1], paddles[index]) for index in reached)


def touches(marker: np.ndarray, paddle: np.ndarray) -> bool:
    return distances_to_lines(marker[None, None], paddle[None])[0, 0] < 1e-9


@pytest.mark.parametrize("gap", [OPTIONS.margin + 0.01, 2 * OPTIONS.margin])
def test_the_label_is_what_following_the_gaps_finds(gap):
    """With any gap between the one within a contour and the one between contours: nothing is ambiguous."""
    for picture in PICTURES:
        assert connected_by_gaps(picture, gap) == picture.connected


def test_contours_keep_their_distance_from_each_other_and_from_other_markers():
    for picture in PICTURES:
        for index, contour in enumerate(picture.contours):
            for other in picture.contours[:index]:
                assert min(distance(one, two) for one in contour for two in other) >= OPTIONS.clearance - 1e-6
        for marker in picture.markers:
            nearest = [distances_to_lines(marker[None, None].repeat(len(c), 0), c).min() for c in picture.contours]
            assert sorted(nearest)[1] >= OPTIONS.clearance + OPTIONS.marker_radius / 2 - 1e-6


def test_contours_have_the_published_shape():
    for picture in PICTURES:
        assert [len(contour) for contour in picture.contours] == [14, 14, 4, 4, 4, 4, 4]
        assert np.linalg.norm(np.subtract(*picture.markers)) >= 7
        for contour in picture.contours:
            along = contour[:, 1] - contour[:, 0]
            assert np.linalg.norm(along, axis=1) == pytest.approx(2)
            assert np.linalg.norm(contour[1:, 0] - contour[:-1, 1], axis=1) == pytest.approx(1)
            cosine = (along[1:] * along[:-1]).sum(1) / 4
            assert (cosine >= np.cos(1) - 1e-9).all()
            assert contour.min() >= 1 - 1e-9
            assert contour.max() <= 31 + 1e-9


def test_pictures_show_markers_brightest_on_black():
    for picture in PICTURES:
        pixels = draw(picture, OPTIONS)
        assert pixels.shape == (32, 32)
        assert pixels.dtype == np.uint8
        for x, y in picture.markers:
            assert pixels[int(y), int(x)] == 255
        assert (pixels == 0).mean() > 0.5
        paddles = pixels[(pixels > 0) & (pixels < 255)]
        assert len(paddles) > 100


def test_any_part_of_a_set_is_balanced():
    labels = [picture_number(index, 5, OPTIONS)[1] for index in range(30)]
    assert [sum(pair) for pair in zip(labels[::2], labels[1::2], strict=True)] == [1] * 15
    assert len({tuple(pair) for pair in zip(labels[::2], labels[1::2], strict=True)}) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pathfinder") / "set"
    generate(folder, PathfinderSetOptions(count=40, seed=1), workers=1)
    return folder


def test_what_is_written_is_read(folder):
    splits = read(folder, 1024)
    assert splits.departures == (), "14 paddles, the paper's"
    assert [len(part) for part in (splits.train, splits.dev, splits.test)] == [32, 4, 4]
    pixels, connected = picture_number(33, 1, OPTIONS)
    example = splits.dev[1]
    assert example["labels"].tolist() == [int(connected)]
    assert (example["input_ids"][0].numpy() - 1 == pixels.flatten()).all()
    assert "attention_mask" not in example, "black pixels are not padding"


def test_the_folder_has_the_released_layout(folder):
    rows = (folder / DIFFICULTY / "metadata" / "0.npy").read_text().splitlines()
    assert rows[5].split()[:3] == ["imgs/0", "sample_5.png", "5"]
    assert Image.open(folder / DIFFICULTY / "imgs" / "0" / "sample_5.png").size == (32, 32)
    assert len(read(folder / DIFFICULTY, 1024).train) == 32, "the inner folder is taken, too"


@pytest.mark.slow
def test_pictures_do_not_depend_on_the_number_of_workers(monkeypatch, tmp_path):
    """Each is a function of the seed and its number; processes only share them out."""
    monkeypatch.setattr("nystromformer.data.lra.pathfinder.BATCH", 8)
    for workers in (1, 2):
        generate(tmp_path / str(workers), PathfinderSetOptions(count=20), workers)
    files = sorted(path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("*.*"))
    assert len(files) == 20 + 3 + 1
    for file in files:
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()


def test_preview_is_a_picture(tmp_path):
    preview(tmp_path / "sheet.png", PathfinderSetOptions(), columns=4)
    assert Image.open(tmp_path / "sheet.png").size == (4 * 36 * 4, 4 * 36 * 4)


def damaged(folder, tmp_path, name, change):
    import shutil

    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / DIFFICULTY / name
    data = change(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    return tmp_path / "copy"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("metadata/0.npy", lambda data: None, r"no metadata/\*.npy; must hold LRA's"),
        ("metadata/0.npy", lambda data: data.rsplit(b" ", 5)[0], r"0.npy, line 40: 3 fields"),
        ("metadata/0.npy", lambda data: data[: data.index(b"imgs/0 sample_30")], r"promises 40; .*cut short"),
        ("metadata/0.npy", lambda data: data.replace(b" 2 0 ", b" 2 7 "), r"line 3: label '7'; must be 0 or 1"),
        ("imgs/0/sample_9.png", lambda data: None, r"sample_9.png: no such file, but .*0.npy, line 10, names it"),
        ("imgs/0/sample_9.png", lambda data: data[:60], r"sample_9.png: not a whole picture .* copy it again"),
        ("imgs/0/sample_9.png", lambda data: b"", r"sample_9.png: not a whole picture"),
    ],
    ids=["no-metadata", "cut-row", "cut-rows", "label", "no-picture", "cut-picture", "empty-picture"],
)
def test_damage_is_named_with_a_remedy(folder, tmp_path, name, change, message):
    if b" 2 0 " not in (folder / DIFFICULTY / "metadata" / "0.npy").read_bytes() and "label" in message:
        change = lambda data: data.replace(b" 2 1 ", b" 2 7 ")
    with pytest.raises(ValueError, match=message):
        read(damaged(folder, tmp_path, name, change), 1024)


def test_an_easier_set_is_made_and_read(tmp_path):
    generate(tmp_path / "easy", PathfinderSetOptions(count=20, contour_length=6), workers=1)
    assert (tmp_path / "easy" / "curv_contour_length_6").is_dir()
    splits = read(tmp_path / "easy", 1024)
    assert len(splits.train) == 16
    assert splits.departures == ("contours of 6 paddles",)
    assert splits.noted() == {"data": splits.fingerprint(), "data_departures": ["contours of 6 paddles"]}
    picture = random_picture(np.random.default_rng(0), True, PathfinderSetOptions(contour_length=6).pictures)
    assert [len(contour) for contour in picture.contours] == [6, 6, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("options, message", [
    ({"count": 0}, "must be even"), ({"count": 21}, "must be even"), ({"contour_length": 2}, "must be 3 to 14"),
])  # fmt: skip
def test_impossible_sets_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PathfinderSetOptions(**options)
