"""Several reward functions with weights become one float32 score for each sample."""

import logging
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxrl_llm.config import Custom, Grader
from jaxrl_llm.observability.moments import Moments
from jaxrl_llm.observability.names import is_reserved
from jaxrl_llm.references import shown, split_path
from jaxrl_llm.rewards.calling import (
    GIVEN_FIELDS,
    LOGGING,
    BatchCall,
    CallError,
    Graded,
    Reply,
    SampleCall,
    TrainerState,
    as_number,
    batch_call,
    call,
    check_columns,
    part_of,
    sample_call,
)
from jaxrl_llm.rewards.graders import worker_reference
from jaxrl_llm.rewards.loading import (
    FunctionInfo,
    is_builtin,
    load_bound,
)
from jaxrl_llm.rewards.statistics import RewardStatistics
from jaxrl_llm.rewards.steps import Steps
from jaxrl_llm.rewards.workers.pool import LostCalls, WorkerPool
from jaxrl_llm.rewards.workers.process import WorkerLimits

if TYPE_CHECKING:  # types.py imports jax, which a program that only grades does not need
    from jaxrl_llm.types import Completion, Prompt

log = logging.getLogger(__name__)
READ_TRUTH = "read_truth"  # function of a grader's module, if the grader runs in the pool
TRUTHS = ("ground_truth", "answer", "solution", "reward_model")  # columns that may hold it


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """A sample without a reward from a function, and why."""

    function: str
    index: int  # place of the sample in the batch
    kind: str  # exception | crash | timeout | bad return | not run | not applicable
    message: str
    prompt: str
    completion: str

    def describe(self) -> str:
        """One line for a log."""
        return (
            f"{self.function}: {self.kind}: {self.message}; prompt {shown(self.prompt)}, "
            f"completion {shown(self.completion)}"
        )


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """The rewards of a batch of N samples, in the order of the completions."""

    scores: np.ndarray  # float32 [N], weighted sum of the parts
    parts: dict[str, np.ndarray]  # function name -> float32 [N], unweighted; NaN for None
    statistics: RewardStatistics  # adds up over the processes that graded parts of a batch
    extras: list[dict[str, Any]]  # one a sample: log_extra columns, other keys of verl dicts
    failures: list[RewardFailure] = field(default_factory=list)  # after all retries
    # For each sample: weights of functions, and the rewards of steps that they gave.
    steps: list[list[tuple[float, Steps]]] = field(default_factory=list)

    @property
    def failed(self) -> np.ndarray:
        """float32 [N]: 1 for a sample that some function, or all, gave no reward."""
        failed = np.zeros(len(self.scores), np.float32)
        failed[[failure.index for failure in self.failures]] = 1.0
        return failed

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of these samples."""
        return self.statistics.metrics()


@dataclass(frozen=True, kw_only=True)
class _Function:
    name: str
    weight: float
    info: FunctionInfo
    index: int  # in the pool's references
    local: Callable[..., Any] | None  # None: runs in the pool
    # Reads a right answer, or raises ValueError; None where a call alone shows whether it can be.
    read_truth: Callable[[Any], Any] | None

    def calls(
        self, batch: BatchCall, samples: list[SampleCall]
    ) -> Sequence[BatchCall | SampleCall]:
        """The calls that grade a batch: one for all samples (TRL), or one each (verl)."""
        return [batch] if self.info.kind == "batch" else samples


class RewardManager:
    """Scores completions with several reward functions; user functions run in worker processes.

    Functions of `jaxrl_llm.rewards` run in this process. All others run in a pool of
    `num_workers` processes (at least one a function), at most `timeout` seconds a call, under
    `limits`. A sample whose function crashed, hung, raised or returned no usable number is tried
    `max_retries` times more. If it fails again, it gets `failure_value` from that function, or no
    value with `on_failure="mask"`. It is counted in `rewards/failures`, logged, and listed in the
    result.

    `total_steps` is what functions see as `trainer_state.max_steps`. Close the manager, or use it
    in a `with`. Raises ValueError, with the remedy, for a function that cannot be loaded.
    """

    def __init__(
        self,
        functions: Sequence[Grader | Custom],
        *,
        weights: Sequence[float] | None = None,
        max_retries: int = 0,
        on_failure: Literal["mask", "value"] = "value",
        failure_value: float = 0.0,
        timeout: float = 30.0,
        num_workers: int = 2,
        max_concurrency: int = 64,
        total_steps: int | None = None,
        limits: WorkerLimits | None = None,
    ) -> None:
        weights = [1.0] * len(functions) if weights is None else list(weights)
        self._max_retries = max_retries
        self._failure_value = np.float32(np.nan if on_failure == "mask" else failure_value)
        self._total_steps = total_steps
        self._wanted: tuple[str, ...] = ()  # columns that functions ask for and some row has
        references = [worker_reference(function) for function in functions]
        self._pool = WorkerPool(
            references,
            num_workers=max(num_workers, len(functions)),
            timeout=timeout,
            max_concurrency=max_concurrency,
            limits=limits,
        )
        try:
            self._functions = [
                self._load(index, path, settings, name, weight)
                for index, ((path, settings, _), name, weight) in enumerate(
                    zip(references, unique_names(references), weights, strict=True)
                )
            ]
        except ValueError:
            self._pool.close()
            raise

    def _load(
        self, index: int, path: str, settings: dict[str, Any], name: str, weight: float
    ) -> _Function:
        local = read = None
        if is_builtin(path):
            local, info = load_bound(path, settings)
            if info.isolated:
                read, local = getattr(sys.modules[split_path(path)[0]], READ_TRUTH, None), None
            elif _compares(info):
                read = partial(local, "")
        else:
            info = self._pool.load(index)
        return _Function(
            name=name, weight=weight, info=info, index=index, local=local, read_truth=read
        )

    def check(
        self,
        columns: Collection[str],
        renamed: Mapping[str, str] | None = None,
        *,
        all_rows: bool = True,
    ) -> None:
        """Check that the rows have the columns that functions ask for. Raises ValueError.

        A grader of ours that compares with a right answer needs a column that has one.

        `renamed` maps our names to the data's, as config.data.columns does. A batch may lack a
        column that other rows have; its values are then None. Without `all_rows`, `columns` come
        from a sample of the rows, and a missing column is only a warning.
        """
        for function in self._functions:
            if all_rows:
                _check_truth(function.info, columns)
            try:
                check_columns(function.info, columns, renamed)
            except ValueError as error:
                if all_rows:
                    raise
                log.warning("No row of a sample of the streamed data has it. %s", error)
                known = {*LOGGING, *GIVEN_FIELDS}
                columns = [*columns, *(x for x in function.info.required if x not in known)]
        asked = {name for function in self._functions for name in function.info.required}
        self._wanted = tuple(name for name in columns if name in asked)

    def unreadable(self, truths: Sequence[Any]) -> dict[str, str]:
        """Why a grader of ours can read none of the right answers `truths`, by its name.

        The text is empty where it can read one. Without truths, no grader is named.
        """
        return {
            function.name: _first_fault(function.read_truth, truths)
            for function in self._functions
            if truths and function.read_truth is not None
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions in their order: the keys of `RewardResult.parts`."""
        return tuple(function.name for function in self._functions)

    def __enter__(self) -> "RewardManager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def score(
        self, prompts: "Sequence[Prompt]", completions: "Sequence[Completion]", step: int
    ) -> RewardResult:
        """Score completion i as an answer to prompt i. `prompts` repeats a prompt for its group.

        Raises ValueError when a function asks for a column that the data do not have, or logs a
        metric under a name that the trainer writes.
        """
        replies: list[tuple[_Function, list[Reply], list[Graded]]] = []
        if prompts:
            state = TrainerState(global_step=step, max_steps=self._total_steps)
            batch = batch_call(prompts, completions, state, self._wanted)
            samples = [sample_call(p, c) for p, c in zip(prompts, completions, strict=True)]
            for function, answers in self._call_all(batch, samples):
                replies.append(self._with_retries(function, answers, batch, samples))
        parts = {f.name: np.zeros(0, np.float32) for f in self._functions}
        extras: list[dict[str, Any]] = [{} for _ in prompts]
        steps: list[list[tuple[float, Steps]]] = [[] for _ in prompts]
        logged: dict[str, list[float]] = {}
        errors: list[tuple[str, int, CallError]] = []
        for function, answers, grades in replies:
            graded = [
                _with_checked_steps(function.name, grade, completion)
                for grade, completion in zip(grades, completions, strict=True)
            ]
            for own, grade in zip(steps, graded, strict=True):
                own += [] if grade.steps is None else [(function.weight, grade.steps)]
            parts[function.name] = self._values(graded)
            errors += [(function.name, i, g.error) for i, g in enumerate(graded) if g.error]
            # verl's keys belong to one function, TRL's columns to the whole run.
            prefix = f"{function.name}/" if function.info.kind == "sample" else ""
            for own, grade in zip(extras, graded, strict=True):
                own.update({prefix + name: value for name, value in grade.extras.items()})
            for name, values in _logged(function, answers, graded).items():
                self._check_name(name, function)
                logged.setdefault(name, []).extend(values)
        scores, applicable = self._weighted_sum(parts, len(prompts))
        none = CallError(kind="not applicable", message="every function returned None")
        known = {index for _, index, _ in errors}
        errors += [("all", int(i), none) for i in np.flatnonzero(~applicable) if i not in known]
        failures = [_failure(*error, prompts, completions) for error in errors]
        _warn_of_failures(failures, len(prompts))
        return RewardResult(
            scores=scores,
            parts=parts,
            statistics=_statistics(logged, parts, failures),
            extras=extras,
            failures=failures,
            steps=steps,
        )

    def _values(self, graded: Sequence[Graded]) -> np.ndarray:
        """float32 [N] of one function: NaN where it does not apply, a value on an error."""
        part = np.full(len(graded), np.nan, np.float32)
        for i, grade in enumerate(graded):
            if grade.error is not None:
                part[i] = self._failure_value
            elif grade.value is not None:
                part[i] = grade.value
        return part

    def _weighted_sum(
        self, parts: Mapping[str, np.ndarray], num_samples: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores, and to which samples some function applied; the failure value for the others."""
        scores, applicable = np.zeros(num_samples, np.float32), np.zeros(num_samples, bool)
        for function in self._functions if num_samples else ():
            part = parts[function.name]
            scores += np.float32(function.weight) * np.nan_to_num(part, nan=0.0)
            applicable |= ~np.isnan(part)
        scores[~applicable] = np.nan_to_num(self._failure_value)
        return scores, applicable

    def _check_name(self, name: str, function: _Function) -> None:
        ours = {f"rewards/{n}/{end}" for n in self.names for end in ("mean", "std", "failures")}
        if is_reserved(name) or name in ours:
            raise ValueError(
                f"The reward function {function.info.path} logs the metric {name!r}, a name that "
                f"the trainer writes itself. Take another one, such as '{function.name}/"
                f"{name.rpartition('/')[2]}'."
            )

    # --------------------------------------------------------------------- calls

    def _call_all(
        self, batch: BatchCall, samples: list[SampleCall]
    ) -> list[tuple[_Function, list[Reply]]]:
        """Replies of each function: one for all samples, or one for each."""
        for function in self._functions:
            check_columns(function.info, batch.fields)
        # The pool works while our own functions run here.
        pending = {
            function.index: self._submit(function, batch, samples)
            for function in self._functions
            if function.local is None
        }
        replies: list[tuple[_Function, list[Reply]]] = []
        for function in self._functions:
            if function.local is not None:
                calls = function.calls(batch, samples)
                own = [call(function.local, function.info, request) for request in calls]
                replies.append((function, own))
        singles: list[tuple[_Function, list[Future[list[Reply]]]]] = []
        for function in self._functions:
            if function.local is not None:
                continue
            answers = _results(pending[function.index])
            if _blames_all(function, answers, len(samples)):
                singles.append((function, self._one_by_one(function, batch, samples)))
            else:
                replies.append((function, answers))
        return replies + [(function, _results(futures)) for function, futures in singles]

    def _with_retries(
        self,
        function: _Function,
        replies: list[Reply],
        batch: BatchCall,
        samples: list[SampleCall],
    ) -> tuple[_Function, list[Reply], list[Graded]]:
        """All replies of a function, and its grade of each sample, after retries of failed ones.

        Functions that run in this process are graders of ours: they would fail again.
        """
        graded = _per_sample(replies, len(samples))
        for _ in range(self._max_retries if function.local is None else 0):
            failed = [i for i, g in enumerate(graded) if g.error and g.error.kind != "not run"]
            if not failed:
                break
            part, some = part_of(batch, failed), [samples[i] for i in failed]
            again = _results(self._submit(function, part, some))
            if _blames_all(function, again, len(some)):
                again = _results(self._one_by_one(function, part, some))
            for i, grade in zip(failed, _per_sample(again, len(failed)), strict=True):
                graded[i] = grade
            replies = [*replies, *again]
        return function, replies, graded

    def _submit(
        self, function: _Function, batch: BatchCall, samples: list[SampleCall]
    ) -> list[Future[list[Reply]]]:
        if function.info.kind == "sample" and not function.info.is_async:
            return self._one_by_one(function, batch, samples)
        calls = function.calls(batch, samples)
        together = function.info.kind == "sample"  # async: they wait at the same time
        return [self._pool.submit(function.index, calls, LostCalls(), together=together)]

    def _one_by_one(
        self, function: _Function, batch: BatchCall, samples: list[SampleCall]
    ) -> list[Future[list[Reply]]]:
        calls: Sequence[BatchCall | SampleCall] = samples
        if function.info.kind == "batch":
            calls = [part_of(batch, [i]) for i in range(batch.size)]
        # Several chunks a worker, so that a slow one does not hold up the end.
        size = -(-len(calls) // (4 * self._pool.num_workers))
        chunks = [calls[i : i + size] for i in range(0, len(calls), size)]
        lost = LostCalls()
        return [self._pool.submit(function.index, chunk, lost) for chunk in chunks]


def _results(futures: Sequence[Future[list[Reply]]]) -> list[Reply]:
    return [reply for future in futures for reply in future.result()]


def _blames_all(function: _Function, replies: Sequence[Reply], num_samples: int) -> bool:
    """True where one sample may have caused the error of others; each is then called alone."""
    shared = [
        reply.error is not None
        and reply.error.kind in ("exception", "crash", "timeout")
        and (function.info.kind == "batch" or reply.error.shared)
        for reply in replies
    ]
    return num_samples > 1 and any(shared)


def _per_sample(replies: Sequence[Reply], num_samples: int) -> list[Graded]:
    """One `Graded` for each sample; a single lost call counts for all of them."""
    graded: list[Graded] = []
    for reply in replies:
        if reply.error is None:
            graded.extend(reply.graded)
        else:
            count = num_samples if len(replies) == 1 else 1
            graded.extend([Graded(error=reply.error)] * count)
    assert len(graded) == num_samples, (len(graded), num_samples)
    return graded


def _with_checked_steps(function: str, graded: Graded, completion: "Completion") -> Graded:
    """An error in place of steps that end behind the response."""
    if graded.steps is None:
        return graded
    try:
        graded.steps.check(completion)
    except ValueError as error:
        message = f"{function} returned {error}"
        return Graded(error=CallError(kind="bad return", message=message), extras=graded.extras)
    return graded


def _logged(
    function: _Function, replies: Sequence[Reply], graded: Sequence[Graded]
) -> dict[str, list[float]]:
    """Finite numbers by metric name: of log_metric, and of verl dicts under `rewards/<function>/`.

    Text and other values of a verl dict are in the trace only.
    """
    pairs = [pair for reply in replies for pair in reply.metrics]
    if function.info.kind == "sample":
        for grade in graded:
            for name, value in grade.extras.items():
                number = as_number(value)
                if number is not None:
                    pairs.append((f"rewards/{function.name}/{name}", number))
    logged: dict[str, list[float]] = {}
    for name, number in pairs:
        if math.isfinite(number):
            logged.setdefault(name, []).append(number)
        else:
            log.warning(
                "The reward function %s logged %s for the metric %r. The value is left out.",
                function.info.path,
                number,
                name,
            )
    return logged


def _failure(
    function: str,
    index: int,
    error: CallError,
    prompts: "Sequence[Prompt]",
    completions: "Sequence[Completion]",
) -> RewardFailure:
    return RewardFailure(
        function=function,
        index=index,
        kind=error.kind,
        message=error.message,
        prompt=prompts[index].text,
        completion=completions[index].text,
    )


def refuse_unreadable(everyone: Sequence[Mapping[str, str]], data: str) -> None:
    """ValueError where a grader can read no right answer of the rows of any process.

    Each process gives `RewardManager.unreadable` of its own rows.
    """
    for name in sorted({name for faults in everyone for name in faults}):
        reasons = [faults[name] for faults in everyone if name in faults]
        if all(reasons):
            raise ValueError(
                f"{name} can grade no row of the {data} data; of the first, {reasons[0]}. It reads "
                "the column ground_truth, answer or solution; another one is "
                "--config.data.columns={ground_truth: THEIRS}"
            )


def _compares(info: FunctionInfo) -> bool:
    """True for a grader of ours that compares with the right answer of a row."""
    return is_builtin(info.path) and info.kind == "sample" and "ground_truth" in info.required


def _first_fault(read: Callable[[Any], Any], truths: Sequence[Any]) -> str:
    first = ""
    for truth in truths:
        try:
            read(truth)
        except ValueError as error:
            first = first or str(error)
        else:
            return ""
    return first


def _check_truth(info: FunctionInfo, columns: Collection[str]) -> None:
    """ValueError where no row can have the right answer that a grader of ours compares with."""
    if _compares(info) and not {*TRUTHS} & {*columns}:
        raise ValueError(
            f"{info.name} compares with a right answer, and no row has one: name the column "
            "ground_truth, answer or solution, say which it is, "
            "--config.data.columns={ground_truth: THEIRS}, or take another reward function "
            "(config.validation.grader of held-out rows); the rows have: "
            f"{', '.join(sorted(columns)) or 'none'}"
        )


def _statistics(
    logged: Mapping[str, Sequence[float]],
    parts: Mapping[str, np.ndarray],
    failures: Sequence[RewardFailure],
) -> RewardStatistics:
    return RewardStatistics(
        logged={name: Moments.of(values) for name, values in logged.items()},
        parts={name: Moments.of(part[~np.isnan(part)]) for name, part in parts.items()},
        failures={name: sum(f.function == name for f in failures) for name in parts},
        num_failed=len({failure.index for failure in failures}),
    )


def unique_names(references: Sequence[tuple[Any, ...]]) -> list[str]:
    """Function names, with _2, _3 ... where two files use the same one."""
    names: list[str] = []
    for path, *_ in references:
        name = base = split_path(path)[1]
        count = 1
        while name in names:
            count += 1
            name = f"{base}_{count}"
        names.append(name)
    return names


def _warn_of_failures(failures: Sequence[RewardFailure], num_samples: int) -> None:
    """One warning a function: a count and the first case. The result lists them all."""
    first: dict[str, RewardFailure] = {}
    counts: dict[str, int] = {}
    for failure in failures:
        first.setdefault(failure.function, failure)
        counts[failure.function] = counts.get(failure.function, 0) + 1
    for name, count in counts.items():
        log.warning(
            "Reward failed on %d of %d samples. First: %s",
            count,
            num_samples,
            first[name].describe(),
        )
