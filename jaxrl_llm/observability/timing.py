"""Wall-clock times of the stages of a step."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class Timer:
    """Adds up seconds by name, for one step.

    jax dispatches asynchronously, so a clock measures the host. To measure a device, stop the clock
    after `jax.block_until_ready`. Clocks may overlap. The times of a name are summed.
    `watch` gets the names of the clocks that run, whenever one starts or stops.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        watch: Callable[[Sequence[str]], None] = lambda running: None,
    ):
        self._clock = clock
        self._watch = watch
        self._started: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def start(self, name: str) -> None:
        """Start the clock of `name`."""
        assert name not in self._started, f"{name} is being timed already"
        self._started[name] = self._clock()
        self._watch(list(self._started))

    def stop(self, name: str) -> float:
        """Stop the clock of `name`; returns the seconds since its start."""
        elapsed = self._clock() - self._started.pop(name)
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed
        self._watch(list(self._started))
        return elapsed

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that another clock measured."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block: `with timer("gen"): ...`. The time also counts when the block raises."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def timings(self) -> dict[str, float]:
        """The seconds of each name so far."""
        return dict(self._seconds)
