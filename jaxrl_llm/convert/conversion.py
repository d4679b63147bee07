"""From a command line of another library to a config of ours, key by key."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxrl_llm.config import ChainSum, Config, ConfigError
from jaxrl_llm.config.algorithms import ALGORITHMS
from jaxrl_llm.config.graders import GRADERS
from jaxrl_llm.config.rules.check import OF_THIS_MACHINE, RULES, faults
from jaxrl_llm.convert.rules import Answer, NoCounterpart, NotNeeded, Ours, Rule, Source
from jaxrl_llm.references import is_file
from jaxrl_llm.typed_records.messages import explain
from jaxrl_llm.typed_records.record import fields_of, validate
from jaxrl_llm.typed_records.tree import as_dict

ALGORITHM = "algorithm."


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A library whose command lines are read."""

    table: Mapping[str, Rule]
    # Values of our keys that need several of theirs, and notes about them.
    finish: Callable[[Source, dict[str, Any]], list[str]]


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A key of the command line, and its answer."""

    key: str
    value: Any
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A config, and an account of every key that was given."""

    config: Config
    keys: tuple[Converted, ...]
    values: Mapping[str, Any]  # our keys whose values are not our defaults
    notes: tuple[str, ...]  # what to look at before the run
    missing: tuple[str, ...]  # files, folders and packages that are not on this machine

    def of_kind(self, kind: type) -> list[Converted]:
        return [converted for converted in self.keys if isinstance(converted.answer, kind)]

    def not_learned(self, allowed: Iterable[str]) -> list[str]:
        """The keys without counterpart that change what is learned, but those `allowed`."""
        keys = self.of_kind(NoCounterpart)
        changing = [each.key for each in keys if each.answer.learned]  # pyright: ignore
        return [key for key in changing if key not in allowed]

    @property
    def by_default(self) -> dict[str, Any]:
        """Our keys with values that no key asked for."""
        asked = [converted.answer for converted in self.of_kind(Ours)]
        named = {name for answer in asked for name in answer.values}  # pyright: ignore
        return {
            name: value
            for name, value in self.values.items()
            if name not in named and not any(is_in(name, answer.part_of) for answer in asked)  # pyright: ignore
        }


def is_in(name: str, key: str) -> bool:
    """True if a dotted key is another one, or below it."""
    return bool(key) and f"{name}.".startswith(f"{key}.")


def convert(source: Source, dialect: Dialect) -> Conversion:
    """The run of `source` as a config that passes our checks, apart from missing files.

    Raises: ConfigError for a value that cannot work, and where the sizes do not fit.
    """
    answers = {key: answer(key, value, source, dialect) for key, value in source.settings.items()}
    defaults = {
        key: answer(key, value, source, dialect)
        for key, value in source.defaults.items()
        if key not in source.settings
    }
    values: dict[str, Any] = {}
    for each in (*defaults.values(), *answers.values()):
        if isinstance(each, Ours):
            values |= each.values
    notes = dialect.finish(source, values)
    _drop_settings(values, answers)
    config = _build(values)
    missing = _check(config)
    return Conversion(
        config=config,
        keys=tuple(
            Converted(key=key, value=source.settings[key], answer=answer)
            for key, answer in answers.items()
        ),
        values=_changed(config),
        notes=tuple(notes),
        missing=tuple(missing),
    )


def answer(key: str, value: Any, source: Source, dialect: Dialect) -> Answer:
    """Translate a key of another library. Raises: ConfigError for its value."""
    rule = rule_of(key, dialect.table)
    if rule is None:
        return NoCounterpart(f"not known here{_nearest_key(key, dialect.table)}")
    if isinstance(rule, str):
        return Ours({rule: value})
    if isinstance(rule, NotNeeded | NoCounterpart):
        return rule
    try:
        return rule(value, source)
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ConfigError(f"{key}={value}: cannot be read: {error}") from None


def _nearest_key(key: str, table: Mapping[str, Rule]) -> str:
    """The key that differs by a slip of the pen, if there is one."""
    near = difflib.get_close_matches(key, table, n=1, cutoff=0.93)
    return f"; did you mean {near[0].removesuffix('.*')}?" if near else ""


def rule_of(key: str, table: Mapping[str, Rule]) -> Rule | None:
    """The rule of a key, or of the folder of keys that it is in."""
    if key in table:
        return table[key]
    folder = key
    while "." in folder:
        folder = folder.rpartition(".")[0]
        if f"{folder}.*" in table:
            return table[f"{folder}.*"]
    return None


def _drop_settings(values: dict[str, Any], answers: dict[str, Answer]) -> None:
    """Leave out settings that the chosen algorithm does not have, and say so of their keys."""
    kind = values["algorithm.kind"]
    record = next(cls for cls in ALGORITHMS if cls.kind == kind)
    known = {"kind", *fields_of(record)}
    dropped = [
        name
        for name in values
        if name.startswith(ALGORITHM) and name.removeprefix(ALGORITHM) not in known
    ]
    for name in dropped:
        del values[name]
    for key, answer in answers.items():
        if isinstance(answer, Ours) and answer.values and set(answer.values) <= set(dropped):
            answers[key] = NotNeeded(f"`{kind}` does not read it")
            if kind == "pair" and values.get("algorithm.loss_mode") != "gpg":
                answers[key] = NoCounterpart(
                    "`pair` takes the loss's own; write a function (docs/add-an-algorithm.md)"
                )


def _build(values: Mapping[str, Any]) -> Config:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *folders, last = name.split(".")
        at = nested
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = value
    try:
        return validate(Config, nested)
    except ValidationError as error:
        raise explain(error, Config, "config") from None


KINDS = {cls.kind: cls for cls in (*ALGORITHMS, *GRADERS)}


def _changed(config: Config) -> dict[str, Any]:
    """The dotted keys whose values are not the defaults; of several kinds, the kind first."""
    return dict(_differences(as_dict(config), as_dict(Config()), ""))


def _differences(ours: Any, plain: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(ours, dict) and isinstance(plain, dict) and plain:
        kind = ours.get("kind")
        if kind != plain.get("kind"):
            yield key, kind
            plain = _defaults_of(kind)
        for name, value in ours.items():
            if name != "kind":
                at = f"{key}.{name}" if key else name
                yield from _differences(value, plain.get(name), at)
    elif ours != plain:
        yield key, ours


def _defaults_of(kind: Any) -> dict[str, Any]:
    """The defaults of a record; fields without one are left out."""
    return {
        name: as_dict(field.get_default(call_default_factory=True))
        for name, field in fields_of(KINDS[kind]).items()
        if not field.is_required()
    }


# ------------------------------------------------------------------------- the check


def _check(config: Config) -> list[str]:
    """Faults that another machine may not have. Raises: ConfigError for any other fault."""
    if not (config.data.train_files or config.data.dataset_class):  # a note says so
        config = replace(config, data=replace(config.data, train_tasks=(ChainSum(),)))
    for fault in faults(config, [rule for rule in RULES if rule not in OF_THIS_MACHINE]):
        raise ConfigError(fault)
    return list(faults(config, OF_THIS_MACHINE))


def rows_of(files: Iterable[str]) -> int:
    """Rows of parquet and JSON lines files that are here; 0 where one is not."""
    total = 0
    for file in files:
        path = Path(file).expanduser()
        if not is_file(path):
            return 0
        if path.suffix == ".parquet":
            from pyarrow.parquet import ParquetFile

            total += ParquetFile(path).metadata.num_rows
        elif path.suffix == ".jsonl":
            with path.open("rb") as lines:
                total += sum(bool(line.strip()) for line in lines)
        else:
            return 0
    return total
