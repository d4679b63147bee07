"""Measured rates of devices and of the links between them.

Each function compiles, runs once to warm up, and takes the fastest of three. Bytes are decimal.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed.multihost import compile_together

Device = Any  # a jax.Device, whose declaration type checkers do not take
REPEATS = 3


@dataclass(frozen=True)
class Sizes:
    """How much work a measurement does: enough for milliseconds, little enough for any device."""

    matmul: int  # rows and columns of a matrix
    array_bytes: int  # of a copy between devices; one in a device's memory is four times as large
    loops: int  # repetitions inside one program


GPU = Sizes(matmul=8192, array_bytes=2**28, loops=20)
CPU = Sizes(matmul=512, array_bytes=2**22, loops=4)


def sizes_for(device: Device) -> Sizes:
    """The sizes that suit a device."""
    return CPU if device.platform == "cpu" else GPU


def fastest(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of three calls, after one that is not counted."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(REPEATS):
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
    return 2 * n**3 * size.loops / fastest(lambda: program(x, w))


def memory_bandwidth(device: Device) -> float:
    """Bytes a second that a device reads and writes in its own memory."""
    size = sizes_for(device)
    x = jnp.ones(size.array_bytes, jnp.float32, device=device)
    program = jax.jit(lambda x: jax.lax.fori_loop(0, size.loops, lambda _, y: y * 1.0001, x))
    return 2 * x.nbytes * size.loops / fastest(lambda: program(x))


def to_device_bandwidth(device: Device) -> float:
    """Bytes a second from the host's memory to a device."""
    x = np.ones(sizes_for(device).array_bytes // 4, np.float32)
    return x.nbytes / fastest(lambda: jax.device_put(x, device, may_alias=False))


def to_host_bandwidth(device: Device) -> float:
    """Bytes a second from a device to the host's memory."""
    x = jnp.ones(sizes_for(device).array_bytes // 4, jnp.float32, device=device)
    double = jax.jit(lambda x: x * 2)

    def run() -> float:
        fresh = jax.block_until_ready(double(x))  # an array keeps the host's copy of itself
        start = time.perf_counter()
        np.asarray(fresh)
        return time.perf_counter() - start

    run()
    return x.nbytes / min(run() for _ in range(REPEATS))


def copy_bandwidth(source: Device, target: Device) -> float:
    """Bytes a second from one device of this process to another."""
    x = jnp.ones(sizes_for(source).array_bytes // 4, jnp.float32, device=source)
    return x.nbytes / fastest(lambda: jax.device_put(x, target))


def all_reduce_bandwidth(devices: Sequence[Device]) -> float:
    """Bytes a second that each device sends in an all-reduce over `devices`.

    A ring sends 2 (n - 1) / n bytes for each byte of the array.

    Requires: every process that has one of the devices calls this at the same time.
    """
    n, size = len(devices), sizes_for(devices[0])
    mesh = Mesh(np.asarray(devices), ("devices",))
    split = NamedSharding(mesh, PartitionSpec("devices"))
    shape = (n, size.array_bytes // 4)
    x = jax.make_array_from_callback(shape, split, lambda index: np.ones((1, shape[1]), np.float32))

    def mean(y: jax.Array) -> jax.Array:
        # The cast keeps the loop's type: each device has its own copy of a sum.
        total = jax.lax.psum(y, "devices") / n
        return jax.lax.pcast(total, "devices", to="varying")

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, size.loops, lambda _, y: mean(y), x)

    program = jax.jit(
        jax.shard_map(
            loop, mesh=mesh, in_specs=PartitionSpec("devices"), out_specs=PartitionSpec("devices")
        )
    )
    compile_together(program, (x,), "all-reduce of the doctor")
    sent = 2 * (n - 1) / n * size.array_bytes * size.loops
    return sent / fastest(lambda: program(x))
