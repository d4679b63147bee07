"""Python looks for garbage in cycles rarely until the first step is done.

Imports and tracing make many objects that live. To look for cycles among them, again and again,
costs a tenth of the CPU time of a start. At the exit it costs half a second.
"""

import atexit
import gc

RARELY = (200_000, 50, 100)


class Collector:
    """Python's thresholds of this process."""

    def __init__(self) -> None:
        self._usual: tuple[int, int, int] | None = None

    def begin_start(self) -> None:
        """Collect rarely from now on; thresholds that are higher stay."""
        usual = gc.get_threshold()
        if usual[0] and usual[0] < RARELY[0]:  # 0 is off
            self._usual = usual
            gc.set_threshold(*RARELY)

    def end_start(self) -> None:
        """Collect as often as before `begin_start`, so that no array outlives its step."""
        usual, self._usual = self._usual, None
        if usual is not None:
            gc.set_threshold(*usual)


COLLECTOR = Collector()


def end_without_search() -> None:
    """Have this process not look for cycles when it exits: its memory is freed with it."""
    atexit.register(gc.freeze)
