"""Records of which each process keeps its share.

With several processes, each checks a stripe of every source, and keeps the records of its stripe.
It reads and tokenises another record again when a batch needs it. So memory and the time to start
shrink with the number of processes, where the source can be read by row.
"""

import hashlib
import json
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np

from jaxrl_llm.distributed.multihost import sum_over_processes

_WRITTEN = (Decimal, date, time, timedelta)  # types whose text is their value
SAMPLED = 10_000  # values that a digest reads
T = TypeVar("T")
S = TypeVar("S")


class Tokens(Protocol):
    """The part of a record by which a checkpoint knows its data again."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token of the record."""
        ...

    @property
    def answer(self) -> Any:
        """Right answers, labels, or masks of tokens."""
        ...


class Share(Sequence[T]):
    """A sequence that every process can read, and of which each keeps the items of `own`."""

    own: Iterable[int]  # indices that this process keeps; each process has others

    @abstractmethod
    def _item(self, index: int) -> T:
        """The item at `index`, which is in range."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> "Share[T]": ...
    def __getitem__(self, index: int | slice) -> "T | Share[T]":
        if isinstance(index, slice):
            return Picked(self, range(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._item(index % len(self))


class Picked(Share[T]):
    """The items at `order` of another sequence; nothing is read before it is asked for."""

    def __init__(self, items: Sequence[T], order: Sequence[int]):
        self._items, self._order = items, order

    @property
    def own(self) -> list[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        kept = set(own_indices(self._items))
        return [i for i, index in enumerate(self._order) if index in kept]

    def __len__(self) -> int:
        return len(self._order)

    def _item(self, index: int) -> T:
        return self._items[self._order[index]]


class Mapped(Share[T], Generic[S, T]):
    """`function(index, item)` of each item of another sequence."""

    def __init__(self, items: Sequence[S], function: Callable[[int, S], T]):
        self._items, self._function = items, function

    @property
    def own(self) -> Iterable[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return own_indices(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def _item(self, index: int) -> T:
        return self._function(index, self._items[index])


@dataclass(frozen=True)
class Source(Generic[T]):
    """One source of a `Striped`: how its rows give records."""

    records_of: Callable[[int], list[T]]  # reads a row by its position
    counts: np.ndarray  # records that each row gives; 0 for one that was left out


class Striped(Share[T]):
    """The records of several sources, one source after the other.

    `kept` has the records of this process's stripe by index. Others are read when asked for.
    """

    def __init__(self, sources: Sequence[Source[T]], kept: Mapping[int, T]):
        self._sources, self._kept = list(sources), dict(kept)
        self._ends = [np.cumsum(source.counts) for source in sources]  # records up to each row
        sizes = [int(ends[-1]) if len(ends) else 0 for ends in self._ends]
        self._starts = [0, *np.cumsum(sizes).tolist()]

    @property
    def own(self) -> Iterable[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._kept.keys()

    def __len__(self) -> int:
        return self._starts[-1]

    def _item(self, index: int) -> T:
        if index in self._kept:
            return self._kept[index]
        number = bisect_right(self._starts, index) - 1
        within, ends = index - self._starts[number], self._ends[number]
        row = int(np.searchsorted(ends, within, side="right"))
        before = int(ends[row - 1]) if row else 0
        return self._sources[number].records_of(row)[within - before]


def own_indices(items: Sequence[Any]) -> Iterable[int]:
    """The indices that this process keeps; all of a plain list."""
    return items.own if isinstance(items, Share) else range(len(items))


def digest(items: Sequence[Tokens]) -> int:
    """A number of the tokens of all records and their order, the same on any number of processes.

    All processes must call it for a `Share`: each adds up its own records.
    """
    return _sums(items, _tokens)[0]


def digests(items: Sequence[Tokens]) -> tuple[int, ...]:
    """As `digest`, of the tokens and of the answers, with each record read once."""
    return _sums(items, _tokens, _answer)


def sampled_digest(values: Sequence[Any]) -> str:
    """16 hex digits of values of JSON's types and others, of at most SAMPLED evenly spaced ones."""
    total = hashlib.blake2b(str(len(values)).encode(), digest_size=8)
    for place in range(0, len(values), -(-len(values) // SAMPLED) or 1):
        total.update(json.dumps(values[place], skipkeys=True, default=_text).encode() + b"\0")
    return total.hexdigest()


def _sums(items: Sequence[Tokens], *contents: Callable[[Tokens], bytes]) -> tuple[int, ...]:
    sums = [0] * len(contents)
    for index in own_indices(items):
        item = items[index]
        sums = [x + _digest(index, of(item)) for x, of in zip(sums, contents, strict=True)]
    if isinstance(items, Share):
        sums = [int(sum_over_processes(x, "digest")) for x in sums]
    return tuple(x % 2**32 for x in sums)


def _tokens(item: Tokens) -> bytes:
    return np.asarray(item.token_ids, np.int32).tobytes()


def _answer(item: Tokens) -> bytes:
    return json.dumps(item.answer, skipkeys=True, default=_text).encode()


def _text(value: Any) -> str:
    """Text for a value that JSON does not have. Its `repr` may hold an address."""
    return str(value) if isinstance(value, _WRITTEN) else type(value).__name__


def _digest(index: int, content: bytes) -> int:
    salt = index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(content, digest_size=4, salt=salt).digest(), "little")
