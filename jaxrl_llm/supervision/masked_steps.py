"""Steps whose samples are all masked: the run ends, because it learns nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.plan.stages import MASKED_FRACTION
from jaxrl_llm.supervision.listener import Listener

MOST_STEPS = 3  # steps in a row without a sample to learn from; in a shorter run its steps


def named_steps(steps: list[int]) -> str:
    """`step 5`, or `steps 5 to 7`."""
    first, last = steps[0], steps[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


@dataclass(kw_only=True)
class MaskedSteps(Listener):
    """Ends the run when `most` steps in a row have no sample that is learned from."""

    most: int
    _steps: list[int] = field(default_factory=list)

    def measured(self, step: int, batch: Any, metrics: Mapping[str, float]) -> dict[str, float]:
        """Count the steps. Raises ValueError."""
        self._steps = [*self._steps, step] if metrics.get(MASKED_FRACTION) == 1.0 else []
        if len(self._steps) == self.most:
            raise ValueError(
                f"every sample of {named_steps(self._steps)} was masked, so nothing is learned: "
                "its reward failed, or it was cut at config.data.max_response_length and "
                "config.rollout.mask_truncated is set. Allow longer responses or learn from "
                "truncated ones; the same command then goes on from the last checkpoint"
            )
        return {}
