"""The layout switch: the same parameters under other sharding rules."""

import math
import statistics
import time
from typing import Any

import jax
from jax.sharding import Sharding


def to_layout(params: Any, shardings: Any) -> Any:
    """`params` laid out by `shardings`, a pytree of the same structure. Call it inside jit."""
    return jax.lax.with_sharding_constraint(params, shardings)


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


def time_switch(params: Any, shardings: Any, *, repeats: int = 3) -> float:
    """Median seconds of the switch alone, after compilation and one warm-up run.

    Requires: memory for both layouts; every process of the mesh calls it.
    """
    switch = jax.jit(lambda tree: tree, out_shardings=shardings)
    jax.block_until_ready(switch(params))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(switch(params))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
