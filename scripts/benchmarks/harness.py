"""Measure cases: compile them together, then check, warm up and time them one after the other.

A case that fails is reported with its message, and the others continue.
"""

import gc
import math
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.profile import record
from benchmarks.records import Row
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.shapes import num_parameters

MOST_CALLS = 200
MAIN = "main"  # begin of the names of programs that are timed

Programs = dict[str, jax.stages.Compiled]
# A program, the seconds that compiling it took, and the time at which it was ready.
Timed = tuple[jax.stages.Compiled, float, float]


class CheckFailed(RuntimeError):
    """A result is wrong. Its row is still timed, but enters no ratio."""


@dataclass(frozen=True)
class Compiling:
    """The programs of a case while they compile."""

    started: float
    lowering: float  # seconds
    programs: dict[str, Future[Timed]]

    def results(self) -> tuple[Programs, dict[str, float]]:
        """The programs, and their compile times (docs/performance.md)."""
        done = {name: future.result() for name, future in self.programs.items()}
        programs = {name: program for name, (program, _, _) in done.items()}
        added_up = self.lowering + sum(seconds for _, seconds, _ in done.values())
        last = max(end for _, _, end in done.values())
        return programs, {
            "s compiling": added_up,
            "s lowering": self.lowering,
            "s longest program": max(seconds for _, seconds, _ in done.values()),
            "s until compiled": last - self.started,
        }


class Case(ABC):
    """One thing to measure. The methods are called in this order, `memory` before `parts`."""

    benchmark: str
    shape: str
    name: str
    who: str = "ours"
    # Shorter calls are queued several at a time, so that dispatch is hidden.
    min_seconds: float = 0.0
    # Whether the check has already run the timed program, so that no warm-up is needed.
    warm: bool = False

    @abstractmethod
    def lower(self) -> dict[str, jax.stages.Lowered]:
        """Every program of the case, from abstract arrays.

        What is timed is "main", and other names that begin so. An object that several cases return
        is compiled once.
        """

    def lower_in_turn(self) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """The programs of `lower`. Each is compiled while the next one is lowered."""
        yield from self.lower().items()

    @abstractmethod
    def prepare(self, programs: Programs) -> None:
        """Make random arrays, so that XLA cannot fold or skip work."""

    @abstractmethod
    def check(self) -> dict[str, float]:
        """Errors against an independent reference; CheckFailed where one is too large."""

    @abstractmethod
    def run(self) -> Any:
        """Dispatch once; returns arrays to wait for."""

    @abstractmethod
    def figures(self, seconds: float) -> dict[str, float]:
        """Figures of the median time, by name with their unit."""

    def parts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The parts of a profile, a trace each; called once, in this order."""
        yield "run", self.run

    def memory(self, programs: Programs) -> int | None:
        """Bytes of a device that the timed program holds; of several, the largest."""
        return max(memory_bytes(programs[name]) or 0 for name in programs if name.startswith(MAIN))

    def release(self) -> None:
        """Drop every array; called also after a failure."""
        vars(self).clear()


def run_cases(
    cases: Sequence[Case],
    *,
    repeats: int,
    compiler_options: dict[str, Any],
    report: Callable[[Row], None],
    profile: Path | None = None,
) -> list[Row]:
    """Measure every case; `report` gets each row as soon as it exists.

    With a folder `profile`, each case runs once more and writes its traces there.
    """
    rows = []
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        shared: dict[int, tuple[Any, Future[Timed]]] = {}
        compiling = [_submit(pool, case, compiler_options, shared) for case in cases]
        waiting = list(zip(cases, compiling, strict=True))
        # Nothing is timed while another case compiles: both would take longer.
        for _, one in waiting:
            for future in one.programs.values():
                future.exception()
        del compiling, shared
        while waiting:
            case, one = waiting.pop(0)
            rows.append(_measure_case(case, one, repeats, profile))
            report(rows[-1])
            del case, one
            gc.collect()
    return rows


def measure(
    run: Callable[[], Any], *, repeats: int, min_seconds: float, warm: bool = False
) -> tuple[float, ...]:
    """Seconds of one call, `repeats` times, after a warm-up unless it is `warm`."""
    if not warm:
        jax.block_until_ready(run())
    calls = 1
    if min_seconds:
        start = time.perf_counter()
        jax.block_until_ready(run())
        once = max(time.perf_counter() - start, 1e-6)
        calls = max(1, min(MOST_CALLS, round(min_seconds / once)))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls - 1):
            run()
        jax.block_until_ready(run())
        seconds.append((time.perf_counter() - start) / calls)
    return tuple(seconds)


def memory_bytes(program: jax.stages.Compiled) -> int | None:
    """Bytes of a device that the program holds: arguments, results and temporaries."""
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def relative_error(actual: Any, expected: Any) -> float:
    """|actual - expected| / |expected| over all leaves together, in the L2 norm and float32.

    NaN where either holds a NaN, so a comparison must be written to fail on it. NaN too where all
    that is expected is 0, as nothing was compared.
    """
    difference, norm = _squares(jax.tree.leaves(actual), jax.tree.leaves(expected))
    return float((difference / norm) ** 0.5)


@jax.jit
def _squares(actual: list[Any], expected: list[Any]) -> tuple[Any, Any]:
    pairs = [
        (x.astype(jnp.float32), y.astype(jnp.float32))
        for x, y in zip(actual, expected, strict=True)
    ]
    difference = sum(jnp.square(x - y).sum() for x, y in pairs)
    return difference, sum(jnp.square(y).sum() for _, y in pairs)


def poison(like: Any) -> None:
    """Free arrays of NaN of these shapes, so that values which a kernel does not write are found.

    jax's allocator on GPUs takes the smallest free piece that fits, so results reuse this memory.
    """
    jax.block_until_ready([jnp.full(x.shape, jnp.nan, x.dtype) for x in jax.tree.leaves(like)])


def require(name: str, value: float, most: float) -> None:
    """CheckFailed unless `value` is at most `most`; NaN fails."""
    if not value <= most:
        raise CheckFailed(f"{name} is {value:.4g}, which must be at most {most:g}")


def most_mult_prob_error(config: ModelConfig, quantization: str) -> float:
    """The largest accepted mean of exp(|log-ratio|) of sampler and trainer over tokens, in bf16.

    Logits of random weights, and their rounding, grow with the hidden size and the root of the
    layers. The excess over 1 was measured as 1.9e-6 to 2.1e-6 of their product from 1.5B to 32B.
    Sampler and trainer were equally far from float32: see docs/performance.md.
    Models up to 2e9 parameters may have 1.02, larger ones 1.05, and 2.15e-6 of that product where
    it is more. Of a trained model, NeMo-RL's guide (docs/adding-new-models.md) asks for an
    investigation above 1.05.
    """
    if quantization == "float8":
        return 1.5
    if num_parameters(config) <= 2e9:
        return 1.02
    return max(1.05, 1 + 2.15e-6 * config.hidden_size * math.sqrt(config.num_layers))


def _submit(
    pool: ThreadPoolExecutor,
    case: Case,
    compiler_options: dict[str, Any],
    shared: dict[int, tuple[Any, Future[Timed]]],
) -> Compiling:
    start, futures = time.perf_counter(), {}
    try:
        for name, program in case.lower_in_turn():
            if id(program) not in shared:
                # The options are for the measured programs; a check keeps the defaults.
                options = compiler_options if name.startswith(MAIN) else None
                # The reference keeps another program from getting this id.
                shared[id(program)] = program, pool.submit(_compile, program, options)
            futures[name] = shared[id(program)][1]
    except Exception as error:  # any failure concerns only this case
        failed: Future[Timed] = Future()
        failed.set_exception(error)
        return Compiling(start, 0.0, {MAIN: failed})
    return Compiling(start, time.perf_counter() - start, futures)


def _compile(program: jax.stages.Lowered, options: dict[str, Any] | None) -> Timed:
    start = time.perf_counter()
    compiled = program.compile(options)
    end = time.perf_counter()
    return compiled, end - start, end


def _measure_case(case: Case, compiling: Compiling, repeats: int, profile: Path | None) -> Row:
    about: dict[str, Any] = {
        "benchmark": case.benchmark,
        "shape": case.shape,
        "case": case.name,
        "who": case.who,
    }
    try:
        programs, until_compiled = compiling.results()
        _check_room(programs)
        case.prepare(programs)
        checks, failed = {}, ""
        try:
            checks = case.check()
        except CheckFailed as error:
            # Timed in spite of the error, which the row carries: a run may be long to repeat.
            failed = _message(error)
        seconds = measure(case.run, repeats=repeats, min_seconds=case.min_seconds, warm=case.warm)
        figures = case.figures(statistics.median(seconds))
        figures |= until_compiled
        memory = case.memory(programs)
        row = Row(
            **about,
            seconds=seconds,
            memory_bytes=memory,
            figures=figures,
            checks=checks,
            error=failed,
        )
        return row if profile is None else _profiled(row, case, profile / row.key)
    except Exception as error:  # out of memory, an unsupported kernel, a failed check: reported
        return Row(**about, error=_message(error))
    finally:
        case.release()


def _check_room(programs: Programs) -> None:
    """Raises MemoryError for a program that does not fit on a device.

    XLA's own error would name whatever waits for the program first.
    """
    limit = _device_bytes()
    for name, program in programs.items():
        needed = memory_bytes(program) or 0
        if needed > limit:
            raise MemoryError(
                f"the program {name!r} needs {needed / 2**30:.1f} GiB of a device that has "
                f"{limit / 2**30:.1f}. What needs less: a smaller --batch or --groups, more "
                "devices on --config.mesh.fsdp; to generate, --config.rollout.cache_tokens or "
                "num_slots; to train, --config.actor.micro_batch_tokens and remat, and the critic's"
            )


def _device_bytes() -> float:
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)


def _profiled(row: Row, case: Case, folder: Path) -> Row:
    try:
        parts = {name: record(folder / name, run) for name, run in case.parts()}
    except Exception as error:  # the measurement stays valid
        return replace(row, profile_error=_message(error))
    return replace(row, profile=parts)


def _message(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}"
