"""Call a reward function with TRL's or verl's arguments, and convert its answer to plain values.

A `Reply` holds plain Python values, whatever the function returned, raised or logged. The
trainer's process (our graders) and the workers (user functions) run the same code. Like
`loading.py`, this file imports no jax.
"""

import asyncio
import math
import numbers
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from jaxrl_llm.references import nearest, shown
from jaxrl_llm.rewards.loading import FunctionInfo
from jaxrl_llm.rewards.steps import Steps, has_steps, read_steps

if TYPE_CHECKING:  # types.py imports jax
    from jaxrl_llm.types import Completion, Prompt

FLOAT32_MAX = 3.4028234663852886e38
MAX_TEXT = 2000  # characters of an error's message, and of a repr in the trace
MAX_DEPTH = 32  # depth of lists and maps in the trace
LOGGING = ("trainer_state", "log_extra", "log_metric")  # TRL's parameters that are not lists
# Columns that the resolved fields of a prompt replace.
RESOLVED = ("prompt", "completion", "data_source", "ground_truth")
# Parameters of a TRL function that are not columns.
GIVEN_FIELDS = ("prompts", "completions", "completion_ids", "data_source", "ground_truth")


# ------------------------------------------------------------------------- requests


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The part of TRL's `trainer_state` that reward functions use."""

    global_step: int
    max_steps: int | None


@dataclass(frozen=True, kw_only=True)
class BatchCall:
    """One call of a TRL function: lists with one entry a sample."""

    fields: dict[str, list[Any]]  # prompts, completions, completion_ids and the columns
    state: TrainerState
    size: int


@dataclass(frozen=True, kw_only=True)
class SampleCall:
    """One call of a verl function."""

    fields: dict[str, Any]
    size: ClassVar[int] = 1


def batch_call(
    prompts: "Sequence[Prompt]",
    completions: "Sequence[Completion]",
    state: TrainerState,
    wanted: Iterable[str] = (),
) -> BatchCall:
    """The arguments of a TRL function.

    A conversational prompt gets a conversational completion. A raw column named `data_source` or
    `ground_truth` does not replace the resolved value. Columns of `wanted` that no prompt of the
    batch has are None.
    """
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    fields: dict[str, list[Any]] = {
        "data_source": [p.data_source for p in prompts],
        "ground_truth": [p.ground_truth for p in prompts],
    }
    for name in names | dict.fromkeys(wanted):
        if name not in RESOLVED:
            fields[name] = [p.columns.get(name) for p in prompts]
    fields["prompts"] = [p.text if p.messages is None else list(p.messages) for p in prompts]
    fields["completions"] = [
        c.text if p.messages is None else [{"role": "assistant", "content": c.text}]
        for p, c in zip(prompts, completions, strict=True)
    ]
    fields["completion_ids"] = [list(c.tokens) for c in completions]
    return BatchCall(fields=fields, state=state, size=len(prompts))


def sample_call(prompt: "Prompt", completion: "Completion") -> SampleCall:
    """The arguments of verl's compute_score.

    `extra_info` is the row's column of that name, of whatever type, or all columns without one.
    """
    extra_info = prompt.columns.get("extra_info")
    if extra_info is None:
        extra_info = prompt.columns
    return SampleCall(
        fields={
            "data_source": prompt.data_source,
            "solution_str": completion.text,
            "ground_truth": prompt.ground_truth,
            "extra_info": dict(extra_info) if isinstance(extra_info, Mapping) else extra_info,
        }
    )


def check_columns(
    info: FunctionInfo, columns: Iterable[str], renamed: Mapping[str, str] | None = None
) -> None:
    """Refuse a function that asks for a column that no row has. Raises ValueError.

    `renamed` maps our names to the data's, as config.data.columns does.
    """
    if info.kind == "sample":
        return
    rows = {*GIVEN_FIELDS, *columns}
    for name in info.required:
        if name in rows or name in LOGGING:
            continue
        ours = next((ours for ours, theirs in (renamed or {}).items() if theirs == name), None)
        hidden = f", which config.data.columns renames to {ours!r}" if ours else ""
        near = "" if ours else nearest(name, {*rows, *LOGGING})
        remedy = f"Ask for {ours!r}, or add" if ours else "Add"
        raise ValueError(
            f"The reward function {info.path} asks for {name!r}{hidden}{near}; the rows have: "
            f"{', '.join(sorted(rows))}. {remedy} the column to the data, or give the parameter a "
            "default."
        )


def part_of(request: BatchCall, samples: Sequence[int]) -> BatchCall:
    """The same call for some of the samples."""
    fields = {name: [values[i] for i in samples] for name, values in request.fields.items()}
    return BatchCall(fields=fields, state=request.state, size=len(samples))


# ------------------------------------------------------------------------- replies


@dataclass(frozen=True, kw_only=True)
class CallError:
    """Why a call or a value is not usable."""

    kind: str  # "exception" | "crash" | "timeout" | "bad return" | "not run"
    message: str
    shared: bool = False  # lost together with other calls: any of them may be the cause


@dataclass(frozen=True, kw_only=True)
class Graded:
    """The answer for one sample: a finite float, None for "not applicable", or an error."""

    value: float | None = None
    error: CallError | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    steps: Steps | None = None  # rewards of steps; their sum is `value`


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer of one call: one `Graded` a sample, or an error for all of them."""

    graded: tuple[Graded, ...] = ()
    metrics: tuple[tuple[str, float], ...] = ()
    error: CallError | None = None


# ------------------------------------------------------------------------- calls


def call(function: Callable[..., Any], info: FunctionInfo, request: Any) -> Reply:
    """Call a synchronous function once."""
    prepared = _Prepared(info, request)
    try:
        return prepared.reply(function(**prepared.arguments))
    except Exception as error:  # user code: whatever it raises is reported with the sample
        return _exception_reply(error)


async def call_async(
    function: Callable[..., Any], info: FunctionInfo, request: Any, limit: float
) -> Reply:
    """Call an async function once; give up after `limit` seconds."""
    prepared = _Prepared(info, request)
    window = asyncio.timeout(limit)
    try:
        async with window:
            result = await function(**prepared.arguments)
        return prepared.reply(result)
    except Exception as error:  # user code: whatever it raises is reported with the sample
        if isinstance(error, TimeoutError) and window.expired():
            return Reply(error=timeout_error(info, limit))
        return _exception_reply(error)


async def call_concurrently(
    function: Callable[..., Any],
    info: FunctionInfo,
    requests: Sequence[Any],
    limit: float,
    max_concurrency: int,
) -> list[Reply]:
    """Await many calls of an async function, at most `max_concurrency` at a time."""
    slots = asyncio.Semaphore(max_concurrency)

    async def one(request: Any) -> Reply:
        async with slots:
            return await call_async(function, info, request, limit)

    return list(await asyncio.gather(*(one(request) for request in requests)))


def timeout_error(info: FunctionInfo, limit: float) -> CallError:
    """The error of a call that ran past its limit of seconds."""
    return CallError(kind="timeout", message=f"{info.name} ran longer than {limit:g} s")


def _exception_reply(error: Exception) -> Reply:
    # The last frame is the user's own and names the place without flooding the log.
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = printable(str(error))
    message = f"{type(error).__name__}: {text} ({place.filename}:{place.lineno})"
    return Reply(error=CallError(kind="exception", message=message))


class _Prepared:
    """The arguments of one call, and what its log functions have received."""

    def __init__(self, info: FunctionInfo, request: BatchCall | SampleCall) -> None:
        self.info = info
        self.request = request
        self.metrics: list[tuple[str, float]] = []
        self.columns: dict[str, list[Any]] = {}
        available: dict[str, Any] = dict(request.fields)
        if isinstance(request, BatchCall):
            logging = (request.state, self.log_extra, self.log_metric)
            available |= dict(zip(LOGGING, logging, strict=True))
        self.arguments = info.arguments(available)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """TRL's log_extra: one value a completion, for the trace."""
        assert isinstance(self.request, BatchCall)
        values = list(values)
        if len(values) != self.request.size:
            raise ValueError(
                f"log_extra({column!r}) got {len(values)} values for {self.request.size} "
                "completions: give one value a completion."
            )
        self.columns[str(column)] = [plain(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """TRL's log_metric: a scalar, averaged over the calls of a step."""
        self.metrics.append((str(name), float(value)))

    def reply(self, result: Any) -> Reply:
        """Check a function's return value and make it plain."""
        if isinstance(self.request, SampleCall):
            return Reply(graded=(_grade_sample(self.info, result),))
        try:
            values = list(result)
        except TypeError:
            values = None
        # A set has no order, so its numbers belong to no completion.
        if values is None or isinstance(result, str | bytes | Mapping | Set):
            got = f"{shown(result)} ({type(result).__name__})"
            return self._bad_return(f"{got} instead of a list with one number a completion")
        if len(values) != self.request.size:
            return self._bad_return(f"{len(values)} rewards for {self.request.size} completions")
        extras = [
            {name: column[i] for name, column in self.columns.items()}
            for i in range(self.request.size)
        ]
        graded = tuple(grade(self.info, v, e) for v, e in zip(values, extras, strict=True))
        return Reply(graded=graded, metrics=tuple(self.metrics))

    def _bad_return(self, what: str) -> Reply:
        return Reply(
            error=CallError(kind="bad return", message=f"{self.info.name} returned {what}")
        )


def _grade_sample(info: FunctionInfo, result: Any) -> Graded:
    if not isinstance(result, Mapping) or has_steps(result):
        return grade(info, result, {})
    extras = {str(k): plain(v) for k, v in result.items() if k != "score"}
    if "score" not in result:
        message = f"{info.name} returned a dict without 'score'; its keys: {shown(list(result))}"
        return _bad_value(message, extras)
    return grade(info, result["score"], extras)


def grade(info: FunctionInfo, value: Any, extras: dict[str, Any]) -> Graded:
    """Check that `value` is None, a number, or rewards of steps.

    Extras named `<function>/error` or `reason` say in the error why there is no such number.
    """
    if value is None:
        return Graded(extras=extras)
    steps = None
    if has_steps(value):
        extras = extras | {str(name): plain(entry) for name, entry in value.items()}
        try:
            steps = read_steps(value)
        except ValueError as error:
            return _bad_value(f"{info.name} returned {error}", extras)
    number = as_number(value) if steps is None else steps.total
    if number is None or not abs(number) <= FLOAT32_MAX:
        what = "is not a number" if number is None else "is not finite in float32"
        message = f"{info.name} returned {shown(value)} ({type(value).__name__}), which {what}"
        if why := extras.get(f"{info.name}/error") or extras.get("reason"):
            message = f"{message}: {printable(str(why))}"
        return _bad_value(message, extras)
    return Graded(value=number, extras=extras, steps=steps)


def _bad_value(message: str, extras: dict[str, Any]) -> Graded:
    return Graded(error=CallError(kind="bad return", message=message), extras=extras)


def as_number(value: Any) -> float | None:
    """A Python, numpy or torch scalar as a float; None for anything else, text included."""
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # an int beyond the floats
            return math.inf
    # A numpy or torch scalar. An array of several numbers is not one reward.
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return as_number(value.item())
    return None


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """A value that JSON can hold, for the trace.

    Numbers that are not finite, integers beyond 64 bits and what lies too deep become text.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else shown(value)
    number = as_number(value)
    if number is not None:
        return number if math.isfinite(number) else repr(number)
    if depth and isinstance(value, Mapping):
        return {str(k): plain(v, depth - 1) for k, v in value.items()}
    if depth and isinstance(value, list | tuple):
        return [plain(v, depth - 1) for v in value]
    return shown(value, MAX_TEXT)


def printable(text: str, length: int = MAX_TEXT) -> str:
    """`text`, at most `length` characters of it, with control characters written out."""
    if len(text) > length:
        text = f"{text[:length]}... ({len(text)} characters)"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
