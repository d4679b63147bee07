"""Some samples of a trace: found by bisecting its files, so a trace of any size is quick."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRAIN, VALIDATION = "train", "validation"
MOST_STEPS = {TRAIN: 48, VALIDATION: 12}  # steps whose samples are shown
A_STEP = 8  # samples of a step and file
MOST_TEXT = 6_000  # characters of a text
MOST_TOKENS = 1_024  # tokens of a response that are shown one by one
MOST_BYTES = 6_000_000  # of all samples of a run, as JSON

_NAME = re.compile(r"(train|validation)(\.process\d+)?-(\d+)\.jsonl")
_STEP = re.compile(rb'\{"step": (\d+)[,}]')
_LONG = ("prompt", "response", "ground_truth")
_SHOWN = ("step", "policy_version", "index", "data_source", "row", "finished", "score")


class Trace:
    """The trace of a run. What was read once is kept: a line never changes while a run goes on."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._read: dict[tuple[Path, int], list[dict[str, Any]]] = {}

    def samples(self) -> list[dict[str, Any]]:
        """Some samples of evenly spread steps, each as the page shows it."""
        found: list[dict[str, Any]] = []
        wanted: dict[tuple[Path, int], None] = {}
        for files in self._files():
            wanted |= dict.fromkeys(_spread_steps(files))
        for file, step in wanted:
            found += self._of_step(file, step)
        self._read = {key: kept for key, kept in self._read.items() if key in wanted}
        return _within(found, MOST_BYTES)

    def _files(self) -> list[list[Path]]:
        """The files of each kind and process, in the order of their steps."""
        found: dict[str, list[Path]] = {}
        for file in sorted(self._folder.glob("*.jsonl")):
            match = _NAME.fullmatch(file.name)
            if match is not None and first_step(file) is not None:
                found.setdefault(match[1] + (match[2] or ""), []).append(file)
        return list(found.values())

    def _of_step(self, file: Path, step: int) -> list[dict[str, Any]]:
        key = file, step
        if len(self._read.get(key, ())) < A_STEP:
            kind = kind_of(file)
            self._read[key] = [shown(row, kind) for row in rows_of_step(file, step, A_STEP)]
        return self._read[key]


def kind_of(file: Path) -> str:
    """Of training or of validation."""
    return TRAIN if file.name.startswith(TRAIN) else VALIDATION


def first_step(file: Path) -> int | None:
    """The step of the first line; None for a file without any."""
    return step_at(file, 0)


def step_at(file: Path, offset: int) -> int | None:
    """The step of the line at `offset`; None at the end of the file."""
    with open(file, "rb") as opened:
        opened.seek(offset)
        return _step_of(opened.readline())


def last_step(file: Path) -> int:
    """The step of the last line, also while another line is being written."""
    last = first_step(file) or 0
    gap = 1
    while step_at(file, first_line_of(file, last + gap)) is not None:
        last, gap = last + gap, gap * 2
    while gap:  # it is in [last, last + gap)
        if step_at(file, first_line_of(file, last + gap)) is not None:
            last += gap
        gap //= 2
    return last


def rows_of_step(file: Path, step: int, most: int) -> list[dict[str, Any]]:
    """The first `most` rows of a step, or of the first step after it that the file holds."""
    rows: list[dict[str, Any]] = []
    with open(file, "rb") as opened:
        opened.seek(first_line_of(file, step))
        for line in opened:
            if len(rows) == most or not line.endswith(b"\n"):
                break
            row = json.loads(line)
            if rows and row["step"] != rows[0]["step"]:
                break
            rows.append(row)
    return rows


def first_line_of(file: Path, step: int) -> int:
    """The offset of the first line whose step is `step` or later. Steps never decrease."""
    with open(file, "rb") as opened:
        low, high = 0, file.stat().st_size  # the line begins in [low, high]
        while low < high:
            middle = (low + high) // 2
            opened.seek(middle)
            if middle:
                opened.seek(middle - 1)
                opened.readline()  # to the start of a line
            start = opened.tell()
            found = _step_of(opened.readline())
            if start >= high or found is None or found >= step:
                high = middle
            else:
                low = opened.tell()
        return low


def shown(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """A row of the trace as the page shows it: long texts and responses are cut."""
    sample = {"kind": kind} | {key: row.get(key) for key in _SHOWN}
    for key in _LONG:
        text = row.get(key)
        sample[key] = text if not isinstance(text, str) or len(text) <= MOST_TEXT else _cut(text)
    for key in ("parts", "extras", "failures"):
        sample[key] = row.get(key) or {}
    sample["num_tokens"] = len(row.get("tokens", ()))
    sample["tokens"] = row.get("tokens", [])[:MOST_TOKENS]
    details = {"logprobs": row.get("logprobs", [])} | (row.get("details") or {})
    sample["details"] = {
        key: _short(values[:MOST_TOKENS] if isinstance(values, list) else values)
        for key, values in details.items()
    }
    return sample


def _cut(text: str) -> str:
    """The start and the end of a long text."""
    half = MOST_TEXT // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters left out … {text[-half:]}"


def _short(values: Any) -> Any:
    if isinstance(values, list):
        return [_short(value) for value in values]
    return float(f"{values:.4g}") if isinstance(values, float) else values


def _step_of(line: bytes) -> int | None:
    """The step of a whole line; None for one that is being written."""
    match = _STEP.match(line) if line.endswith(b"\n") else None
    return None if match is None else int(match[1])


def _spread_steps(files: list[Path]) -> Iterator[tuple[Path, int]]:
    """(file, step) of evenly spread steps of one kind and process; steps may have gaps.

    They lie on a grid of a power of two, so a later grid reuses what was read for this one.
    """
    first, last = first_step(files[0]) or 0, last_step(files[-1])
    stride = 1
    while last - first > MOST_STEPS[kind_of(files[0])] * stride:
        stride *= 2
    for step in sorted({first, last, *range(first - first % stride, last, stride)}):
        found = _from_step(files, step)
        if found is not None:
            yield found


def _from_step(files: list[Path], step: int) -> tuple[Path, int] | None:
    """The first step from `step` on, and its file."""
    starts = [first_step(file) or 0 for file in files]
    begun = sum(start <= step for start in starts)
    for file in files[max(begun - 1, 0) : begun + 1]:
        found = step_at(file, first_line_of(file, step))
        if found is not None:
            return file, found
    return None


def _within(samples: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Every second sample until the rest have at most so many bytes."""
    while len(samples) > 1 and sum(len(json.dumps(sample)) for sample in samples) > most:
        samples = samples[::2]
    return samples
