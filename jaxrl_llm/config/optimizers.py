"""Optimizers and schedules by name, by the path of a function of yours, or as an object."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import PlainValidator

from jaxrl_llm.object_digests import closure_digest
from jaxrl_llm.references import nearest, shown
from jaxrl_llm.typed_records.python_objects import Given
from jaxrl_llm.typed_records.record import validate

KnownOptimizer = Literal["adamw", "muon", "lion", "adafactor", "sgd"]
KnownSchedule = Literal["constant", "linear", "cosine"]
# Copies of the weights in the state of an optimizer. Other optimizers count as AdamW.
MOMENTS = {"adamw": 2, "muon": 1, "lion": 1, "adafactor": 0, "sgd": 1}


def is_transformation(value: Any) -> bool:
    """True for an optax.GradientTransformation, which has a learning rate of its own."""
    return hasattr(value, "init") and hasattr(value, "update")


def _named(known: Sequence[str]) -> PlainValidator:
    """The validator of a known name, of `file.py:function`, and of an object of a program."""

    def read(value: Any) -> Any:
        if isinstance(value, Given):
            return value
        if isinstance(value, Mapping):
            return validate(Given, {key: value[key] for key in value if key != "kind"})
        if isinstance(value, str):
            if value in known or ":" in value:
                return str(value)
            hint = nearest(value, known)
            raise ValueError(f"there is no {value}{hint}\nthere are: {', '.join(known)}")
        if not (callable(value) or is_transformation(value)):
            raise ValueError(f"expected a name, a function or an object of optax: {shown(value)}")
        name = getattr(value, "__name__", type(value).__name__).strip("<>")
        return Given(path=f"object:{name}", digest=closure_digest(value), function=value)

    return PlainValidator(read)


OptimizerName = Annotated[KnownOptimizer | str | Given, _named(get_args(KnownOptimizer))]
ScheduleName = Annotated[KnownSchedule | str | Given, _named(get_args(KnownSchedule))]
