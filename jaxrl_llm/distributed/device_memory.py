"""The memory of the devices of this process."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxrl_llm.distributed.hardware import filled_memory, known_name


def known_kind() -> str | None:
    """The kind of the devices here, if it has a data sheet: a key of `hardware.MEMORY`."""
    return known_name(jax.local_devices()[0].device_kind)


def memory_limit(devices: Sequence[Any] = ()) -> int:
    """The least bytes that jax may use of a device, by default of all here.

    It is 0 where jax knows no limit, as on a CPU.
    """
    stats = (device.memory_stats() or {} for device in devices or jax.local_devices())
    return min(each.get("bytes_limit") or 0 for each in stats)


def free_memory(held: float) -> float:
    """Bytes of a device here that may be filled next to `held` ones; 0 where no limit is known."""
    limit = memory_limit()
    return max(filled_memory(known_kind(), limit) - held, 1.0) if limit else 0.0
