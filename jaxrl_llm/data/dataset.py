"""Whole data sets of prompts, supervised examples or preference pairs, with bad rows set aside.

Rows are read and tokenised once, before the first step: a bad row is found then, not hours later.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from jaxrl_llm.config import TaskConfig
from jaxrl_llm.data.formats import (
    SERVES,
    TRUNCATIONS,
    LabelledExample,
    Overlong,
    PreferencePair,
    TokenExample,
    detect_format,
    example_of,
    kept_positions,
    pair_of,
    prompt_of,
    rated_of,
    unpaired_of,
)
from jaxrl_llm.data.sources import BadRow, RawRow, custom_rows, resolve_files
from jaxrl_llm.data.tasks import problem_space, task_pairs, task_ratings, task_rows
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import Prompt

T = TypeVar("T")
DETECTION_ROWS = 100  # rows of a source whose majority tells its format
SHOWN_REASONS = 5


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where rows come from; files come first, then tasks, in order.

    With `dataset_class` ("module:Class" or "file.py:Class") the files are handed to that class
    instead of being read here.
    """

    files: tuple[str, ...] = ()
    tasks: tuple[TaskConfig, ...] = ()
    split: str = "train"  # of the tasks: train | held_out
    prompt_style: str = "plain"  # of the tasks: plain | chat
    dataset_class: str = ""


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[T]):
    """The records of a data set and what became of the other rows."""

    items: list[T]
    num_rows: int  # read, bad and overlong ones included
    bad_rows: list[BadRow]
    num_overlong: int  # left out by filter_overlong
    formats: dict[str, str]  # source -> the format that was detected


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """What becomes of rows that are too long or bad. ValueError for values that make no sense."""

    max_length: int  # tokens; of a prompt, or of prompt and completion together
    truncation: str = "error"  # of longer rows: error | left | right | middle
    filter_overlong: bool = False  # leave longer rows out instead, and count them
    max_bad_fraction: float = 0.0  # share of rows that may be set aside
    bad_rows_file: str | Path | None = None  # JSON lines; each bad row is added once

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"the length limit {self.max_length} must be at least 1 token")
        if self.truncation not in TRUNCATIONS:
            raise ValueError(
                f"truncation={self.truncation!r} must be one of {', '.join(TRUNCATIONS)}"
            )
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"max_bad_fraction={self.max_bad_fraction} must be between 0 and 1")


def load_prompts(sources: Sources, tokenizer: Tokenizer, rules: RowRules) -> Loaded[Prompt]:
    """Prompts for RL and validation. Text and messages of a truncated prompt stay whole.

    Raises:
        ValueError: too many bad rows, nothing left, an unknown format, an overlong prompt under
            truncation="error", or sources that do not exist.
    """
    return _load(sources, "prompts", _alone(prompt_of, tokenizer), _fit_prompt, rules)


def load_examples(sources: Sources, tokenizer: Tokenizer, rules: RowRules) -> Loaded[TokenExample]:
    """Rows for supervised training; one left without a token to learn from is a bad row.

    Raises ValueError as `load_prompts` does.
    """
    return _load(sources, "examples", _alone(example_of, tokenizer), _fit_example, rules)


def load_preferences(
    sources: Sources, tokenizer: Tokenizer, rules: RowRules
) -> Loaded[PreferencePair]:
    """Preference pairs; the length limit holds for each of the two rows of a pair.

    Raises ValueError as `load_prompts` does.
    """
    return _load(sources, "preferences", _alone(pair_of, tokenizer), _fit_pair, rules)


def load_unpaired(
    sources: Sources, tokenizer: Tokenizer, rules: RowRules
) -> Loaded[LabelledExample]:
    """Completions labelled good (1) or bad (0); pairs are taken apart.

    Raises ValueError as `load_prompts` does.
    """
    convert = partial(unpaired_of, tokenizer=tokenizer)
    return _load(sources, "unpaired", convert, _fit_labelled, rules)


def load_ratings(
    sources: Sources, tokenizer: Tokenizer, rules: RowRules
) -> Loaded[LabelledExample]:
    """Completions with a rating each. Raises ValueError as `load_prompts` does."""
    convert = partial(rated_of, tokenizer=tokenizer)
    return _load(sources, "ratings", convert, _fit_labelled, rules)


def _alone(convert: Callable[..., T], tokenizer: Tokenizer) -> Callable[..., list[T]]:
    """A converter of rows that give one record each, as one of rows that may give several."""
    return lambda *row, **named: [convert(*row, tokenizer=tokenizer, **named)]


def _load(
    sources: Sources,
    purpose: str,
    convert: Callable[..., list[T]],
    fit: Callable[[T, int, str], T],
    rules: RowRules,
) -> Loaded[T]:
    truncation = "error" if rules.filter_overlong else rules.truncation
    items: list[T] = []
    bad: list[BadRow] = []
    formats: dict[str, str] = {}
    num_rows = num_overlong = 0
    for name, rows in _read(sources, purpose):
        num_rows += len(rows)
        bad.extend(row for row in rows if isinstance(row, BadRow))
        good = [row for row in rows if isinstance(row, RawRow)]
        if good:
            formats[name] = _source_format(name, good, purpose)
        for row in good:
            try:
                found = convert(
                    row.data, formats[name], data_source=_default_source(name), index=row.row
                )
                items += [fit(item, rules.max_length, truncation) for item in found]
            except Overlong as error:  # the limit is the user's: such a row is not bad
                if not rules.filter_overlong:
                    raise ValueError(f"{row.source} row {row.row}: {error}") from None
                num_overlong += 1
            except ValueError as error:
                bad.append(BadRow(row.source, row.row, str(error)))
    if rules.bad_rows_file is not None:
        _set_aside(bad, Path(rules.bad_rows_file))
    _check_bad(bad, num_rows, rules)
    if not items:
        raise ValueError(
            f"no rows are left of {num_rows} ({num_overlong} of them overlong): check the files "
            "and tasks, and the length limit"
        )
    return Loaded(
        items=items, num_rows=num_rows, bad_rows=bad, num_overlong=num_overlong, formats=formats
    )


def _read(sources: Sources, purpose: str) -> Iterator[tuple[str, list[RawRow | BadRow]]]:
    """(name, rows) of each source. Names and settings are checked before any file is read."""
    if not sources.files and not sources.tasks and not sources.dataset_class:
        raise ValueError("no data: give files or tasks")
    spaces = [problem_space(task.name, task.settings) for task in sources.tasks]
    if sources.dataset_class:
        yield sources.dataset_class, list(custom_rows(sources.dataset_class, sources.files))
    else:
        for file in resolve_files(sources.files):  # finds every file before the first is read
            yield file.path, list(file.rows())
    paired = {"preferences": task_pairs, "unpaired": task_pairs, "ratings": task_ratings}
    rows_of = paired.get(purpose, task_rows)
    for task, space in zip(sources.tasks, spaces, strict=True):
        rows = rows_of(
            task.name,
            split=sources.split,
            size=task.size,
            prompt_style=sources.prompt_style,
            settings=task.settings,
        )
        yield space.name, [RawRow(space.name, i, row) for i, row in enumerate(rows)]


def _default_source(name: str) -> str:
    """The data_source of rows that name none: the file's name without folder and ending."""
    return Path(name.rpartition(":")[2]).stem


def _source_format(name: str, rows: Sequence[RawRow], purpose: str) -> str:
    """The format of most of the first rows; ValueError where it does not serve the purpose."""
    votes = Counter(detect_format(row.data) for row in rows[:DETECTION_ROWS])
    kind = max(votes, key=lambda found: (found is not None, votes[found]))
    wanted = [other for other, purposes in SERVES.items() if purpose in purposes]
    if kind is None:
        raise ValueError(
            f"{name} holds no rows of a known format: its columns are "
            f"{', '.join(map(repr, rows[0].data)) or 'none'}; {purpose} are read from "
            f"{', '.join(wanted)} rows (docs/data.md lists their columns)"
        )
    if purpose not in SERVES[kind]:
        raise ValueError(
            f"{name} holds {kind} rows, which give no {purpose}: those are read from "
            f"{', '.join(wanted)} rows (docs/data.md lists their columns)"
        )
    return kind


def _set_aside(bad: Sequence[BadRow], file: Path) -> None:
    """Adds the rows that the file does not name yet, so that a resumed run repeats none."""
    known = set(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else set()
    lines = dict.fromkeys(_line(row) for row in bad)
    new = [line for line in lines if line not in known]
    if new:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in new)


def _line(row: BadRow) -> str:
    record: dict[str, Any] = {"source": row.source, "row": row.row, "reason": row.reason}
    return json.dumps(record)  # ASCII: a reason may quote what is not valid Unicode


def _check_bad(bad: Sequence[BadRow], num_rows: int, rules: RowRules) -> None:
    if len(bad) <= rules.max_bad_fraction * num_rows:
        return
    shown = "".join(f"\n  {row.source} row {row.row}: {row.reason}" for row in bad[:SHOWN_REASONS])
    more = f"\n  and {len(bad) - SHOWN_REASONS} more" if len(bad) > SHOWN_REASONS else ""
    where = f" (all are listed in {rules.bad_rows_file})" if rules.bad_rows_file else ""
    raise ValueError(
        f"{len(bad)} of {num_rows} rows ({len(bad) / num_rows:.1%}) are bad, more than "
        f"max_bad_fraction={rules.max_bad_fraction} allows:{shown}{more}\n"
        f"Repair or remove these rows{where}, or raise max_bad_fraction to leave them out."
    )


def _fit_prompt(prompt: Prompt, limit: int, truncation: str) -> Prompt:
    kept = kept_positions(len(prompt.token_ids), limit, truncation)
    if len(kept) == len(prompt.token_ids):
        return prompt
    return replace(prompt, token_ids=tuple(prompt.token_ids[i] for i in kept))


def _fit_example(example: TokenExample, limit: int, truncation: str) -> TokenExample:
    kept = kept_positions(len(example.token_ids), limit, truncation)
    ids = tuple(example.token_ids[i] for i in kept)
    mask = tuple(example.loss_mask[i] for i in kept)
    # The first token of a row is predicted by nothing, also when truncation made it the first.
    mask = (0, *mask[1:])
    if not any(mask):
        raise ValueError(f"truncation leaves no token to learn from: {len(ids)} tokens are kept")
    return replace(example, token_ids=ids, loss_mask=mask)


def _fit_pair(pair: PreferencePair, limit: int, truncation: str) -> PreferencePair:
    return replace(
        pair,
        chosen=_fit_example(pair.chosen, limit, truncation),
        rejected=_fit_example(pair.rejected, limit, truncation),
    )


def _fit_labelled(example: LabelledExample, limit: int, truncation: str) -> LabelledExample:
    return replace(example, completion=_fit_example(example.completion, limit, truncation))
