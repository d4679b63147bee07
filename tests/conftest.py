"""What every test shares: the CPU, and shapes checked while a function runs."""

import atexit
import functools
import gc
import inspect
import os
import re
import shutil
import tempfile
import typing
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest  # noqa: E402
from jaxtyping import AbstractArray, jaxtyped  # noqa: E402

# Compiling is most of what the tests cost, and on a CPU this is three times as fast; what it makes
# is as exact, and two to three times slower. Subprocesses inherit it. `XLA_FLAGS= pytest` leaves
# programs as users have them.
FAST_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def pytest_configure(config: pytest.Config) -> None:
    """Long runs and programs for a GPU are compiled as users have them, the others fast."""
    # Tracing makes many objects that live; looking for cycles among them took a sixth of the time.
    gc.set_threshold(200_000, 50, 100)
    # What several tests compile is compiled once. Workers and other processes inherit the folder.
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    asked_for = re.findall(r"(?<!not )\b(?:slow|h200)\b", config.option.markexpr)
    if not asked_for:
        os.environ.setdefault("XLA_FLAGS", FAST_COMPILE)


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
