"""The trace: an append-only record of every sample of a run."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.observability.jsonl import IMAGES, JsonlFile
from jaxrl_llm.observability.trace_images import ImageStore
from jaxrl_llm.types import Completion, Prompt

STEP = "step"
FILES_IN_LIMIT = 8  # number of files, at least, that a limit of the size has room for


class TraceWriter:
    """Writes one object a sample to FOLDER/<kind>-<first step>.jsonl, `steps_per_file` steps each.

    With a limit of the size, a file also ends at a part of it.

    Keys: step, policy_version (of the policy that sampled the first token), last_policy_version (of
    the last one: newer in a partial rollout), index (in its batch), data_source, row, prompt,
    prompt_ids, question (of a conversation: the last turn of the user), ground_truth, response,
    tokens, logprobs (the sampler's), finished, score (null for a masked failure), parts (reward of
    each function, null where it did not apply), extras (what reward functions logged), failures,
    details (of the first samples of a step: further numbers of each token by name, or one number
    for all), images (of a prompt with images: the names of files in `images`). Log-probs have
    enough digits for the same float32.

    A thread writes, and holds Python's lock for little of it. A step of 0.5 million tokens took
    half a second of Python, in which the next generation was not dispatched. `write` waits for the
    batch before it, and raises what went wrong with that. `wait` waits for the last.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        steps_per_file: int = 100,
        most_bytes: float = math.inf,
    ):
        """`most_bytes` is the limit of this process's files. The oldest are removed beyond it."""
        self.folder = Path(folder)
        self._steps_per_file = steps_per_file
        self._most_bytes = most_bytes
        self._open: dict[str, JsonlFile] = {}  # the current file of each kind
        self._images = ImageStore(self.folder / IMAGES, most_bytes)
        self._thread = ThreadPoolExecutor(1, "trace")
        self._last: Future[None] | None = None
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(
        self,
        kind: str,
        step: int,
        *,
        policy_version: int,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        scores: Sequence[float] | np.ndarray,
        last_policy_versions: Sequence[int] | np.ndarray | None = None,
        parts: Mapping[str, np.ndarray] | None = None,
        extras: Sequence[Mapping[str, Any]] | None = None,
        failures: Mapping[int, Sequence[str]] | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        details: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Append the samples of one step; `kind` is "train" or "validation".

        prompts[i] belongs to completions[i]. `failures` maps such an i to messages. A process that
        writes a part of the batch adds its number to `kind` ("train.process1"). It passes the batch
        index of each of its samples as `indices`. Each array of `details`, [K, R], has the numbers
        of the tokens of the first K samples.

        Requires: nothing changes what is passed.
        """
        self.wait()
        self._last = self._thread.submit(
            self._append,
            kind,
            step,
            policy_version,
            last_policy_versions,
            list(zip(prompts, completions, strict=True)),
            scores,
            parts or {},
            extras,
            failures or {},
            indices,
            details or {},
        )

    def wait(self) -> None:
        """Until the operating system has all samples. Raises what the thread raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _append(
        self,
        kind: str,
        step: int,
        policy_version: int,
        last_versions: Sequence[int] | np.ndarray | None,
        samples: Sequence[tuple[Prompt, Completion]],
        scores: Sequence[float] | np.ndarray,
        parts: Mapping[str, np.ndarray],
        extras: Sequence[Mapping[str, Any]] | None,
        failures: Mapping[int, Sequence[str]],
        indices: Sequence[int] | np.ndarray | None,
        details: Mapping[str, np.ndarray],
    ) -> None:
        records: list[dict[str, Any]] = []
        images: dict[int, list[str]] = {}  # by prompt, which the samples of a group share
        for i, (prompt, completion) in enumerate(samples):
            records.append(
                {
                    STEP: step,
                    "policy_version": policy_version,
                    "last_policy_version": (
                        policy_version if last_versions is None else int(last_versions[i])
                    ),
                    "index": i if indices is None else int(indices[i]),
                    "data_source": prompt.data_source,
                    "row": prompt.row,
                    "prompt": prompt.text,
                    "prompt_ids": np.asarray(prompt.token_ids, np.int32),
                    "question": last_user_turn(prompt) if prompt.messages else None,
                    "ground_truth": as_text(prompt.ground_truth),
                    "response": completion.text,
                    "tokens": np.asarray(completion.tokens, np.int32),
                    "logprobs": np.asarray(completion.logprobs, np.float32),
                    "finished": bool(completion.finished),
                    "score": _or_none(scores[i]),
                    "parts": {name: _or_none(part[i]) for name, part in parts.items()},
                    "extras": dict(extras[i]) if extras else {},
                    "failures": list(failures.get(i, ())),
                    "details": {
                        name: _of_tokens(rows[i][: len(completion.tokens)])
                        for name, rows in details.items()
                        if i < len(rows)
                    },
                }
            )
            if prompt.images:
                if id(prompt) not in images:
                    images[id(prompt)] = self._images.names(prompt.images)
                records[-1]["images"] = images[id(prompt)]
        self._file(kind, step).append(*records)

    def truncate_after(self, step: int) -> None:
        """Remove the samples of later steps. Call it before a resume from `step`."""
        self.wait()
        self._close_files()
        for path in sorted(self.folder.glob("*.jsonl"), reverse=True):
            file = JsonlFile(path, key=STEP)
            file.truncate_after(step)
            file.close()
            if file.last_step is None:
                path.unlink()

    def close(self) -> None:
        """Write what is left, and close the files."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._close_files()

    def _close_files(self) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}

    def _file(self, kind: str, step: int) -> JsonlFile:
        file = self._open.get(kind)
        first = step - step % self._steps_per_file
        if file is None:
            first = max([first, *(_first_step(path) for path in self._files(kind))])
        elif _first_step(file.path) >= first:
            is_full = file.path.stat().st_size >= self._most_bytes / FILES_IN_LIMIT
            if not is_full or file.last_step == step:
                return file
            first = step
        if file is not None:
            file.close()
        file = self._open[kind] = JsonlFile(self.folder / f"{kind}-{first:08d}.jsonl", key=STEP)
        self._remove_oldest()
        return file

    def _files(self, kind: str) -> list[Path]:
        return sorted(self.folder.glob(f"{kind}-*.jsonl"))

    def _remove_oldest(self) -> None:
        """Remove the oldest files beyond the limit, but none that is written now."""
        files = [path for kind in self._open for path in self._files(kind)]
        size = sum(path.stat().st_size for path in files)
        current = {file.path for file in self._open.values()}
        for path in sorted(files, key=_first_step):
            if size <= self._most_bytes:
                return
            if path not in current:
                size -= path.stat().st_size
                path.unlink()


def _first_step(path: Path) -> int:
    """The step in the name of a file."""
    return int(path.stem.rpartition("-")[2])


def last_user_turn(prompt: Prompt) -> str:
    """What was asked last: the last message of a user, or the text of a plain prompt."""
    asked = [message for message in prompt.messages or () if message.get("role") == "user"]
    content = asked[-1].get("content") if asked else None
    return content if isinstance(content, str) else prompt.text


def as_text(truth: Any) -> str | None:
    """A ground truth as the text that people read: itself, or its JSON."""
    if truth is None or isinstance(truth, str):
        return truth
    return json.dumps(truth, ensure_ascii=False, default=str)


def _of_tokens(values: np.ndarray) -> np.ndarray:
    """The numbers of the tokens of a sample; one number where they are all the same."""
    found = np.ascontiguousarray(values, np.float32)
    return found[0] if found.size and (found == found[0]).all() else found


def _or_none(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)
