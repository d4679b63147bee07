"""Every config key with its type, its default and its comment: for --help and docs/config.md.

Comments are read from the source of the records, so they are written once.
`python -m jaxrl_llm.launch.config_keys > docs/config.md` writes the page.
"""

import dataclasses
import functools
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan

from jaxrl_llm.config.agents import ENVIRONMENTS, TOOLS, Command
from jaxrl_llm.config.algorithms import ALGORITHMS
from jaxrl_llm.config.graders import GRADERS
from jaxrl_llm.config.schema import (
    Config,
    ExtraModelConfig,
    OwnUpdate,
    PhaseConfig,
    RewardModelConfig,
    SupervisedConfig,
    TeacherConfig,
)
from jaxrl_llm.config.tasks import PRIORITIES, TASKS
from jaxrl_llm.references import nearest
from jaxrl_llm.typed_records.bounds import MOST, UpTo
from jaxrl_llm.typed_records.messages import ConfigError
from jaxrl_llm.typed_records.other_words import answer
from jaxrl_llm.typed_records.python_objects import Given
from jaxrl_llm.typed_records.record import Custom, Kind, Record, fields_of
from jaxrl_llm.typed_records.tree import as_dict

# Records that a key holds only where it is set, or in a list: (title, begin of the keys, record).
OPTIONAL: tuple[tuple[str, str, type[Record]], ...] = (
    ("A supervised training: warmup, teacher.training, reward.model.training", "warmup",
     SupervisedConfig),
    ("A reward model", "reward.model", RewardModelConfig),
    ("A teacher, of distillation", "teacher", TeacherConfig),
    ("A model of yours", "models.0", ExtraModelConfig),
    ("The update of a model of yours", "models.0.update", OwnUpdate),
    ("A phase", "phases.0", PhaseConfig),
)  # fmt: skip
# Keys that hold one of several kinds: (title, key, kinds).
KINDS: tuple[tuple[str, str, tuple[type[Kind], ...]], ...] = (
    ("Algorithms", "algorithm", ALGORITHMS),
    ("Reward functions and graders", "reward.functions.0", (*GRADERS, Custom)),
    ("Tools", "rollout.tools.0", (*TOOLS, Custom)),
    ("Environments", "rollout.environment.0", (*ENVIRONMENTS, Custom)),
    ("Programs", "rollout.program", (Command, Custom)),
    ("Tasks", "data.train_tasks.0", TASKS),
    ("Priorities", "data.priority", PRIORITIES),
)
GIVEN = ("data.train_rows", "data.val_rows", "actor.params")  # objects of a Python program
PAGE = """# The config

Every key with its type, its default and its meaning. This page is generated: \
`python -m jaxrl_llm.launch.config_keys > docs/config.md`.
`jaxrl train --help` prints the same, and `--help rollout` a part of it.
A key is set with `--config.KEY=VALUE`, in a file with `get_config()`, or from Python: \
`rl.load_config("grpo", {KEY: VALUE})`.
Integers are below 2³¹. Numbers are finite, but for those that say `or inf`."""
# Types as a user writes their values.
NAMES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true | false",
    dict: "map",
    NoneType: "null",
    Any: "any",
    Given: "object",
    SupervisedConfig: "a training, see warmup",
    RewardModelConfig: "a reward model",
    OwnUpdate: "an update",
}
SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


class Key(NamedTuple):
    """One value of a config."""

    name: str
    type: str
    default: str  # empty: it has to be given
    comment: str


def keys_of(
    cls: type[Record], prefix: str = "", instance: Record | None = None, about: str = ""
) -> list[Key]:
    """The keys of a record and of the records in it, in order.

    Defaults come from `instance`, where the record that holds it changes some. A key without a
    comment takes the comment of the nearest base class, or `about`, the comment of its record.
    """
    keys: list[Key] = []
    written = [comments(base) for base in cls.__mro__ if issubclass(base, Record)]
    for name, entry in fields_of(cls).items():
        key = f"{prefix}{name}"
        if key in GIVEN or entry.exclude:
            continue
        required = instance is None and entry.is_required()
        default = entry.get_default(call_default_factory=True)
        value = default if instance is None else getattr(instance, name)
        comment = next((texts[name] for texts in written if texts.get(name)), about)
        if isinstance(value, Record) and not isinstance(value, Kind):
            keys += keys_of(type(value), f"{key}.", value, comment)
            continue
        kind = type_name(entry.annotation, entry.metadata)
        keys.append(Key(key, kind, "" if required else _shown(value), comment))
    return keys


def _shown(value: Any) -> str:
    return value.kind if isinstance(value, Kind) else json.dumps(as_dict(value), ensure_ascii=False)


def type_name(annotation: Any, metadata: Any = ()) -> str:
    """A type as a user writes its values, and the bounds of a number."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0], annotation.__metadata__)
    if origin is Literal:
        return " | ".join(str(choice) or '""' for choice in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is not dict and arguments:  # a union
        return " | ".join(dict.fromkeys(map(type_name, arguments)))
    name = NAMES.get(origin or annotation) or ("kind" if issubclass(annotation, Kind) else "record")
    bounds = [
        f"{SIGNS[type(bound)]} {dataclasses.astuple(bound)[0]:g}"
        for bound in metadata
        if type(bound) in SIGNS and bound != Le(MOST)
    ]
    bounds += [f"{'≤' if b.itself else '<'} {b.key}" for b in metadata if isinstance(b, UpTo)]
    infinite = " or inf" if AllowInfNan(True) in metadata else ""
    return f"{name} {', '.join(bounds)}".strip() + infinite


def comments(cls: type) -> dict[str, str]:
    """The comment of each field that a class declares: in the lines above, and behind it."""
    return _comments_of(cls.__module__).get(cls.__name__, {})


@functools.cache
def _comments_of(module: str) -> dict[str, dict[str, str]]:
    classes: dict[str, dict[str, str]] = {}
    fields, above = {}, []
    for line in inspect.getsource(sys.modules[module]).splitlines():
        code, _, comment = f" {line}".partition(" # ")
        if not code.strip():
            above += [comment] if comment else []
            continue
        if name := re.match(r" class (\w+)", code):
            fields = classes[name[1]] = {}
        if name := re.match(r" {5}(\w+): ", code):
            fields[name[1]] = " ".join([*above, comment]).strip()
        above = []
    return classes


def sections() -> Iterator[tuple[str, str, list[Key]]]:
    """(title, introduction, keys) of every part of a config."""
    groups: dict[str, list[Key]] = {}
    for key in keys_of(Config):
        group = key.name.partition(".")[0] if "." in key.name else ""
        groups.setdefault(group, []).append(key)
    for group, keys in groups.items():
        cls = fields_of(Config)[group].annotation if group else Config
        yield group or "The run", _first_line(cls), keys
    for title, prefix, cls in OPTIONAL:
        yield title, _first_line(cls), keys_of(cls, f"{prefix}.")
    for title, key, kinds in KINDS:
        yield title, f"{key} is one of these kinds: --config.{key}=KIND.", []
        for kind in kinds:
            yield f"{key} = {kind.kind}", _first_line(kind), keys_of(kind, f"{key}.")


def _first_line(cls: Any) -> str:
    return (inspect.cleandoc(cls.__doc__ or "").splitlines() or [""])[0]


def help_of(part: str) -> str:
    """The keys with `part` in their names, such as rollout or lora; or of a kind, algorithm=ppo.

    Raises: ConfigError if there is none.
    """
    chosen = [
        (title, introduction, found)
        for title, introduction, keys in sections()
        if (found := keys if title.replace(" ", "") == part else _with_part(keys, part))
    ]
    if not chosen:
        parts = {name for _, _, keys in sections() for key in keys for name in key.name.split(".")}
        ours = answer(part)
        hint = f"; here it is {ours}" if ours else nearest(part, parts)
        raise ConfigError(f"no key has {part} in its name{hint}")
    return help_text(chosen)


def _with_part(keys: Sequence[Key], part: str) -> list[Key]:
    return [key for key in keys if f".{part}." in f".{key.name}."]


def help_text(chosen: Iterable[tuple[str, str, list[Key]]] | None = None) -> str:
    """The listing for a terminal, of all sections or the chosen ones."""
    lines = ["Config keys, as --config.KEY=VALUE: name, type, default, meaning."]
    if chosen is None:
        lines[0] += " Fewer: --help rollout, or --help algorithm=dapo."
    for title, introduction, keys in sections() if chosen is None else chosen:
        lines += ["", f"{title}: {introduction}"]
        for key in keys:
            default = f"default {key.default}" if key.default else "has to be given"
            text = "; ".join(filter(None, (f"{key.name}  {key.type}", default, key.comment)))
            lines += _wrapped(f"  {text}", 100, indent=6)
    return "\n".join(lines)


def page() -> str:
    """docs/config.md."""
    lines = [PAGE]
    for title, introduction, keys in sections():
        level = "###" if " = " in title else "##"
        lines += ["", f"{level} {title}", "", introduction, *([""] if keys else [])]
        for key in keys:
            default = f"default `{key.default}`" if key.default else "has to be given"
            comment = key.comment[:1].upper() + key.comment[1:]
            text = f"- `{key.name}`: {key.type}; {default}. {comment}".strip()
            lines += _wrapped(text, 160, indent=2)
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    print(page(), end="")
