"""Shares a kernel's work over the devices of a mesh, as the partitioner cannot split it.

Where they share the tokens of a row, each device has two chunks of it: of 2n equal chunks, device i
of n has i and 2n - 1 - i. Causal attention is then the same work on each device.

Shape letters: B rows, T tokens of a row.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


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
        """The number of devices that share the work."""
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


def token_order(length: int, parts: int) -> np.ndarray:
    """The position in the row of each token, in the order in which `parts` devices hold them.

    Requires: `length` is a multiple of 2 * `parts`, or `parts` is 1.
    """
    if parts == 1:
        return np.arange(length)
    first = np.arange(parts)
    mine = np.stack([first, 2 * parts - 1 - first], axis=1)
    return np.arange(length).reshape(2 * parts, -1)[mine].reshape(-1)


def in_row_order(x_BT: jax.Array, parts: int) -> jax.Array:
    """Tokens in the order of their row, of tokens in `token_order`."""
    B, T, *rest = x_BT.shape
    x = x_BT.reshape(B, parts, 2, T // (2 * parts), *rest)
    return jnp.concatenate([x[:, :, 0], x[:, ::-1, 1]], axis=1).reshape(x_BT.shape)


def in_token_order(x_BT: jax.Array, parts: int) -> jax.Array:
    """Tokens in `token_order`, of tokens in the order of their row."""
    B, T, *rest = x_BT.shape
    x = x_BT.reshape(B, 2, parts, T // (2 * parts), *rest)
    return jnp.stack([x[:, 0], x[:, 1, ::-1]], axis=2).reshape(x_BT.shape)
