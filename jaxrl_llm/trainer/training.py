"""One training in progress: its plan, its batches, and its position."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.distributed.multihost import fetch, gather_objects
from jaxrl_llm.evaluation.evaluate import Evaluation
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.program.stage import States
from jaxrl_llm.supervision.listener import Listener, Wish
from jaxrl_llm.supervision.nonfinite import NonFiniteGradients, check_gradients
from jaxrl_llm.supervision.watchdog import BETWEEN, Watch
from jaxrl_llm.trainer.batches import Batches
from jaxrl_llm.trainer.output import MetricsLog

Save = Callable[[int, States, dict[str, float], dict[str, Any]], None]


@dataclass(kw_only=True)
class Training:
    """A plan, a source of batches, and the states that its steps change.

    The steps of a run are one training. Each supervised training before them is another: it has no
    listeners, no checkpoints, and its own file of metrics.
    """

    plan: Plan
    batches: Batches
    states: States
    total_steps: int
    evaluations: Sequence[Evaluation]
    output: MetricsLog
    validate_every: int  # steps; 0 only after the last
    listeners: Sequence[Listener] = ()
    step: int = 0  # steps done
    is_new: bool = False  # begins with a validation and, with `save_first`, a checkpoint
    validate_first: bool = True
    # Ends early once this metric reaches the number, if it is not 0.
    target: tuple[str, float] = ("", 0.0)
    what: str = "step"  # a step's name in the message of a gradient that is not finite
    watch: Watch = field(default_factory=Watch)
    save_with: Save | None = None  # None: no checkpoints
    is_best: Callable[[dict[str, float]], bool] | None = None  # for metrics of a validation
    save_every: int = 0
    save_first: bool = True
    stopped: bool = False
    stopped_by: list[Listener] = field(default_factory=list)
    _save_asked: bool = False  # by a listener after the last step
    _validated_best: bool = False  # the validation of this step is the best so far

    def begin_step(self) -> Timer:
        """Begin the next step. Returns the timer of its stages."""
        self.step += 1
        self._validated_best = False
        if self.plan.begins_program(self.step):
            self.watch.forget()
        self.watch.enter(BETWEEN, self.step)
        self.states = self.plan.enter(self.step, self.states)
        timer = Timer(watch=self._clocks)
        for listener in reversed(self.listeners):
            listener.begin(self.step, timer)
        return timer

    def _clocks(self, running: Sequence[str]) -> None:
        """These clocks of the step run now."""
        self.watch.clocks(running)
        self.output.stage(self.step, running)

    def measure(self, batch: Any, context: Any, metrics: dict[str, Any]) -> dict[str, float]:
        """The metrics of a step whose program ran, on the host.

        Raises NonFiniteGradients. Every process must call it.
        """
        metrics = self.batches.finish(self.step, batch, context, fetch(metrics))
        trees = {name: role.spec.learned for name, role in self.plan.roles.items()}
        try:
            check_gradients(metrics, trees, self.step, self.what)
        except NonFiniteGradients as error:
            for listener in self.listeners:
                listener.failed(self.step, self.states, error)
            raise
        numbers = {name: float(value) for name, value in metrics.items()}
        for listener in self.listeners:
            numbers |= listener.measured(self.step, batch, numbers)
        return numbers

    def validation_is_due(self) -> bool:
        """True when a validation follows this step; it follows the last one always."""
        return self._is_due(self.validate_every)

    def save_is_due(self) -> bool:
        """True when a checkpoint follows this step: always the last, and the best validation."""
        if self.save_with is None:
            return False
        due = self._is_due(self.save_every) or self.stopped
        return due or self._save_asked or self._validated_best

    def validate(self) -> dict[str, float]:
        """Held-out metrics after the last step; empty if there is nothing to measure."""
        if self.step == 0 and not self.validate_first:
            return {}
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        self.watch.enter("validation")
        self.output.stage(self.step, ["validation"])
        for evaluation in self.evaluations:
            metrics |= evaluation.run(self.states, self.step)
        self.watch.enter(BETWEEN)
        self.output.stage(self.step, [])
        self._validated_best = self.is_best is not None and self.is_best(metrics)
        name, least = self.target
        if least and metrics.get(name, 0.0) >= least:
            self.stopped = True
            if self.step < self.total_steps:
                self.output.message(
                    f"{self.what} {self.step} of {self.total_steps} is the last: "
                    f"{name} {metrics[name]:.3g} reached stop_at={least:g}"
                )
        seconds = time.perf_counter() - started
        for listener in self.listeners if metrics else ():
            metrics |= listener.validated(self.step, metrics, seconds)
        return metrics

    def report(self, metrics: dict[str, float]) -> None:
        """Write the metrics of the last step. The processes then agree whether to continue."""
        self.output.log(self.step, metrics)
        wishes = [listener.reported(self.step, metrics) for listener in self.listeners]
        if not wishes or not self.step:  # a run does one step at least
            return
        # Times, memory and signals differ between processes.
        everyone = zip(*gather_objects(wishes, "wishes"), strict=True)
        agreed = list(zip(self.listeners, map(max, everyone), strict=True))
        self._save_asked = any(wish == Wish.SAVE for _, wish in agreed)
        self.stopped_by += [listener for listener, wish in agreed if wish == Wish.STOP]
        self.stopped = self.stopped or bool(self.stopped_by)

    def save(self, metrics: dict[str, float]) -> None:
        """Write a checkpoint."""
        assert self.save_with is not None
        self.watch.enter("save")
        self.output.stage(self.step, ["save"])
        position, ahead = self.batches.saved(self.step, self.states)
        self.save_with(self.step, self.states | ahead, metrics, position)
        self.watch.enter(BETWEEN)
        self.output.stage(self.step, [])

    def take_params(self) -> Params:
        """The learner's parameters; the training gives up its states, and so their memory."""
        states, self.states = self.states, {}
        return self.plan.learner.params_in(states)

    def _is_due(self, every: int) -> bool:
        return self.step == self.total_steps or bool(every and self.step % every == 0)
