"""Values as the annotations of the config want them: from command-line text, JSON, or Python.

Text needs no quotes (`[/data/x.jsonl,/y.jsonl]`, `{terms: 3}`): the annotation says what it is.
"""

import ast
import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, cast

from jaxrl_llm.config import ConfigError, FunctionConfig, TaskConfig
from jaxrl_llm.signatures import Setting, dict_keys, nearest, settings_of

TASKS_MODULE = "jaxrl_llm.data.tasks"  # a task's name is a key of TASKS and a function there


class Text(str):
    """A value as typed on the command line, to be read by the annotation of its field."""


# ------------------------------------------------------------------------- types


def coerce(value: Any, annotation: Any, key: str) -> Any:
    """`value` as `annotation` wants it, or ConfigError naming `key` and what was expected.

    Text is parsed; lists become tuples, ints become floats, dicts become dataclasses where the
    annotation asks for that; nothing else is converted.
    """
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return _guess(value) if isinstance(value, Text) else value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, annotation, key)
    if origin is Literal:
        choices = typing.get_args(annotation)
        if value in choices and type(value) in (Text, *map(type, choices)):
            return choices[choices.index(value)]
        raise _expected(value, f"one of {', '.join(map(str, choices))}", key)
    if dataclasses.is_dataclass(annotation):
        return _coerce_dataclass(value, cast(type, annotation), key)
    if (origin or annotation) in (tuple, list):
        return _coerce_sequence(value, annotation, key)
    if (origin or annotation) is dict:
        if isinstance(value, Text):
            value = _split_mapping(value, key)
        if not isinstance(value, Mapping):
            raise _expected(value, describe(annotation), key)
        kinds = typing.get_args(annotation) or (str, Any)
        return {
            coerce(k, kinds[0], key): coerce(v, kinds[1], f"{key}.{k}") for k, v in value.items()
        }
    return _coerce_scalar(value, annotation, key)


def _coerce_scalar(value: Any, annotation: Any, key: str) -> Any:
    if isinstance(value, Text):
        try:
            if annotation is bool:
                return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
            if annotation in (int, float):
                return annotation(value)
        except (KeyError, ValueError):
            raise _expected(value, describe(annotation), key) from None
        if annotation is str:
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            return str(value[1:-1] if quoted else value)
    if annotation is float and type(value) is int:
        return float(value)
    if annotation is type(None) and value is None:
        return None
    if not isinstance(annotation, type) or type(value) is not annotation:
        raise _expected(value, describe(annotation), key)
    return value


def _coerce_union(value: Any, annotation: Any, key: str) -> Any:
    kinds = typing.get_args(annotation)
    if type(None) in kinds:
        if value is None or (isinstance(value, Text) and value.lower() in ("none", "null")):
            return None
        kinds = tuple(kind for kind in kinds if kind is not type(None))
        if len(kinds) == 1:
            return coerce(value, kinds[0], key)
    for kind in kinds:
        try:
            return coerce(value, kind, key)
        except ConfigError:
            continue
    raise _expected(value, describe(annotation), key)


def _coerce_sequence(value: Any, annotation: Any, key: str) -> Any:
    make = typing.get_origin(annotation) or annotation
    kinds = typing.get_args(annotation)
    if isinstance(value, Text):
        value = _split_list(value, key)
    if not isinstance(value, tuple | list):
        raise _expected(value, describe(annotation), key)
    if make is tuple and kinds and kinds[-1] is not Ellipsis:
        if len(kinds) != len(value):
            raise _expected(value, describe(annotation), key)
    else:
        kinds = (kinds[0] if kinds else Any,) * len(value)
    pairs = enumerate(zip(value, kinds, strict=True))
    return make(coerce(entry, kind, f"{key}.{i}") for i, (entry, kind) in pairs)


def _coerce_dataclass(value: Any, annotation: type, key: str) -> Any:
    kinds = field_types(annotation)
    if isinstance(value, Text) and not value.startswith("{"):
        value = str(value)
    if isinstance(value, str) and not isinstance(value, Text):
        if not issubclass(annotation, FunctionConfig | TaskConfig):
            raise _expected(value, f"{annotation.__name__} as {{key: value, …}}", key)
        value = {next(iter(kinds)): value}  # the path or name alone
    elif isinstance(value, Text):
        value = _split_mapping(value, key)
    elif isinstance(value, annotation):
        value = {name: getattr(value, name) for name in kinds}
    if not isinstance(value, Mapping):
        raise _expected(value, annotation.__name__, key)
    for name in value:
        if name not in kinds:
            known = ", ".join(kinds)
            raise ConfigError(
                f"unknown key {key}.{name}{nearest(str(name), list(kinds))}\nkeys of {key}: {known}"
            )
    required = [f.name for f in dataclasses.fields(annotation) if _is_required(f)]
    for name in required:
        if name not in value:
            raise ConfigError(f"{key}.{name} is missing; set it ({describe(kinds[name])})")
    result = annotation(**{n: coerce(v, kinds[n], f"{key}.{n}") for n, v in value.items()})
    if isinstance(result, FunctionConfig | TaskConfig):
        result = dataclasses.replace(result, settings=_coerce_settings(result, key))
    return result


def _is_required(entry: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return entry.default is missing and entry.default_factory is missing


def function_settings(node: FunctionConfig | TaskConfig, key: str) -> dict[str, Setting]:
    """The settings that the function or task of `node` takes; ConfigError when there is none."""
    if isinstance(node, TaskConfig):
        tasks = dict_keys(TASKS_MODULE, "TASKS")
        if node.name not in tasks:
            raise ConfigError(
                f"{key}.name={node.name}: no such task{nearest(node.name, tasks)}\n"
                f"tasks: {', '.join(tasks)}"
            )
        return settings_of(f"{TASKS_MODULE}:{node.name}")
    try:
        return settings_of(node.path)
    except ConfigError as error:
        raise ConfigError(f"{key}.path={node.path}: {error}") from None


def _coerce_settings(node: FunctionConfig | TaskConfig, key: str) -> dict[str, Any]:
    """The settings of `node`, each known to its function and of the type it declares."""
    known = function_settings(node, key)
    for name in node.settings:
        if name not in known:
            raise ConfigError(
                f"unknown key {key}.settings.{name}{nearest(name, list(known))}\n"
                f"settings of {key}: {', '.join(known) or 'none'}"
            )
    return {
        name: coerce(value, known[name].annotation, f"{key}.settings.{name}")
        for name, value in node.settings.items()
    }


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The field names of a config dataclass and their types, in order."""
    hints = typing.get_type_hints(cls)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(cls)}


def describe(annotation: Any) -> str:
    """An annotation in words for a message."""
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        Any: "any value",
        type(None): "None",
    }
    if annotation in words:
        return words[annotation]
    origin, kinds = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(kind) for kind in kinds)
    if (origin or annotation) in (tuple, list):
        if kinds and (origin is list or kinds[-1] is Ellipsis):
            return f"a list [a,b,…] whose entries are {describe(kinds[0])}"
        return f"a list of {len(kinds)} values" if kinds else "a list [a,b,…]"
    if (origin or annotation) is dict:
        return "a dict {key: value, …}"
    return getattr(annotation, "__name__", str(annotation))


def _expected(value: Any, expected: str, key: str) -> ConfigError:
    shown = str(value) if isinstance(value, Text) else repr(value)
    return ConfigError(f"{key}={shown}: expected {expected}")


def without_none(annotation: Any) -> Any:
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return kinds[0] if is_union and len(kinds) == 1 else annotation


# ------------------------------------------------------------------------- text


def _guess(text: Text) -> Any:
    """The value that `text` looks like: a Python literal or JSON word, a list, a dict, or text."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if text.startswith(("[", "(")):
        return [_guess(entry) for entry in _split_list(text, "")]
    if text.startswith("{"):
        return {str(k): _guess(v) for k, v in _split_mapping(text, "").items()}
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return str(text)


def _split_list(text: Text, key: str) -> list[Text]:
    """The entries of `[a, b]`; text without brackets is the only entry."""
    text = Text(text.strip())
    if not text.startswith(("[", "(")):
        return [text] if text else []
    return [Text(entry) for entry in _split(_inside(text, key), ",", key) if entry]


def _split_mapping(text: Text, key: str) -> dict[Text, Text]:
    """The pairs of `{a: b, c: d}`."""
    if not text.startswith("{"):
        raise _expected(text, "a dict {key: value, …}", key)
    pairs: dict[Text, Text] = {}
    for entry in _split(_inside(text, key), ",", key):
        name, colon, value = entry.partition(":")
        if entry and not colon:
            raise _expected(entry, "a pair key: value", key)
        if entry:
            pairs[Text(name.strip().strip("'\""))] = Text(value.strip())
    return pairs


def _inside(text: str, key: str) -> str:
    closing = {"[": "]", "(": ")", "{": "}"}[text[0]]
    if not text.endswith(closing) or len(text) < 2:
        raise ConfigError(f"{key}={text}: the {text[0]!r} is not closed by a final {closing!r}")
    return text[1:-1]


def _split(text: str, separator: str, key: str) -> list[str]:
    """Split at `separator` outside brackets and quotes; entries are stripped."""
    entries, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[({":
            depth += 1
        elif letter in "])}":
            depth -= 1
        elif letter == separator and depth == 0:
            entries.append("")
            continue
        entries[-1] += letter
    if depth or quote:
        raise ConfigError(f"{key}={text}: a bracket or quote is not closed")
    return [entry.strip() for entry in entries]
