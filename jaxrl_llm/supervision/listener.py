"""Listeners of a run: they follow its steps, add metrics, and ask for a save or for the end."""

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # these import jax, and a launcher imports a listener
    from jaxrl_llm.observability.timing import Timer
    from jaxrl_llm.program.stage import States
    from jaxrl_llm.supervision.nonfinite import NonFiniteGradients


class Wish(IntEnum):
    """The request of a listener after a step."""

    NOTHING = 0
    SAVE = 1
    STOP = 2  # a save, and the end of the run


class Listener:
    """Follows the steps of a run. Every process calls every method, in the same order.

    The first listener of a run is the innermost: it begins a step last, and measures it first.
    """

    def begin(self, step: int, timer: "Timer") -> None:
        """A step begins. The timer has its stages."""

    def measured(self, step: int, batch: Any, metrics: Mapping[str, float]) -> dict[str, float]:
        """A step ran on `batch`. Returns more metrics of it."""
        return {}

    def validated(
        self, step: int, metrics: Mapping[str, float], seconds: float
    ) -> dict[str, float]:
        """Held-out data were measured after a step. Returns more metrics."""
        return {}

    def failed(self, step: int, states: "States", error: "NonFiniteGradients") -> None:
        """A gradient of a step is not finite, so the run ends."""

    def reported(self, step: int, metrics: Mapping[str, float]) -> Wish:
        """The metrics of a step are written. Step 0 is the validation before the first step."""
        return Wish.NOTHING
