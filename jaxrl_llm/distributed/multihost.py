"""Several processes, one program: joining, barriers with a time limit, and shared values.

Every function also works in a single process that never joined anything.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

# jax has no public barrier with a time limit: multihost_utils.sync_global_devices waits for ever.
from jax._src import distributed
from jax.experimental import multihost_utils

DEFAULT_TIMEOUT_S = 300.0

_barrier_uses: Counter[str] = Counter()


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
    timeout_s: float = DEFAULT_TIMEOUT_S,
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
    _barrier_uses[name] += 1
    try:
        client.wait_at_barrier(f"{name}#{_barrier_uses[name]}", round(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        detail = str(error)
        if "DEADLINE_EXCEEDED" not in detail:
            raise
        raise BarrierTimeout(name, timeout_s, _task_ids(detail), detail) from None


def _task_ids(message: str) -> tuple[int, ...]:
    """The process ids that the coordination service lists, one a line. It cuts long lists."""
    listed = message.partition("timed out task names:")[2].partition("\n\n")[0]
    return tuple(sorted(int(number) for number in re.findall(r"(\d+)\s*$", listed, re.MULTILINE)))


def make_global(tree: Any, shardings: Any) -> Any:
    """Global device arrays from a `tree` of numpy arrays.

    `shardings` is one Sharding, or a tree of them that is a prefix of `tree`. A process copies only
    the parts that its own devices hold.

    Requires: every process has the same values.
    """

    def put(sharding: Any, array: Any) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, jax.tree.broadcast(shardings, tree), tree)


def fetch(tree: Any) -> Any:
    """The whole global value of every leaf as numpy arrays, on every process.

    A leaf is first replicated on the devices, so fetch large trees leaf by leaf.

    Requires: when a leaf also lies on other processes' devices, all processes call this with the
        same tree.
    """

    def leaf(x: Any) -> np.ndarray:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return np.asarray(x)
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(leaf, tree)


def gather_rows(array: np.ndarray) -> np.ndarray:
    """The rows of every process's `array`, concatenated in the order of the processes.

    Requires: all processes call it, with the same shape and dtype.
    """
    if jax.process_count() == 1:
        return array
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def gather_objects(value: Any) -> list[Any]:
    """Every process's `value` (of JSON types), in the order of the processes.

    Requires: all processes call it.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = gather_rows(np.array([data.size]))
    padded = np.zeros((1, int(lengths.max())), np.uint8)
    padded[0, : data.size] = data
    rows = gather_rows(padded)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, lengths, strict=True)]
