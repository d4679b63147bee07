"""Endless batches of records, by grain, with a position that fits in a checkpoint.

Rows are reshuffled every epoch. A batch that reaches the end of an epoch is filled from the next
one, so no row is ever dropped: over n epochs each row is drawn n times. A row can therefore stand
twice in one batch, once from each epoch; always so where a batch is larger than the data.

grain finds batch i of this stream without reading those before it, so the position is one number.
It does not depend on `num_workers` or `prefetch`, which a resumed run may change.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grain
import numpy as np
from absl import flags

from jaxrl_llm.types import Prompt


class Tokens(Protocol):
    """What the loader must know of a record, to tell whether a checkpoint is of the same data."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token of the record."""
        ...


NEXT_BATCH = "next_batch"  # the one entry of a position that moves

T = TypeVar("T", bound=Tokens)
B = TypeVar("B")


class Loader(Generic[T, B]):
    """An endless iterator of `collate(records)`, `batch_size` records at a time.

    Args:
        items: the records, held in memory.
        collate: makes the batch, e.g. `functools.partial(collate_records, length=256, pad_id=0)`;
            with `num_workers` it is pickled.
        seed: of the shuffle, with the epoch; any integer.
        num_workers: processes that make batches; 0 makes them in a thread of this process. They
            start anew (spawn), so a script needs its `if __name__ == "__main__"`.
        prefetch: batches made ahead, for each worker; 0 makes each when it is asked for.
        unchanged: more that a position is only good with, in JSON's types.

    Raises:
        ValueError: no records, or a batch size below 1.
    """

    def __init__(
        self,
        items: Sequence[T],
        collate: Callable[[Sequence[T]], B],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        num_workers: int = 0,
        prefetch: int = 2,
        unchanged: Mapping[str, Any] | None = None,
    ) -> None:
        if not items:
            raise ValueError("there are no rows to make batches from")
        if batch_size < 1 or num_workers < 0 or prefetch < 0:
            raise ValueError(
                f"batch_size={batch_size} must be at least 1, num_workers={num_workers} and "
                f"prefetch={prefetch} at least 0"
            )
        self._num_items = len(items)
        self._batch_size = batch_size
        self._order = {"seed": seed % 2**32, "shuffle": shuffle}
        self._unchanged = dict(unchanged or {})
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._fingerprint: int | None = None
        self._items = items
        dataset = grain.MapDataset.source(items).seed(self._order["seed"])
        dataset = dataset.shuffle() if shuffle else dataset
        self._batches = dataset.repeat().batch(batch_size, batch_fn=collate)
        self._next_batch = 0
        self._iterator: Any = None

    def __iter__(self) -> Iterator[B]:
        return self

    def __next__(self) -> B:
        if self._iterator is None:
            self._iterator = self._open()
        batch = next(self._iterator)
        self._next_batch += 1
        return batch

    @property
    def epoch(self) -> int:
        """Whole passes over the data that lie behind the next batch's first row."""
        return self._next_batch * self._batch_size // self._num_items

    def get_state(self) -> dict[str, Any]:
        """The position, in JSON's types, and what must be unchanged for it to mean the same."""
        return {
            NEXT_BATCH: self._next_batch,
            "batch_size": self._batch_size,
            "num_items": self._num_items,
            "items_crc32": self._items_crc32(),
            **self._order,
            **self._unchanged,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues with the batch that `get_state` had ahead of it.

        Raises:
            ValueError: the state is of other data, another order or another batch size.
        """
        check_position(state, self.get_state())
        self.close()
        self._next_batch = int(state[NEXT_BATCH])

    def close(self) -> None:
        """Stops workers and threads; the next batch starts them again."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _open(self) -> Any:
        ahead = self._batches.slice(slice(self._next_batch, None))
        threads = 1 if self._prefetch and not self._num_workers else 0
        dataset = ahead.to_iter_dataset(
            grain.ReadOptions(num_threads=threads, prefetch_buffer_size=self._prefetch * threads)
        )
        if self._num_workers:
            _accept_flag_defaults()
            dataset = dataset.mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=self._num_workers, per_worker_buffer_size=max(1, self._prefetch)
                )
            )
        return iter(dataset)

    def _items_crc32(self) -> int:
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._items)
        return self._fingerprint


class PromptLoader(Loader[Prompt, list[Prompt]]):
    """Endless lists of `batch_size` prompts; arguments as `Loader`."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        num_workers: int = 0,
        prefetch: int = 2,
    ) -> None:
        super().__init__(
            prompts,
            list,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            num_workers=num_workers,
            prefetch=prefetch,
        )


def fingerprint(items: Sequence[Tokens]) -> int:
    """CRC-32 of the tokens of all records, in their order."""
    crc = 0
    for item in items:
        crc = zlib.crc32(np.asarray(item.token_ids, np.int32).tobytes(), crc)
    return crc


def check_position(
    state: Mapping[str, Any], here: Mapping[str, Any], also: Collection[str] = ()
) -> None:
    """Refuse a loader's `state` that does not fit the loader of this run.

    It must have every name of `here` and of `also`, and but for the batch number the values of
    `here`.

    Raises:
        ValueError: what differs, and what would work.
    """
    for name in (*here, *also):
        if name not in state:
            raise ValueError(
                f"the data position in the checkpoint lacks {name!r}: another loader wrote it. "
                "Resume with the config.data.priority of the checkpoint's run (null is none) and "
                "its config.precompute_reference, by the version that wrote it if it had the same, "
                "or start a new run from the checkpoint's weights"
            )
    for name, value in here.items():
        if name != NEXT_BATCH and state[name] != value:
            raise ValueError(
                f"the checkpoint stands in other data: its {name} is {state[name]}, here it is "
                f"{value}. Resume with the same data, seed and batch size, or start a new "
                "run from the checkpoint's weights"
            )


def _accept_flag_defaults() -> None:
    """grain's workers read absl flags, which only absl.app parses."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
