"""The settings of the alarms: for each watcher, when it fires and what happens then.

A watcher is set by its keys (`alarms.kl.action=stop`) or by its action alone (`alarms.kl=off`).
`alarms=off` sets all of them. So it is in Python: `AlarmsConfig(kl="stop")`.
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
    """What happens when a watcher fires: nothing, an event, a checkpoint too, or the end."""

    action: Action = "warn"  # when it fires: nothing, a line, a checkpoint too, or the end


class Level(Alarm):
    """An alarm at a level of a metric."""

    threshold: NotNegative


class Share(Alarm):
    """An alarm at a share of all."""

    threshold: Fraction


class Times(Alarm):
    """An alarm at a multiple of what was usual."""

    threshold: Annotated[float, Gt(1)]


class Spike(Times):
    """An alarm at a multiple, where small values never count."""

    least: NotNegative  # norms up to this never count


class AnyLevel(Alarm):
    """An alarm at a level that may be negative."""

    threshold: Annotated[float, Lt(1)]


class AlarmsConfig(Record):
    """One entry a watcher; docs/alarms.md explains each."""

    nonfinite: Alarm = Alarm()  # metrics that are NaN or infinite
    # A gradient norm against the median of 50 steps; norms up to `least` never count.
    gradient_spike: Spike = Spike(threshold=10.0, least=1.0)
    entropy: Level = Level(threshold=0.02)  # of the policy, nats a token: mean of 5 steps below
    kl: Level = Level(threshold=1.0)  # to the reference, nats a token: mean of 5 steps above
    update_kl: Level = Level(threshold=0.1)  # of one step's update, nats a token, is above
    clip_fraction: Share = Share(threshold=0.3)  # tokens with a clipped ratio: mean of 10 steps
    ratio: Times = Times(threshold=3.0)  # its 1st or 99th percentile is off 1: mean of 10 steps
    mismatch: Times = Times(threshold=1.05)  # `token_mult_prob_error`: mean of 5 steps above
    reward_std: Level = Level(threshold=1e-6)  # of the mean reward over 10 steps, is at most this
    zero_variance: Share = Share(threshold=0.95)  # groups of equal scores: mean of 10 steps above
    # The mean length grew or shrank by this factor within 50 steps, and by 16 tokens.
    length_drift: Times = Times(threshold=2.0)
    cut_share: Share = Share(threshold=0.5)  # responses at the maximum length: mean of 10 steps
    repetition: Share = Share(threshold=0.3)  # 4-grams of a response that repeat: mean of 10 steps
    # Three held-out scores in a row are below the best by this share, and the reward rose.
    reward_hacking: Share = Share(threshold=0.2)
    explained_variance: AnyLevel = AnyLevel(threshold=-0.5)  # the critic's: mean of 10 steps below
    host_memory: Level = Level(threshold=0.5)  # grew by this share since the first 20 steps
    device_memory: Level = Level(threshold=0.5)  # grew by this share since the first 20 steps
    # The median time of 5 steps over that of the 50 before, and a second longer.
    step_time: Times = Times(threshold=2.0)

    @field_validator("*", mode="before")
    @classmethod
    def _complete(cls, given: Any, field: ValidationInfo) -> Any:
        """An action alone, or some keys, set those; the others are the watcher's own."""
        default = getattr(cls, str(field.field_name))
        given = given.action if type(given) is Alarm else given
        given = {"action": given} if isinstance(given, str) else given
        return validate(type(default), vars(default) | given) if isinstance(given, dict) else given


def _all_of_one_action(given: Any) -> Any:
    """An action alone sets all watchers."""
    if not isinstance(given, str):
        return given
    if given not in ACTIONS:
        raise ValueError(f"expected one of {', '.join(ACTIONS)}{nearest(given, ACTIONS)}")
    every: dict[str, Any] = dict.fromkeys(fields_of(AlarmsConfig), str(given))
    return AlarmsConfig(**every)


AlarmSettings = Annotated[AlarmsConfig, BeforeValidator(_all_of_one_action)]
