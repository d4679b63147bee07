"""Answers for a key of another library: keys of ours, not needed, or without counterpart.

A table maps keys to rules. A rule is the name of our key, which then has the same value, or one of
the answers below. It may also be a function of the value and the whole source that gives such an
answer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigError


@dataclass(frozen=True)
class Ours:
    """Values of our config by dotted key; `note` says what changed on the way.

    `part_of` is a key of ours, or a record, whose value takes several of theirs.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    part_of: str = ""


@dataclass(frozen=True)
class NotNeeded:
    """The run is the same without the key."""

    why: str


@dataclass(frozen=True)
class NoCounterpart:
    """The run may differ; `remedy` says what to do. Without `learned` it learns the same."""

    remedy: str
    learned: bool = True


Answer = Ours | NotNeeded | NoCounterpart
Rule = str | NotNeeded | NoCounterpart | Callable[[Any, "Source"], Answer]


@dataclass(frozen=True)
class Source:
    """A command line of another library: what was given, its defaults, and the run's sizes."""

    settings: Mapping[str, Any]
    defaults: Mapping[str, Any]
    devices: int
    rows: int = 0  # rows of the training data; 0 is not known
    trainer: str = ""  # the command of the library, such as grpo

    def get(self, *keys: str) -> Any:
        """The value of the first of these keys that is given, else of the first with a default."""
        for table in (self.settings, self.defaults):
            for key in keys:
                if key in table:
                    return table[key]
        return None

    def number(self, *keys: str) -> float:
        """The same as a number; 0 where there is none. Raises: ConfigError for another value."""
        value = self.get(*keys)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{keys[0]}={value}: expected a number")
        return value

    def whole(self, *keys: str) -> int:
        """The same as a whole number."""
        value = self.number(*keys)
        if value != int(value):
            raise ConfigError(f"{keys[0]}={value}: expected a whole number")
        return int(value)

    def count(self, *keys: str) -> int:
        """The same as a number from 1 on; 1 where there is none."""
        if self.get(*keys) is None:
            return 1
        value = self.whole(*keys)
        if value < 1:
            raise ConfigError(f"{keys[0]}={value}: must be 1 or more")
        return value


def only(expected: Any, why: str, remedy: str) -> Rule:
    """A key whose one value changes nothing here; another has no counterpart."""

    def rule(value: Any, source: Source) -> Answer:
        return NotNeeded(why) if value == expected else NoCounterpart(remedy)

    return rule


def epochs(source: Source, has_steps: bool) -> Answer:
    """A number of epochs, which rows turn into steps."""
    if source.rows or has_steps:
        return Ours(part_of="total_steps")
    return NoCounterpart("a run counts steps; --rows=N turns epochs into them")


def path_at(key: str) -> Rule:
    """A file or folder, whose ~ is written out."""

    def rule(value: Any, source: Source) -> Answer:
        return Ours({key: str(Path(str(value)).expanduser())} if value else {})

    return rule


def part_of(key: str) -> Rule:
    """A key that is one of several parts of ours; `finish` reads it."""
    return lambda value, source: Ours(part_of=key)


def flag(key: str, **words: Any) -> Rule:
    """A switch that is a word here."""
    return lambda value, source: Ours({key: words["on"] if value else words["off"]})


def not_null(remedy: str, *, learned: bool = True) -> Rule:
    def rule(value: Any, source: Source) -> Answer:
        empty = value in (None, False, "", -1) or value == []
        return NotNeeded("it is off") if empty else NoCounterpart(remedy, learned)

    return rule


def schedule(key: str) -> Rule:
    """The schedule after the warm-up."""

    def rule(value: Any, source: Source) -> Answer:
        name = str(value).removesuffix("_with_warmup")
        if value is None:
            return NotNeeded("null is the default")
        if name in ("constant", "linear", "cosine"):
            return Ours({key: name})
        return NoCounterpart("constant, linear and cosine are the schedules")

    return rule


def trackers(value: Any, source: Source) -> Answer:
    """Trackers that are packaged here."""
    names = {str(name).lower() for name in many(value)}
    known = [name for name in ("wandb", "mlflow", "trackio") if name in names]
    others = names - {*known, "console", "tensorboard", "file", "none", "all"}
    if others:
        names = ", ".join(sorted(others))
        return NoCounterpart(f"write a tracker for {names}: docs/trackers.md", learned=False)
    return Ours({"log.trackers": known}, "console and TensorBoard are always there")


def top_k(value: Any, source: Source) -> Answer:
    """Top-k sampling; -1 is off there, 0 here."""
    return Ours({"rollout.top_k": max(int(value or 0), 0)})


def many(value: Any) -> tuple[Any, ...]:
    """A list, or the only entry of one."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def largest_divisor(of: int, at_most: int) -> int:
    """The largest divisor of a number that is at most another; 1 at least."""
    return next((d for d in range(min(of, at_most), 1, -1) if of % d == 0), 1)
