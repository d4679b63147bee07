"""The settings of the alarms: the threshold and the action of each watcher.

A watcher is set by its keys (`alarms.kl.action=stop`) or by its action alone (`alarms.kl=off`).
`alarms=off` sets all of them. In Python: `AlarmsConfig(kl="stop")`.
"""

from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, Lt
from pydantic import BeforeValidator, ValidationInfo, field_validator

from jaxrl_llm.references import nearest
from jaxrl_llm.typed_records.bounds import Fraction, NotNegative
from jaxrl_llm.typed_records.record import Record, fields_of, validate

__all__ = ["Alarm", "AlarmsConfig"]


Action = Literal["off", "warn", "save", "stop"]
ACTIONS = get_args(Action)


class Alarm(Record):
    """The action when a watcher fires: nothing, an event, a checkpoint too, or the end."""

    action: Action = "warn"  # action of the alarm: nothing, a line, a checkpoint too, or the end


class Level(Alarm):
    """An alarm at a level of a metric."""

    threshold: NotNegative


class Share(Alarm):
    """An alarm at a share."""

    threshold: Fraction


class Times(Alarm):
    """An alarm at a multiple of the usual value."""

    threshold: Annotated[float, Gt(1)]


class Spike(Times):
    """An alarm at a multiple, where small values never count."""

    least: NotNegative  # largest norm that never counts


class AnyLevel(Alarm):
    """An alarm at a level that may be negative."""

    threshold: Annotated[float, Lt(1)]


class AlarmsConfig(Record):
    """One entry a watcher; docs/alarms.md explains each."""

    nonfinite: Alarm = Alarm()  # NaN or infinite metrics
    # Gradient norm relative to the median of 50 steps; norms up to `least` never count.
    gradient_spike: Spike = Spike(threshold=10.0, least=1.0)
    entropy: Level = Level(threshold=0.02)  # policy entropy, nats per token: mean of 5 steps below
    kl: Level = Level(threshold=1.0)  # KL to the reference, nats per token: mean of 5 steps above
    update_kl: Level = Level(threshold=0.1)  # KL of one step's update, nats per token: above
    clip_fraction: Share = Share(threshold=0.3)  # share of clipped ratios: mean of 10 steps above
    # Ratio of new to old probability, 1st or 99th percentile, off 1 by a factor: mean of 10 steps.
    ratio: Times = Times(threshold=3.0)
    mismatch: Times = Times(threshold=1.05)  # `token_mult_prob_error`: mean of 5 steps above
    reward_std: Level = Level(threshold=1e-6)  # std of the mean reward over 10 steps: at most
    # Std of the mean reward over 10 steps, in each of 10 steps: above.
    reward_deviation: Level = Level(threshold=0.5)
    # Share of groups with equal scores: mean of 10 steps above.
    zero_variance: Share = Share(threshold=0.95)
    # Factor by which the mean length grew or shrank within 50 steps, and by 16 tokens at least.
    length_drift: Times = Times(threshold=2.0)
    # Share of responses at the maximum length: mean of 10 steps above.
    cut_share: Share = Share(threshold=0.5)
    # Share of samples that left the loss, failed or truncated: mean of 5 steps above.
    masked_share: Share = Share(threshold=0.2)
    # Share of samples whose tools, environment or program failed: mean of 5 steps above.
    environment_failures: Share = Share(threshold=0.1)
    # Calls of tools a sample: mean of 10 steps at most.
    no_tool_calls: Level = Level(threshold=0.0)
    # Factor by which the mean number of turns grew or shrank within 50 steps, by half a turn at
    # least.
    turn_drift: Times = Times(threshold=2.0)
    # Share of repeated 4-grams of a response: mean of 10 steps above.
    repetition: Share = Share(threshold=0.3)
    # Share by which three held-out scores in a row are below the best, while the reward rose.
    reward_hacking: Share = Share(threshold=0.2)
    # Explained variance of the critic: mean of 10 steps below.
    explained_variance: AnyLevel = AnyLevel(threshold=-0.5)
    host_memory: Level = Level(threshold=0.5)  # growth since the first 20 steps, as a share
    device_memory: Level = Level(threshold=0.5)  # growth since the first 20 steps, as a share
    # Median time of 5 steps relative to the 50 steps before, and a second longer at least.
    step_time: Times = Times(threshold=2.0)

    @field_validator("*", mode="before")
    @classmethod
    def _complete(cls, value: Any, field: ValidationInfo) -> Any:
        """Complete an action alone, or some keys, with the watcher's defaults."""
        default = getattr(cls, str(field.field_name))
        value = value.action if type(value) is Alarm else value
        value = {"action": value} if isinstance(value, str) else value
        return validate(type(default), vars(default) | value) if isinstance(value, dict) else value


def _all_of_one_action(value: Any) -> Any:
    """Give one action to all watchers."""
    if not isinstance(value, str):
        return value
    if value not in ACTIONS:
        raise ValueError(f"expected one of {', '.join(ACTIONS)}{nearest(value, ACTIONS)}")
    every: dict[str, Any] = dict.fromkeys(fields_of(AlarmsConfig), str(value))
    return AlarmsConfig(**every)


AlarmSettings = Annotated[AlarmsConfig, BeforeValidator(_all_of_one_action)]
