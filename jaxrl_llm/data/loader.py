"""Endless batches of records, in an order that grain gives, with a position for the checkpoint.

Rows are shuffled again in every epoch. A batch at the end of an epoch is filled from the next
epoch, so no row is dropped: over n epochs each row is drawn n times. A batch can therefore hold a
row twice, and always does if it is larger than the data.

grain computes batch i without reading the batches before it, so the position is one number. It does
not depend on `num_workers`, `prefetch` or the number of processes: a resumed run may change them.
Every process computes the same order, and reads only the records that its rows are made of.
"""

import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from jaxrl_llm.data.share import Picked, Tokens, digests
from jaxrl_llm.types import Prompt

NEXT_BATCH = "next_batch"  # the only entry of a position that changes
CURRICULUM = "curriculum"  # digest of the places that come first, in a run with a curriculum
_NEW_RUN = (
    "start a new run from the checkpoint's weights: --config.actor.path=CHECKPOINT and another "
    "--config.run_dir"
)

T = TypeVar("T", bound=Tokens)
B = TypeVar("B")


class Loader(Generic[T, B]):
    """An endless iterator of `collate(records)`, `batch_size` records at a time.

    Args:
        items: the records.
        collate: makes the batch, e.g. `functools.partial(collate_records, length=256, pad_id=0)`.
            It gets a sequence, whose records are read when it asks for them. It is pickled if there
            are workers.
        seed: any integer. Seed and epoch determine the shuffle.
        num_workers: processes that make batches; 0 uses a thread of this process. Processes are
            spawned, so a script needs its `if __name__ == "__main__"`.
        prefetch: batches that each worker makes ahead; 0 makes each batch when it is requested.
        unchanged: other facts, in JSON's types, that must be equal when a position is restored.
        first: places of the records that come before the first epoch: a curriculum.

    Raises:
        ValueError: no records.
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
        first: np.ndarray | None = None,
    ) -> None:
        if not items:
            raise ValueError("there are no rows to make batches from")
        self._num_items = len(items)
        self._batch_size = batch_size
        self._order = {"seed": seed % 2**32, "shuffle": shuffle}
        self._unchanged = dict(unchanged or {})
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._digests: dict[str, int] | None = None
        self._items = items
        import grain  # takes 0.3 CPU-seconds to import

        order = grain.MapDataset.source(range(len(items))).seed(self._order["seed"])
        order = order.shuffle() if shuffle else order
        order = order.repeat()
        if first is not None:
            order = _Then(first, order)
            self._unchanged[CURRICULUM] = zlib.crc32(first.astype("<i8").tobytes())
        batches = _Batches(items, order, batch_size, collate)
        self._batches: Any = grain.MapDataset.source(batches)
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
        """Number of complete passes over the data before the next batch's first row."""
        return self._next_batch * self._batch_size // self._num_items

    def get_state(self, pending: int = 0) -> dict[str, Any]:
        """The position, in JSON's types, and the facts that must be equal to restore it.

        From there the last `pending` batches come again.
        """
        return {
            NEXT_BATCH: self._next_batch - pending,
            "batch_size": self._batch_size,
            "num_items": self._num_items,
            **self._data_digests(),
            **self._order,
            **self._unchanged,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue with the batch that came next when `get_state` was called.

        Raises:
            ValueError: the state belongs to other data, another order or another batch size.
        """
        check_position(state, self.get_state())
        if CURRICULUM in state and CURRICULUM not in self._unchanged:
            raise ValueError(
                "the checkpoint's run has a curriculum and this one none: resume with its "
                f"config.data.curriculum, or {_NEW_RUN}"
            )
        self.close()
        self._next_batch = int(state[NEXT_BATCH])

    def close(self) -> None:
        """Stop workers and threads. The next batch starts them again."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _open(self) -> Any:
        import grain

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

    def _data_digests(self) -> dict[str, int]:
        if self._digests is None:
            self._digests = digests_of(self._items)
        return self._digests


class _Then:
    """The places `first`, and the endless order after them."""

    def __init__(self, first: np.ndarray, order: Any):
        self._first, self._order = first, order

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:
        before = len(self._first)
        return int(self._first[index]) if index < before else self._order[index - before]


class _Batches(Generic[T, B]):
    """Batch i of the records at `order`, which has no end. A source for grain."""

    def __init__(
        self,
        items: Sequence[T],
        order: Any,  # grain's map from an index to a place in the data
        batch_size: int,
        collate: Callable[[Sequence[T]], B],
    ):
        self._items, self._order = items, order
        self._batch_size, self._collate = batch_size, collate

    def __len__(self) -> int:
        return sys.maxsize // self._batch_size

    def __getitem__(self, index: int) -> B:
        first = index * self._batch_size
        places = Picked(self._order, range(first, first + self._batch_size))
        return self._collate(Picked(self._items, places))


class PromptLoader(Loader[Prompt, list[Prompt]]):
    """Endless lists of `batch_size` prompts. Arguments as for `Loader`.

    `groups` are the places in each batch that are read, by default all. There are no workers: the
    prompts that this process keeps are tokenised already, and a process could only copy them.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        prefetch: int = 2,
        groups: np.ndarray | None = None,
        first: np.ndarray | None = None,
    ) -> None:
        super().__init__(
            prompts,
            list if groups is None else partial(_at, places=groups.tolist()),
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            prefetch=prefetch,
            first=first,
        )


def _at(prompts: Sequence[Prompt], places: list[int]) -> list[Prompt]:
    return [prompts[place] for place in places]


def digests_of(items: Sequence[Tokens]) -> dict[str, int]:
    """Digests of the data that must be equal to restore a position in it."""
    return dict(zip(("items_digest", "answers_digest"), digests(items), strict=True))


def check_position(
    state: Mapping[str, Any], here: Mapping[str, Any], also: Collection[str] = ()
) -> None:
    """Refuse a loader's `state` that does not belong to the loader of this run.

    Raises:
        ValueError: `state` lacks a name of `here` or `also`, or has another value than `here` for
            anything but the batch number.
    """
    for name in (*here, *also):
        if name not in state:
            raise ValueError(
                f"the data position in the checkpoint lacks {name!r}: another loader wrote it. "
                "Resume with the config.data.priority of the checkpoint's run (null is none) and "
                f"its config.precompute_reference, or {_NEW_RUN}"
            )
    for name, value in here.items():
        if name != NEXT_BATCH and state[name] != value:
            raise ValueError(
                f"the checkpoint's position is in other data: its {name} is {state[name]}, here "
                f"it is {value}. Resume with the same data, seed and batch size, or {_NEW_RUN}"
            )


def _accept_flag_defaults() -> None:
    """Mark absl's flags as parsed: grain's workers read them, and only absl.app parses them."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
