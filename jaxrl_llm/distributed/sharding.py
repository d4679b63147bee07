"""Logical axes of parameters to mesh axes: one frozen rules object a role and phase.

A parameter names its dims (`("embed", "q_heads", "head_dim")`); rules say on which mesh axis each
name lies. Training and generation differ only in the rules.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.mesh import AXES, REPLICA_AXES

MeshAxes = str | tuple[str, ...] | None

HOST_MEMORY = "pinned_host"  # memory kind: the host's, between which and its own a device copies


@dataclass(frozen=True)
class ShardingRules:
    """Pairs (logical axis, mesh axis | tuple of mesh axes | None). None: not split."""

    pairs: tuple[tuple[str, MeshAxes], ...]

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes that split `logical`, outermost first. ValueError on an unknown name."""
        table = dict(self.pairs)
        if logical not in table:
            raise ValueError(
                f"no rule for the logical axis {logical!r}; the rules know {sorted(table)}. "
                f"Add it with rules.replace({logical}=None) or name the parameter's axis anew."
            )
        target = table[logical]
        if target is None:
            return ()
        return (target,) if isinstance(target, str) else tuple(target)

    def replace(self, **changes: MeshAxes) -> "ShardingRules":
        """A copy with some rules changed or added."""
        return ShardingRules(tuple((dict(self.pairs) | changes).items()))


TRAIN_RULES = ShardingRules(
    (
        ("batch", REPLICA_AXES),
        ("embed", "fsdp"),
        ("vocab", "tensor"),
        ("q_heads", "tensor"),
        ("kv_heads", "tensor"),
        ("mlp", "tensor"),
        ("head_dim", None),
        # Norms and biases are small: gathering them would cost a collective each and save nothing.
        ("norm", None),
        ("value", None),
    )
)
# Dropping `fsdp` from a dim that nothing else splits makes the switch one plain all-gather.
GENERATION_RULES = TRAIN_RULES.replace(embed=None)


def partition_spec(axes: tuple[str, ...], rules: ShardingRules) -> PartitionSpec:
    """The PartitionSpec of an array whose dims have these logical names, one entry a dim.

    ValueError when two dims would lie on one mesh axis.
    """
    owner: dict[str, str] = {}
    entries: list[MeshAxes] = []
    for logical in axes:
        targets = rules.mesh_axes(logical)
        for target in targets:
            if target in owner:
                raise ValueError(
                    f"the logical axes {owner[target]!r} and {logical!r} both lie on the mesh axis "
                    f"{target!r}; give one of them another: rules.replace({logical}=None)."
                )
            owner[target] = logical
        entries.append(None if not targets else targets[0] if len(targets) == 1 else targets)
    return PartitionSpec(*entries)


def shardings(axes_tree: Any, shapes_tree: Any, mesh: Mesh, rules: ShardingRules) -> Any:
    """A pytree of NamedSharding for parameters.

    `axes_tree` has tuples of logical names as leaves, `shapes_tree` (same structure) anything with
    a `.shape`. ValueError, with the parameter's path and a remedy, on an unknown logical or mesh
    axis, on two dims on one mesh axis, and on a dim that its mesh axes do not divide.
    """

    def leaf(path: Any, axes: tuple[str, ...], array: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        try:
            return _named_sharding(axes, tuple(array.shape), mesh, rules)
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from None

    return jax.tree_util.tree_map_with_path(
        leaf, axes_tree, shapes_tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def _named_sharding(
    axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh, rules: ShardingRules
) -> NamedSharding:
    if len(axes) != len(shape):
        raise ValueError(f"{len(axes)} logical axes {axes} for the shape {shape}; name every dim.")
    spec = partition_spec(axes, rules)
    for logical in axes:
        for target in rules.mesh_axes(logical):
            if target not in mesh.shape:
                raise ValueError(
                    f"the rule for {logical!r} names the mesh axis {target!r}, but the mesh has "
                    f"{tuple(mesh.shape)}; use one of them (make_mesh always makes {AXES})."
                )
    sharding = NamedSharding(mesh, spec)
    try:
        sharding.shard_shape(shape)
    except ValueError:
        raise ValueError(_indivisible(axes, shape, mesh, rules)) from None
    return sharding


def _indivisible(
    axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh, rules: ShardingRules
) -> str:
    """Words for the first dim that its mesh axes do not divide."""
    for logical, size in zip(axes, shape, strict=True):
        targets = rules.mesh_axes(logical)
        parts = math.prod(mesh.shape[target] for target in targets)
        if size % parts:
            fits = [n for n in range(1, parts + 1) if size % n == 0 and parts % n == 0]
            return (
                f"its dim {logical!r} of {size} does not divide over {'*'.join(targets)}={parts}; "
                f"use {'*'.join(targets)} of {fits[-1]}, or keep the dim whole with "
                f"rules.replace({logical}=None)."
            )
    raise AssertionError(f"{shape} was refused although {axes} divide")


def batch_sharding(mesh: Mesh, rules: ShardingRules = TRAIN_RULES) -> NamedSharding:
    """The sharding of arrays whose first dim is the batch; later dims are whole."""
    return NamedSharding(mesh, partition_spec(("batch",), rules))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def in_host_memory(x: Any) -> bool:
    """Whether an array, or its place in a traced program, is in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def check_host_memory(device: Any) -> None:
    """ConfigError where a program on `device` cannot keep arrays in the host's memory.

    A device that exists for the compiler only has no memories to ask about; it passes.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if kinds and HOST_MEMORY not in kinds:
        raise ConfigError(
            f"optimizer.offload=True keeps moments in the host's memory ({HOST_MEMORY}), and of "
            f"{device.device_kind} programs reach {', '.join(kinds)} only: set it to False; "
            "optimizer.moment_dtype=bfloat16 halves what the moments take"
        )
