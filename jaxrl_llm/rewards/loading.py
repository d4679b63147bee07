"""Reward functions: find one by its path, read its signature, bind its settings.

The worker processes of the pool import this file. It imports only the standard library, so that
a worker neither pays for jax nor touches an accelerator.
"""

import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrl_llm import references

SAMPLE_FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")
SIGNATURES = (
    "f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns) "
    "-> list[float | None], or compute_score(data_source, solution_str, ground_truth, extra_info) "
    "-> float | dict"
)


def absolute_path(path: str) -> str:
    """`path` with its file made absolute, so that another process finds it."""
    module, name = references.split_path(path)
    if module.endswith(".py"):
        module = str(Path(module).expanduser().resolve())
    return f"{module}:{name}"


def is_builtin(path: str) -> bool:
    """True for a grader of this package, which may run in the trainer's process."""
    return references.split_path(path)[0].startswith("jaxrl_llm.rewards.")


@dataclass(frozen=True, kw_only=True)
class FunctionInfo:
    """A reward function's kind of call, and its arguments."""

    path: str
    name: str
    kind: Literal["batch", "sample"]  # TRL's signature, or verl's compute_score
    is_async: bool
    parameters: tuple[str, ...]  # filled by the caller, by name
    required: tuple[str, ...]  # the `parameters` without a default
    settings: tuple[str, ...]  # bound from the config, or left at their default
    takes_columns: bool  # has **kwargs: receives every field and column
    isolated: bool  # runs in the process pool

    def arguments(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of `available` that the function takes. A column never replaces a setting."""
        if self.takes_columns:
            return {name: x for name, x in available.items() if name not in self.settings}
        return {name: available[name] for name in self.parameters if name in available}


def load_bound(
    path: str, settings: Mapping[str, Any], pickled: bytes = b""
) -> tuple[Callable[..., Any], FunctionInfo]:
    """Import a function, check it, and bind its settings.

    `pickled` is the function itself, of a program that gave it as an object. It comes from the
    trainer, which unpickles nothing.
    Raises ValueError, with the nearest name, when the file, function or a setting does not exist.
    """
    function = _unpickled(path, pickled) if pickled else references.load(path)
    if not callable(function):
        raise ValueError(f"{path} is a {type(function).__name__}, not a function: {SIGNATURES}")
    info = inspect_function(path, function, settings)
    # A grader of this package may have to look whether this machine can run it.
    prepare = getattr(sys.modules.get(function.__module__), "prepare", None)
    if prepare is not None and is_builtin(path):
        prepare(**settings)
    return functools.partial(function, **settings), info


def _unpickled(path: str, pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as error:  # user code may raise anything
        raise ValueError(
            f"the function {path.rpartition(':')[2]} cannot be made again in its worker process: "
            f"{references.reason(error)}; import what it needs inside of the function"
        ) from None


def inspect_function(
    path: str, function: Callable[..., Any], settings: Mapping[str, Any]
) -> FunctionInfo:
    """Read the signature. Raises ValueError for an unknown signature or setting.

    Keyword-only parameters are settings. A function with a `solution_str` is verl's: its
    parameters beyond verl's four are settings too, since verl binds them from its config.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin function
        raise ValueError(f"{path} does not say what it takes. Write {SIGNATURES}.") from None
    parameters = signature.parameters.values()
    fillable = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = [p.name for p in fillable]
    takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters)
    is_sample = "solution_str" in names
    beyond = [p for p in fillable if is_sample and p.name not in SAMPLE_FIELDS]
    fillable = [p for p in fillable if p not in beyond]
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters) or not (
        is_sample or takes_columns or set(names) & {"prompts", "completions", "completion_ids"}
    ):
        raise ValueError(
            f"{path} has the signature ({', '.join(map(str, parameters))}), which is not a "
            f"reward function's. Write {SIGNATURES}."
        )
    legal = [p for p in parameters if p.kind is p.KEYWORD_ONLY] + beyond
    _check_settings(path, legal, settings)
    return FunctionInfo(
        path=path,
        name=references.split_path(path)[1],
        kind="sample" if is_sample else "batch",
        is_async=_is_async(function),
        parameters=tuple(p.name for p in fillable),
        required=tuple(p.name for p in fillable if p.default is p.empty),
        settings=tuple(p.name for p in legal),
        takes_columns=takes_columns,
        isolated=not is_builtin(path)
        or getattr(sys.modules.get(function.__module__), "RUNS_IN_POOL", False),
    )


def _check_settings(path: str, legal: list[inspect.Parameter], settings: Mapping[str, Any]) -> None:
    names = [p.name for p in legal]
    for name in settings:
        if name not in names:
            raise ValueError(
                f"{path} has no setting {name!r}{references.nearest(name, names)}; its "
                f"keyword-only parameters are: {', '.join(names) or 'none'}"
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
