"""Functions as tools: their JSON schemas, the check of a call, and results as text.

`transformers.utils.get_json_schema` makes the schemas, which chat templates write. An exception
of a tool is a result that says so, as in TRL. It is no failure.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_llm.agents.call_formats import Call, has_type, schema_types
from jaxrl_llm.references import nearest, reason, shown

Schema = dict[str, Any]
MARK = "\n[...]\n"  # stands for the middle of a long result
CHARACTERS = 64  # kept characters for each token of the limit, on each side of a long result


@dataclass(frozen=True)
class ToolInfo:
    """A tool, as the model sees it."""

    name: str
    schema: Schema  # {"type": "function", "function": {"name", "description", "parameters"}}
    is_async: bool


@dataclass(frozen=True)
class Result:
    """The answer to a call."""

    text: str
    failed: bool = False  # an error in place of a result


def describe(function: Callable[..., Any], path: str, bound: Sequence[str] = ()) -> ToolInfo:
    """The schema of a function. `bound` names parameters that settings fill.

    Raises: ValueError, with the remedy, for a function that the model could not call by a schema.
    """
    from transformers.utils import get_json_schema

    parameters = inspect.signature(function).parameters.values()
    odd = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
    if odd:
        raise ValueError(
            f"the tool {path} has the parameter {odd[0]}, which no schema describes: give each "
            "parameter a name, a type and a line under Args:"
        )
    try:
        schema = get_json_schema(function)
    except Exception as error:  # transformers has several kinds
        raise ValueError(
            f"the tool {path} has no schema ({reason(error)}): give it a docstring with a line "
            "for each parameter under Args:, and a type for each parameter"
        ) from error
    wanted = schema["function"].get("parameters", {})
    for name in bound:
        wanted.get("properties", {}).pop(name, None)
    if "required" in wanted:
        wanted["required"] = [name for name in wanted["required"] if name not in bound]
    name = schema["function"]["name"]
    return ToolInfo(name, schema, inspect.iscoroutinefunction(function))


def checked(call: Call, tools: Mapping[str, Schema]) -> Call:
    """The call; with a status and the problem where no tool can run it."""
    if call.status != "ok":
        return call
    if call.name not in tools:
        known = f"the tools are: {', '.join(tools) or 'none'}"
        problem = f"there is no tool {shown(call.name)}{nearest(call.name, tools)} {known}"
        return replace(call, status="unknown_tool", problem=problem)
    function = tools[call.name].get("function", tools[call.name])
    schema = {"type": "object"} | function.get("parameters", {})
    unknown = [name for name in call.values if name not in schema.get("properties", {})]
    problem = f"there is no argument {unknown[0]!r}" if unknown else ""
    problem = problem or _mismatch(call.values, schema, "arguments")
    return replace(call, status="wrong_arguments", problem=problem) if problem else call


def _mismatch(value: Any, schema: Mapping[str, Any], where: str) -> str:
    """What of a value is not as its schema says; empty where all is."""
    types = schema_types(schema)
    if not has_type(value, types):
        return f"{where}: expected {' or '.join(sorted(types))}, and it is {shown(value)}"
    if "enum" in schema and value not in schema["enum"] and value is not None:
        return f"{where}: expected one of {json.dumps(schema['enum'])}, and it is {shown(value)}"
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(value, dict):
        missing = [name for name in schema.get("required", ()) if name not in value]
        if missing:
            return f"{where}: {missing[0]!r} is missing"
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        parts = [(entry, known.get(name, others), name) for name, entry in value.items()]
    elif isinstance(value, list):
        first = schema.get("prefixItems", ())
        each = [*first, *[schema.get("items", {})] * (len(value) - len(first))]
        parts = [(entry, each[i], f"{where}[{i}]") for i, entry in enumerate(value)]
    found = (_mismatch(*part) for part in parts if isinstance(part[1], Mapping))
    return next(filter(None, found), "")


def error_text(problem: str) -> str:
    """The result of a call that failed."""
    return json.dumps({"error": problem}, ensure_ascii=False)


def result_text(value: Any, most: int = 0) -> str:
    """What a tool returned, as text: a str as it is, else JSON.

    `most` is the number of tokens that will be kept; a text that is far longer loses its middle.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode(errors="replace").decode()  # a lone surrogate has no token
    side = most * CHARACTERS
    if most and len(text) > 2 * side:
        return text[:side] + text[-side:]
    return text


# ------------------------------------------------------------------------- long results


def shares(lengths: Sequence[int], room: int) -> list[int]:
    """Tokens for each result: an equal share each, and what is left over in order."""
    if not lengths or sum(lengths) <= room:
        return list(lengths)
    equal = room // len(lengths)
    given = [min(length, equal) for length in lengths]
    left = room - sum(given)
    for i, length in enumerate(lengths):
        more = min(length - given[i], left)
        given[i], left = given[i] + more, left - more
    return given


def cut_middle(
    text: str, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], most: int
) -> str:
    """The text with its middle replaced by a mark, so that it has at most `most` tokens."""
    ids = encode(text)
    if len(ids) <= most:
        return text
    kept = most
    while True:  # the mark takes tokens too, and a cut may change the split at its ends
        head, tail = (kept + 1) // 2, kept // 2
        end = decode(ids[len(ids) - tail :]) if tail else ""
        shorter = decode(ids[:head]) + MARK + end
        over = len(encode(shorter)) - most
        if over <= 0:
            return shorter
        if not kept:
            return decode(ids[:most])
        kept = max(kept - over, 0)
