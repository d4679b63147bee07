"""Statistics of reward functions, as counts that can be added over the processes of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.observability.moments import Moments


@dataclass(frozen=True, kw_only=True)
class RewardStatistics:
    """Statistics of the reward functions on some samples; `merge` adds them up over all samples."""

    logged: dict[str, Moments] = field(default_factory=dict)  # by metric name
    parts: dict[str, Moments] = field(default_factory=dict)  # rewards by function, without NaN
    failures: dict[str, int] = field(default_factory=dict)  # by function
    num_failed: int = 0  # samples with a failure of some function

    def metrics(self) -> dict[str, float]:
        """Metrics that functions logged, and the statistics under rewards/."""
        metrics = {name: moments.mean for name, moments in self.logged.items()}
        for name, part in self.parts.items():
            if part.count:
                metrics[f"rewards/{name}/mean"] = part.mean
                metrics[f"rewards/{name}/std"] = part.std
            metrics[f"rewards/{name}/failures"] = float(self.failures[name])
        return metrics | {"rewards/failures": float(self.num_failed)}

    def to_json(self) -> dict[str, Any]:
        """The record in JSON's types."""
        return {
            "logged": {name: x.numbers for name, x in self.logged.items()},
            "parts": {name: x.numbers for name, x in self.parts.items()},
            "failures": self.failures,
            "num_failed": self.num_failed,
        }


def merge(statistics: Iterable[Mapping[str, Any]]) -> RewardStatistics:
    """The statistics of all samples from the `to_json` of several parts of them."""
    logged: dict[str, Moments] = {}
    parts: dict[str, Moments] = {}
    failures: dict[str, int] = {}
    num_failed = 0
    for one in statistics:
        for total, moments in ((logged, one["logged"]), (parts, one["parts"])):
            for name, numbers in moments.items():
                total[name] = total.get(name, Moments()) + Moments(*numbers)
        for name, count in one["failures"].items():
            failures[name] = failures.get(name, 0) + count
        num_failed += one["num_failed"]
    return RewardStatistics(logged=logged, parts=parts, failures=failures, num_failed=num_failed)
