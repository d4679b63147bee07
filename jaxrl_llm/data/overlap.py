"""Held-out rows that are training rows too."""

import logging
from collections.abc import Iterable, Sequence

from jaxrl_llm.data.collating import OfflineRecord
from jaxrl_llm.types import Prompt

log = logging.getLogger(__name__)

Tokens = tuple[int, ...]


def say_overlap(
    train: Iterable[Prompt | OfflineRecord], held_out: Sequence[Prompt | OfflineRecord]
) -> None:
    """A log line where held-out rows have the tokens of training rows. Tasks have none.

    Of a record with several rows, such as a pair, the first one counts.
    """
    places = overlap(map(_tokens, train), list(map(_tokens, held_out)))
    if not places:
        return
    first = held_out[places[0]]
    source = first if isinstance(first, Prompt) else next(iter(first.rows.values()))
    log.warning(
        "%d of %d held-out rows are training rows too, the first of them %s row %d: a model that "
        "remembers these rows looks better than it is. Give other rows as config.data.val_files",
        len(places),
        len(held_out),
        source.data_source,
        source.row,
    )


def overlap(train: Iterable[Tokens], held_out: Sequence[Tokens]) -> list[int]:
    """The places in `held_out` of rows that are in `train` too."""
    both = set(held_out).intersection(train)
    return [place for place, tokens in enumerate(held_out) if tokens in both]


def _tokens(record: Prompt | OfflineRecord) -> Tokens:
    if isinstance(record, Prompt):
        return record.token_ids
    return next(iter(record.rows.values())).token_ids
