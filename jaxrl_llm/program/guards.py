"""Guards of a program while it runs, on by default: memory that suffices, no hidden copies."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax


class OutOfMemory(RuntimeError):
    """A program did not fit in a device's memory. Checkpoints are unchanged."""


@contextmanager
def memory_guard(program: str, needs_less: Sequence[str]) -> Iterator[None]:
    """Name the program that ran out of memory inside, the memory in use, and what needs less.

    `needs_less` are the settings to try, the cheapest first. Raises OutOfMemory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # A kernel that asks for too much shared memory says RESOURCE_EXHAUSTED as well.
        if not re.match(r"RESOURCE_EXHAUSTED.*out of memory", str(error), re.I | re.S):
            raise
        first_line = str(error).partition("\n")[0]
        raise OutOfMemory(
            f"{program} does not fit in the memory of a device. {first_line}{_in_use()}\n"
            f"What needs less, the cheapest first: {'; '.join(needs_less)}.\n"
            "Start again with one of these; the run goes on from its last checkpoint, if any."
        ) from None


def _in_use() -> str:
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return ""
    names = ("bytes_in_use", "bytes_limit", "largest_free_block_bytes")
    in_use, limit, piece = (stats.get(name, 0) / 2**30 for name in names)
    text = f" In use were {in_use:.1f} of {limit:.1f} GiB"
    # What a program asks for is one piece, so it may fail where the sum would fit.
    return f"{text}; the largest free piece had {piece:.1f}." if piece else f"{text}."


@contextmanager
def transfer_guard() -> Iterator[None]:
    """Refuse hidden copies: a numpy array or Python number given to a compiled program, or an
    argument on the wrong devices. Explicit jax.device_put and device_get are allowed.

    Requires: the program was traced before. Tracing makes constants, which are such copies too.
    """
    with (
        jax.transfer_guard_host_to_device("disallow"),
        jax.transfer_guard_device_to_device("disallow"),
    ):
        yield
