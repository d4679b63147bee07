"""A batch of samples in parts that fit into memory: a pass for each part, and their results joined.

`Padded` cuts the samples into equal parts of one row a sample. `Packed` fills rows with samples up
to a number of tokens, so that the number of parts depends on the lengths and padding costs nothing.
One program serves every mix of lengths: the loop's trip count is data.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm.learner.rows import ROWS, Fields, PackingPlan, packed_rows, plan_packing

Pass = Callable[[Fields], Any]  # of one part
Shard = Callable[[Any], Any]


class MicroBatches(ABC):
    """How a batch, a dict of arrays with one entry a sample, is walked through."""

    @abstractmethod
    def walk(self, fn: Pass, fields: Fields) -> tuple[Any, Any]:
        """fn gives a pair: what to add up over the parts, and arrays with one entry a sample.

        Returns the sums, e.g. of gradients, and the arrays of all samples in their order.
        """

    @property
    @abstractmethod
    def adds_up(self) -> bool:
        """Whether there may be several parts, whose gradients are added up in a loop."""

    @abstractmethod
    def row_use(self, fields: Fields) -> Array:
        """The share of the tokens that are computed which are of samples and not padding."""

    def sum(self, fn: Pass, fields: Fields) -> Any:
        """The sum of fn's results over the parts."""
        return self.walk(lambda part: (fn(part), ()), fields)[0]

    def join(self, fn: Pass, fields: Fields) -> Any:
        """fn's results, arrays with one entry a sample, for all samples in their order."""
        return self.walk(lambda part: ((), fn(part)), fields)[1]


@dataclass(frozen=True, kw_only=True)
class Padded(MicroBatches):
    """Equal parts of the samples. `shard` spreads each part over the mesh."""

    num: int = 1
    shard: Shard = lambda tree: tree

    @property
    def adds_up(self) -> bool:
        return self.num > 1

    def walk(self, fn: Pass, fields: Fields) -> tuple[Any, Any]:
        if self.num == 1:
            return fn(fields)
        stacked = self.shard(split_micro_batches(fields, self.num))

        def add(total: Any, part: Fields) -> tuple[Any, Any]:
            added, joined = fn(part)
            return _add(total, added), joined

        first = jax.tree.map(lambda x: x[0], stacked)
        zeros = _zeros(jax.eval_shape(fn, first)[0])
        total, parts = jax.lax.scan(add, zeros, stacked)
        return total, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)

    def row_use(self, fields: Fields) -> Array:
        lengths = (fields["prompt_lengths"] + _response_lengths(fields)).astype(jnp.float32)
        row = fields["prompts"].shape[-1] + fields["responses"].shape[-1]
        return lengths.mean() / row


@dataclass(frozen=True, kw_only=True)
class Packed(MicroBatches):
    """Rows of `row_tokens` tokens, one a replica and part; see `rows.plan_packing`.

    A part's fields are those of all samples, the values of tokens being 0 outside of the part, and
    its rows under ROWS. What a pass computes for samples outside of its part must be 0.
    """

    row_tokens: int
    group: int = 1
    num_replicas: int = 1
    shard: Shard = lambda tree: tree

    @property
    def adds_up(self) -> bool:
        return True

    def walk(self, fn: Pass, fields: Fields) -> tuple[Any, Any]:
        num_rows, run = self._parts(fn, fields)
        zeros = _zeros(jax.eval_shape(run, jnp.int32(0)))
        # What is joined is 0 outside of its part, so it is added up as well.
        return jax.lax.fori_loop(0, num_rows, lambda i, total: _add(total, run(i)), zeros)

    def row_use(self, fields: Fields) -> Array:
        plan, _ = self._plan(fields)
        return plan.use(fields["prompt_lengths"], _response_lengths(fields))

    def _plan(self, fields: Fields) -> tuple[PackingPlan, tuple[Array, ...]]:
        lengths = _response_lengths(fields)
        samples = (fields["prompts"], fields["prompt_lengths"], fields["responses"], lengths)
        plan = plan_packing(
            fields["prompt_lengths"],
            lengths,
            row_tokens=self.row_tokens,
            group=self.group,
            num_replicas=self.num_replicas,
        )
        return plan, samples

    def _parts(self, fn: Pass, fields: Fields) -> tuple[Array, Callable[[Array], Any]]:
        plan, samples = self._plan(fields)

        def run(row: Array) -> Any:
            rows = self.shard(packed_rows(plan, row, *samples))
            # All of a sample's values and not the mask alone: a ratio of log-probs of which one is
            # 0 may overflow, and its gradient then outlives the mask.
            part = {name: _where_included(x, rows.included) for name, x in fields.items()}
            return fn(part | {ROWS: rows})

        return plan.num_rows, run


def split_micro_batches(tree: Any, num_micro_batches: int) -> Any:
    """[B, ...] -> [M, B/M, ...] on every array of a pytree."""

    def split(x: Array) -> Array:
        assert x.shape[0] % num_micro_batches == 0, (x.shape, num_micro_batches)
        return x.reshape(num_micro_batches, x.shape[0] // num_micro_batches, *x.shape[1:])

    return jax.tree.map(split, tree)


def _response_lengths(fields: Fields) -> Array:
    lengths = fields.get("response_lengths")  # given where the mask leaves tokens out
    return fields["mask"].sum(axis=-1).astype(jnp.int32) if lengths is None else lengths


def _where_included(x: Array, included_B: Array) -> Array:
    if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.where(included_B[:, None], x, 0)
    return x


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(jnp.add, total, part)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
