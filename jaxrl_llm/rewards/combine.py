"""Several reward functions with weights become one float32 score a sample."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxrl_llm.rewards.calls import (
    BatchCall,
    SampleCall,
    TrainerState,
    batch_call,
    check_columns,
    sample_call,
    split_batch,
)
from jaxrl_llm.rewards.function import (
    FunctionInfo,
    absolute_path,
    is_builtin,
    load_bound,
    split_path,
)
from jaxrl_llm.rewards.invoke import CallError, Graded, Reply, as_number, call, shorten
from jaxrl_llm.rewards.pool import Hopeless, Task, WorkerPool

if TYPE_CHECKING:  # types.py imports jax, which a program that only grades does not need
    from jaxrl_llm.types import Completion, Prompt

log = logging.getLogger(__name__)


class FunctionReference(Protocol):
    """A function in a config: where it is, and its keyword-only settings."""

    @property
    def path(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """A sample that got the failure value, and why."""

    function: str
    index: int  # of the sample in the batch
    kind: str  # exception | crash | timeout | bad return | not run | not applicable
    message: str
    prompt: str
    completion: str

    def describe(self) -> str:
        """One line for a log."""
        return (
            f"{self.function}: {self.kind}: {self.message}; prompt {shorten(self.prompt)}, "
            f"completion {shorten(self.completion)}"
        )


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """The rewards of a batch of N samples, in the order of the completions."""

    scores: np.ndarray  # float32 [N], weighted sum of the parts
    parts: dict[str, np.ndarray]  # function name -> float32 [N], unweighted; nan for None
    metrics: dict[str, float]
    extras: list[dict[str, Any]]  # one a sample: log_extra columns, other keys of verl dicts
    failures: list[RewardFailure] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Function:
    name: str
    weight: float
    info: FunctionInfo
    index: int  # in the pool's references
    local: Callable[..., Any] | None  # None: runs in the pool


class RewardManager:
    """Scores completions with several reward functions, user functions in a process pool.

    Functions of `jaxrl_llm.rewards` run in this process; every other one in a pool of
    `num_workers` processes (at least one a function), at most `timeout` seconds a call. A sample
    whose function crashed, hung, raised or returned no usable number gets `failure_value` from
    that function, is counted in `rewards/failures`, logged, and listed in the result.
    `total_steps` is what functions see as `trainer_state.max_steps`. Raises ValueError, with the
    remedy, for a function that cannot be loaded. Close it, or use it in a `with`.
    """

    def __init__(
        self,
        functions: Sequence[FunctionReference],
        *,
        weights: Sequence[float] | None = None,
        failure_value: float = 0.0,
        timeout: float = 30.0,
        num_workers: int = 2,
        max_concurrency: int = 64,
        give_up_after: int = 16,
        total_steps: int | None = None,
    ) -> None:
        if not functions:
            raise ValueError(
                "No reward function: give at least one, such as "
                "'jaxrl_llm.rewards.exact_answer:exact_answer'."
            )
        weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(weights) != len(functions):
            raise ValueError(
                f"{len(weights)} reward weights for {len(functions)} functions: give one each."
            )
        if timeout <= 0 or num_workers < 1 or not np.isfinite(failure_value):
            raise ValueError(
                f"timeout={timeout}, num_workers={num_workers}, failure_value={failure_value}: "
                "need timeout > 0, num_workers >= 1 and a finite failure_value."
            )
        self._failure_value = failure_value
        self._give_up_after = give_up_after
        self._total_steps = total_steps
        references = [(absolute_path(f.path), dict(f.settings)) for f in functions]
        self._pool = WorkerPool(
            references,
            num_workers=max(num_workers, len(functions)),
            timeout=timeout,
            max_concurrency=max_concurrency,
        )
        try:
            self._functions = [
                self._load(index, path, settings, name, weight)
                for index, ((path, settings), name, weight) in enumerate(
                    zip(references, _unique_names(references), weights, strict=True)
                )
            ]
        except ValueError:
            self._pool.close()
            raise

    def _load(
        self, index: int, path: str, settings: dict[str, Any], name: str, weight: float
    ) -> _Function:
        local = None
        if is_builtin(path):
            local, info = load_bound(path, settings)
        else:
            info = self._pool.load(index)
        if info.isolated:
            local = None
        return _Function(name=name, weight=weight, info=info, index=index, local=local)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the functions, in their order: the keys of `RewardResult.parts`."""
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
        """Score completion i as an answer to prompt i; `prompts` repeats a prompt for its group.

        Raises ValueError when a function asks for a column that the data do not have.
        """
        if len(prompts) != len(completions):
            raise ValueError(
                f"{len(prompts)} prompts for {len(completions)} completions: repeat each prompt "
                "once a completion."
            )
        tally = _Tally(prompts, completions, self._failure_value)
        if prompts:
            self._call_all(tally, TrainerState(global_step=step, max_steps=self._total_steps))
        return tally.result(self._functions)

    def _call_all(self, tally: "_Tally", state: TrainerState) -> None:
        prompts, completions = tally.prompts, tally.completions
        batch = batch_call(prompts, completions, state)
        samples = [sample_call(p, c) for p, c in zip(prompts, completions, strict=True)]
        for function in self._functions:
            check_columns(function.info, batch if function.info.kind == "batch" else samples[0])
        # User functions are under way while ours run here.
        pending = {
            function.index: self._submit(function, batch, samples)
            for function in self._functions
            if function.local is None
        }
        for function in self._functions:
            if function.local is None:
                continue
            calls = [batch] if function.info.kind == "batch" else samples
            tally.add(function, [call(function.local, function.info, c) for c in calls])
        retries: list[tuple[_Function, list[Future[list[Reply]]]]] = []
        for function in self._functions:
            if function.local is not None:
                continue
            replies = _replies(pending[function.index])
            if len(samples) > 1 and any(_blames_all(function, reply) for reply in replies):
                # One sample spoiled the call of all: call again with each alone to find it.
                singles = split_batch(batch) if function.info.kind == "batch" else samples
                retries.append((function, self._one_by_one(function, singles)))
            else:
                tally.add(function, replies)
        for function, futures in retries:
            tally.add(function, _replies(futures))

    def _submit(
        self, function: _Function, batch: BatchCall, samples: list[SampleCall]
    ) -> list[Future[list[Reply]]]:
        hopeless = Hopeless(self._give_up_after)
        if function.info.kind == "batch":
            task = Task(function=function.index, calls=[batch])
            return [self._pool.submit(task, hopeless)]
        if function.info.is_async:
            task = Task(function=function.index, calls=samples, operation="gather")
            return [self._pool.submit(task, hopeless)]
        return self._one_by_one(function, samples)

    def _one_by_one(
        self, function: _Function, calls: Sequence[BatchCall | SampleCall]
    ) -> list[Future[list[Reply]]]:
        # Several chunks a worker, so that a slow one does not hold up the end.
        size = -(-len(calls) // (4 * self._pool.num_workers))
        chunks = [calls[i : i + size] for i in range(0, len(calls), size)]
        hopeless = Hopeless(self._give_up_after)
        tasks = [Task(function=function.index, calls=chunk) for chunk in chunks]
        return [self._pool.submit(task, hopeless) for task in tasks]


def _replies(futures: Sequence[Future[list[Reply]]]) -> list[Reply]:
    return [reply for future in futures for reply in future.result()]


def _blames_all(function: _Function, reply: Reply) -> bool:
    """True for an error that one sample may have caused for the others called with it."""
    if reply.error is None or reply.error.kind not in ("exception", "crash", "timeout"):
        return False
    return function.info.kind == "batch" or reply.error.shared


class _Tally:
    """Collects the replies of one batch."""

    def __init__(
        self,
        prompts: "Sequence[Prompt]",
        completions: "Sequence[Completion]",
        failure_value: float,
    ) -> None:
        self.prompts = prompts
        self.completions = completions
        self._failure_value = failure_value
        self._parts: dict[str, np.ndarray] = {}
        self._extras: list[dict[str, Any]] = [{} for _ in prompts]
        self._logged: dict[str, list[float]] = {}
        self._failures: list[RewardFailure] = []

    def add(self, function: _Function, replies: Sequence[Reply]) -> None:
        """Take in the replies of a function: one for all samples, or one each."""
        graded: list[Graded] = []
        for reply in replies:
            for name, value in reply.metrics:
                self._logged.setdefault(name, []).append(value)
            if reply.error is None:
                graded.extend(reply.graded)
            else:
                count = len(self.prompts) if len(replies) == 1 else 1
                graded.extend([Graded(error=reply.error)] * count)
        assert len(graded) == len(self.prompts), (function.name, len(graded))
        part = np.full(len(graded), np.nan, np.float32)
        for i, grade in enumerate(graded):
            # verl's keys are its function's own; TRL's columns are named for the whole run.
            prefix = f"{function.name}/" if function.info.kind == "sample" else ""
            self._extras[i].update({prefix + name: v for name, v in grade.extras.items()})
            if grade.error is not None:
                self._fail(function.name, i, grade.error)
                part[i] = self._failure_value
            elif grade.value is not None:
                part[i] = grade.value
        self._parts[function.name] = part
        if function.info.kind == "sample":
            self._log_extras(function.name, graded)

    def _log_extras(self, function: str, graded: Sequence[Graded]) -> None:
        """The numbers that verl dicts hold beside the score become metrics."""
        for grade in graded:
            for name, value in grade.extras.items():
                number = as_number(value)
                if number is not None:
                    self._logged.setdefault(f"rewards/{function}/{name}", []).append(number)

    def _fail(self, function: str, index: int, error: CallError) -> None:
        self._failures.append(
            RewardFailure(
                function=function,
                index=index,
                kind=error.kind,
                message=error.message,
                prompt=self.prompts[index].text,
                completion=self.completions[index].text,
            )
        )

    def result(self, functions: Sequence[_Function]) -> RewardResult:
        """Weigh, sum and report."""
        num_samples = len(self.prompts)
        parts = {f.name: self._parts.get(f.name, np.zeros(0, np.float32)) for f in functions}
        scores = np.zeros(num_samples, np.float32)
        applicable = np.zeros(num_samples, bool)
        for function in functions:
            part = parts[function.name]
            scores += np.float32(function.weight) * np.nan_to_num(part, nan=0.0)
            applicable |= ~np.isnan(part)
        for index in np.flatnonzero(~applicable):
            none = CallError(kind="not applicable", message="every function returned None")
            self._fail("all", int(index), none)
        scores[~applicable] = self._failure_value
        metrics = {name: float(np.mean(values)) for name, values in self._logged.items()}
        for name, part in parts.items():
            metrics |= _part_metrics(name, part[~np.isnan(part)])
            own = [failure for failure in self._failures if failure.function == name]
            metrics[f"rewards/{name}/failures"] = float(len(own))
        metrics["rewards/failures"] = float(len({failure.index for failure in self._failures}))
        _log_failures(self._failures, num_samples)
        return RewardResult(
            scores=scores,
            parts=parts,
            metrics=metrics,
            extras=self._extras,
            failures=self._failures,
        )


def _unique_names(references: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Function names, with _2, _3 ... where two files use the same one."""
    names: list[str] = []
    for path, _ in references:
        name = base = split_path(path)[1]
        count = 1
        while name in names:
            count += 1
            name = f"{base}_{count}"
        names.append(name)
    return names


def _part_metrics(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean and unbiased standard deviation, as TRL reports them, where the function applied."""
    if values.size == 0:
        return {}
    wide = values.astype(np.float64)
    std = float(wide.std(ddof=1)) if values.size > 1 else 0.0
    return {f"rewards/{name}/mean": float(wide.mean()), f"rewards/{name}/std": std}


def _log_failures(failures: Sequence[RewardFailure], num_samples: int) -> None:
    """One warning a function: a count and the first case; the result has them all."""
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
