"""The rewards of a config: graders, the place of a reward function, limits of workers."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jaxrl_llm import config as c
from jaxrl_llm.rewards.code import code
from jaxrl_llm.rewards.exact_answer import exact_answer
from jaxrl_llm.rewards.format import format_match
from jaxrl_llm.rewards.gsm8k import gsm8k
from jaxrl_llm.rewards.judge import judge
from jaxrl_llm.rewards.length import length_range
from jaxrl_llm.rewards.loading import absolute_path
from jaxrl_llm.rewards.math_answer import math_answer
from jaxrl_llm.rewards.overlong import overlong_penalty
from jaxrl_llm.rewards.remote import remote
from jaxrl_llm.rewards.workers.process import WorkerLimits

FUNCTIONS: dict[type[c.Grader], Callable[..., Any]] = {
    c.ExactAnswer: exact_answer,
    c.GSM8K: gsm8k,
    c.MathAnswer: math_answer,
    c.FormatMatch: format_match,
    c.LengthRange: length_range,
    c.OverlongPenalty: overlong_penalty,
    c.Code: code,
    c.Judge: judge,
    c.Remote: remote,
}


def worker_reference(function: c.Grader | c.Custom) -> tuple[str, dict[str, Any], bytes]:
    """Path, settings and pickle, by which a worker process loads a reward function.

    The pickle holds a function that was given as an object; it is empty for others.
    Raises: ValueError for an object that cannot be pickled.
    """
    path, settings = path_and_settings(function)
    if not isinstance(function, c.Given):
        return path, settings, b""
    import cloudpickle

    try:
        return path, settings, cloudpickle.dumps(function.function)
    except Exception as error:  # objects may raise anything
        raise ValueError(
            f"the reward function {path.rpartition(':')[2]} cannot be sent to its worker process "
            f"({type(error).__name__}: {error}); make such objects inside of the function, or "
            "write it in a file and name that, my_file.py:my_function"
        ) from None


def path_and_settings(function: c.Grader | c.Custom) -> tuple[str, dict[str, Any]]:
    """The path and the settings of a reward function."""
    if isinstance(function, c.Grader):
        grader = FUNCTIONS[type(function)]
        return f"{grader.__module__}:{grader.__name__}", asdict(function)
    return absolute_path(function.path), dict(function.settings)


def worker_limits(rewards: c.RewardConfig) -> WorkerLimits:
    """The limits of a process for user functions."""
    return WorkerLimits(memory_gb=rewards.memory_gb, file_gb=rewards.file_gb)
