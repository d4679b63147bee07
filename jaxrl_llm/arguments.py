"""Numbers of a config as arguments of compiled programs, so that a sweep over them compiles once.

Rates, coefficients, clips and seeds are leaves of pytrees: keywords of `jax.tree_util.Partial`, and
fields of registered dataclasses. A program is traced with arrays in their place. Other leaves are
constants: functions, names, sizes, and zeros. A zero means that a term is left out.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar

import jax
import numpy as np
from jax._src.lax.lax import (  # pyright: ignore[reportPrivateImportUsage]
    _convert_element_type,  # pyright: ignore[reportPrivateUsage]
)

T = TypeVar("T")
Seed = np.int32  # a seed that is an argument; a Python int is a constant


def seed_of(number: int) -> Seed:
    """A seed as an argument; `jax.random.key` of it is the key of `number`."""
    return np.int64(number).astype(np.int32)


def is_zero(x: Any) -> bool:
    """True for a constant 0; False for an array, also while it is traced."""
    return not isinstance(x, jax.Array) and x == 0


def numbers_of(tree: Any) -> list[np.ndarray]:
    """The numbers of a pytree that are arguments, as float32 and int32."""
    return [
        np.asarray(leaf, np.int32 if isinstance(leaf, np.integer) else np.float32)
        for leaf in jax.tree.leaves(tree)
        if _is_number(leaf)
    ]


def with_numbers(tree: T, numbers: Sequence[Any]) -> T:
    """`tree` with arrays in place of `numbers_of`. Call it inside jit.

    Guarantees: the arrays take the dtype of what they are combined with, as Python's numbers do.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = iter(numbers)
    return structure.unflatten(
        _convert_element_type(next(arrays), weak_type=not isinstance(leaf, np.integer))
        if _is_number(leaf)
        else leaf
        for leaf in leaves
    )


class Numbered:
    """A dataclass that is traced with its numbers as arguments."""

    numbers: ClassVar[tuple[str, ...]] = ()  # fields whose numbers are arguments

    @property
    def arguments(self) -> list[np.ndarray]:
        """The numbers."""
        return numbers_of([getattr(self, name) for name in self.numbers])

    def with_arguments(self, arguments: Sequence[Any]) -> Self:
        """The same with traced numbers."""
        values = with_numbers([getattr(self, name) for name in self.numbers], arguments)
        changes: dict[str, Any] = dict(zip(self.numbers, values, strict=True))
        own: Any = self
        return replace(own, **changes) if changes else self


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, np.integer) or (isinstance(leaf, float) and leaf != 0.0)
