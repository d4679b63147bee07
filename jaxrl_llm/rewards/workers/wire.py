"""Messages between the trainer and a reward worker: msgpack behind a length. Never pickle.

A request carries data of the user's rows, so it keeps Python's common types. An answer comes from
a process in which a model's text was graded: it has plain values only, and its length is limited.
"""

import datetime
import socket
import struct
import time
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgpack

LENGTH = struct.Struct("!Q")
MAX_ANSWER = 64 * 2**20  # bytes of one answer
MAX_ENTRIES = 2**20  # of one list or map in an answer: a header alone must not take memory

# Types beyond msgpack's own. Each is made again by a constructor that runs no code of the sender.
_TUPLE, _INT, _DATETIME, _DATE, _TIME, _TIMEDELTA, _DECIMAL, _SET = range(1, 9)


class Malformed(ValueError):
    """A message that this protocol does not allow; the text says what it is."""


# ------------------------------------------------------------------------- values


def pack_request(value: Any) -> bytes:
    """A request as bytes. Raises TypeError for a type that cannot be sent."""
    return msgpack.Packer(
        default=_extended, strict_types=True, unicode_errors="surrogatepass"
    ).pack(value)


def unpack_request(message: bytes) -> Any:
    """The value of `pack_request`; arrays of numpy have become lists."""
    return msgpack.unpackb(
        message, ext_hook=_restored, strict_map_key=False, unicode_errors="surrogatepass"
    )


def pack_answer(value: Any) -> bytes:
    """An answer as bytes. Requires: None, bools, ints, finite floats, text, lists and dicts."""
    return msgpack.Packer(unicode_errors="surrogatepass").pack(value)


def unpack_answer(message: bytes) -> Any:
    """Plain values, tuples as lists. Raises Malformed."""
    try:
        return msgpack.unpackb(
            message,
            unicode_errors="surrogatepass",
            max_array_len=MAX_ENTRIES,
            max_map_len=MAX_ENTRIES,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise Malformed(f"a message that is not msgpack ({type(error).__name__})") from None


def _extended(value: Any) -> Any:
    """What msgpack packs in place of a value of another type, or of a subclass of its own."""
    if hasattr(value, "tolist"):  # scalars and arrays of numpy, and what behaves like them
        return value.tolist()
    for kind, (code, content) in _CODES.items():
        if isinstance(value, kind):
            return msgpack.ExtType(code, pack_request(content(value)))
    if isinstance(value, str):
        return str.__str__(value)  # str(value) is the name of an enum's member
    subclasses_of: tuple[Any, ...] = (float, bytes, list)
    for kind in subclasses_of:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to a reward worker")


_CODES: dict[type, tuple[int, Any]] = {
    tuple: (_TUPLE, list),
    int: (_INT, hex),  # one beyond 64 bits
    datetime.datetime: (_DATETIME, datetime.datetime.isoformat),
    datetime.date: (_DATE, datetime.date.isoformat),
    datetime.time: (_TIME, datetime.time.isoformat),
    datetime.timedelta: (_TIMEDELTA, lambda x: [x.days, x.seconds, x.microseconds]),
    Decimal: (_DECIMAL, str),
    set: (_SET, list),
    frozenset: (_SET, list),
}
_MAKERS: dict[int, Any] = {
    _TUPLE: tuple,
    _INT: lambda text: int(text, 16),
    _DATETIME: datetime.datetime.fromisoformat,
    _DATE: datetime.date.fromisoformat,
    _TIME: datetime.time.fromisoformat,
    _TIMEDELTA: lambda parts: datetime.timedelta(*parts),
    _DECIMAL: Decimal,
    _SET: set,
}


def _restored(code: int, content: bytes) -> Any:
    return _MAKERS[code](unpack_request(content))


# ------------------------------------------------------------------------- transport


class Channel:
    """One end of a socket that carries whole messages. For one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def send(self, message: bytes, limit: float | None = None) -> None:
        """Send a message within `limit` seconds. Raises OSError: TimeoutError, BrokenPipeError."""
        self._socket.settimeout(limit)
        self._socket.sendall(LENGTH.pack(len(message)) + message)

    def receive(self, limit: float | None = None, maximum: int | None = None) -> bytes:
        """The next message, complete within `limit` seconds.

        Raises TimeoutError, EOFError when the other end is closed, and Malformed when the message
        is longer than `maximum` bytes.
        """
        deadline = None if limit is None else time.monotonic() + limit
        self._fill(LENGTH.size, deadline)
        (length,) = LENGTH.unpack_from(self._buffer)
        if maximum is not None and length > maximum:
            raise Malformed(f"a message of {length} bytes; at most {maximum} are taken")
        self._fill(LENGTH.size + length, deadline)
        message = bytes(memoryview(self._buffer)[LENGTH.size : LENGTH.size + length])
        del self._buffer[: LENGTH.size + length]
        return message

    def _fill(self, size: int, deadline: float | None) -> None:
        """Read until the buffer has `size` bytes. Python's own timeout would count each part."""
        while len(self._buffer) < size:
            if deadline is not None:
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            missing = size - len(self._buffer)
            try:
                part = self._socket.recv(max(2**16, min(missing, 2**20)))
            except ConnectionResetError:
                raise EOFError from None
            if not part:
                raise EOFError
            self._buffer += part

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
