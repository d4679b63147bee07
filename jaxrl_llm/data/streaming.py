"""Records that are read and tokenised when a batch needs them, so that memory stays flat.

Only the first rows of each source are checked before the first step. A later row that is bad or too
long is replaced by the next good one. The rows alone decide it, so a resumed run finds the same.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import jax

from jaxrl_llm.data.formats import Overlong
from jaxrl_llm.data.share import Share
from jaxrl_llm.data.sources import BadRow, RawRow, Rows

T = TypeVar("T")
CHECKED_ROWS = 1000  # rows of each source that are checked before the first step
DIGESTED = 256  # records that stand for all in the digest of a checkpoint
MOST_SKIPPED = 1000  # bad rows one after the other
MOST_DECODED = 16_000_000  # bytes that one row may decode: about 20 ms
SEVERAL = (
    "config.data.streaming: a row of this data gives several records, and streaming needs one a "
    "row; set --config.data.streaming=false, or for conversations --config.data.keep_thinking=true"
)
log = logging.getLogger(__name__)


def check_groups(name: str, rows: Rows) -> None:
    """ValueError for a file of which a row in random order costs too much."""
    if rows.bytes_of_one > MOST_DECODED:
        raise ValueError(
            f"config.data.streaming: {name} has row groups of up to {rows.bytes_of_one / 1e6:.0f} "
            f"MB, and a shuffled row decodes its whole group; at most {MOST_DECODED / 1e6:.0f} MB "
            "work. Write it with pyarrow.parquet.write_table(table, FILE, row_group_size=100) or "
            "as an arrow stream, or set --config.data.shuffle=false"
        )


@dataclass(frozen=True)
class FirstRows(Rows):
    """The first rows of a source, for the check before the first step."""

    rows: Rows

    def __len__(self) -> int:
        return min(len(self.rows), CHECKED_ROWS)

    def read(self, start: int, stop: int) -> Iterator[RawRow | BadRow]:
        return self.rows.read(start, min(stop, len(self)))


@dataclass(frozen=True)
class StreamedSource:
    """One source, and how its rows become records."""

    rows: Rows
    records_of: Callable[[RawRow], Sequence[Any]]  # raises ValueError or Overlong


@dataclass
class Skipped:
    """Counts of rows that this process read and set aside."""

    max_bad_fraction: float
    filter_overlong: bool
    set_aside: Callable[[BadRow], None]  # writes it to the list of bad rows
    read: int = 0
    bad: int = 0

    def skip(self, row: BadRow) -> None:
        """Set a bad row aside. ValueError where there are more than the run allows."""
        self.bad += 1
        if self.bad > self.max_bad_fraction * max(self.read, CHECKED_ROWS):
            raise ValueError(
                f"{row.source} row {row.row}: {row.reason}\nIt is bad row {self.bad} of "
                f"{self.read} that were read, more than config.data.max_bad_fraction="
                f"{self.max_bad_fraction} allows"
            )
        log.warning("A bad row is left out: %s row %d: %s", row.source, row.row, row.reason)
        self.set_aside(row)


class Streamed(Share[T]):
    """The records of sources one after the other, each read when it is asked for.

    Record i belongs to row i, or to the next good row after it.
    """

    def __init__(self, sources: Sequence[StreamedSource], skipped: Skipped):
        self._sources, self._skipped = list(sources), skipped
        self._ends = list(accumulate(len(source.rows) for source in sources))

    @property
    def own(self) -> Iterable[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Indices of the sample that this process digests: evenly spaced, not all."""
        every = -(-len(self) // DIGESTED)
        sample = range(0, len(self), every)
        return sample[jax.process_index() :: jax.process_count()]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _item(self, index: int) -> T:
        most = min(MOST_SKIPPED, len(self))
        for further in range(most):
            records = self._records((index + further) % len(self))
            if len(records) > 1:
                raise ValueError(SEVERAL)
            if records:
                return records[0]
        raise ValueError(f"{most} rows one after the other are bad or too long")

    def _records(self, index: int) -> Sequence[T]:
        """The record of a row; none where it is left out."""
        number = bisect_right(self._ends, index)
        source = self._sources[number]
        row = source.rows.one(index - (self._ends[number - 1] if number else 0))
        self._skipped.read += 1
        if isinstance(row, RawRow):
            try:
                return source.records_of(row)
            except Overlong as error:
                if not self._skipped.filter_overlong:
                    raise ValueError(f"{row.source} row {row.row}: {error}") from None
                return ()
            except ValueError as error:
                row = BadRow(row.source, row.row, str(error))
        self._skipped.skip(row)
        return ()
