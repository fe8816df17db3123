"""Time by interleaved repeats."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

SLOW = 0.5
"""A call that takes longer than these seconds is warm after one."""


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

    @property
    def spread(self) -> dict[str, float | str]:
        """What a record says beside the median.

        >>> Times((1.0, 1.5)).spread
        {'unit': 's', 'minimum': 1.0, 'maximum': 1.5, 'repeats': 2}
        """
        repeats = len(self.seconds)
        return {"unit": "s", "minimum": self.minimum, "maximum": max(self.seconds), "repeats": repeats}

    def is_steady(self, within: float, count: int = 3) -> bool:
        """Whether the `count` fastest lie within this share of the fastest: then no disturbance made it.

        >>> Times((1.0, 1.5, 1.02, 1.01)).is_steady(0.05), Times((1.0, 1.5, 1.02)).is_steady(0.05)
        (True, False)
        """
        fastest = sorted(self.seconds)[:count]
        return len(fastest) == count and fastest[-1] <= (1 + within) * fastest[0]


def interleaved_times(
    runs: Mapping[str, Callable[[], None]],
    *,
    warm_up: int = 2,
    min_repeats: int = 3,
    max_repeats: int = 30,
    budget: float = 10.0,
    steady: float | None = None,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Time each of `runs` in turn, round after round, until each had `max_repeats` or the `budget` in seconds is used.

    The order rotates from round to round, so that nobody always runs after the same neighbor. `tick` is called
    after each round. With `steady` the rounds end as soon as the three fastest times of each lie within this share:
    a quiet machine is measured soon, and a disturbed one for as long as the budget allows.

    >>> sorted(interleaved_times({"a": lambda: None, "b": lambda: None}, max_repeats=3))
    ['a', 'b']
    """
    names = list(runs)
    for name in names:
        warm(runs[name], warm_up)
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
        if (
            steady is not None
            and repeat + 1 >= min_repeats
            and all(Times(tuple(each)).is_steady(steady) for each in seconds.values())
        ):
            break
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def warm(run: Callable[[], None], calls: int) -> None:
    """Call it so often, but a slow one once."""
    for _ in range(calls):
        started = time.perf_counter()
        run()
        if time.perf_counter() - started > SLOW:
            return
