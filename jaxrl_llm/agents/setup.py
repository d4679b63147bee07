"""The tools and environments of a config, and the driver of a run."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxrl_llm import config as c
from jaxrl_llm.agents.calculator import Calculator, IntegerCalculator, calculator
from jaxrl_llm.agents.conversation import Budgets
from jaxrl_llm.agents.driver import Driver, DriverSettings
from jaxrl_llm.agents.games import Guess, Maze
from jaxrl_llm.agents.observations import Observations
from jaxrl_llm.agents.sessions import Reference, Setup
from jaxrl_llm.agents.verifying import CodeEnvironment, Retry, python
from jaxrl_llm.agents.workers import open_tools
from jaxrl_llm.references import split_path
from jaxrl_llm.rewards.graders import worker_limits, worker_reference
from jaxrl_llm.tokenizer import Tokenizer

TOOLS: dict[type[c.Tool], Callable[..., Any]] = {
    c.CalculatorTool: calculator,
    c.PythonTool: python,
}
ENVIRONMENTS: dict[type[c.Environment], type] = {
    c.Calculator: Calculator,
    c.Guess: Guess,
    c.IntegerCalculator: IntegerCalculator,
    c.Maze: Maze,
    c.Retry: Retry,
    c.CodeEnvironment: CodeEnvironment,
}


def has_turns(config: c.Config) -> bool:
    """Whether answers of the run may have several turns."""
    rollout = config.rollout
    return bool(rollout.tools or rollout.environment or rollout.program)


def gives_rewards(config: c.Config) -> bool:
    """Whether an environment or a program may give rewards of its own."""
    return bool(config.rollout.environment) or isinstance(config.rollout.program, c.Custom)


def open_driver(
    config: c.Config,
    tokenizer: Tokenizer,
    *,
    max_context: int,
    folder: Path | None = None,
    origin: str = "",
) -> Driver:
    """The driver of a run. Close it at the end. `folder` keeps the observations for a resume.

    Observations of another `origin` are not used: it stands for code and settings.

    Raises: ValueError, with the remedy, for tools and environments that cannot be loaded.
    """
    rollout, rewards = config.rollout, config.reward
    named = [*rollout.tools, *rollout.environment]
    setup = Setup(
        tools=tuple(map(_reference, rollout.tools)),
        environments=tuple((name_of(e), _reference(e)) for e in rollout.environment),
        most=rollout.max_tool_result_tokens,
    )
    budgets = Budgets(
        max_response_length=config.data.max_response_length,
        max_context=max_context,
        max_turns=rollout.max_turns,
        max_turn_tokens=rollout.max_turn_tokens,
        max_tool_calls=rollout.max_tool_calls,
        max_parse_errors=rollout.max_parse_errors,
        max_tool_result_tokens=rollout.max_tool_result_tokens,
    )
    settings = DriverSettings(
        budgets=budgets,
        seed=config.seed,
        max_prompt_length=config.data.max_prompt_length,
        tool_timeout_s=rollout.tool_timeout_s,
        max_retries=rewards.max_retries,
        max_rows=rollout.max_rows,
        forks=rollout.earlier_thinking == "fork",
        origin=origin,
    )
    tools = open_tools(
        setup,
        local=not any(map(_needs_process, named)),
        num_workers=rollout.num_tool_workers,
        limits=worker_limits(rewards),
    )
    observations = None if folder is None else Observations(folder)
    return Driver(tokenizer, tools, settings, observations)


def _ours(settings: c.Tool | c.Environment | c.Custom) -> Callable[..., Any] | None:
    """The function or class of this package; None for a user's."""
    if isinstance(settings, c.Tool):
        return TOOLS[type(settings)]
    return ENVIRONMENTS[type(settings)] if isinstance(settings, c.Environment) else None


def name_of(environment: c.Environment | c.Custom) -> str:
    """The name by which a row asks for an environment."""
    if isinstance(environment, c.Custom):
        return split_path(environment.path)[1]
    return environment.kind


def _needs_process(settings: c.Tool | c.Environment | c.Custom) -> bool:
    """Whether it may wait or do anything: a user's, and ours that say so."""
    ours = _ours(settings)
    return ours is None or getattr(sys.modules[ours.__module__], "RUNS_IN_POOL", False)


def _reference(settings: c.Tool | c.Environment | c.Custom) -> Reference:
    """How a process loads a tool or an environment."""
    ours = _ours(settings)
    if ours is None:
        assert isinstance(settings, c.Custom)
        return worker_reference(settings)
    values = {} if isinstance(settings, c.Retry) else asdict(settings)
    if isinstance(settings, c.Retry):
        values = {key: getattr(settings, key) for key in ("attempts", "message", "enough")}
        values["grader"] = worker_reference(settings.grader)
    return f"{ours.__module__}:{ours.__name__}", values, b""
