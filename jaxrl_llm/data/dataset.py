"""Data sets of prompts, supervised examples or preference pairs. Bad rows are set aside.

All rows are read and tokenised before the first step, so that a bad row is found at once. Several
processes share this work: each checks a stripe of every source, and keeps its records.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from jaxrl_llm.config import Task
from jaxrl_llm.data.formats import (
    LENGTH_KEYS,
    SERVES,
    TRAINED_COLUMNS,
    LabelledExample,
    Overlong,
    PreferencePair,
    TokenExample,
    detect_format,
    examples_of,
    kept_positions,
    pairs_of,
    prompt_of,
    rated_of,
    unpaired_of,
)
from jaxrl_llm.data.hub import hub_files
from jaxrl_llm.data.shaping import Shape, ShapedRows
from jaxrl_llm.data.share import Source, Striped, sampled_digest
from jaxrl_llm.data.sources import (
    BadRow,
    ListedRows,
    ObjectRows,
    RawRow,
    Rows,
    custom_rows,
    open_rows,
    takes_split,
)
from jaxrl_llm.data.streaming import (
    SEVERAL,
    FirstRows,
    Skipped,
    Streamed,
    StreamedSource,
    check_groups,
)
from jaxrl_llm.data.tasks import problem_space, task_pairs, task_ratings, task_rows
from jaxrl_llm.data_files import HUB, SHARD, DataFile, hub_name, resolve_files
from jaxrl_llm.distributed.multihost import gather_objects, is_main
from jaxrl_llm.references import load
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import Prompt

T = TypeVar("T")
Judge = Callable[[Mapping[str, Any], str, Sequence[TokenExample]], list[T]]
log = logging.getLogger(__name__)
DETECTION_ROWS = 100  # first rows of a source that vote for its format
SHOWN_REASONS = 5
NAMES = "{ours: THEIRS}"
# data.columns for rows of other forms, by the columns that they have: ShareGPT, Alpaca.
OTHERS = {
    frozenset({"conversations"}): "{messages: conversations}",
    frozenset({"instruction", "output"}): "{prompt: instruction+input, completion: output}",
}


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where rows come from: `rows` first, then files, then tasks, in order.

    `dataset_class` ("module:Class" or "file.py:Class") gives the rows instead of the files, which
    are passed to it. If it takes a keyword `split`, it gives both splits. Otherwise it gives the
    training rows, and held-out rows come from files and tasks as if there were no class.
    """

    rows: Sequence[Mapping[str, Any]] | None = None  # rows of a Python program
    files: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()
    split: str = "train"  # split of tasks and dataset_class: train | held_out
    prompt_style: str = "plain"  # style of the tasks: plain | chat
    dataset_class: str = ""
    shape: Shape = Shape()  # shape of the rows that files and dataset_class give
    key: str = ""  # config key of the files and tasks, for messages; "" follows `split`

    def are_empty(self) -> bool:
        """True if nothing gives rows. Loads `dataset_class` where the answer depends on it."""
        if self.rows is not None or self.files or self.tasks:
            return False
        return not self.dataset_class or (
            self.split != "train" and not takes_split(load(self.dataset_class))
        )

    @property
    def keys(self) -> str:
        """The config keys that say where the rows come from."""
        if self.key:
            return f"{self.key}.files or {self.key}.tasks"
        part = "train" if self.split == "train" else "val"
        return f"config.data.{part}_files or config.data.{part}_tasks"


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[T]):
    """The records of a data set, and the rows that are not among them."""

    items: Sequence[T]  # a list; a Share of them with several processes
    num_rows: int  # all rows, bad and overlong ones included
    bad_rows: list[BadRow]
    num_overlong: int  # rows that filter_overlong left out
    formats: dict[str, str]  # source -> detected format


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """Handling of rows that are too long or bad."""

    max_length: int  # tokens of a prompt, or of prompt and completion together
    truncation: str = "error"  # handling of longer rows: error | left | right | middle
    filter_overlong: bool = False  # leave longer rows out instead, and count them
    max_bad_fraction: float = 0.0  # fraction of rows that may be set aside
    bad_rows_file: str | Path | None = None  # JSON lines; each bad row is added once
    streaming: bool = False  # check the first rows only, and read each when a batch needs it
    shuffled: bool = True  # rows are read in a random order; for streaming
    keep_thinking: bool = False  # one row a conversation, with the thinking of earlier turns


def load_prompts(sources: Sources, tokenizer: Tokenizer, rules: RowRules) -> Loaded[Prompt]:
    """Prompts for RL and validation. Truncation shortens the token ids only, not the text.

    Raises:
        ValueError: too many rows are bad, no row is left, a format is unknown, a prompt is
            overlong under truncation="error", or a source does not exist.
    """
    convert = partial(_prompts_of, tokenizer=tokenizer)
    return _load(sources, "prompts", convert, _fit_prompt, rules)


def load_examples(sources: Sources, tokenizer: Tokenizer, rules: RowRules) -> Loaded[TokenExample]:
    """Rows for supervised training. A row with no token in its loss is a bad row.

    Raises ValueError as `load_prompts` does.
    """
    convert = partial(examples_of, tokenizer=tokenizer, keep_thinking=rules.keep_thinking)
    return _load(sources, "examples", convert, _fit_example, rules)


def load_preferences(
    sources: Sources, tokenizer: Tokenizer, rules: RowRules
) -> Loaded[PreferencePair]:
    """Preference pairs. The length limit applies to each of the two rows of a pair.

    Raises ValueError as `load_prompts` does.
    """
    return _load(sources, "preferences", _judged(pairs_of, tokenizer, rules), _fit_pair, rules)


def load_unpaired(
    sources: Sources, tokenizer: Tokenizer, rules: RowRules
) -> Loaded[LabelledExample]:
    """Completions labelled good (1) or bad (0). A pair gives two.

    Raises ValueError as `load_prompts` does.
    """
    return _load(sources, "unpaired", _judged(unpaired_of, tokenizer, rules), _fit_labelled, rules)


def load_ratings(
    sources: Sources, tokenizer: Tokenizer, rules: RowRules
) -> Loaded[LabelledExample]:
    """Completions with a rating each. Raises ValueError as `load_prompts` does."""
    return _load(sources, "ratings", _judged(rated_of, tokenizer, rules), _fit_labelled, rules)


# Loaders pickle what follows, so it is made of functions of this file.
def _prompts_of(*row: Any, **named: Any) -> list[Prompt]:
    return [prompt_of(*row, **named)]


def _judged(judge: Judge[T], tokenizer: Tokenizer, rules: RowRules) -> Callable[..., list[T]]:
    keep_thinking = rules.keep_thinking
    return partial(_judge, judge, tokenizer=tokenizer, keep_thinking=keep_thinking)


def _judge(judge: Judge[T], row: Mapping[str, Any], kind: str, **named: Any) -> list[T]:
    return judge(row, kind, examples_of(row, kind, **named))


def _load(
    sources: Sources,
    purpose: str,
    convert: Callable[..., list[T]],
    fit: Callable[[T, int, str], T],
    rules: RowRules,
) -> Loaded[T]:
    truncation = "error" if rules.filter_overlong else rules.truncation
    own: list[_Stripe[T]] = []
    streamed: list[StreamedSource] = []
    for name, rows in read_sources(sources, purpose):
        every = (row for row in rows.read(0, len(rows)) if isinstance(row, RawRow))
        first = list(islice(every, DETECTION_ROWS))
        kind = source_format(name, first, purpose, sources.keys) if first else ""
        reader = _Reader(name, kind, rows, convert, fit, rules.max_length, truncation)
        checked = replace(reader, rows=FirstRows(rows)) if rules.streaming else reader
        stripe = _check_stripe(checked, rules.filter_overlong)
        own.append(replace(stripe, first=sampled_digest([row.data for row in first])))
        if rules.streaming:
            rows = rows if purpose == "prompts" else rows.only(TRAINED_COLUMNS)
            streamed.append(StreamedSource(rows, reader.records_of))
            if rules.shuffled:
                check_groups(name, rows)
        if own[-1].error:
            break
    # One list a process, of one summary a source.
    everyone = gather_objects([stripe.summary() for stripe in own], "data")
    by_source = list(zip_longest(*everyone))
    parts = [[part for part in summaries if part is not None] for summaries in by_source]
    errors = [part["error"] for summaries in parts for part in summaries if part["error"]]
    if errors:
        raise ValueError(errors[0])
    _check_same_rows([stripe.reader.name for stripe in own], everyone)
    bad = [
        BadRow(*row)
        for summaries in parts
        for kind in ("unread", "unconverted")
        for part in summaries
        for row in part[kind]
    ]
    num_rows = sum(len(stripe.reader.rows) for stripe in own)
    num_overlong = sum(part["num_overlong"] for summaries in parts for part in summaries)
    if rules.bad_rows_file is not None:
        _set_aside(bad, Path(rules.bad_rows_file))
    _check_bad(bad, num_rows, rules)
    items = _streamed(own, streamed, rules) if rules.streaming else _joined(own, parts)
    if not items and not num_rows:
        names = ", ".join(Path(stripe.reader.name).name for stripe in own)
        raise ValueError(f"no rows are left of 0: {names} is empty; set {sources.keys} to data")
    if not items:
        first = f"; the first: {bad[0].source} row {bad[0].row}: {bad[0].reason}" if bad else ""
        raise ValueError(
            f"no rows are left of {num_rows} ({num_overlong} of them overlong, {len(bad)} "
            f"bad{first}): check {sources.keys}, and {LENGTH_KEYS}"
        )
    if is_main():
        _say_what_is_left_out(bad, num_overlong, num_rows, rules)
    formats = {stripe.reader.name: stripe.reader.kind for stripe in own if stripe.reader.kind}
    return Loaded(
        items=items, num_rows=num_rows, bad_rows=bad, num_overlong=num_overlong, formats=formats
    )


@dataclass(frozen=True)
class _Reader(Generic[T]):
    """Reader of the rows of one source, as records."""

    name: str
    kind: str  # the format
    rows: Rows
    convert: Callable[..., list[T]]
    fit: Callable[[T, int, str], T]
    limit: int
    truncation: str

    def records_of(self, row: RawRow) -> list[T]:
        """Raises ValueError for a bad row, Overlong for one beyond the limit."""
        records = self.convert(
            row.data, self.kind, data_source=_default_source(self.name), index=row.row
        )
        return [self.fit(record, self.limit, self.truncation) for record in records]

    def records_at(self, place: int) -> list[T]:
        """The records of a row that some process has checked."""
        row = self.rows.one(place)
        assert isinstance(row, RawRow), (self.name, place)
        return self.records_of(row)


@dataclass
class _Stripe(Generic[T]):
    """Records and bad rows of this process's stripe of one source."""

    reader: _Reader[T]
    items: list[T] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # records of each row
    unread: list[BadRow] = field(default_factory=list)
    unconverted: list[BadRow] = field(default_factory=list)
    num_overlong: int = 0
    error: str = ""
    first: str = ""  # a digest of the first rows of the source, which every process reads

    def summary(self) -> dict[str, Any]:
        """Everything but the records, in JSON's types; counts as runs of equal ones."""
        return {
            "counts": [(count, len(list(run))) for count, run in groupby(self.counts)],
            "unread": [astuple(row) for row in self.unread],
            "unconverted": [astuple(row) for row in self.unconverted],
            "num_overlong": self.num_overlong,
            "error": self.error,
            "source": [len(self.reader.rows), self.first],
        }


def _check_same_rows(names: Sequence[str], everyone: Sequence[Sequence[Any]]) -> None:
    """ValueError for a source that is another one in some process; its first rows are compared.

    Each process checks and keeps a stripe, so a batch would be of rows of both.
    """
    for process, summaries in enumerate(everyone):
        for name, one, main in zip(names, summaries, everyone[0], strict=True):
            if one["source"] != main["source"]:
                raise ValueError(
                    f"{name} has other rows in process {process} than in process 0: all processes "
                    "must read the same file, and a class must give the same rows in each"
                )


def _check_stripe(reader: _Reader[T], filter_overlong: bool) -> _Stripe[T]:
    """Read and convert the rows of this process: an equal part of the source, in order."""
    stripe, size = _Stripe(reader), len(reader.rows)
    start, stop = (
        size * index // jax.process_count()
        for index in (jax.process_index(), jax.process_index() + 1)
    )
    for row in reader.rows.read(start, stop):
        records: list[T] = []
        if isinstance(row, BadRow):
            stripe.unread.append(row)
        else:
            try:
                records = reader.records_of(row)
            except Overlong as error:  # the user set the limit: such a row is not bad
                if not filter_overlong:
                    stripe.error = f"{row.source} row {row.row}: {error}"
                    break
                stripe.num_overlong += 1
            except ValueError as error:
                stripe.unconverted.append(BadRow(row.source, row.row, str(error)))
        stripe.items += records
        stripe.counts.append(len(records))
    return stripe


def _joined(own: Sequence[_Stripe[T]], summaries: Sequence[Sequence[Any]]) -> Sequence[T]:
    """The records of all sources: a list, or with several processes what reads the others'.

    `summaries` has one of each process, in order, for each source.
    """
    if jax.process_count() == 1:
        return [item for stripe in own for item in stripe.items]
    sources: list[Source[T]] = []
    kept: dict[int, T] = {}
    first = 0  # index of the first record of the source
    for stripe, every in zip(own, summaries, strict=True):
        parts = [np.repeat(*np.array(one["counts"], int).reshape(-1, 2).T) for one in every]
        before = first + sum(int(part.sum()) for part in parts[: jax.process_index()])
        kept |= dict(enumerate(stripe.items, before))
        counts = np.concatenate(parts)
        sources.append(Source(stripe.reader.records_at, counts))
        first += int(counts.sum())
    return Striped(sources, kept)


def _streamed(
    own: Sequence[_Stripe[T]], sources: Sequence[StreamedSource], rules: RowRules
) -> Sequence[T]:
    """All records, of which none is kept. ValueError where a row gives several."""
    if any(count > 1 for stripe in own for count in stripe.counts):
        raise ValueError(SEVERAL)
    file = rules.bad_rows_file
    skipped = Skipped(
        max_bad_fraction=rules.max_bad_fraction,
        filter_overlong=rules.filter_overlong,
        set_aside=partial(_set_one_aside, None if file is None else Path(file)),
    )
    return Streamed(sources, skipped)


def _set_one_aside(file: Path | None, row: BadRow) -> None:
    if file is not None:
        _set_aside([row], file)


def read_sources(sources: Sources, purpose: str) -> Iterator[tuple[str, Rows]]:
    """Name and rows of each source. Names and settings are checked before any file is read."""
    spaces = [problem_space(task.kind, task.settings) for task in sources.tasks]
    dataset_class = load(sources.dataset_class) if sources.dataset_class else None
    if dataset_class and (sources.split == "train" or takes_split(dataset_class)):
        name, files = sources.dataset_class, sources.files
        rows = ListedRows(custom_rows(dataset_class, name, files, sources.split))
        yield sources.dataset_class, ShapedRows(rows, sources.shape)
    elif sources.rows is None and not sources.files and not sources.tasks:
        only = (
            f"config.data.dataset_class={sources.dataset_class} takes no keyword `split`, so its "
            "rows are for training: add it to the class, or "
            if dataset_class
            else ""
        )
        raise ValueError(f"no data: {only}set {sources.keys}")
    else:
        if sources.rows is not None:
            name = "train_data" if sources.split == "train" else "val_data"
            yield name, ShapedRows(ObjectRows(name, sources.rows), sources.shape)
        files = [named for pattern in sources.files for named in _files(pattern)]
        for name, file in files:  # every file is there before the first is read
            yield name, ShapedRows(open_rows(file), sources.shape)
    paired = {"preferences": task_pairs, "unpaired": task_pairs, "ratings": task_ratings}
    rows_of = paired.get(purpose, task_rows)
    for task, space in zip(sources.tasks, spaces, strict=True):
        made = rows_of(
            task.kind,
            split=sources.split,
            size=task.size,
            prompt_style=sources.prompt_style,
            settings=task.settings,
        )
        rows = ListedRows([RawRow(space.name, i, row) for i, row in enumerate(made)])
        yield space.name, ShapedRows(rows, sources.shape.without_columns())


def _files(pattern: str) -> list[tuple[str, DataFile]]:
    """(name, file) of what a pattern of the config names."""
    name = hub_name(pattern)
    if name is None:
        return [(file.path, file) for file in resolve_files(pattern)]
    return [(f"{HUB}{name.path}", file) for file in hub_files(name)]


def _default_source(name: str) -> str:
    """The data_source of rows that name none: the file's name without folder and ending.

    A name on the hub has no ending. The files that a data set was split into are one source.
    """
    if name.startswith(HUB):
        return name.rpartition("/")[2]
    stem = Path(name.rpartition(":")[2]).stem
    shard = SHARD.fullmatch(stem)
    return shard[1] if shard else stem


def source_format(name: str, rows: Sequence[RawRow], purpose: str, keys: str) -> str:
    """The format of most of the first rows. ValueError if it does not serve the purpose."""
    votes = Counter(detect_format(row.data, purpose) for row in rows)
    kind = max(votes, key=lambda form: (form is not None, votes[form]))
    wanted = ", ".join(other for other, purposes in SERVES.items() if purpose in purposes)
    if kind is not None and purpose in SERVES[kind]:
        return kind
    if kind is None:
        columns = ", ".join(map(repr, rows[0].data)) or "none"
        problem = f"holds no rows of a known format: its columns are {columns}"
        theirs = next((theirs for own, theirs in OTHERS.items() if own <= set(rows[0].data)), "")
        other = f", or say which column is which with config.data.columns={theirs or NAMES}"
    else:
        problem, other = f"holds {kind} rows, which give no {purpose}", ""
    raise ValueError(
        f"{name} {problem}. Set {keys} to data with {wanted} rows, which give {purpose}{other} "
        "(docs/data.md lists their columns)"
    )


def _set_aside(bad: Sequence[BadRow], file: Path) -> None:
    """Add the rows that the file does not list yet: a resumed run finds the same rows again."""
    known = set(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else set()
    lines = dict.fromkeys(_line(row) for row in bad)
    new = [line for line in lines if line not in known]
    if new:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in new)


def _line(row: BadRow) -> str:
    record: dict[str, Any] = {"source": row.source, "row": row.row, "reason": row.reason}
    return json.dumps(record)  # ASCII: a reason may quote text that is not valid Unicode


def _check_bad(bad: Sequence[BadRow], num_rows: int, rules: RowRules) -> None:
    if len(bad) <= rules.max_bad_fraction * num_rows:
        return
    shown = "".join(f"\n  {row.source} row {row.row}: {row.reason}" for row in bad[:SHOWN_REASONS])
    more = f"\n  and {len(bad) - SHOWN_REASONS} more" if len(bad) > SHOWN_REASONS else ""
    where = f" (all are listed in {rules.bad_rows_file})" if rules.bad_rows_file else ""
    raise ValueError(
        f"{len(bad)} of {num_rows} rows ({len(bad) / num_rows:.1%}) are bad, more than "
        f"config.data.max_bad_fraction={rules.max_bad_fraction} allows:{shown}{more}\n"
        f"Repair or remove these rows{where}, or raise config.data.max_bad_fraction to leave them "
        "out."
    )


def _say_what_is_left_out(
    bad: Sequence[BadRow], num_overlong: int, num_rows: int, rules: RowRules
) -> None:
    if num_overlong:
        log.warning(
            "%d of %d rows have more than %d tokens and are left out: "
            "config.data.filter_overlong_prompts",
            num_overlong,
            num_rows,
            rules.max_length,
        )
    if bad:
        log.warning(
            "%d of %d rows are bad and are left out, as config.data.max_bad_fraction=%s allows; "
            "the first: %s row %d: %s",
            len(bad),
            num_rows,
            rules.max_bad_fraction,
            bad[0].source,
            bad[0].row,
            bad[0].reason,
        )


def _fit_prompt(prompt: Prompt, limit: int, truncation: str) -> Prompt:
    truncation = "error" if prompt.images else truncation  # no image is cut
    kept = kept_positions(len(prompt.token_ids), limit, truncation)
    if len(kept) == len(prompt.token_ids):
        return prompt
    return replace(prompt, token_ids=tuple(prompt.token_ids[i] for i in kept))


def _fit_example(example: TokenExample, limit: int, truncation: str) -> TokenExample:
    truncation = "error" if example.images else truncation
    kept = kept_positions(len(example.token_ids), limit, truncation)
    ids = tuple(example.token_ids[i] for i in kept)
    mask = tuple(example.loss_mask[i] for i in kept)
    # Nothing predicts the first token of a row, also if truncation made it the first.
    mask = (0, *mask[1:])
    if not any(mask):
        raise ValueError(
            f"config.data.truncation={truncation} leaves no token to learn from: {len(ids)} of "
            f"{len(example.token_ids)} tokens are kept. Raise {LENGTH_KEYS}, or set "
            "config.data.filter_overlong_prompts=true"
        )
    return replace(example, token_ids=ids, loss_mask=mask)


def _fit_pair(pair: PreferencePair, limit: int, truncation: str) -> PreferencePair:
    return replace(
        pair,
        chosen=_fit_example(pair.chosen, limit, truncation),
        rejected=_fit_example(pair.rejected, limit, truncation),
    )


def _fit_labelled(example: LabelledExample, limit: int, truncation: str) -> LabelledExample:
    return replace(example, completion=_fit_example(example.completion, limit, truncation))
