"""Both attentions train for the same time, on the same slides; a picture shows what was planted and each map."""

import io
from itertools import islice

import numpy as np
from PIL import Image

from nystromformer.demo.slides import BATCH, EXACT, NYSTROM, batches_of, draw_slide_map, race
from nystromformer.training.slides import draw_slide


def small_pool(count: int) -> list:
    return [draw_slide(0, 0, index, (500, 500), 8.0) for index in range(count)]


def test_exact_attention_gets_the_same_time():
    steps, seen = 4, []
    racers = race(small_pool(BATCH), steps, 500, 0, seen.append)
    assert len(racers[NYSTROM].seconds) == steps
    assert len(racers[EXACT].seconds) >= 2
    assert racers[EXACT].training.model.layer1.attn.num_landmarks == 501
    assert len(seen) == 2 + steps, "as many as the progress bar has"


def test_all_slides_are_seen_before_one_is_seen_again():
    pool = small_pool(2 * BATCH)
    first, second, third = islice(batches_of(pool, seed=1), 3)
    assert {id(slide) for slide in first + second} == {id(slide) for slide in pool}
    assert {id(slide) for slide in third} <= {id(slide) for slide in pool}


def test_a_picture_shows_what_was_planted_and_each_map(tmp_path):
    slide = draw_slide(0, 0, 0, (500, 500), shift=6.0)
    weights = np.where(slide.planted, 0.1, 1e-4)
    sizes = []
    for count in (1, 2):
        maps = {f"map {number}": weights for number in range(count)}
        draw_slide_map(tmp_path / "map.png", slide.cells.numpy(), slide.planted, slide.artifacts, maps)
        picture = Image.open(io.BytesIO((tmp_path / "map.png").read_bytes()))
        sizes.append(picture.size[0])
        colors = {color for _, color in picture.convert("RGB").getcolors(1_000_000)}
        assert (215, 38, 61) in colors, "planted tiles are red"
        assert any(red > 240 and green > 240 and blue < 190 for red, green, blue in colors), "high weights are bright"
    assert sizes[1] > sizes[0]
