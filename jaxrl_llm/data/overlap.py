"""Held-out rows that are training rows too."""

import logging
from collections.abc import Iterable, Sequence

from jaxrl_llm.data.collating import OfflineRecord
from jaxrl_llm.types import Prompt

log = logging.getLogger(__name__)
COMPARED = 8  # tokens in the middle of a row, by which most rows differ

Tokens = tuple[int, ...]


def say_overlap(
    train: Iterable[Prompt | OfflineRecord], held_out: Sequence[Prompt | OfflineRecord]
) -> None:
    """A log line where held-out rows have the tokens of training rows. Tasks have none.

    Of a record with several rows, such as a pair, the first one counts.
    """
    found = overlap(map(_tokens, train), list(map(_tokens, held_out)))
    if not found:
        return
    first = held_out[found[0]]
    source = first if isinstance(first, Prompt) else next(iter(first.rows.values()))
    log.warning(
        "%d of %d held-out rows are training rows too, the first of them %s row %d: a model that "
        "remembers these rows looks better than it is. Give other rows as config.data.val_files",
        len(found),
        len(held_out),
        source.data_source,
        source.row,
    )


def overlap(train: Iterable[Tokens], held_out: Sequence[Tokens]) -> list[int]:
    """The places in `held_out` of what is in `train` too."""
    by_middle: dict[Tokens, set[Tokens]] = {}
    for tokens in held_out:
        by_middle.setdefault(_middle(tokens), set()).add(tokens)
    nothing: set[Tokens] = set()
    both = {tokens for tokens in train if tokens in by_middle.get(_middle(tokens), nothing)}
    return [place for place, tokens in enumerate(held_out) if tokens in both]


def _middle(tokens: Tokens) -> Tokens:
    """A few tokens that tell most rows apart. The hash of a long row would take much longer."""
    start = max(len(tokens) - COMPARED, 0) // 2
    return (len(tokens), *tokens[start : start + COMPARED])


def _tokens(record: Prompt | OfflineRecord) -> Tokens:
    if isinstance(record, Prompt):
        return record.token_ids
    return next(iter(record.rows.values())).token_ids
