"""Sharding rules: which mesh axes split each logical axis.

A parameter names its dims by logical axes, for example ("embed", "q_heads", "head_dim"). One rules
object says where each of them lies. The rules of training are here. The rules of generation and of
other sizes of `tensor` are in layout.py.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.schema import REPLICA_AXES
from jaxrl_llm.distributed.mesh import axis_size, parts_of

LogicalAxis = Literal[
    "batch",
    "tokens",
    "residual",
    "layers",
    "embed",
    "vocab",
    "q_heads",
    "kv_heads",
    "mlp",
    "head_dim",
    "norm",
    "value",
    "rank",
    "expert",
    "expert_embed",
    "merged",
]
# One mesh axis or part of one, several (outermost first), or None: the dim is not split.
MeshAxes = str | tuple[str, ...] | None

HOST_MEMORY = "pinned_host"  # memory kind of the host, from and to which a device can copy


@dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """The mesh axes of each logical axis; the field names are `LogicalAxis`."""

    batch: MeshAxes = None
    tokens: MeshAxes = None  # tokens in rows of activations
    residual: MeshAxes = None  # tokens in rows of the residual stream, between blocks
    layers: MeshAxes = None  # stages of a pipeline; stored weights have no such dim
    embed: MeshAxes = None
    vocab: MeshAxes = None
    q_heads: MeshAxes = None
    kv_heads: MeshAxes = None
    mlp: MeshAxes = None
    head_dim: MeshAxes = None
    norm: MeshAxes = None  # norm scales and other vectors of the hidden size
    value: MeshAxes = None  # the output of a scalar head
    rank: MeshAxes = None  # rank of an adapter
    expert: MeshAxes = None
    expert_embed: MeshAxes = None  # the hidden size in the weights of experts
    merged: MeshAxes = None  # outputs of several projections in one kernel, which stays whole

    def mesh_axes(self, logical: LogicalAxis) -> tuple[str, ...]:
        """The mesh axes that split `logical`, outermost first."""
        target: MeshAxes = getattr(self, logical)
        if target is None:
            return ()
        return (target,) if isinstance(target, str) else tuple(target)

    def replace(self, **changes: MeshAxes) -> "ShardingRules":
        """A copy with other mesh axes for some logical axes. TypeError for an unknown name."""
        return dataclasses.replace(self, **changes)


TRAIN_RULES = ShardingRules(
    batch=REPLICA_AXES,
    tokens="sequence",
    residual=("sequence", "tensor"),
    layers="pipeline",
    # Every axis that shares the work of one sample also shares the storage of weights. They are in
    # the order of the mesh, so that neighbouring devices hold neighbouring parts.
    embed=("pipeline", "fsdp", "expert", "sequence"),
    vocab="tensor",
    q_heads="tensor",
    kv_heads="tensor",
    mlp="tensor",
    expert="expert",
    expert_embed=("pipeline", "fsdp", "sequence"),
    # Norms and biases are small. To split them would save nothing and cost a collective each.
)


def partition_spec(
    axes: tuple[LogicalAxis, ...], rules: ShardingRules, mesh: Mesh | None = None
) -> PartitionSpec:
    """The PartitionSpec of an array whose dims have these logical axes, one entry a dim.

    With a `mesh`, axes are replaced by their parts, without parts of size 1.
    """
    entries: list[MeshAxes] = []
    for logical in axes:
        targets = rules.mesh_axes(logical)
        if mesh is not None:
            targets = _split_by(targets, mesh)
        entries.append(None if not targets else targets[0] if len(targets) == 1 else targets)
    return PartitionSpec(*entries)


def _split_by(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    return tuple(part for part in parts_of(mesh, *axes) if mesh.shape[part] > 1)


def shardings(axes_tree: Any, shapes_tree: Any, mesh: Mesh, rules: ShardingRules) -> Any:
    """A pytree of NamedSharding for parameters.

    The leaves of `axes_tree` are tuples of logical axes; the leaves of `shapes_tree` (same
    structure) have a `.shape`.

    Raises: ValueError with the parameter's path and a remedy, for a dim that its mesh axes do not
        divide.
    """

    def leaf(path: Any, axes: tuple[LogicalAxis, ...], array: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        try:
            return _named_sharding(axes, tuple(array.shape), mesh, rules)
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from None

    return jax.tree_util.tree_map_with_path(
        leaf, axes_tree, shapes_tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def _named_sharding(
    axes: tuple[LogicalAxis, ...], shape: tuple[int, ...], mesh: Mesh, rules: ShardingRules
) -> NamedSharding:
    sharding = NamedSharding(mesh, partition_spec(axes, rules, mesh))
    try:
        sharding.shard_shape(shape)
    except ValueError:
        raise ValueError(_indivisible(axes, shape, mesh, rules)) from None
    return sharding


def _indivisible(
    axes: tuple[LogicalAxis, ...], shape: tuple[int, ...], mesh: Mesh, rules: ShardingRules
) -> str:
    """The error message for the first dim that its mesh axes do not divide."""
    for logical, size in zip(axes, shape, strict=True):
        targets = _split_by(rules.mesh_axes(logical), mesh)
        parts = axis_size(mesh, *targets)
        if size % parts:
            fits = [n for n in range(1, parts + 1) if size % n == 0 and parts % n == 0]
            return (
                f"its dim {logical!r} of {size} does not divide over {'*'.join(targets)}={parts}; "
                f"use {'*'.join(targets)} of {fits[-1]}, or keep the dim whole with "
                f"rules.replace({logical}=None)."
            )
    raise AssertionError(f"{shape} was refused although {axes} divide")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays whose first dim is the batch; later dims are whole."""
    return NamedSharding(mesh, partition_spec(("batch",), TRAIN_RULES, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def in_host_memory(x: Any) -> bool:
    """True if an array, concrete or traced, is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def second_array(x: Any) -> Any:
    """A second array on the memory of an array; anything else as it is.

    An array keeps what was read of it: a copy, or a view of its memory. Memory with views cannot
    be donated to a program of a GPU. What is read of the second array goes away with it.
    """
    if not isinstance(x, jax.Array):
        return x
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts, dtype=x.dtype)


def check_host_memory(device: Any) -> None:
    """Raises: ConfigError when a program on `device` cannot keep arrays in host memory.

    A device of the compiler alone (no hardware) reports no memories and passes.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if kinds and HOST_MEMORY not in kinds:
        raise ConfigError(
            f"optimizer.offload=True keeps moments in the host's memory ({HOST_MEMORY}), and of "
            f"{device.device_kind} programs reach {', '.join(kinds)} only: set it to False; "
            "optimizer.moment_dtype=bfloat16 halves what the moments take"
        )
