"""Every config key with its type, its default and its comment: for --help and docs/config.md.

Comments are read from the source of the records, so they are written once.
`python -m jaxrl_llm.config.listing > docs/config.md` writes the page.
"""

import ast
import dataclasses
import functools
import inspect
import io
import json
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple

from annotated_types import Ge, Gt, Le, Lt

from jaxrl_llm.config.algorithms import ALGORITHMS
from jaxrl_llm.config.functions import GRADERS, PRIORITIES, TASKS
from jaxrl_llm.config.records import Custom, Kind, Record, field_names
from jaxrl_llm.config.schema import (
    Config,
    ExtraModelConfig,
    PhaseConfig,
    RewardModelConfig,
    SupervisedConfig,
    TeacherConfig,
    as_dict,
)

WIDTH = 100
# Records that a key holds only where it is set, or in a list: (title, begin of the keys, record).
OPTIONAL: tuple[tuple[str, str, type[Record]], ...] = (
    ("A supervised training: warmup, teacher.training, reward.model.training", "warmup",
     SupervisedConfig),
    ("A reward model", "reward.model", RewardModelConfig),
    ("A teacher, of distillation", "teacher", TeacherConfig),
    ("A model of yours", "models.0", ExtraModelConfig),
    ("A phase", "phases.0", PhaseConfig),
)  # fmt: skip
# Keys that hold one of several kinds: (title, key, kinds).
KINDS: tuple[tuple[str, str, tuple[type[Kind], ...]], ...] = (
    ("Algorithms", "algorithm", ALGORITHMS),
    ("Reward functions and graders", "reward.functions.0", (*GRADERS, Custom)),
    ("Tasks", "data.train_tasks.0", TASKS),
    ("Priorities", "data.priority", PRIORITIES),
)
GIVEN = ("data.train_rows", "data.val_rows")  # objects of a Python program
ELSEWHERE = {SupervisedConfig: "a training, see warmup", RewardModelConfig: "a reward model"}


class Key(NamedTuple):
    """One value of a config."""

    name: str
    type: str
    default: str  # empty: it has to be given
    comment: str


def keys_of(cls: type[Record], prefix: str = "", instance: Record | None = None) -> list[Key]:
    """The keys of a record and of the records in it, in order.

    Defaults are those of `instance`, where the record that holds it changes some.
    """
    found: list[Key] = []
    for name in field_names(cls):
        entry = cls.__pydantic_fields__[name]  # pyright: ignore
        key = f"{prefix}{name}"
        nested: Any = entry.annotation
        is_record = dataclasses.is_dataclass(nested) and not issubclass(nested, Kind)  # pyright: ignore
        if key in GIVEN or entry.exclude:
            continue
        if is_record and not entry.is_required():
            default = entry.get_default(call_default_factory=True)
            part: Any = entry.annotation
            found += keys_of(part, f"{key}.", getattr(instance, name, default))
            continue
        if instance is not None:
            default = _shown(getattr(instance, name))
        elif entry.is_required():
            default = ""
        else:
            default = _shown(entry.get_default(call_default_factory=True))
        comment = comments(_owner(cls, name)).get(name, "")
        found.append(Key(key, type_name(entry.annotation, entry.metadata), default, comment))
    return found


def _owner(cls: type, name: str) -> type:
    """The class that declares a field."""
    return next(base for base in cls.__mro__ if name in base.__dict__.get("__annotations__", {}))


def _shown(value: Any) -> str:
    if isinstance(value, Kind):
        settings = as_dict(value)
        return str(settings["kind"])
    return "null" if value is None else json.dumps(as_dict(value), ensure_ascii=False)


# ------------------------------------------------------------------------- types


def type_name(annotation: Any, metadata: Any = ()) -> str:
    """A type as a user writes its values."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0], annotation.__metadata__)
    if origin is Literal:
        return " | ".join(str(choice) or '""' for choice in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is dict or annotation is dict:
        return "map"
    if arguments:  # a union
        names = [type_name(each) for each in arguments if each is not NoneType]
        null = ["null"] if NoneType in arguments else []
        return " | ".join(dict.fromkeys([*names, *null]))
    if annotation in ELSEWHERE:
        return ELSEWHERE[annotation]
    if inspect.isclass(annotation) and issubclass(annotation, Kind):
        return "kind"
    if dataclasses.is_dataclass(annotation):
        return "record"
    names = {int: "integer", float: "number", str: "text", bool: "true | false"}
    return names.get(annotation, "any") + _bounds(metadata)


def _bounds(metadata: Any) -> str:
    found = []
    for bound in metadata:
        for kind, sign in ((Ge, "≥"), (Gt, ">"), (Le, "≤"), (Lt, "<")):
            if isinstance(bound, kind):
                found.append(f"{sign} {getattr(bound, kind.__name__.lower()):g}")
    return f" {', '.join(found)}" if found else ""


# ------------------------------------------------------------------------- comments


def comments(cls: type) -> dict[str, str]:
    """The comment of each field that a class declares: behind it, or in the lines above."""
    return _comments_of(inspect.getsourcefile(cls) or "").get(cls.__name__, {})


@functools.cache
def _comments_of(file: str) -> dict[str, dict[str, str]]:
    source = Path(file).read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    behind: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokens:
        if token.type == tokenize.COMMENT:
            place = alone if token.line.strip().startswith("#") else behind
            place[token.start[0]] = token.string.lstrip("# ")
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            fields = [entry for entry in node.body if isinstance(entry, ast.AnnAssign)]
            found[node.name] = {
                ast.unparse(entry.target): _comment(entry, behind, alone) for entry in fields
            }
    return found


def _comment(entry: ast.AnnAssign, behind: dict[int, str], alone: dict[int, str]) -> str:
    above: list[str] = []
    line = entry.lineno - 1
    while line in alone:
        above.insert(0, alone[line])
        line -= 1
    lines = range(entry.lineno, (entry.end_lineno or entry.lineno) + 1)
    last = [behind[line] for line in lines if line in behind]
    return " ".join([*above, *last])


# ------------------------------------------------------------------------- pages


def sections() -> Iterator[tuple[str, str, list[Key]]]:
    """(title, introduction, keys) of every part of a config."""
    groups: dict[str, list[Key]] = {}
    for key in keys_of(Config):
        group = key.name.partition(".")[0] if "." in key.name else ""
        groups.setdefault(group, []).append(key)
    for group, keys in groups.items():
        cls = Config.__pydantic_fields__[group].annotation if group else Config  # pyright: ignore
        yield group or "The run", _first_line(cls), keys
    for title, prefix, cls in OPTIONAL:
        yield title, _first_line(cls), keys_of(cls, f"{prefix}.")
    for title, key, kinds in KINDS:
        yield title, f"{key} is one of these kinds: --config.{key}=KIND.", []
        for kind in kinds:
            yield f"{key} = {kind.kind}", _first_line(kind), keys_of(kind, f"{key}.")


def _first_line(cls: Any) -> str:
    return (inspect.cleandoc(cls.__doc__ or "").splitlines() or [""])[0]


def help_text() -> str:
    """The listing for a terminal."""
    lines = ["Config keys, as --config.KEY=VALUE: name, type, default, meaning."]
    for title, introduction, keys in sections():
        lines += ["", f"{title}: {introduction}"]
        for key in keys:
            default = f"default {key.default}" if key.default else "has to be given"
            text = "; ".join(filter(None, (f"{key.name}  {key.type}", default, key.comment)))
            lines += textwrap.wrap(
                text, WIDTH, initial_indent="  ", subsequent_indent="      ", **_WHOLE_WORDS
            )
    return "\n".join(lines)


_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def page() -> str:
    """docs/config.md."""
    lines = [
        "# The config",
        "",
        "Every key with its type, its default and its meaning. This page is generated: "
        "`python -m jaxrl_llm.config.listing > docs/config.md`.",
        "`jaxrl train --help` prints the same. A key is set with `--config.KEY=VALUE`, in a file "
        "with `get_config()`,",
        'or from Python: `rl.load_config("grpo", {KEY: VALUE})`.',
    ]
    for title, introduction, keys in sections():
        level = "###" if " = " in title else "##"
        lines += ["", f"{level} {title}", "", introduction]
        lines += [""] if keys else []
        for key in keys:
            default = f"default `{key.default}`" if key.default else "has to be given"
            text = f"- `{key.name}`: {key.type}; {default}. {key.comment}".strip()
            lines += textwrap.wrap(text, 160, subsequent_indent="  ", **_WHOLE_WORDS)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
