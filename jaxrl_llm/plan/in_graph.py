"""Answers of several turns in one program: generation, environment, rewards and update.

The host begins the games of a step, and the rest runs on the devices. The trace is written from the
arrays of the batch afterwards.

Shape letters: N samples, R response tokens, K numbers of a row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import config as c
from jaxrl_llm import references
from jaxrl_llm.agents.driver import Sample, columns_of, id_of
from jaxrl_llm.agents.environments import taken_columns
from jaxrl_llm.agents.setup import name_of
from jaxrl_llm.agents.styles import PlainStyle
from jaxrl_llm.agents.token_environments import TokenCalculator, TokenGuess, TokenMaze
from jaxrl_llm.agents.trajectory import Trajectory, Turn
from jaxrl_llm.generation.in_graph import (
    MAX_TOKENS,
    MAX_TURN_TOKENS,
    OVERFLOW,
    STOP_REASONS,
    InGraph,
    InGraphTurns,
    TurnRecord,
)
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.numerics import masked_mean
from jaxrl_llm.plan.conversing import PROMPTS, STATE_KEYS, TURN_IDS
from jaxrl_llm.plan.generating import SAMPLED, Generate
from jaxrl_llm.plan.scores import ENVIRONMENT, LEFT_OUT, STEP_REWARDS
from jaxrl_llm.program.stage import HOST, Stage, StageOutput, StepContext
from jaxrl_llm.tokenizer import CharTokenizer, Tokenizer
from jaxrl_llm.types import Prompt

NUMBERS, TURN_REWARDS, STOPS = "environment_numbers", "turn_rewards", "stop_reasons"
OURS: dict[type[c.Environment], type] = {
    c.Guess: TokenGuess,
    c.IntegerCalculator: TokenCalculator,
    c.Maze: TokenMaze,
}
METHOD = "step_tokens"  # a class with it is an environment of JAX functions


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTurns:
    """The environment of a run whose turns are a part of the generation program."""

    config: c.Config
    tokenizer: Tokenizer
    environment: InGraph
    name: str

    def settings(self, settings: GenerationSettings) -> GenerationSettings:
        """Settings of generation with this environment."""
        rollout, sampling = self.config.rollout, settings.sampling
        ends = PlainStyle(self.tokenizer, self.environment.stop).stop_ids
        ids = dict.fromkeys((*sampling.stop_token_ids, *ends))
        turns = InGraphTurns(
            environment=self.environment,
            max_turns=rollout.max_turns,
            max_turn_tokens=min(rollout.max_turn_tokens, sampling.max_new_tokens),
        )
        return replace(settings, sampling=replace(sampling, stop_token_ids=tuple(ids)), turns=turns)

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Check that rows name no other environment. Raises ValueError."""
        for prompt in prompts:
            named = prompt.columns.get("environment")
            if named not in (None, self.name):
                raise ValueError(
                    f"a row has the environment {named!r}; config.rollout.environment has: "
                    f"{self.name}"
                )

    def begin(self, samples: Sequence[Sample | None]) -> dict[str, np.ndarray]:
        """Prompts with openings, their lengths, and the numbers of the rows; None is padding.

        Raises: ValueError where the prompts of a group differ, or one is too long.
        """
        most, (prompts, lengths) = self.config.data.max_prompt_length, PROMPTS
        fields = {
            prompts: np.full((len(samples), most), self.tokenizer.pad_id, np.int32),
            lengths: np.zeros(len(samples), np.int32),
            NUMBERS: np.zeros((len(samples), self.environment.row_size), np.int32),
        }
        known: dict[int, tuple[int, ...]] = {}
        for row, sample in enumerate(samples):
            if sample is None:
                continue
            columns = columns_of(sample, self.config.seed)
            begin = self.environment.begin
            opening, numbers = begin(**taken_columns(begin, columns))
            ids = (*sample.prompt.token_ids, *opening)
            if known.setdefault(sample.group, ids) != ids:
                raise ValueError(
                    "config.rollout.environment: two samples of one prompt begin with different "
                    "texts; derive the opening from the row or from `group_seed`"
                )
            if len(ids) > most:
                raise ValueError(
                    f"a prompt has {len(ids)} tokens with the opening of {self.name}: set "
                    f"--config.data.max_prompt_length={len(ids)} or more"
                )
            fields[prompts][row, : len(ids)], fields[lengths][row] = ids, len(ids)
            fields[NUMBERS][row] = numbers
        return fields


RECORDED = (*PROMPTS, *SAMPLED[:2], SAMPLED[3], TURN_IDS, TURN_REWARDS, STOPS)


def trajectories_of(
    tokenizer: Tokenizer, samples: Sequence[Sample], fields: Mapping[str, np.ndarray]
) -> list[Trajectory]:
    """The record of each sample, from the arrays RECORDED of a batch."""
    return [
        _trajectory(tokenizer, sample, {name: fields[name][row] for name in RECORDED})
        for row, sample in enumerate(samples)
    ]


def _trajectory(tokenizer: Tokenizer, sample: Sample, row: Mapping[str, Any]) -> Trajectory:
    length, number = int(row["response_lengths"]), int(row[STOPS])
    ids, turn_ids = row["responses"][:length].tolist(), row[TURN_IDS][:length]
    turns: list[Turn] = []
    prompt = row["prompts"][: int(row["prompt_lengths"])].tolist()
    messages, end, text = [*(sample.prompt.messages or ())], 0, ""
    if opening := prompt[len(sample.prompt.token_ids) :]:
        messages.append({"role": "user", "content": tokenizer.decode(opening)})
    for turn in range(int(turn_ids.max(initial=-1)) + 1):
        (places,) = np.nonzero(turn_ids == turn)
        start = int(places[0])
        if turn:
            messages.append({"role": "user", "content": tokenizer.decode(ids[end:start])})
        end = int(places[-1]) + 1
        text = tokenizer.decode(ids[start:end]).strip()
        messages.append({"role": "assistant", "content": text})
        is_cut = end == length and number in (MAX_TOKENS, MAX_TURN_TOKENS)
        reward = None if is_cut else float(row[TURN_REWARDS][end - 1])
        turns.append(Turn(start=start, end=end, reward=reward, message=len(messages) - 1))
    return Trajectory(
        id=id_of(sample),
        sample=sample.sample,
        group=sample.group,
        prompt_ids=tuple(prompt),
        response_ids=tuple(ids),
        mask=tuple((turn_ids >= 0).astype(int).tolist()),
        logprobs=tuple(row["rollout_logprobs"][:length].tolist()),
        turns=tuple(turns),
        stop_reason=STOP_REASONS[number],  # pyright: ignore[reportArgumentType]
        messages=tuple(messages),
        text=text,
    )


def open_token_turns(config: c.Config, tokenizer: Tokenizer) -> TokenTurns | None:
    """The environment that runs inside the generation program; None where the host drives turns.

    A class of this package that cannot run there is driven by the host. One of the user's that has
    no other form is refused.

    Raises: ConfigError, ValueError, with the remedy.
    """
    if len(config.rollout.environment) != 1:
        for environment in config.rollout.environment:
            if isinstance(environment, c.Custom) and _kind(environment):
                _refuse(environment, "config.rollout.environment has several")
        return None
    (environment,) = config.rollout.environment
    if isinstance(environment, c.Environment):
        kind, settings = OURS.get(type(environment)), vars(environment)
        if kind is None or not isinstance(tokenizer, CharTokenizer) or _why_not(config):
            return None
    else:
        kind, settings = _kind(environment), dict(environment.settings)
        if kind is None:
            return None
        references.check_settings(environment.path, kind, settings, takes_fields=True)
        if why := _why_not(config):
            _refuse(environment, why)
    made = references.call(name_of(environment), kind, tokenizer, **settings)
    return TokenTurns(
        config=config, tokenizer=tokenizer, environment=made, name=name_of(environment)
    )


def _why_not(config: c.Config) -> str:
    """The setting for which the host drives turns; empty without one."""
    rollout, reward = config.rollout, config.reward
    reasons = {
        "config.rollout.in_graph is false": not rollout.in_graph,
        "config.max_staleness lets the host generate ahead": config.max_staleness > 0,
        "config.placement.rollout gives it other devices": "rollout" in config.placement,
        "config.rollout.tools are functions of the host": bool(rollout.tools),
        "config.reward.functions read what the host records": bool(reward.functions),
        "config.reward.model adds a score": reward.model is not None,
        "config.models add scores": any(model.weight for model in config.models),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _refuse(environment: c.Custom, why: str) -> None:
    raise c.ConfigError(
        f"config.rollout.environment: {environment.path} has {METHOD}, so it runs inside the "
        f"generation program, and {why}; take that away, or write a class with reset and step"
    )


def _kind(environment: c.Custom) -> Any:
    """The user's class, if its step is a JAX function; None otherwise.

    A file without that method's name is not imported in this process.
    """
    if isinstance(environment, c.Given):
        kind = environment.function
    else:
        try:
            file = references.file_of(environment.path)
        except (ModuleNotFoundError, ValueError):  # an adapter, whose package is not here
            return None
        if file is None or METHOD not in file.read_text(errors="replace"):
            return None
        kind = references.load(environment.path)
    return kind if hasattr(kind, METHOD) else None


# ------------------------------------------------------------------------- stages


@dataclass(frozen=True, kw_only=True, eq=False)
class BeginTurns(Stage):
    """Begins the games of a step, on the host: prompts with openings, and numbers of the rows."""

    turns: TokenTurns

    gathers = True
    name = "begin"
    role = HOST
    writes = (*PROMPTS, NUMBERS)

    def shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        most, size = self.turns.config.data.max_prompt_length, self.turns.environment.row_size
        shapes = {PROMPTS[0]: (rows, most), PROMPTS[1]: (rows,), NUMBERS: (rows, size)}
        return {name: jax.ShapeDtypeStruct(x, jnp.int32) for name, x in shapes.items()}

    def __call__(
        self, context: StepContext, step: int, *, sample_ids: np.ndarray, group_ids: np.ndarray
    ) -> StageOutput:
        samples = samples_of(context, step, sample_ids, group_ids)
        return StageOutput(self.turns.begin(list(samples)))


def samples_of(
    context: StepContext, step: int, sample_ids: np.ndarray, group_ids: np.ndarray
) -> Iterator[Sample]:
    """The requests of the rows that this process owns."""
    prompts: Sequence[Prompt] = context.prompts_of(context.rows.owned)
    for prompt, sample, group in zip(prompts, sample_ids.tolist(), group_ids.tolist(), strict=True):
        yield Sample(prompt=prompt, step=step, sample=sample, group=group)


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerateTurns(Generate):
    """Samples answers of several turns, `group` a prompt, with an environment in the program."""

    @property
    def writes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (*SAMPLED, TURN_IDS, STATE_KEYS, TURN_REWARDS, STOPS, *self.how.recorded)

    @property
    def num_pieces(self) -> int:
        """None: turns are one program."""
        return 0

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        state: Any,
        step: jax.Array,
        *,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        sample_ids: jax.Array,
        environment_numbers: jax.Array,
    ) -> StageOutput:
        out = self.how.run(
            self.model,
            state,
            step,
            prompts,
            prompt_lengths,
            sample_ids,
            self.how.settings,
            numbers=environment_numbers,
        )
        assert out.turns is not None
        output = self.output(out)
        fields = dict(zip((TURN_IDS, STATE_KEYS, TURN_REWARDS, STOPS), out.turns, strict=True))
        metrics = turn_metrics(out.turns, out.lengths)
        return StageOutput({**output.writes, **fields}, {**output.metrics, **metrics})


def turn_metrics(turns: TurnRecord, lengths_N: jax.Array) -> dict[str, jax.Array]:
    """Metrics of turns, as `agents/statistics.py` has them."""
    sampled_NR = turns.turn_ids >= 0
    has_N = lengths_N > 0  # a row without a prompt has no turn
    number_N = jnp.max(turns.turn_ids, axis=1) + 1
    sampled_N = jnp.sum(sampled_NR, axis=1)
    each = {
        "num_turns": number_N.astype(jnp.float32),
        "observation_length": (lengths_N - sampled_N).astype(jnp.float32),
        "env/reward": jnp.sum(turns.rewards, axis=1),
    }
    metrics: dict[str, jax.Array] = {}
    for name, x_N in each.items():
        metrics[f"{name}/mean"] = masked_mean(x_N, has_N)
        metrics[f"{name}/min"] = jnp.min(x_N, where=has_N, initial=jnp.inf)
        metrics[f"{name}/max"] = jnp.max(x_N, where=has_N, initial=-jnp.inf)
    metrics["turn_length/mean"] = jnp.sum(sampled_N) / jnp.maximum(jnp.sum(number_N), 1)
    for number, reason in enumerate(STOP_REASONS):
        metrics[f"stop/{reason}"] = masked_mean(turns.stop_reasons == number, has_N)
    return metrics


@dataclass(frozen=True, kw_only=True, eq=False)
class TurnScores(Stage):
    """The sum of the rewards of a sample's turns; by choice, rewards of turns and a mask."""

    writes: tuple[str, ...] = ("scores",)  # and perhaps step_rewards, left_out

    name = "reward"

    def __call__(
        self,
        state: Any,
        step: jax.Array,
        *,
        turn_rewards: jax.Array,
        stop_reasons: jax.Array,
    ) -> StageOutput:
        scores = jnp.sum(turn_rewards, axis=1)
        truncated = jnp.isin(stop_reasons, jnp.array([MAX_TOKENS, MAX_TURN_TOKENS, OVERFLOW]))
        fields = {
            "scores": scores,
            STEP_REWARDS: turn_rewards,
            LEFT_OUT: truncated.astype(jnp.float32),
        }
        metrics = {
            f"rewards/{ENVIRONMENT}/mean": scores.mean(),
            f"rewards/{ENVIRONMENT}/std": scores.std(),
        }
        return StageOutput({name: fields[name] for name in self.writes}, metrics)
