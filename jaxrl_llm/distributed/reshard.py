"""The layout switch: the same parameters under other sharding rules.

The collectives are written out. A sharding constraint would leave the choice to the partitioner.
Where an axis moves from one dim to another, it may gather the whole array first.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxrl_llm.distributed import transfer
from jaxrl_llm.distributed.multihost import processes_of
from jaxrl_llm.distributed.transfer import call

Axes = tuple[str, ...]
IN_FLIGHT = 2**30  # bytes of whole arrays on a device, on their way to other devices


def to_layout(params: Any, source: Any, target: Any) -> Any:
    """`params` moved from the shardings `source` to `target` by all-to-alls and all-gathers.

    Both are pytrees of NamedSharding with the structure of `params`. Call it inside jit.

    Guarantees: an axis that changes its dim moves by an all-to-all, before other axes are gathered.
        So no device receives more than its part of the target, and none holds a whole array that
        the target splits.
    Requires: the target splits a dim no more than these collectives can.
    """
    before, after = (jax.tree.map(lambda s: s.spec, tree) for tree in (source, target))
    (mesh,) = {sharding.mesh for sharding in jax.tree.leaves((source, target))}
    if mesh.size == 1:
        return params

    def switch(params: Any) -> Any:
        return jax.tree.map(_switch, params, before, after)

    return jax.shard_map(switch, mesh=mesh, in_specs=(before,), out_specs=after, check_vma=False)(
        params
    )


def _switch(x: jax.Array, before: PartitionSpec, after: PartitionSpec) -> jax.Array:
    """A device's shard under `after`, from its shard under `before`."""
    held = [_axes(before, dim) for dim in range(x.ndim)]
    wanted = [_axes(after, dim) for dim in range(x.ndim)]
    for dim, axes in enumerate(wanted):
        added = axes[len(held[dim]) :]
        if axes[: len(held[dim])] != held[dim] or not added:
            continue
        origin = next((i for i in range(x.ndim) if set(added) <= set(held[i])), None)
        if origin is None:  # whole on all of their devices: each keeps its part
            size = x.shape[dim] // jax.lax.axis_size(added)
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(added) * size, size, dim)
            held[dim] = axes
            continue
        # What lies inside the moved axes is gathered first, so that they are the innermost.
        last = max(held[origin].index(axis) for axis in added) + 1
        x = _gather(x, held[origin][last:], origin)
        held[origin] = held[origin][:last]
        inner = held[origin][-len(added) :]
        assert set(inner) == set(added), (before, after)
        x = jax.lax.all_to_all(x, added, split_axis=dim, concat_axis=origin, tiled=True)
        x = _reordered(x, origin, added, inner)
        held[origin], held[dim] = held[origin][: -len(added)], axes
    for dim, axes in enumerate(wanted):
        assert held[dim][: len(axes)] == axes, (before, after)
        x = _gather(x, held[dim][len(axes) :], dim)
    return x


def _reordered(x: jax.Array, dim: int, current: Axes, wanted: Axes) -> jax.Array:
    """Parts of a dim, from the order of the axes `current` to the order `wanted`."""
    if current == wanted:
        return x
    sizes = [jax.lax.axis_size(axis) for axis in current]
    shape, parts = x.shape, (*sizes, x.shape[dim] // math.prod(sizes))
    x = x.reshape(*shape[:dim], *parts, *shape[dim + 1 :])
    order = [dim + current.index(axis) for axis in wanted]
    rest = range(dim + len(current), x.ndim)
    return x.transpose(*range(dim), *order, *rest).reshape(shape)


def _gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _axes(spec: PartitionSpec, dim: int) -> Axes:
    entry = spec[dim] if dim < len(spec) else None
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def to_devices(
    params: Any, target: Any, dtype: str, stays: Callable[[Any], bool] = lambda path: False
) -> tuple[Any, int]:
    """`params` in `dtype` on other devices, under the shardings `target`; and the bytes that move.

    Arrays at a path that `stays` keep their own dtype. Call it outside of jit.
    An array is gathered on its own devices, and each of them sends to its share of the new ones.
    Arrays that are gathered at a time have at most `IN_FLIGHT` bytes, or are one.
    Between processes an array moves by `transfer.moved`, and its bytes are sent once.

    Requires: every process calls it, as `transfer.moved` requires.
    """
    moved, in_flight = 0, []

    def between_processes(x: jax.Array, sharding: NamedSharding, dtype: str) -> jax.Array:
        nonlocal moved
        small = call(_cast(x.sharding, dtype), (x,), x.sharding.mesh)  # pyright: ignore
        moved += small.nbytes
        return transfer.moved(small, sharding)

    def in_process(x: jax.Array, sharding: NamedSharding, dtype: str) -> jax.Array:
        nonlocal moved
        whole = _whole(x.sharding.mesh, dtype)(x)  # pyright: ignore[reportAttributeAccessIssue]
        copies = [shard.data for shard in whole.addressable_shards]
        parts = []
        for i, (device, index) in enumerate(sharding.devices_indices_map(x.shape).items()):
            parts.append(jax.device_put(copies[i % len(copies)][index], device))
            moved += parts[-1].nbytes
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    def leaf(path: Any, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        own = str(x.dtype) if stays(path) else dtype
        several = len(processes_of(x.sharding.device_set | sharding.device_set)) > 1
        array = (between_processes if several else in_process)(x, sharding, own)
        in_flight.append(array)
        if sum(each.nbytes for each in in_flight) > IN_FLIGHT:
            jax.block_until_ready(in_flight)
            in_flight.clear()
        return array

    return jax.tree.map_with_path(leaf, params, target), moved


@cache
def _cast(sharding: Sharding, dtype: str) -> Any:
    """Casts an array where it lies."""
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)


@cache
def _whole(mesh: Mesh, dtype: str) -> Any:
    """Casts an array and makes it whole on every device of its mesh."""

    def cast(x: jax.Array) -> jax.Array:
        # Without the barrier the partitioner gathers the array as it was before the cast.
        return jax.lax.optimization_barrier(x.astype(dtype))

    return jax.jit(cast, out_shardings=NamedSharding(mesh, PartitionSpec()))


def switch_bytes(shapes: Any, source: Any, target: Any) -> int:
    """Bytes that the busiest device receives when `shapes` move from `source` to `target`.

    Bytes that a device already holds do not count. `shapes` holds arrays or ShapeDtypeStructs, the
    other two hold Shardings.

    Requires: all three are pytrees of one structure, over the same devices.
    """
    received: dict[Any, int] = {}
    leaves = zip(
        jax.tree.leaves(shapes), jax.tree.leaves(source), jax.tree.leaves(target), strict=True
    )
    for array, before, after in leaves:
        for device, count in _elements_received(tuple(array.shape), before, after).items():
            received[device] = received.get(device, 0) + count * array.dtype.itemsize
    return max(received.values(), default=0)


def _elements_received(shape: tuple[int, ...], before: Sharding, after: Sharding) -> dict[Any, int]:
    held = before.devices_indices_map(shape)
    counts = {}
    for device, wanted in after.devices_indices_map(shape).items():
        own = held[device]
        spans = [_span(s, n) for s, n in zip(wanted, shape, strict=True)]
        kept = [
            max(0, min(stop, own_stop) - max(start, own_start))
            for (start, stop), (own_start, own_stop) in zip(
                spans, (_span(s, n) for s, n in zip(own, shape, strict=True)), strict=True
            )
        ]
        counts[device] = math.prod(stop - start for start, stop in spans) - math.prod(kept)
    return counts


def _span(part: slice, size: int) -> tuple[int, int]:
    start, stop, _ = part.indices(size)
    return start, stop
