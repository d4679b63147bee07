"""A batch of samples in parts that fit into memory: how it is cut, and how results are joined.

`Padded` cuts the samples into equal parts of one row a sample. `Packed` fills rows with samples up
to a number of tokens: the number of parts depends on the lengths, and padding costs nothing. One
program serves every mix of lengths, because the trip count of the loop is data.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jaxrl_llm.distributed.communication import MICRO_BATCHES
from jaxrl_llm.learner.row_length import row_length
from jaxrl_llm.learner.rows import (
    ROWS,
    Fields,
    PackingPlan,
    packed_rows,
    plan_packing,
    strict_tokens,
)

Pass = Callable[[Fields], Any]  # a computation on one part
Shard = Callable[[Any], Any]


class Parts(ABC):
    """A batch that was cut. Results of one entry a sample are collected over the parts."""

    @property
    @abstractmethod
    def num(self) -> int | Array:
        """The number of parts; the int 1 needs no loop."""

    @abstractmethod
    def at(self, index: int | Array) -> Fields:
        """The fields of part `index`."""

    @abstractmethod
    def empty(self, shapes: Any) -> Any:
        """Zeros to collect in; `shapes` are the results of one part."""

    @abstractmethod
    def put(self, collected: Any, results: Any, index: int | Array) -> Any:
        """`collected` with the results of part `index`."""

    @abstractmethod
    def samples(self, collected: Any) -> Any:
        """The results of all samples, in the order of the batch."""

    @abstractmethod
    def specs(self, axes: tuple[str, ...]) -> tuple[Any, PartitionSpec]:
        """The specs of these parts, and of the collected results, in a shard_map over `axes`.

        Every group has the same number of parts, and its own rows of each.
        Requires: `axes` are the outermost of the batch.
        """

    @abstractmethod
    def of_group(self, shard: Shard) -> "Parts":
        """The parts inside that shard_map; `shard` spreads a part over the devices of a group."""


class MicroBatches(ABC):
    """The cut of a batch, a dict of arrays with one entry a sample, into parts."""

    @abstractmethod
    def split(self, fields: Fields) -> Parts:
        """The parts of `fields`."""

    @property
    @abstractmethod
    def adds_up(self) -> bool:
        """True if there may be several parts, whose gradients are added up in a loop."""

    @abstractmethod
    def row_use(self, fields: Fields) -> Array:
        """The share of the computed tokens that belong to samples, not to padding."""

    def sum(self, fn: Pass, fields: Fields) -> Any:
        """The sum of fn's results over the parts."""
        parts = self.split(fields)
        if isinstance(parts.num, int) and parts.num == 1:
            return fn(parts.at(0))

        def add(index: Array, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, fn(parts.at(index)))

        first = zeros_of(jax.eval_shape(lambda i: fn(parts.at(i)), jnp.int32(0)))
        with jax.named_scope(MICRO_BATCHES):
            return jax.lax.fori_loop(0, parts.num, add, first)

    def join(self, fn: Pass, fields: Fields) -> Any:
        """fn's results, arrays with one entry a sample, for all samples in their order."""
        return self.join_counted(fn, fields)[0]

    def join_counted(self, fn: Pass, fields: Fields) -> tuple[Any, int | Array]:
        """`join`, and how many parts there were."""
        parts = self.split(fields)
        if isinstance(parts.num, int) and parts.num == 1:
            return fn(parts.at(0)), 1

        def collect(index: Array, collected: Any) -> Any:
            return parts.put(collected, fn(parts.at(index)), index)

        first = parts.empty(jax.eval_shape(lambda i: fn(parts.at(i)), jnp.int32(0)))
        with jax.named_scope(MICRO_BATCHES):
            collected = jax.lax.fori_loop(0, parts.num, collect, first)
        return parts.samples(collected), parts.num


@dataclass(frozen=True, kw_only=True)
class Padded(MicroBatches):
    """Equal parts of the samples. `shard` spreads each part over the mesh."""

    num: int = 1
    align: int | None = None  # the multiple at which runs of strict rows begin
    shard: Shard = lambda tree: tree

    def split(self, fields: Fields) -> "_EqualParts":
        if self.num == 1:
            return _EqualParts(count=1, fields=fields)
        stacked = self.shard(split_micro_batches(fields, self.num))
        return _EqualParts(count=self.num, fields=stacked)

    @property
    def adds_up(self) -> bool:
        return self.num > 1

    def row_use(self, fields: Fields) -> Array:
        lengths = (fields["prompt_lengths"] + fields["response_lengths"]).astype(jnp.float32)
        prompt, response = (fields[name].shape[-1] for name in ("prompts", "responses"))
        if self.align is None:
            return lengths.mean() / (prompt + response)
        # A strict row has no last token of a response.
        return jnp.maximum(lengths - 1, 0).mean() / strict_tokens(prompt, response, self.align)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _EqualParts(Parts):
    """`fields` are the batch itself where it is one part, else [count, B / count, ...]."""

    count: int = field(metadata={"static": True})
    fields: Fields

    @property
    def num(self) -> int:
        return self.count

    def at(self, index: int | Array) -> Fields:
        return self.fields if self.count == 1 else nth(self.fields, index)

    def empty(self, shapes: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((self.count, *x.shape), x.dtype), shapes)

    def put(self, collected: Any, results: Any, index: int | Array) -> Any:
        def one(x: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(x, part, index, axis=0)

        return jax.tree.map(one, collected, results)

    def samples(self, collected: Any) -> Any:
        if self.count == 1:
            return collected
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), collected)

    def specs(self, axes: tuple[str, ...]) -> tuple[Any, PartitionSpec]:
        split = PartitionSpec(axes) if self.count == 1 else PartitionSpec(None, axes)
        return replace(self, fields=split), split  # pyright: ignore[reportArgumentType]

    def of_group(self, shard: Shard) -> Parts:
        return self


@dataclass(frozen=True, kw_only=True)
class Packed(MicroBatches):
    """Rows of `row_tokens` tokens, `rows` of each replica a part; see `rows.plan_packing`.

    Rows are shorter where all samples of a replica take fewer tokens.

    A part has the fields of all samples. The values of tokens are 0 outside of the part, and its
    rows stand under ROWS.
    Requires: what a pass computes for samples outside of its part is 0.
    """

    row_tokens: int
    group: int = 1
    num_replicas: int = 1
    rows: int = 1
    align: int | None = None  # the multiple at which runs of strict rows begin
    shard: Shard = lambda tree: tree

    def split(self, fields: Fields) -> "_PackedParts":
        plan, samples = self._plan(fields)
        return _PackedParts(fields=fields, plan=plan, rows=samples, shard=self.shard)

    @property
    def adds_up(self) -> bool:
        return True

    def row_use(self, fields: Fields) -> Array:
        plan, _ = self._plan(fields)
        return plan.use(fields["prompt_lengths"], fields["response_lengths"])

    def _plan(self, fields: Fields) -> tuple[PackingPlan, tuple[Array, ...]]:
        lengths = fields["response_lengths"]
        samples = (fields["prompts"], fields["prompt_lengths"], fields["responses"], lengths)
        widths = fields["prompts"].shape[-1], fields["responses"].shape[-1]
        all_tokens = lengths.size // self.num_replicas * sum(widths)
        row_tokens = row_length(self.row_tokens, all_tokens)
        if self.align is not None:  # padding between the runs of a sample may need more
            row_tokens = max(row_tokens, strict_tokens(*widths, self.align))
        plan = plan_packing(
            fields["prompt_lengths"],
            lengths,
            row_tokens=row_tokens,
            group=self.group,
            num_replicas=self.num_replicas,
            rows_of_part=self.rows,
            align=self.align,
        )
        return plan, samples


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _PackedParts(Parts):
    """Part i is the i-th rows of every replica. Results are 0 outside of it, so they add up."""

    fields: Fields
    plan: PackingPlan
    rows: tuple[Array, ...]  # arguments of `packed_rows`
    shard: Shard = field(metadata={"static": True})

    @property
    def num(self) -> Int[Array, ""]:
        return self.plan.num_parts

    def at(self, index: int | Array) -> Fields:
        rows = self.shard(packed_rows(self.plan, jnp.asarray(index), *self.rows))
        # All values of a sample are set to 0, not the mask alone: a ratio of log-probs of which
        # one is 0 may overflow, and its gradient would survive the mask.
        part = {name: _where_included(x, rows.included) for name, x in self.fields.items()}
        return part | {ROWS: rows}

    def empty(self, shapes: Any) -> Any:
        return zeros_of(shapes)

    def put(self, collected: Any, results: Any, index: int | Array) -> Any:
        return jax.tree.map(jnp.add, collected, results)

    def samples(self, collected: Any) -> Any:
        return collected

    def specs(self, axes: tuple[str, ...]) -> tuple[Any, PartitionSpec]:
        split: Any = PartitionSpec(axes)
        whole: Any = PartitionSpec()
        plan = replace(self.plan, starts=split, leaders=split, row=split, num_rows=whole)
        return replace(self, fields=split, plan=plan, rows=split), split

    def of_group(self, shard: Shard) -> Parts:
        return replace(self, shard=shard)


def split_micro_batches(tree: Any, num_micro_batches: int) -> Any:
    """[B, ...] -> [M, B/M, ...] on every array of a pytree."""

    def split(x: Array) -> Array:
        assert x.shape[0] % num_micro_batches == 0, (x.shape, num_micro_batches)
        return x.reshape(num_micro_batches, x.shape[0] // num_micro_batches, *x.shape[1:])

    return jax.tree.map(split, tree)


def _where_included(x: Array, included_B: Array) -> Array:
    if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.where(included_B[:, None], x, 0)
    return x


def nth(stacked: Any, index: int | Array) -> Any:
    """Entry `index` of the leading axis of every array of a pytree."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False), stacked
    )


def zeros_of(shapes: Any) -> Any:
    """Zeros of the shapes and dtypes of a pytree."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
