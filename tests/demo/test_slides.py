"""Both attentions train for the same time, on the same slides."""

from itertools import islice

from nystromformer.data.slides import draw_slide
from nystromformer.demo.slides import BATCH, EXACT, NYSTROM, batches_of, race


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
