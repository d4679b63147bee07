"""Environments of other packages, such as `skyrl_gym:ID`, `textarena:ID`, `verifiers:TASKSET`.

Each adapter is a class of environments with `reset` and `step`. Its keyword arguments go to the
package. A user installs the package.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from jaxrl_llm.agents.environments import Observation, Step
from jaxrl_llm.references import nearest

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class SkyRLGym:
    """An environment of SkyRL. Columns `reward_spec`, `extra_info` and `max_turns` go to it."""

    def __init__(self, *, id: str, **settings: Any) -> None:
        from skyrl_gym.envs.registration import registry  # pyright: ignore[reportMissingImports]

        if id not in registry:
            known = ", ".join(registry)
            raise ValueError(f"there is no {id!r}{nearest(id, registry)}; there are: {known}")
        self._id, self._settings = id, settings
        self._environment: Any = None

    def reset(self, *, prompt: Any, ground_truth: Any = None, **row: Any) -> Observation:
        """Make the environment for a row, and begin. Returns what it adds to the prompt."""
        import skyrl_gym  # pyright: ignore[reportMissingImports]
        from omegaconf import DictConfig  # pyright: ignore[reportMissingImports]

        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        spec = row.get("reward_spec") or {"method": "rule", "ground_truth": ground_truth}
        extras = {**row, "reward_spec": spec, "extra_info": row.get("extra_info") or {}}
        config = DictConfig(self._settings)
        self._environment = skyrl_gym.make(self._id, env_config=config, extras=extras)
        begun, _ = self._environment.init([*given])
        if list(begun[: len(given)]) != given:
            raise ValueError(f"skyrl_gym:{self._id} changes the prompt, which is sampled from")
        return list(begun[len(given) :]) or None

    def step(self, action: str) -> Step:
        """Answer a turn. Observations of the last turn are left out."""
        answer = self._environment.step(action)
        if answer.get("postprocessed_action") not in (None, action):
            raise ValueError(f"skyrl_gym:{self._id} changes the answer, which was sampled")
        info = answer.get("metadata") or {}
        return Step(list(answer["observations"]), answer["reward"], answer["done"], info)

    def close(self) -> None:
        """End it."""
        self._environment.close()


class TextArena:
    """A game for one player, with a random state of its own; the package has one for all games."""

    def __init__(self, *, id: str, **settings: Any) -> None:
        import textarena  # pyright: ignore[reportMissingImports]

        self._id = id
        self._game = textarena.make(id, **settings)
        self._state: Any = None

    def reset(self, group_seed: int = 0) -> str:
        """Begin. Samples of a prompt have the same game."""
        observation, _ = self._with_state(lambda: self._game.reset(num_players=1, seed=group_seed))
        return observation

    def step(self, action: str) -> Step:
        """Move. The reward comes at the end of the game."""
        observation, (done, info) = self._with_state(lambda: self._game.step(action=action))
        reward = None
        if done:
            rewards, _ = self._game.close()
            reward = rewards[0]
        return Step(observation, reward, done, info)

    def _with_state(self, act: Callable[[], Any]) -> tuple[str, Any]:
        """Do what may draw from Python's one generator, and give what the player sees then."""
        ours = random.getstate()
        if self._state is not None:
            random.setstate(self._state)
        try:
            result = act()
            return self._seen(), result
        finally:
            self._state = random.getstate()
            random.setstate(ours)

    def _seen(self) -> str:
        """New messages, without the player's own action."""
        game = self._game
        while hasattr(game, "env"):
            game = game.env
        player, messages = game.get_observation()
        if player:
            raise ValueError(f"textarena:{self._id} asks another player: only games for one work")
        roles = game.state.role_mapping
        return "\n".join(
            f"[{roles.get(sender, sender)}] {message}"
            for sender, message, kind in messages
            if kind.name != "PLAYER_ACTION"
        )


class ReasoningGym:
    """A question of a data set, and the score of its answer. A wrong one may have further tries.

    The answer is the text in <answer> tags, else the whole text. The question is the row's `index`,
    else one that all samples of a prompt share.
    """

    def __init__(
        self,
        *,
        id: str,
        attempts: int = 1,
        message: str = "Wrong. Try again.",
        seed: int = 0,
        size: int = 10_000,
        **settings: Any,
    ) -> None:
        self._data = _data_set(id, seed, size, tuple(settings.items()))
        self._left, self._message, self._score = attempts, message, 0.0
        self._entry: Any = None

    def reset(self, index: int | None = None, group_seed: int = 0) -> str:
        """Ask."""
        place = group_seed % len(self._data) if index is None else int(index)
        self._entry = self._data[place]
        return str(self._entry["question"])

    def step(self, action: str) -> Step:
        """Score an answer; the reward is the change of the score."""
        self._left -= 1
        found = ANSWER.findall(action)
        answer = found[-1].strip() if found else action.strip()
        score = float(self._data.score_answer(answer=answer, entry=self._entry))
        reward, self._score = score - self._score, score
        if score >= 1 or not self._left:
            return Step(reward=reward, done=True)
        return Step(self._message, reward=reward)


@cache
def _data_set(id: str, seed: int, size: int, settings: Sequence[tuple[str, Any]]) -> Any:
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    return reasoning_gym.create_dataset(id, seed=seed, size=size, **dict(settings))


class Verifiers:
    """A task of a taskset of verifiers 0.4, with one answer. Its rewards are added with weights.

    The task is the row's `index`, else one that all samples of a prompt share. Rewards that need a
    runtime of the package (a container, a program) are refused.
    """

    def __init__(self, *, id: str, **settings: Any) -> None:
        self._id = id
        self._tasks = _tasks(id, tuple(settings.items()))
        self._task: Any = None

    def reset(self, index: int | None = None, group_seed: int = 0) -> Observation:
        """Ask."""
        place = group_seed % len(self._tasks) if index is None else int(index)
        self._task = self._tasks[place]
        prompt = self._task.data.prompt or ""
        if isinstance(prompt, str):
            return prompt
        return [message.model_dump(exclude_none=True) for message in prompt]

    async def step(self, action: str) -> Step:
        """Score the answer."""
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
        from verifiers.v1.types import (  # pyright: ignore[reportMissingImports]
            AssistantMessage,
            UserMessage,
        )

        data = self._task.data
        asked = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        said = [(message, False) for message in asked or ()]
        said.append((AssistantMessage(content=action), True))
        nodes = [
            vf.MessageNode(parent=i - 1 if i else None, message=message, sampled=sampled)
            for i, (message, sampled) in enumerate(said)
        ]
        trace = vf.Trace(
            task=vf.TraceTask(type=type(self._task).__name__, data=data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=nodes,
        )
        await self._task.score(trace)
        if not trace.rewards:
            raise ValueError(f"verifiers:{self._id} gives no reward without a runtime of its own")
        return Step(reward=trace.reward, done=True, info=dict(trace.metrics))


@cache
def _tasks(id: str, settings: Sequence[tuple[str, Any]]) -> Sequence[Any]:
    from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
        load_taskset,
        taskset_config_type,
    )

    taskset = load_taskset(taskset_config_type(id)(id=id, **dict(settings)))
    if not taskset.bounded:
        raise ValueError(f"verifiers:{id} has no end of tasks: give it a limit in its settings")
    return list(taskset)


ADAPTERS: Mapping[str, type] = {
    "verifiers": Verifiers,
    "skyrl_gym": SkyRLGym,
    "textarena": TextArena,
    "reasoning_gym": ReasoningGym,
}


def adapter_of(path: str) -> tuple[type, str] | None:
    """The adapter for a path and the id in it; None for a path of another package."""
    package, _, identity = path.partition(":")
    return (ADAPTERS[package], identity) if package in ADAPTERS else None
