"""From a command line of another library to a config of ours, key by key."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxrl_llm.config import Config, ConfigError, load_config
from jaxrl_llm.config.algorithms import ALGORITHMS
from jaxrl_llm.config.graders import GRADERS
from jaxrl_llm.config.rules.paths import tracker_fault
from jaxrl_llm.convert.rules import Answer, NoCounterpart, NotNeeded, Ours, Rule, Source
from jaxrl_llm.data_files import HUB, check_files
from jaxrl_llm.references import check_path, is_file, is_folder, is_hub_name
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
    """A key that was given, and what became of it."""

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
    missing: tuple[str, ...]  # files and folders that are not on this machine

    def of_kind(self, kind: type) -> list[Converted]:
        return [found for found in self.keys if isinstance(found.answer, kind)]

    @property
    def by_default(self) -> dict[str, Any]:
        """Our keys with values that no key asked for."""
        asked = [found.answer for found in self.of_kind(Ours)]
        named = {name for answer in asked for name in answer.values}  # pyright: ignore
        return {
            name: value
            for name, value in self.values.items()
            if name not in named and not any(is_in(name, answer.part_of) for answer in asked)  # pyright: ignore
        }

    @property
    def share(self) -> float:
        """The share of keys that were translated or are not needed."""
        open_keys = len(self.of_kind(NoCounterpart))
        return 1 - open_keys / len(self.keys) if self.keys else 1.0


def is_in(name: str, key: str) -> bool:
    """Whether a dotted key is another one, or below it."""
    return bool(key) and f"{name}.".startswith(f"{key}.")


def convert(source: Source, dialect: Dialect) -> Conversion:
    """The run of `source` as a config that passes our checks, apart from missing files.

    Raises: ConfigError for a value that cannot work, and where the sizes do not fit.
    """
    answers = {key: answer(key, value, source, dialect) for key, value in source.given.items()}
    defaults = {
        key: answer(key, value, source, dialect)
        for key, value in source.defaults.items()
        if key not in source.given
    }
    values: dict[str, Any] = {}
    for found in (*defaults.values(), *answers.values()):
        if isinstance(found, Ours):
            values |= found.values
    notes = dialect.finish(source, values)
    _drop_settings(values, answers)
    config = _build(values)
    missing = _missing(config)
    load_config(_elsewhere(config))
    return Conversion(
        config=config,
        keys=tuple(
            Converted(key=key, value=source.given[key], answer=answer)
            for key, answer in answers.items()
        ),
        values=_changed(config),
        notes=tuple(notes),
        missing=tuple(missing),
    )


def answer(key: str, value: Any, source: Source, dialect: Dialect) -> Answer:
    """What a key of another library becomes here. Raises: ConfigError for its value."""
    rule = rule_of(key, dialect.table)
    if rule is None:
        return NoCounterpart(f"not known here{_nearest_key(key, dialect.table)}")
    if isinstance(rule, str):
        if isinstance(value, bool) and _is_number(rule):
            raise ConfigError(f"{key}={value}: expected a number")
        return Ours({rule: value})
    if isinstance(rule, NotNeeded | NoCounterpart):
        return rule
    try:
        return rule(value, source)
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ConfigError(f"{key}={value}: cannot be read: {error}") from None


def _is_number(ours: str) -> bool:
    """Whether the default of one of our keys is a number."""
    default: Any = Config()
    for part in ours.split("."):
        default = getattr(default, part, None)
    return isinstance(default, int | float) and not isinstance(default, bool)


def _nearest_key(key: str, table: Mapping[str, Rule]) -> str:
    """The key that differs by a slip of the pen, if there is one."""
    last = key.rpartition(".")[2]
    for found in difflib.get_close_matches(key, table, n=8, cutoff=0.75):
        end = found.removesuffix(".*").rpartition(".")[2]
        if difflib.SequenceMatcher(None, last, end).ratio() >= 0.7:
            return f"; did you mean {found.removesuffix('.*')}?"
    return ""


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
    fields = fields_of(KINDS[kind]).items()
    given = {n: f.get_default(call_default_factory=True) for n, f in fields if not f.is_required()}
    return {name: as_dict(value) for name, value in given.items()}


# ------------------------------------------------------------------------- what is elsewhere

ELSEWHERE = "other/machine"


def _missing(config: Config) -> list[str]:
    """Files and folders of the config that are not here."""
    found = [path for path in _models(config).values() if path and not _is_here(path)]
    for file in (*config.data.train_files, *config.data.val_files):
        try:
            check_files(file)
        except ValueError as error:
            found.append(str(error) if file.startswith(HUB) else file)
    for name in config.log.trackers:
        if tracker_fault(name):
            found.append(f"the package of {name}: pip install 'jaxrl_llm[{name}]'")
    found += [path for path in _functions(config) if not _function_is_here(path)]
    return list(dict.fromkeys(found))


def _is_here(path: str) -> bool:
    return is_folder(path) or is_hub_name(path)


def _function_is_here(path: str) -> bool:
    if ":" not in path:
        return True
    try:
        check_path(path)
    except ValueError:
        return False
    return True


def _functions(config: Config) -> list[str]:
    own = [getattr(function, "path", "") for function in config.reward.functions]
    graders = [getattr(config.validation.grader, "path", "")]
    return [path for path in (*own, *graders, config.data.dataset_class) if ":" in path]


def _models(config: Config) -> dict[str, str]:
    paths = {"actor": config.actor.path, "critic": config.critic.path}
    for name, model in (("reward.model", config.reward.model), ("teacher", config.teacher)):
        if model is not None:
            paths[name] = model.path
    return paths


def _elsewhere(config: Config) -> Config:
    """The config as a machine with all its files would see it, for a check of everything else."""
    here = config
    for name, path in _models(config).items():
        if path and not _is_here(path):
            here = _with_path(here, name)
    data = replace(here.data, train_files=(), val_files=(), dataset_class="", train_tasks=())
    tasks = validate(type(data), as_dict(data) | {"train_tasks": ["chain_sum"]})
    reward = here.reward
    gone = [f for f in reward.functions if not _function_is_here(getattr(f, "path", ""))]
    if gone:
        kept = tuple(f for f in reward.functions if f not in gone)
        plain = Config().validation.grader
        reward = replace(reward, functions=(*kept, *(plain for _ in gone)))
    validation = replace(here.validation, grader=Config().validation.grader)
    adapter = here.actor.lora
    if adapter.path and not is_folder(adapter.path):
        here = replace(here, actor=replace(here.actor, lora=replace(adapter, path="", rank=1)))
    return replace(here, data=tasks, reward=reward, validation=validation, log=_quiet(here))


def _quiet(config: Config) -> Any:
    return replace(config.log, trackers=())


def _with_path(config: Config, name: str) -> Config:
    """The config whose model `name` has a hub's name in place of a folder that is not here."""
    first, *rest = name.split(".")
    owner: Any = getattr(config, first)
    if rest:
        inner = replace(getattr(owner, rest[0]), path=ELSEWHERE)
        changed = dataclasses.replace(owner, **{rest[0]: inner})
    else:
        changed = dataclasses.replace(owner, path=ELSEWHERE)
    return dataclasses.replace(config, **{first: changed})


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
