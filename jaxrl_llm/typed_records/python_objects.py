"""Objects of a Python program in a config, which a file cannot hold: functions, rows, weights.

The config holds the object. Its JSON holds a name and a digest, so that a run that goes on is given
the same object. Both records are made by the field that takes them.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from jaxrl_llm.object_digests import function_digest, params_digest, rows_digest, source_object
from jaxrl_llm.typed_records.bounds import Count, none_word
from jaxrl_llm.typed_records.record import Custom, Record

__all__ = ["Given", "GivenParams", "GivenRows"]

WANTED = "expected a list of dicts, one a row, or a datasets.Dataset"


class Given(Custom, kind="given"):
    """A function or a class of yours as an object of a Python program.

    In a file of JSON it has no `function`; `rl.train(config, rewards=[...])` gives it again.
    """

    digest: str
    function: Any = Field(default=None, exclude=True, repr=False)


def _as_given(value: Any) -> Any:
    """A function, or an object that can be called, as its record; others as they are."""
    if not callable(value) or isinstance(value, type):
        return value
    own = source_object(value)
    name = type(value).__name__ if own.__name__ == "__call__" else own.__name__
    path = f"object:{name.strip('<>')}"  # a lambda's name is <lambda>
    return Given(path=path, digest=function_digest(value), function=value)


GIVEN = BeforeValidator(_as_given)


def _class_as_given(value: Any) -> Any:
    """A class, or a function that makes objects, as its record; others as they are."""
    if not isinstance(value, type) or issubclass(value, Record):
        return _as_given(value)
    return Given(path=f"object:{value.__name__}", digest=function_digest(value), function=value)


GIVEN_CLASS = BeforeValidator(_class_as_given)


class GivenRows(Record):
    """Rows of a Python program: a list of dicts, or a `datasets.Dataset`."""

    num_rows: Count
    digest: str
    rows: Any = Field(default=None, exclude=True, repr=False)


def _as_rows(value: Any) -> Any:
    """Rows as their record; others as they are."""
    value = none_word(value)
    if isinstance(value, GivenRows | Mapping | str) or value is None:
        return value
    if not isinstance(value, Iterable):
        raise ValueError(WANTED)
    is_list = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    rows: Any = value if is_list else list(value)
    if not len(rows):
        raise ValueError("the rows are empty; give one dict a row")
    try:
        first = rows[0]
    except LookupError:  # a table by its columns
        raise ValueError(WANTED) from None
    if not isinstance(first, Mapping):
        raise ValueError(f"the first row is of type {type(first).__name__}; give one dict a row")
    return GivenRows(num_rows=len(rows), digest=rows_digest(rows), rows=rows)


Rows = Annotated[GivenRows | None, BeforeValidator(_as_rows)]


class GivenParams(Record):
    """Weights of a Python program: our nested dicts of arrays, or Hugging Face's names."""

    num_arrays: Count
    digest: str
    tree: Any = Field(default=None, exclude=True, repr=False)


def _as_params(value: Any) -> Any:
    """Weights as their record; others as they are."""
    value = none_word(value)
    of_file = isinstance(value, Mapping) and isinstance(value.get("digest"), str)
    if value is None or isinstance(value, GivenParams | str) or of_file:
        return value
    if not isinstance(value, Mapping) or not value:
        raise ValueError("expected nested dicts of arrays, or a dict of arrays by tensor name")
    number, digest = params_digest(value)
    return GivenParams(num_arrays=number, digest=digest, tree=value)


Params = Annotated[GivenParams | None, BeforeValidator(_as_params)]
