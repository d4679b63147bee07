"""Some samples of a trace: found by bisecting its files, so a trace of any size is quick."""

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxrl_llm.observability.jsonl import IMAGES, object_of
from jaxrl_llm.report.conversations import KEYS, conversation

TRAIN, VALIDATION = "train", "validation"
MOST_STEPS = {TRAIN: 48, VALIDATION: 12}  # steps whose samples are shown
A_STEP = 8  # samples of a step and file
MOST_TEXT = 6_000  # characters of a text
MOST_TOKENS = 1_024  # tokens of a response that are shown one by one
MOST_BYTES = 6_000_000  # all samples of a run, as JSON
MOST_IMAGE_BYTES = 4_000_000  # all images of a run

_NAME = re.compile(r"(train|validation)(\.process\d+)?-(\d+)\.jsonl")
_IMAGE = re.compile(r"[0-9a-f]{32}\.(png|jpg|gif|webp)")
_STEP = re.compile(rb'\{"step": ?(\d+)[,}]')
_LONG = ("prompt", "question", "response", "ground_truth")
_SHOWN = ("step", "policy_version", "index", "data_source", "row", "finished", "score")


class Trace:
    """The trace of a run. What was read once is kept: a line only changes when a run resumes."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._read: dict[tuple[Path, int], list[dict[str, Any]]] = {}

    def forget(self) -> None:
        """Read everything again: the run has resumed."""
        self._read = {}

    def samples(self) -> tuple[list[dict[str, Any]], int]:
        """Some samples of evenly spread steps, each as the page shows it, and how many more of
        these steps were left out for their size.
        """
        before, self._read = self._read, {}
        for kind, files in self._files():
            self._read_steps(kind, files, before)
        found = [sample for samples in self._read.values() for sample in samples]
        within = _within(found, MOST_BYTES)
        return within, len(found) - len(within)

    def images(self, samples: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Data URLs of the images of samples, by name, up to a limit of their bytes."""
        found: dict[str, str] = {}
        left = MOST_IMAGE_BYTES
        for name in dict.fromkeys(name for sample in samples for name in sample["images"]):
            file = self._folder / IMAGES / name
            # The name comes from a file: it may name no other folder.
            if (kind := _IMAGE.fullmatch(name)) is None or not file.is_file():
                continue
            if (left := left - file.stat().st_size) < 0:
                break
            data = base64.b64encode(file.read_bytes()).decode()
            found[name] = f"data:image/{kind[1].replace('jpg', 'jpeg')};base64,{data}"
        return found

    def _files(self) -> Iterator[tuple[str, list[tuple[Path, int]]]]:
        """The files of each kind and process, with their first steps, in the order of these."""
        found: dict[tuple[str, str], list[tuple[Path, int]]] = {}
        for path in sorted(self._folder.glob("*.jsonl")):
            match = _NAME.fullmatch(path.name)
            if match is not None:
                with open(path, "rb") as file:
                    first = step_at(file, 0)
                if first is not None:
                    found.setdefault((match[1], match[2] or ""), []).append((path, first))
        return ((kind, files) for (kind, _), files in found.items())

    def _read_steps(
        self,
        kind: str,
        files: list[tuple[Path, int]],
        before: Mapping[tuple[Path, int], list[dict[str, Any]]],
    ) -> None:
        """Read the samples of some steps, as far as they are not in `before`."""
        with open(files[-1][0], "rb") as file:
            steps = spread(files[0][1], last_step(file), MOST_STEPS[kind])
        ends = [first for _, first in files[1:]] + [steps[-1] + 1]
        beyond = False  # a step comes after the end of the file before
        for (path, first), end in zip(files, ends, strict=True):
            wanted = [first] * beyond + [step for step in steps if first <= step < end]
            beyond = False
            if not wanted:
                continue
            with open(path, "rb") as file:
                for step in wanted:
                    offset = first_line_of(file, step)
                    found = step_at(file, offset)
                    if found is None:
                        beyond = True
                        break
                    rows = self._read.get((path, found)) or before.get((path, found), [])
                    if len(rows) < A_STEP:  # more may have been written since
                        rows = [shown(row, kind) for row in rows_at(file, offset, A_STEP)]
                    self._read[path, found] = rows


def spread(first: int, last: int, most: int) -> list[int]:
    """At most `most` steps from `first` to `last`, both among them.

    The others lie on a grid of a power of two, so a later grid reuses what was read for this one.
    """
    stride = 1
    while True:
        grid = range(first + 1 + -(first + 1) % stride, last, stride)
        if len(grid) + 2 <= most:
            return sorted({first, last, *grid})
        stride *= 2


def step_at(file: IO[bytes], offset: int) -> int | None:
    """The step of the line at `offset`; None at the end of the file."""
    file.seek(offset)
    return _step_of(file.readline())


def last_step(file: IO[bytes]) -> int:
    """The step of the last line, also while another line is being written."""
    last = step_at(file, 0) or 0
    gap = 1
    while step_at(file, first_line_of(file, last + gap)) is not None:
        last, gap = last + gap, gap * 2
    while gap:  # it is in [last, last + gap)
        if step_at(file, first_line_of(file, last + gap)) is not None:
            last += gap
        gap //= 2
    return last


def rows_at(file: IO[bytes], offset: int, most: int) -> list[dict[str, Any]]:
    """The first `most` rows of the step whose first line is at `offset`."""
    rows: list[dict[str, Any]] = []
    file.seek(offset)
    for line in file:
        if len(rows) == most or not line.endswith(b"\n"):
            break
        row = object_of(line, "step", file.name)
        if row is None:
            continue
        if rows and row["step"] != rows[0]["step"]:
            break
        rows.append(row)
    return rows


def first_line_of(file: IO[bytes], step: int) -> int:
    """The offset of the first line whose step is `step` or later. Steps never decrease."""
    low, high = 0, file.seek(0, os.SEEK_END)  # the line begins in [low, high]
    while low < high:
        middle = (low + high) // 2
        file.seek(middle)
        if middle:
            file.seek(middle - 1)
            file.readline()  # to the start of a line
        start = file.tell()
        found = _step_of(file.readline())
        if start >= high or found is None or found >= step:
            high = middle
        else:
            low = file.tell()
    return low


def shown(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """A row of the trace as the page shows it: long texts and responses are cut."""
    sample = {"kind": kind} | {key: row.get(key) for key in _SHOWN}
    for key in _LONG:
        text = row.get(key)
        sample[key] = _cut(text) if isinstance(text, str) else text
    extras: dict[str, Any] = row.get("extras") or {}
    turns = sample["conversation"] = conversation(extras, _cut)
    hidden = KEYS if turns is not None else ()
    sample["extras"] = {key: value for key, value in extras.items() if key not in hidden}
    for key in ("parts", "failures"):
        sample[key] = row.get(key) or {}
    sample["images"] = [str(name) for name in row.get("images") or ()]
    sample["num_tokens"] = len(row.get("tokens", ()))
    sample["tokens"] = row.get("tokens", [])[:MOST_TOKENS]
    details = {"logprobs": row.get("logprobs", [])} | (row.get("details") or {})
    sample["details"] = {
        key: _short(values[:MOST_TOKENS] if isinstance(values, list) else values)
        for key, values in details.items()
    }
    return sample


def _cut(text: str) -> str:
    """A text, or the start and the end of a long one."""
    if len(text) <= MOST_TEXT:
        return text
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


def _within(samples: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Every second sample until the rest have at most so many bytes."""
    while len(samples) > 1 and sum(len(json.dumps(sample)) for sample in samples) > most:
        samples = samples[::2]
    return samples
