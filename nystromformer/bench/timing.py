"""Times by interleaved repeats: noise of the machine then hits all alike, and ratios can be trusted."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Times:
    """Seconds of each repeat."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)


def interleaved_times(
    runs: Mapping[str, Callable[[], None]],
    *,
    warm_up: int = 2,
    min_repeats: int = 3,
    max_repeats: int = 30,
    budget: float = 10.0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Time each of `runs` in turn, round after round, until each had `max_repeats` or the `budget` in seconds is used.

    The order rotates from round to round, so that nobody always runs behind the same neighbour. `tick` is called
    after each round.

    >>> sorted(interleaved_times({"a": lambda: None, "b": lambda: None}, max_repeats=3))
    ['a', 'b']
    """
    names = list(runs)
    for name in names:
        for _ in range(warm_up):
            runs[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    for repeat in range(max_repeats):
        if repeat >= min_repeats and time.perf_counter() - started > budget:
            break
        for offset in range(len(names)):
            name = names[(offset + repeat) % len(names)]
            before = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - before)
        tick()
    return {name: Times(tuple(values)) for name, values in seconds.items()}
