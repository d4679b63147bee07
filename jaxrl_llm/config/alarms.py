"""The settings of the alarms: for each watcher, when it fires and what happens then.

A watcher is set by its keys (`alarms.kl.action=stop`) or by its action alone (`alarms.kl=off`).
`alarms=off` sets all of them.
"""

from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, Lt
from pydantic import model_validator
from pydantic_core import PydanticCustomError

from jaxrl_llm.config.records import (
    Fraction,
    NotNegative,
    Record,
    field_names,
)
from jaxrl_llm.references import nearest

__all__ = ["Action", "Alarm", "AlarmsConfig"]

Action = Literal["off", "warn", "save", "stop"]
Times = Annotated[float, Gt(1)]  # a multiple of what was usual


def _as_action(given: str) -> str:
    words = get_args(Action)
    if given not in words:
        known, hint = ", ".join(words), nearest(str(given), words)
        context = {"known": known, "hint": hint}
        raise PydanticCustomError("action", "expected one of {known}{hint}", context)
    return str(given)


class Alarm(Record):
    """What happens when a watcher fires: nothing, an event, a checkpoint too, or the end."""

    action: Action = "warn"

    @model_validator(mode="before")
    @classmethod
    def _action_alone(cls, given: Any) -> Any:
        return {"action": _as_action(given)} if isinstance(given, str) else given


class NonFinite(Alarm):
    """Metrics that are NaN or infinite."""


class GradientSpike(Alarm):
    """A gradient norm against the median of 50 steps; norms up to `least` never count."""

    threshold: Times = 10.0
    least: NotNegative = 1.0


class Entropy(Alarm):
    """Entropy of the policy, nats a token: the mean of 5 steps is below."""

    threshold: NotNegative = 0.02


class KL(Alarm):
    """KL to the reference, nats a token: the mean of 5 steps is above."""

    threshold: NotNegative = 1.0


class UpdateKL(Alarm):
    """KL of one step's update, nats a token, is above."""

    threshold: NotNegative = 0.1


class ClipFraction(Alarm):
    """Share of tokens whose ratio is clipped: the mean of 10 steps is above."""

    threshold: Fraction = 0.3


class Ratio(Alarm):
    """The 1st or 99th percentile of the ratio is off 1 by this factor: the mean of 10 steps."""

    threshold: Times = 3.0


class Mismatch(Alarm):
    """`token_mult_prob_error` of sampler and trainer: the mean of 5 steps is above."""

    threshold: Times = 1.05


class RewardSpread(Alarm):
    """Standard deviation of the mean reward over 10 steps is at most this."""

    threshold: NotNegative = 1e-6


class ZeroVariance(Alarm):
    """Share of groups with equal scores: the mean of 10 steps is above."""

    threshold: Fraction = 0.95


class LengthDrift(Alarm):
    """The mean length grew or shrank by this factor within 50 steps, and by 16 tokens."""

    threshold: Times = 2.0


class CutShare(Alarm):
    """Share of responses at the maximum length: the mean of 10 steps is above."""

    threshold: Fraction = 0.5


class Repetition(Alarm):
    """Share of repeated 4-grams in a response: the mean of 10 steps is above."""

    threshold: Fraction = 0.3


class RewardHacking(Alarm):
    """Three held-out scores in a row are below the best by this share, and the reward rose."""

    threshold: Fraction = 0.2


class ExplainedVariance(Alarm):
    """The critic's explained variance: the mean of 10 steps is below."""

    threshold: Annotated[float, Lt(1)] = -0.5


class MemoryGrowth(Alarm):
    """Memory grew by this share since the process's first 20 steps."""

    threshold: NotNegative = 0.5


class StepTime(Alarm):
    """The median time of 5 steps over that of the 50 before, and a second longer."""

    threshold: Times = 2.0


class AlarmsConfig(Record):
    """One entry a watcher; docs/alarms.md explains each."""

    nonfinite: NonFinite = NonFinite()
    gradient_spike: GradientSpike = GradientSpike()
    entropy: Entropy = Entropy()
    kl: KL = KL()
    update_kl: UpdateKL = UpdateKL()
    clip_fraction: ClipFraction = ClipFraction()
    ratio: Ratio = Ratio()
    mismatch: Mismatch = Mismatch()
    reward_std: RewardSpread = RewardSpread()
    zero_variance: ZeroVariance = ZeroVariance()
    length_drift: LengthDrift = LengthDrift()
    cut_share: CutShare = CutShare()
    repetition: Repetition = Repetition()
    reward_hacking: RewardHacking = RewardHacking()
    explained_variance: ExplainedVariance = ExplainedVariance()
    host_memory: MemoryGrowth = MemoryGrowth()
    device_memory: MemoryGrowth = MemoryGrowth()
    step_time: StepTime = StepTime()

    @model_validator(mode="before")
    @classmethod
    def _action_of_all(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        return dict.fromkeys(field_names(cls), _as_action(given))
