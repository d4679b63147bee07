"""Callbacks: functions of the user that see a run after each step, and may stop it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.distributed.multihost import is_main
from jaxrl_llm.supervision.listener import Listener, Wish


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer of the policy in training, with its grade."""

    prompt: str  # as rendered by the chat template
    response: str
    score: float  # NaN if its reward failed and the sample is masked
    parts: Mapping[str, float]  # unweighted score of each reward function; NaN for None
    ground_truth: Any
    data_source: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # the sampler's, one a token
    finished: bool  # False if it was cut at the maximum length


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """A step as a callback sees it. Step 0 is the validation before the first one."""

    step: int
    total_steps: int
    metrics: Mapping[str, float]  # names as in metrics.jsonl: docs/metrics.md
    samples: Sequence[Sample]  # samples of this step in the main process
    run_dir: Path
    _reasons: list[str]

    def stop(self, reason: str = "") -> None:
        """End the run after this step. It saves a checkpoint, from which the same call resumes."""
        self._reasons.append(reason)


Callback = Callable[[StepReport], None]


@dataclass(kw_only=True)
class Callbacks(Listener):
    """The callbacks of a run. They are called on the main process alone."""

    functions: Sequence[Callback]
    run_dir: Path
    total_steps: int
    _samples: dict[int, list[Sample]] = field(default_factory=dict)  # by step
    _reasons: list[str] = field(default_factory=list)  # reasons of the stops so far

    @property
    def want_samples(self) -> bool:
        """True when somebody looks at the samples."""
        return bool(self.functions) and is_main()

    @property
    def reason(self) -> str:
        """Why the first of them asked."""
        return self._reasons[0] if self._reasons else ""

    def add(self, step: int, samples: Sequence[Sample]) -> None:
        """Samples of a step, which has not ended; some at a time."""
        self._samples.setdefault(step, []).extend(samples)

    def reported(self, step: int, metrics: Mapping[str, float]) -> Wish:
        """Call each callback after a step. What it raises ends the run."""
        samples = self._samples.pop(step, [])
        if not is_main():
            return Wish.NOTHING
        report = StepReport(
            step=step,
            total_steps=self.total_steps,
            metrics=dict(metrics),
            samples=samples,
            run_dir=self.run_dir,
            _reasons=self._reasons,
        )
        for function in self.functions:
            function(report)
        return Wish.STOP if self._reasons else Wish.NOTHING
