"""Keeps the memory that a CPU program frees, for the next program.

XLA takes a program's temporary arrays, hundreds of MB, from malloc and gives them back after it.
glibc hands such pieces to the kernel at once, which clears every page again for the next program.
"""

import ctypes
import os

# Parameters of glibc's mallopt, from malloc.h.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX, ARENA_MAX = -1, -2, -4, -8
KEPT_BYTES = 2**31 - 1  # free memory at the end of the heap that stays; the largest value
GROWTH_BYTES = 2**26  # by which the heap grows
MOST_CORES = 8  # threads of more would wait for the one heap


def keep_freed_memory() -> None:
    """Have glibc keep freed memory, in one heap. With another C library or many cores, do nothing.

    Requires: XLA has no threads yet. A thread that has a heap of its own would go on with it, and
    its heap cannot hold large pieces.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or len(os.sched_getaffinity(0)) > MOST_CORES:
        return
    mallopt(ARENA_MAX, 1)
    mallopt(MMAP_MAX, 0)
    mallopt(TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(TOP_PAD, GROWTH_BYTES)
