"""What an environment is, and how one of each kind is called.

An environment has `reset(**row)` and `step(action)`, or as in TRL `reset`, public methods that are
the tools of the model, and `get_reward()`. Each sample has an instance of its own. `reset` gets the
columns of the row that it names, all of them with `**row`; also `seed`, of the sample, and
`group_seed`, which all samples of a prompt share.

For a model without a chat template, `stop` of the class names the texts that end a turn.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxrl_llm.agents.tools import Result, ToolInfo, describe, error_text, result_text
from jaxrl_llm.rewards.calling import FLOAT32_MAX, as_number, plain, printable

Observation = str | list[dict[str, Any]] | None  # text, messages, or nothing
OWN_METHODS = ("reset", "step", "get_reward", "close")


@dataclass(frozen=True)
class Step:
    """The answer of an environment to an action."""

    observation: Observation = None
    reward: float | None = None  # None: this action has no reward
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """An environment with steps."""

    def reset(self, **row: Any) -> Observation:
        """Begin. Text goes to the end of the last user message, and messages follow the prompt."""
        ...

    def step(self, action: str) -> Step:
        """Answer the text of a turn."""
        ...


@dataclass(frozen=True, kw_only=True)
class EnvironmentInfo:
    """A class of environments, as the loop sees it."""

    name: str
    steps: bool  # it has `step`
    tools: tuple[ToolInfo, ...]  # public methods of a class without `step`
    grades: bool  # it has `get_reward`
    is_async: bool
    stop: tuple[str, ...]


def environment_info(name: str, kind: type) -> EnvironmentInfo:
    """What a class of environments has. ValueError for one that no turn could use."""
    steps = callable(getattr(kind, "step", None))
    methods = {} if steps else _public_methods(kind)
    if not steps and not methods:
        raise ValueError(
            f"the environment {name} has neither step(action) nor public methods, which would be "
            "the tools of the model"
        )
    tools = tuple(describe(method, f"{name}.{key}") for key, method in methods.items())
    own = [getattr(kind, key, None) for key in OWN_METHODS]
    stop = getattr(kind, "stop", ())
    return EnvironmentInfo(
        name=name,
        steps=steps,
        tools=tools,
        grades=callable(getattr(kind, "get_reward", None)),
        is_async=any(map(inspect.iscoroutinefunction, [*own, *methods.values()])),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )


def _public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    names = [name for name in dir(kind) if not name.startswith("_") and name not in OWN_METHODS]
    members = {name: inspect.getattr_static(kind, name) for name in names}
    return {name: x for name, x in members.items() if inspect.isfunction(x)}


def taken_columns(reset: Callable[..., Any], columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns of a row that a function names; all of them with `**row`."""
    parameters = inspect.signature(reset).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return columns
    return {name: value for name, value in columns.items() if name in parameters}


class Instance:
    """The environment of one sample."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def reset(self, columns: Mapping[str, Any]) -> Observation:
        """Begin, with the columns that it takes."""
        reset = getattr(self._environment, "reset", None)
        if reset is None:
            return None
        observation = await _awaited(reset(**taken_columns(reset, columns)))
        if isinstance(observation, tuple) and len(observation) == 2:  # (observation, info)
            observation = observation[0]
        return _observation(observation)

    async def step(self, action: str) -> Step:
        """Answer the text of a turn."""
        return _as_step(await _awaited(self._environment.step(action)))

    async def reward(self) -> float | None:
        """The reward at the end."""
        return _reward(await _awaited(self._environment.get_reward()))

    def method(self, name: str) -> Callable[..., Any]:
        """A public method, which is a tool."""
        return getattr(self._environment, name)

    async def close(self) -> None:
        """End it."""
        if callable(close := getattr(self._environment, "close", None)):
            await _awaited(close())


async def call_tool(
    function: Callable[..., Any], arguments: Mapping[str, Any], most: int
) -> Result:
    """Call a tool. What it raises is a result too. `most` is the number of tokens to keep."""
    try:
        return Result(result_text(await _awaited(function(**arguments)), most))
    except (Exception, SystemExit) as error:  # user code may raise anything
        text = printable(str(error)) or type(error).__name__
        return Result(result_text(error_text(text)), failed=True)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _as_step(answer: Any) -> Step:
    """A step, also of a mapping, or of gymnasium's tuple of four or five. ValueError otherwise."""
    if isinstance(answer, Mapping):
        answer = {"observation": None, "reward": None, "done": False, "info": {}} | dict(answer)
        answer = tuple(answer[key] for key in ("observation", "reward", "done", "info"))
    elif isinstance(answer, Step):
        answer = (answer.observation, answer.reward, answer.done, answer.info)
    if not isinstance(answer, tuple) or len(answer) not in (4, 5):
        raise ValueError(
            f"step returned a {type(answer).__name__}: expected a Step, a dict with observation, "
            "reward, done and info, or a tuple of these"
        )
    observation, reward, *done, info = answer
    return Step(_observation(observation), _reward(reward), any(map(bool, done)), plain(info or {}))


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    number = as_number(value)
    if number is None or not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"the reward {value!r:.80} is not a finite number")
    return number


def _observation(value: Any) -> Observation:
    if value is None or isinstance(value, str):
        return None if value is None else result_text(value)
    if isinstance(value, Sequence) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value
    ):
        return [_message(message) for message in value]
    raise ValueError(f"the observation {value!r:.80} is neither a text nor a list of messages")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content", "")
    if not isinstance(content, str):
        raise ValueError(f"the content {content!r:.80} of a message is not a text")
    return plain(message) | {"content": result_text(content)}
