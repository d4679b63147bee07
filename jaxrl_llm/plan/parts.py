"""Partial rollouts: a response is cut after some tokens, and newer weights go on with it.

The engine computes the prompt and the response so far again, under the newer weights. A token keeps
the log-prob, the experts and the version of the policy that sampled it. Its draw depends on its
place, so a policy that never changes gives the response of one go.

Between two parts the batch has everything that the next one needs, so a checkpoint has it too.

Shape letters: N samples, P prompt tokens, R response tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.distributed.multihost import gather_objects
from jaxrl_llm.generation.engine_group import EngineGroup
from jaxrl_llm.generation.sequence import Sequence as Sampled
from jaxrl_llm.generation.stop_strings import START, Stops
from jaxrl_llm.learner.rows import KEPT, ROUTES
from jaxrl_llm.plan.generating import SAMPLED
from jaxrl_llm.plan.sessions import (
    Answer,
    Sessions,
    SessionStage,
    kept_of,
    routes_of,
    seed_words,
    write_answer,
)
from jaxrl_llm.program.stage import StageOutput, States, StepContext

VERSIONS = "policy_versions"
NO_VERSION = -1  # the version of a token that no policy sampled


@dataclass(eq=False, kw_only=True)
class Response:
    """A response so far."""

    step: int
    sample: int
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: dict[int, Any] = field(default_factory=dict)  # ids that filters kept, by column
    routes: np.ndarray | None = None  # experts of each id when it was read first
    stop_state: int = START  # state of the stop strings
    ended: bool = False

    def end_of(self, tokens: Sequence[int], stops: Stops) -> int:
        """How many of these tokens come next: up to the first that ends the response.

        The engine itself ends at stop tokens.
        """
        strings = stops.strings
        for number, token in enumerate(tokens if strings else (), start=1):
            assert strings is not None
            self.stop_state = strings.after(self.stop_state, token)
            if self.stop_state == strings.complete:
                self.ended = True
                return number
        self.ended = bool(tokens) and tokens[-1] in stops.token_ids
        return len(tokens)

    def take(self, sequence: Sampled, end: int, version: int) -> None:
        """Take the tokens of a part, up to `end` of the response."""
        first = len(self.tokens)
        self.tokens += sequence.response[first:end]
        self.logprobs += sequence.logprobs[sequence.num_prompt + first :][: end - first]
        self.versions += [version] * (end - first)
        self.kept |= {column: ids for column, ids in kept_of(sequence).items() if column >= first}
        routes = routes_of(sequence)
        if routes is not None:
            old = routes[:0] if self.routes is None else self.routes
            self.routes = np.concatenate([old, routes[len(old) : len(self.prompt) + end - 1]])


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one policy adds to the responses of one batch."""

    context: StepContext
    tokens: int  # most new tokens of a response


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerateInParts(SessionStage):
    """Samples responses in parts, `group` a prompt. `advance` adds one, and a call writes all."""

    sessions: Sessions

    @property
    def writes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (*SAMPLED, VERSIONS, *self.how.recorded)

    def blank(self, rows: int) -> dict[str, jax.Array]:
        none = jnp.full((rows, self.response), NO_VERSION, jnp.int32)
        return super().blank(rows) | {VERSIONS: none}

    def begin(self, context: StepContext, step: int, sample_ids: np.ndarray) -> None:
        """Responses without a token for the owned rows of a batch."""
        prompts = context.prompts_of(context.rows.owned)
        context.responses = [
            Response(step=step, sample=sample, prompt=tuple(prompt.token_ids))
            for prompt, sample in zip(prompts, sample_ids.tolist(), strict=True)
        ]

    def restore(self, context: StepContext, fields: Mapping[str, np.ndarray]) -> None:
        """Take the responses so far from what a call wrote."""
        for row, response in enumerate(context.responses):
            length, first = int(fields["response_lengths"][row]), len(response.prompt)
            tokens = fields["responses"][row, :length].tolist()
            response.end_of(tokens, self._stops)
            response.tokens = tokens
            response.logprobs = fields["rollout_logprobs"][row, :length].tolist()
            response.versions = fields[VERSIONS][row, :length].tolist()
            if KEPT in fields:
                response.kept = dict(enumerate(fields[KEPT][row, :length]))
            if ROUTES in fields and length:
                each = fields[ROUTES][row]
                after = each[self.prompt : self.prompt + length - 1]
                response.routes = np.concatenate([each[:first], after])

    def advance(self, parts: Sequence[Part], version: int, states: States) -> dict[str, float]:
        """Add a part to the responses of several batches, in one call of the engines.

        Every process calls it. The engines' memory is free again afterwards.
        """
        state = self.model.state_of({name: states[name] for name in self.shares})
        rows = max(len(part.context.responses) for part in parts)
        engines = self.sessions.open(
            self.model,
            state,
            self.how.settings,
            self.how.dtype,
            rows=rows,
            stop_ids=self._stops.token_ids,
        )
        try:
            self._run(engines, parts, version)
            steps = max(gather_objects(engines.num_steps, "parts"))  # the slowest process's
            return {"rollout/decode_steps": float(steps)}
        finally:
            engines.close()

    def _run(self, engines: EngineGroup, parts: Sequence[Part], version: int) -> None:
        going: dict[Sampled, Response] = {}
        for part in parts:
            if not part.context.responses:
                continue
            beginnings: dict[tuple[int, ...], Any] = {}
            seed_key = seed_words(self.how, part.context.responses[0].step)
            for each in part.context.responses:
                left = self.response - len(each.tokens)
                if each.ended or left < 1:
                    continue
                if each.prompt not in beginnings:
                    beginnings[each.prompt] = engines.beginning(each.prompt)
                sequence = engines.add(
                    each.prompt,
                    response=each.tokens,
                    limit=min(part.tokens, left),
                    beginning=beginnings[each.prompt],
                    seed_key=seed_key,
                    sample_id=each.sample,
                )
                going[sequence] = each
        read = {sequence: len(each.tokens) for sequence, each in going.items()}
        while engines.has_work:
            for sequence in engines.step():
                each, new = going[sequence], sequence.response[read[sequence] :]
                read[sequence] += each.end_of(new, self._stops)
                if each.ended or sequence.status == "waiting":
                    each.take(sequence, read[sequence], version)
                    engines.abort(sequence)

    @property
    def _stops(self) -> Stops:
        return self.how.settings.sampling.stops

    def __call__(
        self, context: StepContext, step: int, *, sample_ids: np.ndarray, states: States
    ) -> StageOutput:
        fields = {name: np.array(x) for name, x in self.blank(len(sample_ids)).items()}
        for row, each in enumerate(context.responses):
            answer = Answer(
                num_prompt=len(each.prompt),
                tokens=each.tokens,
                mask=[1] * len(each.tokens),
                logprobs=each.logprobs,
                routes=each.routes,
                kept=each.kept,
            )
            write_answer(fields, row, answer, prompt=self.prompt)
            fields[VERSIONS][row, : len(each.versions)] = each.versions
        return StageOutput(fields)
