"""Measures what devices, and the links between them, do: FLOPs and bytes a second.

Each function compiles, runs once to warm up, and takes the fastest of a few. Bytes are decimal.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed.multihost import compile_together, gather_objects

Device = Any  # a jax.Device, whose declaration type checkers do not take
Groups = Sequence[Sequence[Device]]  # devices of equal number in each group


@dataclass(frozen=True)
class Sizes:
    """The work of a measurement: enough for milliseconds, little enough for any device."""

    matmul: int  # rows and columns of a matrix
    array_bytes: int  # bytes a device sends; its array is four times as large
    copy_bytes: int  # bytes of a copy to or from another memory
    loops: int  # repetitions inside one program, at most
    seconds: float  # limit of a program with a link, if one repetition does not take more
    repeats: int  # runs of a program; the fastest counts


GPU = Sizes(2**13, array_bytes=2**28, copy_bytes=2**28, loops=20, seconds=2.0, repeats=3)
CPU = Sizes(2**9, array_bytes=2**22, copy_bytes=2**22, loops=4, seconds=2.0, repeats=3)


def sizes_for(device: Device) -> Sizes:
    """The sizes that suit a device."""
    return CPU if device.platform == "cpu" else GPU


def fastest(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, after one that is not counted."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def matmul_flops(device: Device) -> float:
    """FLOPs a second of square matmuls in bf16 (float32 on a CPU)."""
    size = sizes_for(device)
    n, dtype = size.matmul, jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    x = jnp.ones((n, n), dtype, device=device)
    w = jnp.full((n, n), 1 / n, dtype, device=device)
    program = jax.jit(lambda x, w: jax.lax.fori_loop(0, size.loops, lambda _, y: y @ w, x))
    return 2 * n**3 * size.loops / fastest(lambda: program(x, w), size.repeats)


def memory_bandwidth(device: Device) -> float:
    """Bytes a second that a device reads and writes in its own memory."""
    size = sizes_for(device)
    x = jnp.ones(size.array_bytes, jnp.float32, device=device)
    program = jax.jit(lambda x: jax.lax.fori_loop(0, size.loops, lambda _, y: y * 1.0001, x))
    return 2 * x.nbytes * size.loops / fastest(lambda: program(x), size.repeats)


def to_device_bandwidth(device: Device) -> float:
    """Bytes a second from the host's memory to a device."""
    size = sizes_for(device)
    x = np.ones(size.copy_bytes // 4, np.float32)
    return x.nbytes / fastest(lambda: jax.device_put(x, device, may_alias=False), size.repeats)


def to_host_bandwidth(device: Device) -> float:
    """Bytes a second from a device to the host's memory."""
    size = sizes_for(device)
    x = jnp.ones(size.copy_bytes // 4, jnp.float32, device=device)
    double = jax.jit(lambda x: x * 2)

    def run() -> float:
        fresh = jax.block_until_ready(double(x))  # an array keeps the host's copy of itself
        start = time.perf_counter()
        np.asarray(fresh)
        return time.perf_counter() - start

    run()
    return x.nbytes / min(run() for _ in range(size.repeats))


def copy_bandwidth(source: Device, target: Device) -> float:
    """Bytes a second from one device of this process to another."""
    size = sizes_for(source)
    x = jnp.ones(size.copy_bytes // 4, jnp.float32, device=source)
    return x.nbytes / fastest(lambda: jax.device_put(x, target), size.repeats)


def all_reduce_bandwidth(groups: Groups) -> float:
    """Bytes a second that each device of this process sends in an all-reduce over its group.

    A ring of n devices sends 2 (n - 1) / n bytes for each byte of the array. All groups do this at
    the same time.

    Requires: every process that has one of the devices calls this at the same time.
    """
    n, size = len(groups[0]), sizes_for(groups[0][0])

    def mean(y: jax.Array) -> jax.Array:
        # The cast keeps the loop's type: each device has its own copy of a sum.
        return jax.lax.pcast(jax.lax.psum(y, "device") / n, "device", to="varying")

    return 2 * (n - 1) / n * size.array_bytes / _seconds_of_step(groups, mean, size)


def repetitions(size: Sizes, seconds: float) -> int:
    """Repetitions of a step of that duration in a program."""
    return min(size.loops, max(1, int(size.seconds / seconds)))


def _seconds_of_step(groups: Groups, step: Callable[[jax.Array], jax.Array], size: Sizes) -> float:
    """Seconds of one `step`, a collective, on an array of `size.array_bytes` on each device.

    A slow link gets fewer repetitions. All processes take the same number.
    """
    mesh = Mesh(np.asarray(groups), ("group", "device"))
    split = PartitionSpec(("group", "device"))
    shape = (mesh.size, size.array_bytes // 4)
    make = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=NamedSharding(mesh, split))
    x = make()

    def loop(x: jax.Array, loops: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, loops, lambda _, y: step(y), x)

    specs = (split, PartitionSpec())
    program = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=specs, out_specs=split))
    one = np.int32(1)
    compile_together(program, (x, one), "links of the doctor")
    slowest = max(gather_objects(fastest(lambda: program(x, one), 1), "one step of links"))
    loops = repetitions(size, slowest)
    return fastest(lambda: program(x, np.int32(loops)), size.repeats) / loops
