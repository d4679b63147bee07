"""Runs tools and environments, in a worker process or for our own ones in the trainer.

A request is answered in full or with an error. A session, the environment of one sample, is made
again from its history where it does not exist, as after the loss of a worker.
"""

import asyncio
import functools
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_llm import references
from jaxrl_llm.agents.adapters import adapter_of
from jaxrl_llm.agents.environments import (
    EnvironmentInfo,
    Instance,
    Observation,
    Step,
    call_tool,
    environment_info,
)
from jaxrl_llm.agents.running import open_program
from jaxrl_llm.agents.tools import Result, ToolInfo, describe
from jaxrl_llm.rewards.calling import CallError, printable

Reference = tuple[str, Mapping[str, Any], bytes]  # path, settings, pickle of an object


@dataclass(frozen=True)
class Setup:
    """The tools and the environments of a run."""

    tools: tuple[Reference, ...] = ()
    environments: tuple[tuple[str, Reference], ...] = ()  # with their names
    most: int = 0  # tokens of a result that are kept; 0: all
    program: Reference | str | None = None  # a function, or a command line


@dataclass(frozen=True)
class Description:
    """The tools and the environments, as the loop sees them."""

    tools: tuple[ToolInfo, ...]
    environments: tuple[EnvironmentInfo, ...]


# ------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Reset:
    """Make an environment and begin. Answered with an observation."""

    environment: int
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Say:
    """The text of a turn for `step`. Answered with a Step."""

    text: str


@dataclass(frozen=True)
class Calls:
    """The calls of a turn: names and arguments. Answered with their results, in order."""

    calls: tuple[tuple[str, Mapping[str, Any]], ...]


@dataclass(frozen=True)
class Grade:
    """Ask for the reward. Answered with a number or None."""


@dataclass(frozen=True)
class Run:
    """Run the program for a row, against a server. Answered with a number or None."""

    row: Mapping[str, Any]
    base_url: str
    api_key: str


Action = Reset | Say | Calls | Grade | Run
Value = Observation | Step | tuple[Result, ...] | float


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    value: Any = None
    error: CallError | None = None
    differs: bool = False  # the environment was made again, and answered its history otherwise


class Host:
    """Tools and environments, loaded. Raises ValueError, with the remedy, for what cannot be."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._most = setup, setup.most
        self._functions = [_load(*reference) for reference in setup.tools]
        self._tools: dict[str, Callable[..., Any]] = {}
        for function, (_, settings, _) in zip(self._functions, setup.tools, strict=True):
            name = function.__name__
            if name in self._tools:
                raise ValueError(f"two tools have the name {name!r}: rename one")
            self._tools[name] = functools.partial(function, **settings) if settings else function
        self._async = {f.__name__ for f in self._functions if inspect.iscoroutinefunction(f)}
        self._kinds: list[Callable[[], Any]] = []
        for _, (path, settings, pickled) in setup.environments:
            adapter = adapter_of(path)
            if adapter is not None:
                settings = {**settings, "id": adapter[1]}
            kind = adapter[0] if adapter else _load(path, settings, pickled)
            self._kinds.append(functools.partial(kind, **settings))
        self._instances: dict[int, Instance] = {}
        self._program = open_program(setup.program, _load) if setup.program else None

    def describe(self) -> Description:
        """What the model and the loop see. Raises ValueError as the class does."""
        tools = tuple(
            describe(function, path, tuple(settings))
            for function, (path, settings, _) in zip(
                self._functions, self._setup.tools, strict=True
            )
        )
        environments: list[EnvironmentInfo] = []
        for (name, (path, *_)), made in zip(self._setup.environments, self._kinds, strict=True):
            kind = made.func if isinstance(made, functools.partial) else made
            # What makes environments shows what it makes, and an adapter whether its id is known.
            if not isinstance(kind, type) or adapter_of(path):
                kind = type(_made(made, path))
            environments.append(environment_info(name, kind))
        return Description(tools, tuple(environments))

    async def answer(
        self,
        session: int,
        history: Sequence[tuple[Action, Value]],
        action: Action,
        limit: float | None = None,
    ) -> Answer:
        """Do an action, in its session. What user code raises is an error, not ours.

        `history` has the actions of a session that is not held here, and how they were answered.
        """
        window = asyncio.timeout(limit) if limit is not None else None
        try:
            if window is None:
                return await self._answer(session, history, action)
            async with window:
                return await self._answer(session, history, action)
        except (Exception, SystemExit) as error:  # user code may raise anything
            kind, message = "exception", printable(references.reason(error))
            if isinstance(error, TimeoutError) and window is not None and window.expired():
                kind, message = "timeout", f"it ran longer than {limit:g} s"
            return Answer(error=CallError(kind=kind, message=message))

    async def _answer(
        self, session: int, history: Sequence[tuple[Action, Value]], action: Action
    ) -> Answer:
        differs = False
        for earlier, value in history:
            differs |= await self._do(session, earlier) != value
        return Answer(value=await self._do(session, action), differs=differs)

    async def _do(self, session: int, action: Action) -> Value:
        if isinstance(action, Reset):
            instance = self._instances[session] = Instance(self._kinds[action.environment]())
            return await instance.reset(action.columns)
        if isinstance(action, Say):
            return await self._instances[session].step(action.text)
        if isinstance(action, Grade):
            return await self._instances[session].reward()
        if isinstance(action, Run):
            assert self._program is not None
            return await self._program(action.row, action.base_url, action.api_key)
        names = [name for name, _ in action.calls]
        calls = [
            call_tool(self._function(session, name), arguments, self._most)
            for name, arguments in action.calls
        ]
        if all(name in self._async for name in names):
            return tuple(await asyncio.gather(*calls))
        return tuple([await call for call in calls])  # in their order: each may change a state

    def _function(self, session: int, name: str) -> Callable[..., Any]:
        return self._tools[name] if name in self._tools else self._instances[session].method(name)

    async def end(self, session: int) -> None:
        """Drop the environment of a session."""
        instance = self._instances.pop(session, None)
        if instance is not None:
            try:
                await instance.close()
            except (Exception, SystemExit):  # nothing depends on it any more
                pass


def _load(path: str, settings: Mapping[str, Any], pickled: bytes) -> Any:
    """Import what a path names, or make an object again. ValueError where that fails."""
    try:
        loaded = pickle.loads(pickled) if pickled else references.load(path)
    except ValueError:
        raise
    except Exception as error:  # user code may raise anything
        raise ValueError(
            f"{path.rpartition(':')[2]} cannot be made again in its worker process: "
            f"{references.reason(error)}; import what it needs inside of it"
        ) from None
    if not callable(loaded):
        raise ValueError(f"{path} is a {type(loaded).__name__}, not a function or a class")
    return loaded


def _made(make: Callable[[], Any], path: str) -> Any:
    """An environment. ValueError where it cannot be made."""
    try:
        return make()
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ValueError(f"the environment {path}: {references.reason(error)}") from error


def error_of(message: str, kind: str = "crash", *, shared: bool = False) -> Answer:
    """An answer that is an error."""
    return Answer(error=replace(CallError(kind=kind, message=message), shared=shared))
