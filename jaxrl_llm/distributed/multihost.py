"""Several processes, one program: joining, barriers with a time limit, and shared values.

Each process holds the rows of a batch that lie on its devices (`HostRows`). Nothing of the size of
the batch comes to its memory. What hosts say to each other is small and goes through the
coordination service, which names a process that is missing.

Every function also works in a single process that never joined anything.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# jax has no public barrier with a time limit: multihost_utils.sync_global_devices waits for ever.
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The limit of every wait for other processes. The slowest thing that one process does while others
# wait is to compile, to grade a batch, or to read its share of the data.
DEFAULT_TIMEOUT_S = 1800.0
JOIN_TIMEOUT_S = 300.0  # limit of the first contact
MOST_EXCHANGED = 2**20  # bytes of one array that hosts send to each other

_uses: Counter[str] = Counter()  # uses of each name of a barrier or an exchange
_waits: list[str] = []  # names of the barriers at which threads of this process wait now


class BarrierTimeout(RuntimeError):
    """Some processes did not reach a barrier in time; `missing` holds their ids if known."""

    def __init__(self, name: str, timeout_s: float, missing: tuple[int, ...], detail: str):
        who = f"process {', '.join(map(str, missing))}" if missing else "at least one process"
        super().__init__(
            f"barrier {name!r}: {who} of {jax.process_count()} did not arrive within "
            f"{timeout_s:g} s. Look at the log of {who}: it died, is stuck, or took another path. "
            f"The coordination service said: {detail}"
        )
        self.missing = missing


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout_s: float = JOIN_TIMEOUT_S,
) -> None:
    """Join the other processes.

    Process 0 runs the coordination service at `coordinator_address`, "host:port". With no address,
    jax detects Slurm and Open MPI. `local_device_ids` are the GPUs of this process, counted among
    the visible ones; None takes all of them, or what the detected cluster says.

    Requires: nothing has touched a device yet.
    Guarantees: with a loopback address, other machines cannot reach the service.
    Raises: within about `timeout_s` seconds when the coordinator is not reached.
    """
    bind_address = detection = None
    if coordinator_address is not None:
        # jax binds to all network interfaces by default.
        bind_address = coordinator_address if _is_loopback(coordinator_address) else None
        # Inside a Slurm allocation jax would otherwise give this process one GPU, by SLURM_LOCALID.
        detection = "deactivate"
    jax.distributed.initialize(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=local_device_ids,
        cluster_detection_method=detection,
        initialization_timeout=max(1, round(timeout_s)),
        coordinator_bind_address=bind_address,
    )


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def is_main() -> bool:
    """True in the process that writes files and prints: process 0."""
    return jax.process_index() == 0


def barrier(name: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Wait until every process calls this with the same `name`.

    It uses the coordination service, not the devices, so it does not wait for computations.

    Raises: BarrierTimeout that names the processes that did not come.
    """
    client = distributed.global_state.client
    if client is None:
        return
    # Each use has its own id, so a late process cannot join the next use of the same name.
    _uses[name] += 1
    _waits.append(name)
    try:
        client.wait_at_barrier(f"{name}#{_uses[name]}", round(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        detail = str(error)
        if "DEADLINE_EXCEEDED" not in detail:
            raise
        raise BarrierTimeout(name, timeout_s, _task_ids(detail), detail) from None
    finally:
        _waits.remove(name)


def waits_at() -> str | None:
    """The barrier or exchange at which this process waits for others now. Any thread may ask."""
    return next(iter(_waits), None)


def compile_together(
    program: Any, arguments: Sequence[Any], name: str, takes_part: bool = True
) -> None:
    """Compile a jitted `program`, and wait until every process that takes part has done so.

    Libraries that connect devices wait a short time for the others, Gloo 30 s: a process that
    compiles slowly would end the run. A process alone compiles when it calls the program.

    Raises: BarrierTimeout that names the processes that did not come.
    """
    if distributed.global_state.client is not None:
        if takes_part:
            program.lower(*arguments).compile()  # the call finds this executable
        barrier(f"compiled {name}")


def _task_ids(message: str) -> tuple[int, ...]:
    """The process ids that the coordination service lists, one a line. It cuts long lists."""
    listed = message.partition("timed out task names:")[2].partition("\n\n")[0]
    return tuple(sorted(int(number) for number in re.findall(r"(\d+)\s*$", listed, re.MULTILINE)))


# ------------------------------------------------------------------------- rows of a batch


@dataclass(frozen=True, eq=False)
class HostRows:
    """The rows of a batch that this process holds, and the ones that it owns, in ascending order.

    It holds the rows that lie on its devices. Processes that hold the same row (a `tensor` axis
    over several processes) share the work: each row is owned by one of them. The owner computes
    the row's reward and writes it to the trace.
    """

    num_rows: int  # rows of the batch
    held: np.ndarray
    owned: np.ndarray
    shared: bool  # some row is held by several processes, which all know it

    @property
    def read(self) -> np.ndarray:
        """The rows to make a batch of: those held, or one for its shape where none is held."""
        return self.held if len(self.held) else np.zeros(1, int)


@lru_cache(maxsize=64)
def host_rows(sharding: NamedSharding, num_rows: int, group: int = 1) -> HostRows:
    """The share of this process in batches of `num_rows` rows.

    Processes that hold the same rows divide them by whole groups of `group` rows, where they hold
    whole groups.
    """
    holders: dict[tuple[int, int], set[int]] = {}
    for device, (rows,) in sharding.devices_indices_map((num_rows,)).items():
        start, stop, _ = rows.indices(num_rows)
        holders.setdefault((start, stop), set()).add(device.process_index)
    return rows_of_process(holders, num_rows, group, jax.process_index())


def rows_of_process(
    holders: Mapping[tuple[int, int], set[int]], num_rows: int, group: int, process: int
) -> HostRows:
    """`host_rows` from the processes that hold each range (start, stop) of rows."""
    held, owned = np.zeros(num_rows, bool), np.zeros(num_rows, bool)
    for (start, stop), processes in holders.items():
        if process not in processes:
            continue
        held[start:stop] = True
        count, rank = len(processes), sorted(processes).index(process)
        first, last = (start + (stop - start) * k // count for k in (rank, rank + 1))
        # Up to the next group that begins in the range.
        first, last = (min(-(-row // group) * group, stop) for row in (first, last))
        owned[start if rank == 0 else first : stop if rank == count - 1 else last] = True
    return HostRows(
        num_rows=num_rows,
        held=np.flatnonzero(held),
        owned=np.flatnonzero(owned),
        shared=any(len(processes) > 1 for processes in holders.values()),
    )


def fetch_rows(tree: Any, rows: HostRows) -> Any:
    """The rows that this process owns, of every leaf [B, ...], as numpy arrays.

    Not a collective: it copies from the devices of this process.
    """

    def leaf(x: Any) -> np.ndarray:
        if not isinstance(x, jax.Array):
            return np.asarray(x)[rows.owned]
        pieces: dict[int, jax.Array] = {}
        for shard in x.addressable_shards:
            pieces.setdefault(shard.index[0].start or 0, shard.data)
        if not pieces:
            return np.zeros((0, *x.shape[1:]), x.dtype)
        starts = sorted(pieces)
        data = [_to_host(pieces[start]) for start in starts]
        present = [np.arange(s, s + len(piece)) for s, piece in zip(starts, data, strict=True)]
        whole = data[0] if len(data) == 1 else np.concatenate(data)
        if len(whole) == len(rows.owned):
            return whole
        return whole[np.searchsorted(np.concatenate(present), rows.owned)]

    return jax.tree.map(leaf, tree)


def place_held(tree: Any, sharding: NamedSharding, rows: HostRows) -> Any:
    """Global arrays of a batch from the rows that each process holds, [len(rows.held), ...].

    A process that holds none gives arrays of any number of rows.
    """

    def put(array: Any) -> jax.Array:
        array = np.asarray(array)

        def piece(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(rows.num_rows)
            first = int(np.searchsorted(rows.held, start))
            return array[first : first + stop - start]

        shape = (rows.num_rows, *array.shape[1:])
        return jax.make_array_from_callback(shape, sharding, piece, dtype=array.dtype)

    return jax.tree.map(put, tree)


def place_owned(tree: Any, sharding: NamedSharding, rows: HostRows) -> Any:
    """Global arrays of a batch from the rows that each process owns, [len(rows.owned), ...].

    A row that several processes hold reaches the others through the devices.

    Requires: all processes call this with trees of the same structure.
    """
    if not rows.shared:
        return place_held(tree, sharding, rows)
    mesh = sharding.mesh
    (split,) = sharding.spec
    batch_axes = split if isinstance(split, tuple) else (split,)
    others = tuple(name for name in mesh.axis_names if name not in batch_axes)
    stacked = NamedSharding(mesh, PartitionSpec(others, split))
    copies = math.prod(mesh.shape[axis] for axis in others)

    def put(array: Any) -> jax.Array:
        array = np.asarray(array)
        placed: set[int] = set()  # one device gives each owned row, the others give zeros

        def piece(device: Any, index: Any) -> jax.Array:
            start, stop, _ = index[1].indices(rows.num_rows)
            part = np.zeros((1, stop - start, *array.shape[1:]), array.dtype)
            if start not in placed:
                placed.add(start)
                first, last = np.searchsorted(rows.owned, (start, stop))
                part[0, rows.owned[first:last] - start] = array[first:last]
            return jax.device_put(part, device)

        shape = (copies, rows.num_rows, *array.shape[1:])
        indices = stacked.addressable_devices_indices_map(shape)
        parts = [piece(device, index) for device, index in indices.items()]
        whole = jax.make_array_from_single_device_arrays(shape, stacked, parts, dtype=array.dtype)
        return _sum_copies(whole, sharding)

    return jax.tree.map(put, tree)


def _sum_copies(stacked: jax.Array, sharding: NamedSharding) -> jax.Array:
    def add(x: jax.Array) -> jax.Array:
        return jnp.any(x, axis=0) if x.dtype == bool else x.sum(axis=0, dtype=x.dtype)

    return jax.jit(add, out_shardings=sharding)(stacked)


# ------------------------------------------------------------------------- whole arrays


def make_global(tree: Any, shardings: Any) -> Any:
    """Global device arrays from a `tree` of numpy arrays.

    `shardings` is one Sharding, or a tree of them that is a prefix of `tree`. A process copies only
    the parts that its own devices hold.

    Requires: every process has the same values.
    """

    def put(sharding: Any, array: Any) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: array[index], dtype=array.dtype
        )

    return jax.tree.map(put, jax.tree.broadcast(shardings, tree), tree)


def fetch(tree: Any) -> Any:
    """The whole global value of every leaf as numpy arrays, on every process.

    For metrics, and for weights that a process writes to a file. A leaf is first replicated on the
    devices, so fetch large trees leaf by leaf. Of a batch, take `fetch_rows`.

    Requires: when a leaf also lies on other processes' devices, all processes call this with the
        same tree. One that only some processes hold is small, as hosts exchange it.
    """
    leaves, structure = jax.tree.flatten(tree)
    apart = [x for x in leaves if _is_apart(x)]
    exchanged = iter(_exchanged(apart) if apart else ())
    values = [next(exchanged) if _is_apart(x) else _whole(x) for x in leaves]
    return jax.tree.unflatten(structure, values)


def _whole(x: Any) -> np.ndarray:
    """The whole value of an array that lies on all processes, or on this one alone."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return _to_host(x)
    if x.is_fully_replicated:
        return _to_host(x.addressable_data(0))
    barrier("fetch")  # the collective below would wait for ever
    return multihost_utils.process_allgather(x, tiled=True)


def _exchanged(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """The values of arrays that only some processes hold: one of these sends each to all."""
    own: list[Any] = []
    for i, x in enumerate(arrays):
        assert x.nbytes <= MOST_EXCHANGED, x
        holders = processes_of(x.sharding.device_set)
        if jax.process_index() in holders:
            mesh: Any = x.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
            whole = x if x.is_fully_replicated else _replicate(mesh)(x)
            if jax.process_index() == min(holders):
                own.append([i, _to_host(whole.addressable_data(0)).tolist()])
    values = {i: value for one in gather_objects(own, "values of groups") for i, value in one}
    return [np.array(values[i], x.dtype) for i, x in enumerate(arrays)]


@lru_cache(maxsize=64)
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _is_apart(x: Any) -> bool:
    """True if some process has no device of an array that lies on a mesh."""
    on_mesh = isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)
    return on_mesh and len(processes_of(x.sharding.device_set)) < jax.process_count()


def processes_of(devices: Iterable[Any]) -> frozenset[int]:
    """The processes that hold these devices."""
    return frozenset(device.process_index for device in devices)


def _to_host(array: Any) -> np.ndarray:
    """A copy of one device's array. What comes from devices to a host passes here."""
    return np.asarray(array)


# ------------------------------------------------------------------------- small values


def gather_objects(
    value: Any, name: str = "gather", timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Every process's `value` (of JSON types), in the order of the processes.

    For small values: it passes through the coordination service, not through the devices.

    Requires: all processes call it, in the same order of calls.
    Raises: BarrierTimeout that names the processes that did not come.
    """
    client = distributed.global_state.client
    if client is None:
        return [value]
    use = f"jaxrl/{name}/{_uses[name]}"
    client.key_value_set_bytes(f"{use}/{jax.process_index()}", json.dumps(value).encode())
    barrier(name, timeout_s)
    texts = {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get_bytes(use)}
    if is_main() and _uses[name] > 1:
        # Everybody has read the values of the last use: each came to the barrier after that.
        client.key_value_delete(f"jaxrl/{name}/{_uses[name] - 2}")
    return [json.loads(texts[process]) for process in range(jax.process_count())]


def sum_over_processes(value: float, name: str = "sum") -> float:
    """The sum of every process's number. All processes must call it."""
    return sum(gather_objects(value, name))


def value_of_main(value: Any, name: str = "main") -> Any:
    """Process 0's `value` (of JSON types). All processes must call it."""
    return gather_objects(value if is_main() else None, name)[0]
