"""What every test shares: eight CPU devices, the compile cache, and checked shapes."""

import functools
import gc
import importlib.metadata
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import AbstractArray, jaxtyped
from timing import CpuReport

from jaxrl_llm.launch.runtime import IN_ORDER
from jaxrl_llm.observability.garbage import end_without_search

# A mesh may be smaller than the machine, so that tests of one device and of several share a
# process. Other processes have one device, as a user's do. A `TinyRun` has as many: programs of
# another number of devices are compiled again.
NUM_DEVICES = 8

# Folders with long files first, so that no worker is left with one at the end.
LONG = (
    "learning",
    "distributed",
    "trainer",
    "evaluation",
    "supervision",
    "plan",
    "kernels",
    "generation",
)

# Eight devices share few cores. After 40 s of waiting for another XLA would end the process.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
# Compiling is most of what the tests cost, and on a CPU this is three times as fast; what it makes
# is as exact, and two to three times slower. Subprocesses inherit it. `XLA_FLAGS= pytest` leaves
# programs as users have them.
FAST_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    # One module a program: with two cores the work of splitting it was a seventh of the CPU time.
    "--xla_cpu_parallel_codegen_split_count=1 "
    # Loops run as they are written: looking for what is left of each took a twentieth.
    "--xla_disable_hlo_passes=simplify-while-loops "
    f"{IN_ORDER} "
    f"{PATIENCE}"
)

# Compiled programs, of every run of the tests.
CACHE = f".pytest_cache/jax-{importlib.metadata.version('jax')}"
CACHE_BYTES = 2**30

# A worker takes up to 3 GB.
MOST_WORKERS = 8
WORKER_BYTES = 4 * 2**30


def asked_for(config: pytest.Config) -> set[str]:
    """The markers that the command asks for."""
    return set(re.findall(r"(?<!not )\b(?:slow|torch|h200)\b", config.option.markexpr))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of `-n auto`: one more than there are cores, as some tests wait for processes.

    Slow tests run alone, as some hold a run to the clock. Files that the command names run without
    workers, which take seconds to start.
    """
    if "slow" in asked_for(config) or any(
        Path(argument.split("::")[0]).is_file() for argument in config.args
    ):
        return 0
    if wanted := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):  # as pytest-xdist has it
        return int(wanted)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(cores + 1, MOST_WORKERS, memory // WORKER_BYTES))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the folders whose every test has a marker that the command leaves out."""
    marker = {"parity": "torch", "h200": "h200"}.get(collection_path.name)
    left_out = marker is not None and f"not {marker}" in config.option.markexpr
    return True if left_out and collection_path.parent == Path(__file__).parent else None


def pytest_configure(config: pytest.Config) -> None:
    """Long runs and programs for a GPU are compiled as users have them, the others fast."""
    # Tracing makes many objects that live; looking for cycles among them took a sixth of the time.
    gc.set_threshold(200_000, 50, 100)
    end_without_search()
    config.pluginmanager.register(CpuReport(), "cpu-report")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Or each process that a test starts would compile the modules of the package again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # What one test compiled is there for the others. Workers and other processes inherit it.
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = config.rootpath / CACHE
        folder.mkdir(parents=True, exist_ok=True)
        shrink(folder, CACHE_BYTES)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    asked = asked_for(config)
    if "torch" in asked:  # its threads wait for each other, and take half of the CPU time
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not asked & {"slow", "h200"}:
        os.environ.setdefault("XLA_FLAGS", FAST_COMPILE)
        # Operations without the lines of Python that they come from.
        os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    # As the launcher has it for several CPU devices, which could wait for each other for ever.
    os.environ.setdefault("XLA_FLAGS", f"{IN_ORDER} {PATIENCE}")
    import jax  # reads the environment when it is imported

    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    import runs
    from less_work import do_less

    config.pluginmanager.register(runs, "fixtures of every folder")
    do_less()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Have pytest find nothing to go through when it collects garbage at its end."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files of LONG to the front, in its order; the others keep theirs."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)


def shrink(folder: Path, limit: int) -> None:
    """Delete the oldest files of `folder` until the others take at most `limit` bytes."""
    files = [(file.stat(), file) for file in folder.iterdir()]
    total = sum(stat.st_size for stat, _ in files)
    for stat, file in sorted(files, key=lambda entry: entry[0].st_mtime):
        if total <= limit:
            return
        file.unlink(missing_ok=True)
        total -= stat.st_size


@pytest.fixture
def checked() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrap a function so that its jaxtyping annotations, results included, hold on every call."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(fn, eval_str=True)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            with jaxtyped("context"):  # one binding of the dimension names for the whole call
                for name, value in bound.arguments.items():
                    _check(value, signature.parameters[name].annotation, f"argument {name}")
                result = fn(*args, **kwargs)
                _check(result, signature.return_annotation, "result")
            return result

        return call

    return wrap


def _check(value: Any, annotation: Any, what: str) -> None:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        assert isinstance(value, annotation), f"{what}: {value} is no {annotation.__name__}"
    elif origin is tuple:
        for i, (item, kind) in enumerate(zip(value, arguments, strict=True)):
            _check(item, kind, f"{what}[{i}]")
    elif origin is dict:
        for key, item in value.items():
            _check(item, arguments[1], f"{what}[{key!r}]")
