"""The alarms of a run: process 0 watches the metrics, and writes what fires."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxrl_llm.distributed.multihost import is_main
from jaxrl_llm.learner.train_state import TrainState
from jaxrl_llm.observability.alarms import Alarms, Event
from jaxrl_llm.plan.dataflow import States
from jaxrl_llm.plan.guards import NonFiniteGradients, nonfinite_values


@dataclass(kw_only=True)
class AlarmBell:
    """Alarms and where they are written."""

    alarms: Alarms
    write: Callable[[Event], None]

    def step(self, step: int, metrics: dict[str, float]) -> set[str]:
        """Write the alarms of a step; the actions that they ask for. Empty but on process 0.

        Times and memory differ between processes, so the others must be asked for their agreement.
        """
        events = self.alarms.step(step, metrics) if is_main() else []
        for event in events:
            self.write(event)
        return {event.action for event in events}

    def nonfinite(self, step: int, states: States, error: NonFiniteGradients) -> None:
        """Write which parameters are not finite: by value, or else by gradient.

        Raises: NonFiniteGradients where the values are the cause. Every process must call it.
        """
        params = {role: s.params for role, s in states.items() if isinstance(s, TrainState)}
        values = nonfinite_values(params)
        what, names = ("value", values) if values else ("gradient", error.parameters)
        self.write(self.alarms.nonfinite_parameters(step, what, names))
        if values:
            raise NonFiniteGradients(
                f"step {step}: {len(values)} parameters are not finite, the first is {values[0]}: "
                "this update or an earlier one was too large, so later checkpoints are no use. "
                "Lower the learning rate and go on from an earlier checkpoint, in another folder: "
                "--config.run_dir=FOLDER --config.resume=CHECKPOINT"
            ) from None
