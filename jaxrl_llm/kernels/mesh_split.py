"""How the devices of a mesh share the work of a kernel, which the partitioner cannot split."""

import math
from dataclasses import dataclass

import jax


@dataclass(frozen=True, kw_only=True)
class MeshSplit:
    """The axes of the mesh in scope that split rows, tokens of a row, and heads, outermost first.

    Rows or heads that their axes do not divide are computed by every device.
    """

    rows: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """How many devices share the work."""
        return axes_size((*self.rows, *self.tokens, *self.heads))

    @property
    def num_token_parts(self) -> int:
        """Into how many parts each row is split."""
        return axes_size(self.tokens)

    def rows_of(self, number: int) -> tuple[str, ...]:
        """The axes that split so many rows."""
        return self.rows if number % axes_size(self.rows) == 0 else ()

    def heads_of(self, number: int) -> tuple[str, ...]:
        """The axes that split so many heads."""
        return self.heads if number % axes_size(self.heads) == 0 else ()


def axes_size(axes: tuple[str, ...]) -> int:
    """The devices along these axes of the mesh in scope."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in axes)
