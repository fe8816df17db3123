import io

import numpy as np
from PIL import Image

from nystromformer.data.slides import draw_slide
from nystromformer.report.slide_map import draw_slide_map


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
