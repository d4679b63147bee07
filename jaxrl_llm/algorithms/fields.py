"""Which batch fields a function of this room reads: its positional parameters say so."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.types import ROLLOUT_FIELDS

# What the update computes anew on each mini-batch, beside the fields of the rollout batch.
UPDATE_FIELDS = ("logprobs", "entropy", "new_values", "top_logprobs")
# What a field of the update is computed from: the policy's log-probs of the teacher's candidates.
COMPUTED_FROM = {"top_logprobs": ("teacher_top_ids",)}


def field_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The batch fields that `fn` reads: its positional parameters, in order.

    Keyword-only parameters are settings. `functools.partial` with keywords keeps the names.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(fn).parameters.values() if p.kind in positional)


def check_fields(role: str, fn: Callable[..., Any], *, update: bool = False) -> None:
    """Refuse a function whose positional parameters are not fields.

    `update` also allows what only the update has (`UPDATE_FIELDS`). Raises
    ValueError with the nearest field, so a misspelt parameter is found before any device is
    touched.
    """
    known = ROLLOUT_FIELDS + (UPDATE_FIELDS if update else ())
    for name in field_names(fn):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"{role} asks for the batch field '{name}', which does not exist here: {hint}"
                f"The fields are {', '.join(known)}. A setting must be keyword-only (after *)."
            )


def function_of_fields(
    fields: Sequence[str], like: Callable[..., Any], body: Callable[[dict[str, Any]], Any]
) -> Callable[..., Any]:
    """A function that reads `fields` and has the settings of `like`; `body` gets both by name.

    For a function that is made of another: its signature declares the fields like a written one.
    """
    settings = [
        parameter
        for parameter in inspect.signature(like).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = [inspect.Parameter(name, kind) for name in dict.fromkeys(fields)]
    signature = inspect.Signature([*positional, *settings])

    def made(*args: Any, **kwargs: Any) -> Any:
        return body(signature.bind(*args, **kwargs).arguments)

    made.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return made


def with_renamed_fields(fn: Callable[..., Any], names: Mapping[str, str]) -> Callable[..., Any]:
    """`fn` reading other fields in place of some of its own: {its name: the field}."""
    own = field_names(fn)
    if not set(own) & set(names):
        return fn

    def body(given: dict[str, Any]) -> Any:
        settings = {name: value for name, value in given.items() if name not in read}
        return fn(*(given[names.get(name, name)] for name in own), **settings)

    read = {names.get(name, name) for name in own}
    return function_of_fields([names.get(name, name) for name in own], fn, body)
