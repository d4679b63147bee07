"""The stage that generates answers of several turns: the host drives engines and tools.

Each process drives engines on its own devices, for the samples that it owns. So tools and
environments run where their samples are, and no process waits for another one's tool.

Shape letters: N samples, P prompt tokens, R response tokens, K kept tokens, L layers.
"""

import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.agents.driver import Driver, Sample
from jaxrl_llm.agents.setup import has_turns, open_driver
from jaxrl_llm.agents.statistics import metrics, records
from jaxrl_llm.agents.trajectory import Trajectory, Turn
from jaxrl_llm.checkpoint.identity import file_digests
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.distributed.multihost import gather_objects
from jaxrl_llm.generation.sequence import Sequence as Sampled
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.learner.rows import ROW_STARTS
from jaxrl_llm.plan.generating import SAMPLED
from jaxrl_llm.plan.roles import Role
from jaxrl_llm.plan.scores import ENVIRONMENT
from jaxrl_llm.plan.sessions import (
    Answer,
    Sessions,
    SessionStage,
    check_sessions,
    recorded,
    seed_words,
    write_answer,
)
from jaxrl_llm.program.stage import StageOutput, StepContext
from jaxrl_llm.rewards.manager import RewardFailure
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import Completion, Prompt

if TYPE_CHECKING:
    from jaxrl_llm.server.programs import Programs

PROMPTS = ("prompts", "prompt_lengths")
TURN_KEYS = "config.rollout.tools, environment and program"
TURN_IDS, STATE_KEYS = "turn_ids", "state_keys"


@dataclass(eq=False)
class Conversations:
    """The tools and environments of a run, and the engines that answer."""

    config: Config
    tokenizer: Tokenizer
    driver: "Driver | Programs"
    # Entered while tools, environments and programs are waited for: a stop request ends that.
    host_work: Callable[[], AbstractContextManager[None]]
    sessions: Sessions
    # Held-out prompts may be answered while the rollout's thread generates ahead.
    _one_at_a_time: Any = field(default_factory=threading.Lock, repr=False)
    _saved: int = 0  # step of the last checkpoint that was begun

    @property
    def _forks(self) -> bool:
        return self.config.rollout.earlier_thinking == "fork"

    def saved(self, step: int) -> None:
        """A checkpoint is being written; until it is there, a resume takes the one before."""
        self.driver.drop_before(self._saved + 1)
        self._saved = step

    def run(
        self,
        role: Role,
        state: Any,
        samples: Sequence[Sample],
        settings: GenerationSettings,
        dtype: str,
    ) -> tuple[list[Trajectory], list[tuple[Sampled, ...]], dict[str, float]]:
        """The trajectories of `samples`, in their order; the sequences of their rows; counts.

        The engines' memory is free again afterwards.
        """
        plain = any(sample.prompt.messages is None for sample in samples)
        own_stops = self.config.rollout.stop_token_ids
        engines = self.sessions.open(
            role,
            state,
            settings,
            dtype,
            rows=len(samples),
            stop_ids=tuple(dict.fromkeys((*self.driver.stop_ids(plain=plain), *own_stops))),
            # Programs write prompts of their own, and rows that fork have others: each sequence has
            # its prompt in its pages.
            shares=isinstance(self.driver, Driver) and not self._forks,
        )
        try:
            with self.host_work(), self._one_at_a_time:
                trajectories = self.driver.run(engines, samples)
            return (
                [replace(trajectory, rows=()) for trajectory in trajectories],
                [tuple(row.sequence for row in trajectory.rows) for trajectory in trajectories],
                {"rollout/decode_steps": float(engines.num_steps)},
            )
        finally:
            engines.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class Converse(SessionStage):
    """Samples answers of several turns, `n` a prompt, with tools and environments.

    Observed tokens stand in the response with mask 0. A sample that failed is left out by the
    reward stage, or has a reward of its own: then it is learned from as far as it came.
    """

    turns: Conversations | None  # None in a run that is only planned
    several_rows: bool = False  # trajectories may have several rows

    gathers = True

    @property
    def writes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        rows = (ROW_STARTS,) if self.several_rows else ()
        return (*PROMPTS, *SAMPLED, TURN_IDS, STATE_KEYS, *rows, *self.how.recorded)

    def blank(self, rows: int) -> dict[str, jax.Array]:
        none = jnp.full((rows, self.response), -1, jnp.int32)
        starts = {ROW_STARTS: none} if self.several_rows else {}
        return (
            super().blank(rows)
            | starts
            | {
                "prompts": jnp.full((rows, self.prompt), self.pad_id, jnp.int32),
                "prompt_lengths": jnp.zeros((rows,), jnp.int32),
                TURN_IDS: none,
                STATE_KEYS: jnp.zeros((rows, self.response), jnp.int32),
            }
        )

    def __call__(
        self,
        context: StepContext,
        step: int,
        *,
        sample_ids: np.ndarray,
        group_ids: np.ndarray,
        states: dict[str, Any],
    ) -> StageOutput:
        assert self.turns is not None
        seed_key = seed_words(self.how, step)
        samples = [
            Sample(
                prompt=prompt,
                step=step,
                sample=int(sample),
                group=int(group),
                options={"seed_key": seed_key, "sample_id": int(sample)},
            )
            for prompt, sample, group in zip(
                context.prompts_of(context.rows.owned),
                sample_ids.tolist(),
                group_ids.tolist(),
                strict=True,
            )
        ]
        state = self.model.state_of(states)
        trajectories, sequences, counts = self.turns.run(
            self.model, state, samples, self.how.settings, self.how.dtype
        )
        context.trajectories = trajectories
        writes = {name: np.array(x) for name, x in self.blank(len(samples)).items()}
        prompts = _prompts_of_groups(samples, trajectories)
        for row, trajectory in enumerate(trajectories):
            self._write(writes, row, prompts[row], trajectory, sequences[row])
        everyone = gather_objects([records(trajectories), counts], "turns")
        steps = {name: max(own[name] for _, own in everyone) for name in counts}
        return StageOutput(writes, metrics([x for own, _ in everyone for x in own]) | steps)

    def _write(
        self,
        writes: dict[str, np.ndarray],
        row: int,
        prompt: tuple[int, ...],
        trajectory: Trajectory,
        sequences: Sequence[Sampled],
    ) -> None:
        """Write one sample into the fields."""
        writes["prompts"][row, : len(prompt)] = prompt
        writes["prompt_lengths"][row] = len(prompt)
        if prompt != trajectory.prompt_ids:  # it failed before it began
            return
        places = (-len(prompt), *trajectory.row_starts, len(trajectory.response_ids))
        routes, kept = recorded(sequences, places)
        answer = Answer(
            num_prompt=len(prompt),
            tokens=trajectory.response_ids,
            mask=trajectory.mask,
            logprobs=trajectory.logprobs[: len(trajectory.response_ids)],
            routes=routes,
            kept=kept,
        )
        for start, end in pairwise(places[1:] if self.several_rows else ()):
            writes[ROW_STARTS][row, start:end] = start
        write_answer(writes, row, answer, prompt=self.prompt)
        before = 0  # end of the turn before
        for number, turn in enumerate(trajectory.turns):
            observed = trajectory.response_ids[before : turn.start]
            writes[TURN_IDS][row, turn.start : turn.end] = number
            writes[STATE_KEYS][row, turn.start : turn.end] = _state_key(turn, observed)
            before = turn.end


def _state_key(turn: Turn, observed: Sequence[int]) -> int:
    """A hash of the state before a turn: the one that the environment named, else what it said."""
    state = turn.state.encode() if turn.state else np.array(observed, np.int32).tobytes()
    return zlib.crc32(state) >> 1


def _prompts_of_groups(
    samples: Sequence[Sample], trajectories: Sequence[Trajectory]
) -> list[tuple[int, ...]]:
    """The prompt of each sample. One that failed at once takes the prompt of its group.

    Raises: ValueError where samples of one prompt begin differently, as rows share a prompt.
    """
    known: dict[int, tuple[int, ...]] = {}
    for trajectory in trajectories:
        if not trajectory.turns:  # it failed before it began
            continue
        first = known.setdefault(trajectory.group, trajectory.prompt_ids)
        if first != trajectory.prompt_ids:
            raise ValueError(
                "config.rollout.environment: two samples of one prompt begin with different texts; "
                "derive what `reset` returns from the row or from `group_seed`"
            )
    return [
        known.get(trajectory.group, sample.prompt.token_ids)
        for sample, trajectory in zip(samples, trajectories, strict=True)
    ]


def check_turns(config: Config, sampler: Role, *, greedy: bool) -> None:
    """Raises: ConfigError for what answers of several turns do not go with.

    `greedy`: the algorithm compares samples with a greedy answer.
    """
    check_sessions(sampler, TURN_KEYS)
    refused = {
        f"config.algorithm={config.algorithm.label}": greedy,
        "config.partial_rollouts": config.partial_rollouts > 0,
        "config.rollout.stop": bool(config.rollout.stop),
    }
    for key, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{key}: {TURN_KEYS} do not work with it yet; choose another value")
    if config.rollout.program is not None and sampler.spec.config.delta is not None:
        raise ConfigError(
            "config.rollout.program: this model has states, which do not work with it yet; take "
            "config.rollout.tools or config.rollout.environment"
        )


def open_conversations(
    config: Config,
    tokenizer: Tokenizer,
    host_work: Callable[[], AbstractContextManager[None]],
    folder: Path | None = None,
) -> Conversations | None:
    """The tools and environments of a run; None where it has none. `close` its driver at the end.

    `folder` keeps observations, for a step that begins again.

    Raises: ValueError, with the remedy, for tools and environments that cannot be loaded.
    """
    if config.rollout.program is not None:
        from jaxrl_llm.server.programs import open_programs  # packages of the extra `serve`

        driver = open_programs(config, tokenizer)
        return Conversations(config, tokenizer, driver, host_work, Sessions(config))
    if not has_turns(config):
        return None
    if folder is not None:
        folder = folder / f"process{jax.process_index()}"
    rollout, files = config.rollout, file_digests(config)
    own = {name: digest for name, digest in files.items() if name.startswith("config.rollout.")}
    driver = open_driver(
        config,
        tokenizer,
        max_context=config.data.max_row_length,
        folder=folder,
        origin=f"{config.seed} {rollout.tools} {rollout.environment} {own}",
    )
    return Conversations(config, tokenizer, driver, host_work, Sessions(config))


def validation_samples(
    prompts: Sequence[Prompt], numbers: Sequence[int], *, n: int, seed_key: np.ndarray
) -> list[Sample]:
    """Requests for held-out prompts; `numbers` count all samples."""
    options: dict[str, Any] = {"seed_key": seed_key}
    return [
        Sample(
            prompt=prompt,
            step=-1,
            sample=number,
            group=number // n,
            options=options | {"sample_id": number},
        )
        for prompt, number in zip(prompts, numbers, strict=True)
    ]


def completions_of_turns(trajectories: Sequence[Trajectory]) -> list[Completion]:
    """The answers as reward functions and the trace have them: the text is the last turn."""
    return [
        Completion(
            tokens=trajectory.response_ids,
            text=trajectory.text,
            logprobs=trajectory.logprobs,
            finished=not trajectory.truncated,
        )
        for trajectory in trajectories
    ]


def with_turns(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Prompt]:
    """The prompts as they were sent, with columns that a reward function may ask for."""
    return [
        replace(
            prompt,
            token_ids=trajectory.prompt_ids or prompt.token_ids,
            columns=prompt.columns | turn_columns(trajectory),
        )
        for prompt, trajectory in zip(prompts, trajectories, strict=True)
    ]


def turn_columns(trajectory: Trajectory | None = None) -> dict[str, Any]:
    """Columns of an answer of several turns. Without one, their names count."""
    trajectory = trajectory or Trajectory(id="", sample=0, group=0, prompt_ids=())
    return {
        "messages": [*trajectory.messages],
        "num_turns": len(trajectory.turns),
        "num_tool_calls": sum(len(turn.calls) for turn in trajectory.turns),
        "stop_reason": trajectory.stop_reason,
        "environment_reward": trajectory.reward,
    }


def traced(trajectory: Trajectory) -> dict[str, Any]:
    """The part of the trace that only answers of several turns have."""
    turns = [
        {
            "start": turn.start,
            "end": turn.end,
            "message": turn.message,
            "reward": turn.reward,
            "failed": turn.num_failed,
            "calls": [call.status for call in turn.calls],
            "tool_s": round(turn.tool_s, 3),
        }
        for turn in trajectory.turns
    ]
    return {
        "trajectory": trajectory.id,
        "stop_reason": trajectory.stop_reason,
        "turns": turns,
        "messages": [*trajectory.messages],
        "tool_s": round(trajectory.tool_s, 3),
        **({"row_starts": [*trajectory.row_starts]} if trajectory.row_starts else {}),
    }


def environment_failures(
    prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]
) -> list[RewardFailure]:
    """The trajectories whose tools or environment failed, as samples without a reward."""
    return [
        RewardFailure(
            function=ENVIRONMENT,
            index=index,
            kind=trajectory.stop_reason,
            message=trajectory.failure,
            prompt=prompt.text,
            completion=trajectory.text,
        )
        for index, (prompt, trajectory) in enumerate(zip(prompts, trajectories, strict=True))
        if trajectory.failed
    ]
