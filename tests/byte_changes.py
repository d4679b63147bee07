"""Changed bytes of a file, and the limits within which its reader must answer."""

import resource
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

INSERTED = (b"[", b"{", b"null", b"1e999", b'"', b"9" * 5000, b"[" * 3000, b"\xff\xfe", bytes(8))
MOST_SECONDS, MOST_KILOBYTES = 5.0, 1_000_000


def changed(good: bytes, draw: Random) -> bytes:
    """Some bytes set, cut, repeated or put in."""
    out = bytearray(good)
    for _ in range(draw.choice([1, 1, 3])):
        place, other = draw.randrange(len(good)), draw.randrange(len(good))
        match draw.randrange(5):
            case 0:
                out[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                out[place : place + 1] = bytes([good[place] ^ 1 << draw.randrange(8)])
            case 2:
                del out[place : place + draw.choice([1, 8, 64, 10**6])]
            case 3:
                out[place:place] = good[other : other + draw.choice([1, 16, 200])]
            case _:
                out[place:place] = draw.choice(INSERTED)
    return bytes(out)


def refused_changes(
    file: Path, read: Callable[[], object], changes: int, change: Callable[[bytes, Random], bytes]
) -> int:
    """How many of so many changes of `file`, with a fixed seed, `read` refuses by a ValueError.

    Any other error, more than 5 s for one of them, and 1 GB more memory fail the test.
    """
    good, draw, refused, slowest = file.read_bytes(), Random(0), 0, 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(changes):
        content = change(good, draw)
        file.unlink()  # what reads the old file by a map keeps it
        file.write_bytes(content)
        start = time.perf_counter()
        try:
            read()
        except ValueError as error:
            assert str(error), number
            refused += 1
        slowest = max(slowest, time.perf_counter() - start)
        assert slowest < MOST_SECONDS, f"change {number} took {slowest:.1f} s"
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert more < MOST_KILOBYTES, f"{more} KB more memory"
    print(
        f"{file.name}: {changes} changes, {refused} refused, {slowest:.2f} s, {more / 1e3:.0f} MB"
    )
    return refused
