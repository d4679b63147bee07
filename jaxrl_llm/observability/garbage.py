"""How Python runs until the first step is done: it rarely looks for garbage, and takes short turns.

Imports and tracing make many objects that live. To look for cycles among them, again and again,
costs a tenth of the CPU time of a start.

One thread lowers programs, and the main thread starts hundreds of small ones that draw weights. It
waits a turn of the other thread for each of them.
"""

import gc
import sys

RARELY = (200_000, 50, 100)
TURN_S = 0.0005  # how long a thread may keep others from Python; 0.005 is usual


class Collector:
    """Python's thresholds of this process, and the length of its threads' turns."""

    def __init__(self) -> None:
        self._usual: tuple[int, int, int] | None = None
        self._usual_turn_s: float | None = None

    def begin_start(self) -> None:
        """Collect rarely and take short turns from now on; thresholds that are higher stay."""
        turn_s = sys.getswitchinterval()
        if turn_s > TURN_S:
            self._usual_turn_s = turn_s
            sys.setswitchinterval(TURN_S)
        found = gc.get_threshold()
        if found[0] and found[0] < RARELY[0]:  # 0 is off
            self._usual = found
            gc.set_threshold(*RARELY)

    def end_start(self) -> None:
        """As before `begin_start`, so that no array outlives its step."""
        turn_s, self._usual_turn_s = self._usual_turn_s, None
        if turn_s is not None:
            sys.setswitchinterval(turn_s)
        usual, self._usual = self._usual, None
        if usual is not None:
            gc.set_threshold(*usual)


COLLECTOR = Collector()  # of this process
