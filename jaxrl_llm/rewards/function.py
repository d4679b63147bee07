"""Reward functions by path: finding one, reading its signature, binding its settings.

Only the standard library is imported here. The worker processes of the pool run this file, and
they must neither pay for jax nor touch an accelerator.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

SAMPLE_FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_FIELDS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)
SIGNATURES = (
    "f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns) "
    "-> list[float | None], or compute_score(data_source, solution_str, ground_truth, extra_info) "
    "-> float | dict"
)


@dataclass(frozen=True, kw_only=True)
class FunctionInfo:
    """What the caller must know of a reward function: how to call it, and with what."""

    path: str
    name: str
    kind: Literal["batch", "sample"]  # TRL's signature, or verl's compute_score
    is_async: bool
    parameters: tuple[str, ...]  # filled by the caller, by name
    required: tuple[str, ...]  # those of `parameters` without a default
    takes_columns: bool  # has **kwargs: gets every field and column
    isolated: bool  # to be run in the process pool

    def arguments(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """The part of `available` that the function asks for."""
        if self.takes_columns:
            return dict(available)
        return {name: available[name] for name in self.parameters if name in available}


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """' Did you mean ...?' when a candidate is near, else an empty string."""
    near = difflib.get_close_matches(word, list(candidates), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def split_path(path: str) -> tuple[str, str]:
    """'my_rewards.py:fn' or 'package.module:fn' -> (module part, function name)."""
    module, colon, name = path.rpartition(":")
    if not colon or not module or not name:
        raise ValueError(
            f"{path!r} does not name a function: write 'my_rewards.py:fn' or 'package.module:fn'."
        )
    return module, name


def absolute_path(path: str) -> str:
    """The same reference with a file made absolute, so that it holds in another process."""
    module, name = split_path(path)
    return f"{Path(module).expanduser().resolve()}:{name}" if module.endswith(".py") else path


def is_builtin(path: str) -> bool:
    """True for the graders of this package, which are trusted to run in the trainer's process."""
    return split_path(path)[0].startswith("jaxrl_llm.rewards.")


def load_function(path: str) -> Callable[..., Any]:
    """Import the callable that `path` names.

    Raises ValueError, with the nearest file or name, when the file, the module or the function is
    missing or when importing it fails.
    """
    module_name, name = split_path(path)
    if module_name.endswith(".py"):
        module = _import_file(Path(module_name).expanduser().resolve())
    else:
        module = _import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        defined = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(
            f"{module_name} has no function {name!r}; it has: {', '.join(defined) or 'none'}."
            + did_you_mean(name, defined)
        )
    return function


def _import_file(file: Path) -> ModuleType:
    if not file.is_file():
        beside = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ValueError(
            f"There is no file {file}: check the path of the reward function."
            + did_you_mean(file.name, beside)
        )
    # Under this name in sys.modules, dataclasses and pickling work inside the user's file. The
    # checksum keeps two files of the same name in different folders apart.
    module_name = f"jaxrl_llm_user_{file.stem}_{zlib.crc32(str(file).encode()):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last: a neighbour must not hide an installed package
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code: whatever it raises means that it cannot be used
        del sys.modules[module_name]
        raise ValueError(f"Importing {file} failed: {type(error).__name__}: {error}") from error
    return module


def _import_module(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # user code: whatever it raises means that it cannot be used
        raise ValueError(
            f"Importing the module {module_name!r} failed: {type(error).__name__}: {error}. "
            "Install its package, start from the folder that holds it, or name the file: "
            "'path/to/file.py:fn'."
        ) from error


def inspect_function(
    path: str, function: Callable[..., Any], settings: Mapping[str, Any]
) -> FunctionInfo:
    """Read the signature; raises ValueError for an unknown signature or setting.

    Keyword-only parameters are settings. A function with a `solution_str` is verl's; there the
    parameters beyond verl's four are settings too, since verl binds them from its config.
    """
    parameters = inspect.signature(function).parameters.values()
    fillable = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = [p.name for p in fillable]
    takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters)
    is_sample = "solution_str" in names
    if is_sample:
        beyond = [p for p in fillable if p.name not in SAMPLE_FIELDS]
        fillable = [p for p in fillable if p.name in SAMPLE_FIELDS]
    else:
        beyond = []
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters) or not (
        is_sample or takes_columns or set(names) & {"prompts", "completions", "completion_ids"}
    ):
        raise ValueError(
            f"{path} has the signature ({', '.join(names)}), which is no reward function's. "
            f"Write {SIGNATURES}."
        )
    legal = [p for p in parameters if p.kind is p.KEYWORD_ONLY] + beyond
    _check_settings(path, legal, settings)
    return FunctionInfo(
        path=path,
        name=split_path(path)[1],
        kind="sample" if is_sample else "batch",
        is_async=_is_async(function),
        parameters=tuple(p.name for p in fillable),
        required=tuple(p.name for p in fillable if p.default is p.empty),
        takes_columns=takes_columns,
        isolated=not is_builtin(path)
        or getattr(sys.modules.get(function.__module__), "RUNS_IN_POOL", False),
    )


def _check_settings(path: str, legal: list[inspect.Parameter], settings: Mapping[str, Any]) -> None:
    names = [p.name for p in legal]
    for name in settings:
        if name not in names:
            raise ValueError(
                f"{path} has no setting {name!r}; its keyword-only parameters are: "
                f"{', '.join(names) or 'none'}." + did_you_mean(name, names)
            )
    missing = [p.name for p in legal if p.default is p.empty and p.name not in settings]
    if missing:
        raise ValueError(
            f"{path} needs the setting {missing[0]!r}: keyword-only parameters are settings. "
            "Give it a value in the config, a default, or move it before the `*` if it is a "
            "column of the data."
        )


def _is_async(function: Callable[..., Any]) -> bool:
    if inspect.iscoroutinefunction(function):
        return True
    return inspect.iscoroutinefunction(type(function).__call__)  # an object with async __call__


def load_bound(path: str, settings: Mapping[str, Any]) -> tuple[Callable[..., Any], FunctionInfo]:
    """Load a function, check it, and bind its settings."""
    function = load_function(path)
    info = inspect_function(path, function, settings)
    return functools.partial(function, **settings), info
