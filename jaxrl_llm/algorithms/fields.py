"""The batch fields that a function of this room reads: its positional parameters."""

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial

from jaxrl_llm.references import nearest
from jaxrl_llm.types import ROLLOUT_FIELDS

# Fields that the update computes on each mini-batch, in addition to the rollout batch's.
UPDATE_FIELDS = ("logprobs", "entropy", "new_values", "top_logprobs")
# Inputs of fields of the update. `top_logprobs` are log-probs of the teacher's candidates.
COMPUTED_FROM = {"top_logprobs": ("teacher_top_ids",)}


def field_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The batch fields that `fn` reads: its positional parameters, in order.

    Keyword-only parameters are settings. `functools.partial` with keywords keeps the names.
    """
    if isinstance(fn, FieldFunction):
        return fn.reads
    if isinstance(fn, partial) and not fn.args:
        return field_names(fn.func)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(fn).parameters.values() if p.kind in positional)


def check_fields(
    role: str, fn: Callable[..., Any], *, update: bool = False, own: Sequence[str] = ()
) -> None:
    """Refuse a function whose positional parameters are not fields, before a device is used.

    `update` also allows fields that only the update has (`UPDATE_FIELDS`), `own` fields of the
    user's stages.

    Raises: ValueError with the nearest field.
    """
    known = (*ROLLOUT_FIELDS, *(UPDATE_FIELDS if update else ()), *own)
    for name in field_names(fn):
        if name not in known:
            raise ValueError(
                f"{role} asks for the batch field '{name}', which does not exist here"
                f"{nearest(name, known)}\nThe fields are {', '.join(known)}. A setting must be "
                "keyword-only (after *)."
            )


def pair_of(role: str, result: Any, mask: Any, *, metrics: bool = False) -> tuple[Any, Any]:
    """The two results of a function: an array of tokens, and another one or a dict of `metrics`.

    Raises: ValueError unless an array has one value for each token of `mask`, and a metric as well
        or a single one. Another shape may broadcast, and then it is another loss.
    """
    first, second = result
    arrays = {"loss": first} | second if metrics else {"advantages": first, "returns": second}
    for name, value in arrays.items():
        shape = np.shape(value)
        if shape != mask.shape and (shape or not metrics or name == "loss"):
            raise ValueError(
                f"{role} returned {name!r} of shape {shape}; it must have the shape of `mask`, "
                f"{mask.shape}: one value for each token, and no mean over them"
            )
    return first, second


def check_metric_name(who: str, name: str, taken: Container[str] = ()) -> None:
    """Raises: ValueError for a metric with a name that the trainer gives its own."""
    if name in taken:
        raise ValueError(
            f"{who} returns the metric {name!r}, which the trainer writes itself; take another "
            f"name, such as {name + '_of_mine'!r}"
        )


@partial(jax.tree_util.register_dataclass, data_fields=["fn"], meta_fields=["reads"])
@dataclass(frozen=True)
class FieldFunction:
    """A function made of another one: `fn` takes the fields `reads`, in this order."""

    fn: Callable[..., Any]
    reads: tuple[str, ...]

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Call `fn` with fields by position or by name; other names are settings."""
        rest = tuple(named.pop(name) for name in self.reads[len(values) :])
        return self.fn(*values, *rest, **named)


def with_renamed_fields(fn: Callable[..., Any], names: Mapping[str, str]) -> Callable[..., Any]:
    """`fn` reading other fields instead of some of its own: {its name: the field}."""
    own = field_names(fn)
    if not set(own) & set(names):
        return fn
    renamed = [names.get(name, name) for name in own]
    reads = tuple(dict.fromkeys(renamed))
    places = [reads.index(name) for name in renamed]
    return FieldFunction(Partial(_rearranged, fn, places), reads)


def _rearranged(fn: Callable[..., Any], places: Sequence[int], *values: Any, **named: Any) -> Any:
    return fn(*(values[place] for place in places), **named)
