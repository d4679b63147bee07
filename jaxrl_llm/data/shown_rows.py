"""The first training rows as tokens, for a reader: `jaxrl train --dry_run --show=3`."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice

from jaxrl_llm.data.dataset import Sources, read_sources, source_format
from jaxrl_llm.data.formats import prompt_of, seen_pieces
from jaxrl_llm.data.sources import BadRow, RawRow
from jaxrl_llm.images import images_of
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.turns import Piece

BETWEEN = "\u00b7"  # stands between tokens


def shown_rows(
    sources: Sources, purpose: str, tokenizer: Tokenizer, count: int, *, keep_thinking: bool
) -> Iterator[str]:
    """Lines about the first rows of each source: where each piece comes from, what is learned.

    A template that drops thinking gives several rows of tokens for one row of data.
    """
    yield f"tokens of the first rows; {BETWEEN} stands between tokens, [learned] in brackets"
    for name, rows in read_sources(sources, purpose):
        first = list(islice(rows.read(0, len(rows)), count))
        good = [row for row in first if isinstance(row, RawRow)]
        kind = source_format(name, good, purpose, sources.keys) if good else "unknown"
        yield f"{name}, rows of the format {kind}"
        for row in first:
            try:
                if isinstance(row, BadRow):
                    raise ValueError(row.reason)
                for pieces in _rows(row, kind, purpose, tokenizer, keep_thinking):
                    yield from _lines(row, pieces, tokenizer)
            except ValueError as error:
                yield f"  row {row.row} is bad: {error}"
    ends = tokenizer.stop_origins.items()
    yield "ends of a response: " + ", ".join(
        f"{_text(tokenizer, [i])} ({i}, {origin})" for i, origin in ends
    )


def _rows(
    row: RawRow, kind: str, purpose: str, tokenizer: Tokenizer, keep_thinking: bool
) -> list[list[Piece]]:
    if purpose != "prompts":
        return seen_pieces(row.data, kind, tokenizer, keep_thinking=keep_thinking)
    prompt = prompt_of(row.data, kind, tokenizer, data_source="", index=row.row)
    origin = "prompt" if prompt.messages is None else "chat template"
    return [[Piece(prompt.token_ids, False, origin)]]


def _lines(row: RawRow, pieces: list[Piece], tokenizer: Tokenizer) -> Iterator[str]:
    total = sum(len(piece.ids) for piece in pieces)
    learned = sum(len(piece.ids) for piece in pieces if piece.learned)
    yield f"  row {row.row}: {total} tokens, {learned} learned"
    for piece in pieces:
        text = _text(tokenizer, piece.ids)
        yield f"    {piece.origin}: " + (f"[{text}]" if piece.learned else text)


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    shown, seen = [], images_of(tokenizer)
    for is_image, run in groupby(ids, lambda i: seen is not None and i == seen.token_id):
        if is_image:
            shown.append(f"<image: {len(list(run))} tokens>")
        else:
            shown += [repr(tokenizer.decode([i], skip_special=False))[1:-1] for i in run]
    return BETWEEN.join(shown)
