"""Groups of devices on different processes: who takes part in a program, and how arrays move.

A process that holds no device of an array has the array without data. It may pass it on, and jax
knows its shape and sharding. A program of such devices is not entered here: its results are arrays
without data too. So every process runs the same code.

An array moves as pieces of equal size. Each piece goes once from one device to another, by a
program of all devices of both groups. The new devices then gather what they need among themselves.
"""

import math
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxrl_llm.distributed.multihost import barrier, processes_of

AXIS = "device"  # the only axis of a mesh of two groups
Devices = tuple[Any, ...]
_met: set[tuple[Devices, Devices]] = set()  # groups between which something has moved


def takes_part(mesh: Mesh) -> bool:
    """True if this process holds a device of the mesh, and so enters its programs."""
    return jax.process_index() in processes_of(mesh.devices.flat)


def holds(sharding: Sharding) -> bool:
    """True if this process holds a device of the sharding."""
    return jax.process_index() in processes_of(sharding.device_set)


def spread(meshes: Collection[Mesh]) -> bool:
    """True if these are several groups of devices of several processes."""
    holders = {process for mesh in meshes for process in processes_of(mesh.devices.flat)}
    return len(meshes) > 1 and len(holders) > 1


def call(program: Any, arguments: Sequence[Any], mesh: Mesh) -> Any:
    """What a jitted `program` of `mesh` returns; arrays without data on a process that has no part.

    Requires: the program was jitted with `out_shardings`.
    """
    return program(*arguments) if takes_part(mesh) else results_elsewhere(program, arguments)


def results_elsewhere(program: Any, arguments: Sequence[Any]) -> Any:
    """The results of a jitted program that other processes run, without data.

    Requires: the program was jitted with `out_shardings`.
    """
    return jax.tree.map(without_data, program.eval_shape(*arguments))


def without_data(x: Any) -> jax.Array:
    """An array of the shape, dtype and sharding of `x`, all of whose devices others hold."""
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype)


def moved(x: jax.Array, target: NamedSharding) -> jax.Array:
    """`x` on other devices, under `target`.

    Requires: every process calls it, in the same order of calls, and nothing else is in flight on
        the devices of both where processes differ.
    """
    same = x.sharding.device_set == target.device_set
    if same or len(processes_of(x.sharding.device_set | target.device_set)) == 1:
        return jax.device_put(x, target)
    return in_pieces(x, target)


def in_pieces(x: jax.Array, target: NamedSharding) -> jax.Array:
    """`moved` between processes. The groups may share devices."""
    source: Any = x.sharding
    place: Any = target.mesh
    senders, receivers = (tuple(mesh.devices.flat) for mesh in (source.mesh, place))
    if (senders, receivers) not in _met:
        # Devices connect now, and wait a short time only: Gloo 30 s.
        jax.block_until_ready(x)
        barrier("groups of devices meet")
        _met.add((senders, receivers))
    count = math.lcm(len(senders), len(receivers))
    pieces = call(_cut(source, count), (x,), source.mesh)
    received = _sent(pieces, place, count)
    return call(_joined(target, x.shape), (received,), place)


@cache
def _cut(source: NamedSharding, count: int) -> Any:
    """Cuts an array into `count` pieces of equal size, [count, size], in the order of devices."""

    def cut(x: jax.Array) -> jax.Array:
        flat = x.reshape(-1)
        return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)

    return jax.jit(cut, out_shardings=_by_device(source.mesh))


@cache
def _joined(target: NamedSharding, shape: tuple[int, ...]) -> Any:
    """Makes an array of `shape` of its pieces."""

    def join(pieces: jax.Array) -> jax.Array:
        return pieces.reshape(-1)[: math.prod(shape)].reshape(shape)

    return jax.jit(join, out_shardings=target)


def _by_device(mesh: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def _sent(pieces: jax.Array, target: Mesh, count: int) -> jax.Array:
    """The pieces, [count, size], on the devices of `target`.

    The devices of the smaller group have several pieces. Each gives or takes one in a round. Those
    of one round are as far apart as these are many, so no device has two of them.
    """
    senders: Any = pieces.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
    everyone = [*dict.fromkeys([*senders.devices.flat, *target.devices.flat])]
    union, place_of = Mesh(np.array(everyone), (AXIS,)), {d: i for i, d in enumerate(everyone)}
    receivers = [place_of[device] for device in target.devices.flat]
    given, taken = count // senders.size, count // target.size
    rounds, size = max(given, taken), pieces.shape[1]
    own = {shard.device: shard.data for shard in pieces.addressable_shards}
    zeros = {d: jnp.zeros((1, size), pieces.dtype, device=d) for d in _own(target)}
    found: dict[Any, dict[int, jax.Array]] = {device: {} for device in zeros}
    for turn in range(rounds if own or zeros else 0):
        chosen = range(turn, count, rounds)
        sends = {senders.devices.flat[piece // given]: piece % given for piece in chosen}
        parts = zeros | {d: x[(at := sends.get(d, 0)) : at + 1] for d, x in own.items()}
        shape, sharding = (union.size, size), _by_device(union)
        whole = jax.make_array_from_single_device_arrays(
            shape, sharding, [parts[d] for d in _own(union)]
        )
        pairs = tuple((piece // given, receivers[piece // taken]) for piece in chosen)
        got = {s.device: s.data for s in _permutation(union, pairs)(whole).addressable_shards}
        for piece in chosen:
            device = target.devices.flat[piece // taken]
            if device in found:
                found[device][piece] = got[device]
    stacked = [_stacked([each[piece] for piece in sorted(each)]) for each in found.values()]
    return jax.make_array_from_single_device_arrays(
        (count, size), _by_device(target), stacked, dtype=pieces.dtype
    )


def _own(mesh: Mesh) -> list[Any]:
    """The devices that this process holds."""
    return [d for d in mesh.devices.flat if d.process_index == jax.process_index()]


def _stacked(pieces: list[jax.Array]) -> jax.Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


@cache
def _permutation(union: Mesh, pairs: tuple[tuple[int, int], ...]) -> Any:
    spec = PartitionSpec(AXIS)

    def permute(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, AXIS, pairs)

    program = jax.shard_map(permute, mesh=union, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(program)
