"""The alarms of a run: watchers of its metrics, each a pure function of a short history.

A watcher keeps a history for each metric that it watches, and takes a value of it or none. It fires
in the step in which its condition begins to hold. It fires again only after the condition did not
hold for REARM steps. The histories are part of a checkpoint, so a resumed run fires the same.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any, ClassVar, Literal

from jaxrl_llm.config.alarms import AlarmsConfig
from jaxrl_llm.distributed.multihost import is_main
from jaxrl_llm.learner.train_state import TrainState
from jaxrl_llm.observability.console import number
from jaxrl_llm.observability.jsonl import read_jsonl
from jaxrl_llm.observability.names import WATCHED
from jaxrl_llm.program.stage import States
from jaxrl_llm.supervision.listener import Listener, Wish
from jaxrl_llm.supervision.nonfinite import NonFiniteGradients, nonfinite_values

REARM = 10  # steps without the condition, before an alarm may fire again
SHOWN = 5  # names in an event
NONFINITE = "nonfinite"
STEP = "step"
EVENTS = "events.jsonl"
WISHES = {"warn": Wish.NOTHING, "save": Wish.SAVE, "stop": Wish.STOP}  # by action

History = list[Any]  # entries of JSON types
Metrics = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of events.jsonl."""

    step: int
    name: str  # name of the watcher
    metric: str  # name of the metric, or of parameters
    value: float
    threshold: float
    action: str
    look_at: str

    def line(self) -> str:
        """For the console."""
        return (
            f"alarm {self.name} ({self.action}) at step {self.step}: {self.metric} "
            f"{number(self.value)}, threshold {number(self.threshold)}; look at {self.look_at}"
        )


def alarms_after(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The lines of events.jsonl of steps after `step`."""
    file = run_dir / EVENTS
    lines = read_jsonl([file], key=STEP) if file.exists() else ()
    return [line for line in lines if line[STEP] > step]


# ------------------------------------------------------------------------- watchers


@dataclass(frozen=True, kw_only=True)
class Watcher(ABC):
    """Reads some metrics; says when one is out of bounds."""

    look_at: str
    metrics: tuple[str, ...] = ()  # patterns of names
    threshold: float = 0.0
    restarts: ClassVar[bool] = False  # a new process begins a new history

    def subjects(self, metrics: Metrics) -> Iterator[tuple[str, Any]]:
        """(metric, entry of its history) of a step."""
        for name, value in metrics.items():
            if any(fnmatchcase(name, pattern) for pattern in self.metrics):
                if math.isfinite(value):
                    yield name, value

    @abstractmethod
    def kept(self, history: History) -> History:
        """The part of a history that the next step needs."""

    @abstractmethod
    def value(self, history: History) -> float | None:
        """The value to compare; None while the history is too short. This step's entry is last."""

    def fires(self, value: float) -> bool:
        """True when the value is out of bounds."""
        return value > self.threshold


@dataclass(frozen=True, kw_only=True)
class Level(Watcher):
    """The mean of the last `window` steps is above the threshold, or below it."""

    window: int = 10
    side: Literal["above", "below", "at most"] = "above"

    def kept(self, history: History) -> History:
        return history[-self.window :]

    def value(self, history: History) -> float | None:
        return fmean(history[-self.window :]) if len(history) >= self.window else None

    def fires(self, value: float) -> bool:
        if self.side == "above":
            return value > self.threshold
        return value < self.threshold or (self.side == "at most" and value == self.threshold)


@dataclass(frozen=True, kw_only=True)
class Deviation(Level):
    """The standard deviation over the last `window` steps."""

    def value(self, history: History) -> float | None:
        return pstdev(history[-self.window :]) if len(history) >= self.window else None


@dataclass(frozen=True, kw_only=True)
class Unrest(Level):
    """The least standard deviation over `window` steps, of the last `window` such values."""

    def kept(self, history: History) -> History:
        return history[1 - 2 * self.window :]

    def value(self, history: History) -> float | None:
        ends = range(len(history) - self.window + 1, len(history) + 1)
        if len(history) < 2 * self.window - 1:
            return None
        return min(pstdev(history[end - self.window : end]) for end in ends)


@dataclass(frozen=True, kw_only=True)
class Fresh(Level):
    """A level that counts only where the samples come from the newest policy."""

    def subjects(self, metrics: Metrics) -> Iterator[tuple[str, Any]]:
        if not metrics.get("rollout/staleness"):
            yield from super().subjects(metrics)


@dataclass(frozen=True, kw_only=True)
class Factor(Fresh):
    """The distance of a level from 1: the larger of the value and its inverse."""

    def subjects(self, metrics: Metrics) -> Iterator[tuple[str, Any]]:
        for name, value in super().subjects(metrics):
            if value > 0:
                yield name, max(value, 1 / value)


@dataclass(frozen=True, kw_only=True)
class Spike(Watcher):
    """A value over the median of the last `window` before it, at least ten of them."""

    window: int = 50
    least: float = 0.0  # values up to this never count

    def kept(self, history: History) -> History:
        return history[-self.window :]

    def value(self, history: History) -> float | None:
        *before, now = history
        if len(before) < 10 or now <= self.least:
            return None
        usual = median(before[-self.window :])
        return now / usual if usual > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class Shift(Watcher):
    """The median of the last few steps over the median of the `window` before; the larger over
    the smaller with `both`. A change of at most `least` never counts.
    """

    window: int = 50
    recent: int = 5
    least: float = 0.0
    both: bool = False

    def kept(self, history: History) -> History:
        return history[-self.window - self.recent :]

    def value(self, history: History) -> float | None:
        before, now = history[-self.window - self.recent : -self.recent], history[-self.recent :]
        if len(before) < 10:
            return None
        old, new = median(before), median(now)
        change = abs(new - old) if self.both else new - old
        if change <= self.least:
            return None
        small, large = (min(old, new), max(old, new)) if self.both else (old, new)
        return large / small if small > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class Duration(Shift):
    """Times of steps that compiled nothing."""

    def subjects(self, metrics: Metrics) -> Iterator[tuple[str, Any]]:
        if not metrics.get("perf/compilations"):
            yield from super().subjects(metrics)


@dataclass(frozen=True, kw_only=True)
class Growth(Watcher):
    """The least of the last `window` steps over the most of the process's first `first` steps,
    minus 1. The history is [steps seen, most of the first, last ones].
    """

    window: int = 10
    first: int = 20
    restarts: ClassVar[bool] = True

    def kept(self, history: History) -> History:
        seen, most, last = self._parts(history)
        return [[seen, most, last]]

    def value(self, history: History) -> float | None:
        seen, most, last = self._parts(history)
        if seen < self.first + self.window or most <= 0:
            return None
        return min(last) / most - 1.0

    def _parts(self, history: History) -> tuple[int, float, list[float]]:
        """The history with its newest entries taken in."""
        seen, most, last = 0, 0.0, []
        for entry in history:
            if isinstance(entry, list):
                seen, most, last = entry
            else:
                seen, last = seen + 1, [*last, entry][-self.window :]
                most = max(most, entry) if seen <= self.first else most
        return seen, most, last


@dataclass(frozen=True, kw_only=True)
class Hacking(Watcher):
    """Held-out scores fall while the training reward rises.

    An entry of a step is [held-out score or None, reward or None]. One of a validation is
    [held-out score, mean reward since the held-out score before]. The history has the entries of
    the best validation and of the three last ones, then of the steps since.
    """

    reward: str = "critic/score/mean"
    patience: int = 3

    def subjects(self, metrics: Metrics) -> Iterator[tuple[str, Any]]:
        held_out = [value for _, value in super().subjects(metrics)]
        reward = metrics.get(self.reward)
        if held_out or reward is not None:
            yield "held-out score", [fmean(held_out) if held_out else None, reward]

    def kept(self, history: History) -> History:
        closed, open_ = self._validations(history)
        if len(closed) > self.patience + 1:
            best = max(closed[: -self.patience], key=lambda entry: entry[0])
            closed = [best, *closed[-self.patience :]]
        return [*([*entry, 0] for entry in closed), *open_]

    def value(self, history: History) -> float | None:
        closed, open_ = self._validations(history)
        if open_ or len(closed) <= self.patience:
            return None
        *before, first, second, third = closed
        best, reward_then = max(before, key=lambda entry: entry[0])
        rewards = [entry[1] for entry in (first, second, third)]
        if best <= 0 or reward_then is None or None in rewards or fmean(rewards) <= reward_then:
            return None
        # The best of the three: all of them are lower than the best before.
        return (best - max(first[0], second[0], third[0])) / best

    def _validations(self, history: History) -> tuple[list[list[Any]], History]:
        """[held-out score, mean reward before it] of each validation, and the steps since."""
        closed: list[list[Any]] = []
        since: History = []
        for entry in history:
            if len(entry) == 3:  # closed by an earlier `kept`
                closed.append(entry[:2])
                continue
            since.append(entry)
            if entry[0] is not None:
                rewards = [reward for _, reward in since if reward is not None]
                closed.append([entry[0], fmean(rewards) if rewards else None])
                since = []
        return closed, since


@dataclass(frozen=True, kw_only=True)
class Finite(Watcher):
    """Metrics that are NaN or infinite; the value is how many."""

    def subjects(self, metrics: Metrics) -> Iterator[tuple[str, Any]]:
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        yield ", ".join(bad[:SHOWN]), len(bad)

    def kept(self, history: History) -> History:
        return []

    def value(self, history: History) -> float | None:
        return float(history[-1])


def watchers(config: AlarmsConfig) -> dict[str, Watcher]:
    """Every watcher by its key in the config."""

    table: dict[str, Watcher] = {
        NONFINITE: Finite(look_at="rewards, learning rate, dtype"),
        "gradient_spike": Spike(
            least=config.gradient_spike.least,
            look_at="learning rate, max_grad_norm, the trace's samples of this step",
        ),
        "entropy": Level(
            side="below",
            window=5,
            look_at="samples that are all alike, entropy_coef, clip_high, learning rate",
        ),
        "kl": Level(window=5, look_at="kl_coef or kl_loss_coef, learning rate, held-out score"),
        "update_kl": Level(window=1, look_at="learning rate, ppo_epochs, actor/pg_clipfrac"),
        "clip_fraction": Level(look_at="learning rate, ppo_epochs, clip_low and clip_high"),
        "ratio": Factor(
            look_at="learning rate, ppo_epochs, the number of mini-batches, actor/ppo_kl"
        ),
        "mismatch": Fresh(
            window=5, look_at="dtypes of rollout and actor, quantization, rollout_is"
        ),
        "reward_std": Deviation(
            side="at most", look_at="the reward function, rewards/failures, samples"
        ),
        "reward_deviation": Unrest(
            look_at="learning rate, the scale of the reward, rewards/failures, samples"
        ),
        "zero_variance": Level(
            look_at="difficulty of the prompts, rollout.n, filter_groups, the reward function"
        ),
        "length_drift": Shift(
            least=16.0,
            both=True,
            look_at="samples, rewards that depend on length, loss aggregation",
        ),
        "cut_share": Level(look_at="max_response_length, stop tokens, an overlong penalty"),
        "masked_share": Level(
            window=5,
            look_at="the failures in the samples, the reward's server or sandbox, mask_truncated",
        ),
        "environment_failures": Level(
            window=5,
            look_at="env/failures/*, stop/failed and stop/timeout, the failures in the samples",
        ),
        "no_tool_calls": Level(
            side="at most",
            look_at="samples, the format of calls, a prompt that shows one, rewards without calls",
        ),
        "turn_drift": Shift(
            least=0.5,
            both=True,
            look_at="samples, stop/*, rewards that depend on the number of turns",
        ),
        "repetition": Level(look_at="samples, temperature, learning rate"),
        "reward_hacking": Hacking(
            look_at="samples with high reward, the reward function, an earlier checkpoint"
        ),
        "explained_variance": Level(
            side="below", look_at="the critic's learning rate, critic.warmup_steps"
        ),
        "host_memory": Growth(
            look_at="the reward function and dataset class, the step at which it began"
        ),
        "device_memory": Growth(look_at="arrays that your own stages keep"),
        "step_time": Duration(
            least=1.0,
            look_at="timing_s/* of these steps, response lengths, other jobs on the machine",
        ),
    }
    bounds = {name: getattr(getattr(config, name), "threshold", 0.0) for name in table}
    return {n: replace(w, metrics=WATCHED[n], threshold=bounds[n]) for n, w in table.items()}


# ------------------------------------------------------------------------- all of them


@dataclass(kw_only=True)
class Alarms:
    """The watchers of a run with their histories."""

    config: AlarmsConfig
    _histories: dict[str, dict[str, History]] = field(default_factory=dict)
    # By watcher and metric: how many more steps without the condition until it may fire again.
    _silent: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table = watchers(self.config)
        self._actions = {name: getattr(self.config, name).action for name in table}
        self._watchers = {name: w for name, w in table.items() if self._actions[name] != "off"}

    def step(self, step: int, metrics: Metrics) -> list[Event]:
        """Take in the metrics of a step; the alarms that fire in it."""
        events = []
        for name, watcher in self._watchers.items():
            for metric, value in self._judged(name, watcher, metrics):
                if self._may_fire(name if name == NONFINITE else f"{name} {metric}", value):
                    events.append(self._event(step, name, metric, value[0]))
        return events

    def nonfinite_parameters(self, step: int, what: str, parameters: Sequence[str]) -> Event:
        """The event of gradients or values (`what`) that end a run; its value is how many."""
        more = f" and {len(parameters) - SHOWN} more" if len(parameters) > SHOWN else ""
        return Event(
            step=step,
            name=NONFINITE,
            metric=f"{what} of {', '.join(parameters[:SHOWN])}{more}",
            value=float(len(parameters)),
            threshold=0.0,
            action="stop",
            look_at="learning rate, dtype, the samples of this step; nothing of it was saved",
        )

    def state(self) -> dict[str, Any]:
        """The histories in JSON types, for a checkpoint."""
        return {"histories": self._histories, "silent": self._silent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. An earlier process's memory is forgotten."""
        restarting = {name for name, watcher in watchers(self.config).items() if watcher.restarts}
        histories = state.get("histories", {})
        self._histories = {n: dict(h) for n, h in histories.items() if n not in restarting}
        silent = state.get("silent", {})
        self._silent = {k: n for k, n in silent.items() if k.partition(" ")[0] not in restarting}

    def _judged(
        self, name: str, watcher: Watcher, metrics: Metrics
    ) -> Iterator[tuple[str, tuple[float, bool]]]:
        """(metric, (value, out of bounds)) of each history that is long enough."""
        histories = self._histories.setdefault(name, {})
        for metric, entry in watcher.subjects(metrics):
            history = [*histories.get(metric, ()), entry]
            value = watcher.value(history)
            if kept := watcher.kept(history):
                histories[metric] = kept
            if value is not None:
                yield metric, (value, watcher.fires(value))

    def _may_fire(self, key: str, value: tuple[float, bool]) -> bool:
        """True when the condition begins here."""
        left = self._silent.get(key, 0)
        if value[1]:
            self._silent[key] = REARM
            return left == 0
        if left > 1:
            self._silent[key] = left - 1
        elif left:
            del self._silent[key]
        return False

    def _event(self, step: int, name: str, metric: str, value: float) -> Event:
        watcher, action = self._watchers[name], self._actions[name]
        return Event(
            step=step,
            name=name,
            metric=metric,
            value=value,
            threshold=watcher.threshold,
            action=action,
            look_at=watcher.look_at,
        )


@dataclass(kw_only=True)
class AlarmBell(Listener):
    """The alarms of a run, which process 0 watches, and where they are written."""

    alarms: Alarms
    write: Callable[[Event], None]

    def reported(self, step: int, metrics: Mapping[str, float]) -> Wish:
        """Write the alarms of a step, and ask for what they ask for."""
        events = self.alarms.step(step, metrics) if is_main() else []
        for event in events:
            self.write(event)
        return max((WISHES[event.action] for event in events), default=Wish.NOTHING)

    def failed(self, step: int, states: States, error: NonFiniteGradients) -> None:
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
