"""Which batch fields a function of this room reads: its positional parameters say so."""

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.references import nearest
from jaxrl_llm.types import ROLLOUT_FIELDS

# What the update computes on each mini-batch, in addition to the fields of the rollout batch.
UPDATE_FIELDS = ("logprobs", "entropy", "new_values", "top_logprobs")
GIVEN_SETTINGS = ("coef",)  # what a stage gives: kl_reward has the controller's coefficient
# What a field of the update is computed from: the policy's log-probs of the teacher's candidates.
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
    """Refuse a function whose positional parameters are not fields.

    `update` also allows what only the update has (`UPDATE_FIELDS`), `own` fields of the user's
    stages. Raises
    ValueError with the nearest field, so a misspelt parameter is found before any device is
    touched.
    """
    made = isinstance(fn.func if isinstance(fn, partial) else fn, FieldFunction)
    for parameter in () if made else inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            raise ValueError(
                f"{role} takes **{parameter.name}; name the batch fields that it reads as its "
                "positional parameters"
            )
        unbound = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if unbound and parameter.name not in GIVEN_SETTINGS:
            raise ValueError(
                f"{role}: the setting {parameter.name!r} has no value: give it a default, or bind "
                "it with functools.partial"
            )
    known = (*ROLLOUT_FIELDS, *(UPDATE_FIELDS if update else ()), *own)
    for name in field_names(fn):
        if name not in known:
            raise ValueError(
                f"{role} asks for the batch field '{name}', which does not exist here"
                f"{nearest(name, known)}\nThe fields are {', '.join(known)}. A setting must be "
                "keyword-only (after *)."
            )


def pair_of(role: str, found: Any, mask: Any, *, metrics: bool = False) -> tuple[Any, Any]:
    """The two results of a function: an array of tokens, and another one or a dict of `metrics`.

    Raises: ValueError unless they are two, and each array has one value for each token of `mask`.
        Another shape may broadcast, and then it is another loss. A loss of integers has no
        gradient. A metric may be a single number, too.
    """
    wanted = "(loss, metrics)" if metrics else "(advantages, returns)"
    if not isinstance(found, tuple | list) or len(found) != 2:
        many = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise ValueError(f"{role} returned {type(found).__name__}{many}; it must return {wanted}")
    for value in found[:1] if metrics else found:
        if (shape := np.shape(value)) != mask.shape:
            raise ValueError(
                f"{role} returned an array of shape {shape} in {wanted}; it must have the shape of "
                f"`mask`, {mask.shape}: one value for each token, and no mean over them"
            )
    if metrics and not isinstance(found[1], dict):
        raise ValueError(
            f"{role} returned {type(found[1]).__name__} as the metrics of {wanted}; it must be a "
            "dict, which may be empty"
        )
    if metrics and not jnp.issubdtype(jnp.result_type(found[0]), jnp.floating):
        raise ValueError(
            f"{role} returned a loss of {jnp.result_type(found[0])}, which has no gradient; it "
            "must be of floating-point numbers"
        )
    for name, value in found[1].items() if metrics else ():
        check_metric_name(role, name)
        if _shape(value) not in ((), mask.shape):
            raise ValueError(
                f"{role} returned the metric {name!r} as {_kind(value)}; a metric has the shape of "
                f"`mask`, {mask.shape}, or is one number"
            )
    return found[0], found[1]


def check_metric_name(who: str, name: Any, taken: Container[str] = ()) -> None:
    """ValueError for a metric without a name, or with one that the trainer gives its own."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{who} returned a metric with the name {name!r}; give it a name of text")
    if name in taken:
        raise ValueError(
            f"{who} returns the metric {name!r}, which the trainer writes itself; take another "
            f"name, such as {name + '_of_mine'!r}"
        )


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of numbers; None for anything else."""
    try:
        jnp.result_type(value)
        return np.shape(value)
    except (TypeError, ValueError):
        return None


def _kind(value: Any) -> str:
    shape = _shape(value)
    return type(value).__name__ if shape is None else f"an array of shape {shape}"


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

    def read_by_other_names(*values: Any, **settings: Any) -> Any:
        given = dict(zip(reads, values, strict=True))
        return fn(*(given[name] for name in renamed), **settings)

    return FieldFunction(read_by_other_names, reads)
