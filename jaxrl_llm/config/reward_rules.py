"""Rules of rewards and graders, checked without jax; see rules.py."""

from collections.abc import Iterator
from typing import Any

from jaxrl_llm.config.functions import Code, Judge, Remote
from jaxrl_llm.config.records import ConfigError
from jaxrl_llm.config.schema import Config

__all__ = ["check_rewards", "check_times", "graders"]


def check_rewards(config: Config) -> None:
    """An online run has a reward, and its parts fit. Raises: ConfigError."""
    reward = config.reward
    if not reward.functions and reward.model is None:
        raise ConfigError(
            "config.reward has neither functions nor a model: set "
            "--config.reward.functions=[my_rewards.py:my_function]"
        )
    if reward.process_rewards and not reward.functions:
        raise ConfigError(
            "config.reward.process_rewards=true, and no function that could score steps: set "
            "--config.reward.functions=[my_rewards.py:my_function]"
        )
    if reward.weights and len(reward.weights) != len(reward.functions):
        ones = ",".join(["1"] * len(reward.functions))
        raise ConfigError(
            f"config.reward.weights={list(reward.weights)}: {len(reward.weights)} weights for "
            f"{len(reward.functions)} functions; [{ones}] works"
        )
    for i, extra in enumerate(config.models):
        if extra.weight and extra.kind != "scalar":
            raise ConfigError(
                f"config.models.{i}.weight={extra.weight:g}: {extra.name} is a language model, "
                "which gives no score; set its kind to scalar, or the weight to 0"
            )
    model = reward.model
    if model is not None and not model.path and model.training is None:
        raise ConfigError(
            "config.reward.model has no path and no training: set --config.reward.model.path=DIR, "
            "or --config.reward.model.training={} to train it in the run"
        )


def check_times(config: Config) -> None:
    """Graders with a limit of their own end before their call does. Raises: ConfigError."""
    limit = config.reward.timeout_s
    for key, function in graders(config):
        if isinstance(function, Code | Judge | Remote) and function.total_s >= limit:
            raise ConfigError(
                f"config.{key}.total_s={function.total_s:g} does not end before "
                f"config.reward.timeout_s={limit:g}, so slow work counts as a failed call: "
                f"--config.reward.timeout_s={function.total_s + 5:g} works"
            )


def graders(config: Config) -> Iterator[tuple[str, Any]]:
    """The functions that grade answers of a policy, by key."""
    yield "validation.grader", config.validation.grader
    for i, one in enumerate(config.validation.graders):
        yield f"validation.graders.{i}.grader", one.grader
    for i, function in enumerate(config.reward.functions):
        yield f"reward.functions.{i}", function
