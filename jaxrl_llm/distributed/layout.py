"""Layouts: where the arrays of a role lie in a phase, such as training or generation.

A layout is a mesh and one set of sharding rules. All phases share one mesh, so the switch from one
layout to another stays inside a program. A phase with a tensor size of its own takes more or fewer
neighbouring devices for the heads, and the others become replicas.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.config.schema import REPLICA_AXES, MeshAxis
from jaxrl_llm.distributed.mesh import (
    axis_parts,
    axis_size,
    make_mesh,
    parts_of,
)
from jaxrl_llm.distributed.sharding import (
    TRAIN_RULES,
    LogicalAxis,
    ShardingRules,
    partition_spec,
)

_in_scope: ContextVar["Layout | None"] = ContextVar("layout", default=None)


@dataclass(frozen=True)
class Layout:
    """Where arrays lie in one phase."""

    mesh: Mesh
    rules: ShardingRules

    def axes(self, *logical: LogicalAxis) -> tuple[str, ...]:
        """The parts of the mesh that split these logical axes, also parts of size 1."""
        names = [axis for each in logical for axis in self.rules.mesh_axes(each)]
        return parts_of(self.mesh, *names)

    def size(self, *logical: LogicalAxis) -> int:
        """Into how many shards these logical axes are split."""
        return axis_size(self.mesh, *self.axes(*logical))

    @property
    def num_replicas(self) -> int:
        """Into how many shares the batch is split."""
        return self.size("batch")

    def spec(self, *dims: LogicalAxis | None) -> PartitionSpec:
        """The PartitionSpec of an array with these dims; None is a dim that is not split."""
        split = iter(partition_spec(tuple(d for d in dims if d), self.rules, self.mesh))
        return PartitionSpec(*(next(split) if dim else None for dim in dims))

    def sharding(self, *dims: LogicalAxis | None) -> NamedSharding:
        """The sharding of an array with these dims."""
        return NamedSharding(self.mesh, self.spec(*dims))

    def constrain(self, x: jax.Array, *dims: LogicalAxis | None) -> jax.Array:
        """x with its leading dims laid out so. A dim that does not divide is left to the compiler.

        A layout that splits no tokens between blocks leaves all to the compiler.
        """
        if self.size("residual") == 1:
            return x
        entries = list(self.spec(*dims))
        for i, dim in enumerate(dims):
            if dim is not None and x.shape[i] % self.size(dim):
                entries[i] = PartitionSpec.UNCONSTRAINED
        in_scope = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if in_scope.empty else in_scope
        spec = PartitionSpec(*entries)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The parts of `data`, larger than 1, that split the batch. They are the outermost ones."""
        parts = (a for a in self.axes("batch") if a.partition(".")[0] == "data")
        return tuple(axis for axis in parts if self.mesh.shape[axis] > 1)

    @property
    def of_data_group(self) -> "Layout | None":
        """The layout of one group of devices inside a shard_map over `data_axes`.

        None where a group is one device.
        """
        manual = {axis: AxisType.Manual for axis in self.data_axes}
        if self.mesh.size == axis_size(self.mesh, *manual):
            return None
        # Any: of a mesh, a layout in a shard_map needs names and sizes alone.
        mesh: Any = self.mesh.abstract_mesh.update_axis_types(manual)
        batch = tuple(axis for axis in self.axes("batch") if axis not in manual)
        return Layout(mesh, self.rules.replace(batch=batch))

    @property
    def of_stage(self) -> "Layout":
        """The layout of the layers of one pipeline stage, which has all rows of a micro-batch.

        It has the weights of its layers: stages do not share their storage.
        """
        stages = self.axes("layers")

        def within(logical: LogicalAxis) -> tuple[str, ...]:
            return tuple(axis for axis in self.axes(logical) if axis not in stages)

        rules = self.rules.replace(
            batch=within("batch"),
            embed=within("embed"),
            expert_embed=within("expert_embed"),
            layers=None,
        )
        return Layout(self.mesh, rules)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Layers find this layout, and jax its mesh, while the block runs."""
        with self.for_layers(), jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            yield

    @contextmanager
    def for_layers(self) -> Iterator[None]:
        """Layers find this layout while the block runs; jax keeps its mesh."""
        token = _in_scope.set(self)
        try:
            yield
        finally:
            _in_scope.reset(token)


def layout_in_scope() -> Layout | None:
    """The layout whose `scope` is open, or None on one device."""
    return _in_scope.get()


def train_layout(mesh: Mesh, num_kv_heads: int, *, tensor: int = 0) -> Layout:
    """The layout of training, and of passes without a gradient.

    `tensor` is a tensor size of its own; 0 is the size of the mesh's axis.

    Requires: the mesh was made with the cuts for that tensor size (`cuts_for`).
    """
    if tensor in (0, axis_size(mesh, "tensor")):
        kv_axes = _kv_axes(mesh, parts_of(mesh, "tensor"), num_kv_heads)
        return Layout(mesh, TRAIN_RULES.replace(kv_heads=kv_axes))
    heads, others = _groups(mesh, tensor)
    rows = tuple(a for a in others if a.partition(".")[0] in (*REPLICA_AXES, "tensor"))
    embed = tuple(a for a in others if a.partition(".")[0] != "data")
    rules = _by_heads(mesh, heads, num_kv_heads).replace(batch=rows, embed=embed)
    named = {
        field: tuple(a for a in others if a.partition(".")[0] == axis) or None
        for field, axis in (("tokens", "sequence"), ("layers", "pipeline"), ("expert", "expert"))
    }
    rules = rules.replace(expert_embed=tuple(a for a in embed if a not in (named["expert"] or ())))
    residual = (*(named["tokens"] or ()), *heads)
    return Layout(mesh, rules.replace(**named, residual=residual))


def generation_layout(mesh: Mesh, num_kv_heads: int, *, tensor: int = 0) -> Layout:
    """The layout of generation: weights are whole but for the heads, all other devices replicas.

    `tensor` is a tensor size of its own; 0 is the size of the mesh's axis.

    Requires: the mesh was made with the cuts for that tensor size (`cuts_for`).
    """
    heads, others = _groups(mesh, tensor or axis_size(mesh, "tensor"))
    # Rows of a training replica stay on its devices.
    rows = sorted(others, key=lambda axis: axis.partition(".")[0] not in REPLICA_AXES)
    return Layout(mesh, _by_heads(mesh, heads, num_kv_heads).replace(batch=tuple(rows)))


def layouts_of(
    mesh: Mesh, num_kv_heads: int, *, train: int = 0, passes: int = 0, generation: int = 0
) -> tuple[Layout, Layout, Layout]:
    """The layouts of updates, of passes without a gradient and of generation, by tensor size."""
    return (
        train_layout(mesh, num_kv_heads, tensor=train),
        train_layout(mesh, num_kv_heads, tensor=passes),
        generation_layout(mesh, num_kv_heads, tensor=generation),
    )


def _by_heads(mesh: Mesh, heads: tuple[str, ...], num_kv_heads: int) -> ShardingRules:
    kv_axes = _kv_axes(mesh, heads, num_kv_heads)
    return ShardingRules(vocab=heads, q_heads=heads, kv_heads=kv_axes, mlp=heads)


def _groups(mesh: Mesh, tensor: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of groups of `tensor` devices, as heads are split, and all other axes.

    Heads that a smaller group has split stay where they are in a larger one. So a group begins
    with the axis tensor and goes on with its nearest neighbours. One that is smaller than the axis
    is its outer part.
    """
    own = parts_of(mesh, "tensor")
    if tensor < axis_size(mesh, *own):
        heads = next(
            (own[:i] for i in range(len(own)) if axis_size(mesh, *own[:i]) == tensor), None
        )
    else:
        nearest = [part for part in reversed(mesh.axis_names) if part not in own]
        groups = [tuple(nearest[:i]) for i in range(len(nearest) + 1)]
        size = tensor // axis_size(mesh, *own)
        heads = next((own + group for group in groups if axis_size(mesh, *group) == size), None)
    assert heads is not None and tensor % axis_size(mesh, *heads) == 0, (mesh.shape, tensor)
    return heads, tuple(part for part in mesh.axis_names if part not in heads)


def _kv_axes(mesh: Mesh, heads: tuple[str, ...], num_kv_heads: int) -> tuple[str, ...]:
    """The axes that split KV heads: all axes of heads where they divide.

    With fewer KV heads than devices, the first axes give each device one KV head, of which several
    devices hold copies. Where no axes do, every device holds all KV heads.
    """
    if num_kv_heads % axis_size(mesh, *heads) == 0:
        return heads
    firsts = [heads[:i] for i in range(len(heads))]
    return next((axes for axes in firsts if axis_size(mesh, *axes) == num_kv_heads), ())


def mesh_of(
    config: MeshConfig,
    num_kv_heads: Sequence[int],
    model_sizes: Sequence[int] = (),
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """The mesh of a config, with the parts that its phases and models with so many heads need.

    `model_sizes` are tensor sizes of single models. `devices` is None for the first ones.

    Raises: ValueError for sizes that do not fit the devices or each other.
    """
    phases = (config.generation.tensor, config.passes.tensor, *model_sizes)
    cuts = cuts_for(config.sizes, phases, num_kv_heads)
    return make_mesh(**config.sizes, cuts=cuts, devices=devices)


def cuts_for(
    sizes: Mapping[MeshAxis, int], phases: Sequence[int], num_kv_heads: Sequence[int]
) -> tuple[int, ...]:
    """The cuts with which `make_mesh` can lay out every phase.

    `phases` are the tensor sizes of the phases; 0 is the size of the mesh. `num_kv_heads` has a
    number for each model. With fewer KV heads than devices, each head gets its own part of the
    axis, unless that contradicts another cut.

    Raises: ValueError for tensor sizes of phases that do not fit the mesh.
    """
    tensor = sizes.get("tensor", 1)
    each = sorted({size or tensor for size in (0, *phases)})
    cuts = {size if size > tensor else tensor // size for size in each if size != tensor}
    if any(size < tensor and tensor % size for size in each):
        raise ValueError(f"tensor sizes {each} of a mesh with tensor={tensor}: one must divide it")
    axis_parts(sizes, tuple(cuts))
    for size in each:
        for heads in num_kv_heads:
            if heads < size and size % heads == 0:
                cut = tensor // heads if heads <= tensor else heads
                with suppress(ValueError):
                    axis_parts(sizes, (*cuts, cut))
                    cuts.add(cut)
    return tuple(sorted(cut for cut in cuts if cut > 1))


def shard_stacked(layout: Layout) -> Callable[[Any], Any]:
    """Constrains stacked [M, B/M, ...] arrays so that every slice spreads over the replicas."""
    if layout.mesh.size == 1:
        return _unchanged
    return partial(constrained, sharding=layout.sharding(None, "batch"))


def shard_rows(layout: Layout) -> Callable[[Any], Any]:
    """Constrains arrays of rows, one row a replica, to the devices of their replica."""
    if layout.mesh.size == 1:
        return _unchanged
    return partial(constrained, sharding=layout.sharding("batch"))


def _unchanged(tree: Any) -> Any:
    return tree


def constrained(tree: Any, sharding: NamedSharding) -> Any:
    """Arrays laid out so. Inside a shard_map `sharding` counts for the axes that it leaves."""
    in_scope = jax.sharding.get_abstract_mesh()
    if not in_scope.empty:
        sharding = NamedSharding(in_scope, sharding.spec)
    return jax.lax.with_sharding_constraint(tree, sharding)
