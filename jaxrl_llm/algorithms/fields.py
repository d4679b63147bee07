"""Which batch fields a function of this room reads: its positional parameters say so."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_llm.types import ROLLOUT_FIELDS

# What the update computes anew on each mini-batch, beside the fields of the rollout batch.
UPDATE_FIELDS = ("logprobs", "entropy", "new_values")


def field_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The batch fields that `fn` reads: its positional parameters, in order.

    Keyword-only parameters are settings. `functools.partial` with keywords keeps the names.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(fn).parameters.values() if p.kind in positional)


def check_fields(role: str, fn: Callable[..., Any], *, update: bool = False) -> None:
    """Refuse a function whose positional parameters are not fields.

    `update` also allows what only the update has: `logprobs`, `entropy`, `new_values`. Raises
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
