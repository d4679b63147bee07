"""Engines of sessions on a role's weights, for answers that the host takes part in.

Each process drives engines on its own devices, for the samples that it owns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.distributed.multihost import processes_of
from jaxrl_llm.distributed.reshard import to_layout
from jaxrl_llm.distributed.sharding import shardings
from jaxrl_llm.generation.engine import generation_form
from jaxrl_llm.generation.engine_group import EngineGroup, engines_on, replicas_here, replicas_of
from jaxrl_llm.generation.sequence import Sequence as Sampled
from jaxrl_llm.generation.session import EngineSettings
from jaxrl_llm.generation.settings import GenerationSettings, Quantization
from jaxrl_llm.generation.slots import no_kept, no_routes
from jaxrl_llm.learner.rows import KEPT, ROUTES
from jaxrl_llm.learner.train_state import params_of
from jaxrl_llm.models.base import ModelSpec
from jaxrl_llm.plan.generating import Generation
from jaxrl_llm.plan.roles import Role, sampling_model
from jaxrl_llm.program.stage import HOST, Stage


@dataclass(eq=False)
class Sessions:
    """Opens engines, and keeps the programs that form their weights."""

    config: Config
    _forms: dict[Any, Any] = field(default_factory=dict)

    def open(
        self,
        role: Role,
        state: Any,
        settings: GenerationSettings,
        dtype: str,
        *,
        rows: int,
        stop_ids: Sequence[int],
        shares: bool = True,
    ) -> EngineGroup:
        """An engine on each replica of the role here. Close them at the end.

        `settings` are for one replica. `rows` are the samples of a batch here, and the most slots.
        `shares`: samples of a prompt have its tokens in common.
        """
        data, group = self.config.data, settings.group
        spec, params = self._formed(role, state, settings.quantization, dtype)
        replicas = replicas_here(role.generation)
        rows = max(1, -(-rows // len(replicas)))
        slots = min(settings.num_slots or rows, rows)
        return engines_on(
            spec,
            params,
            EngineSettings(
                max_context=data.max_row_length,
                num_slots=slots,
                cache_tokens=settings.cache_tokens,
                stop_ids=tuple(stop_ids),
                sampling=settings.sampling,
                num_beginnings=max(1, -(-slots // group) + 1) if shares else 0,
                beginning_tokens=data.max_prompt_length if shares else 0,
                group=group,
                quantization=settings.quantization,
                in_generation_form=True,
                attention=settings.attention,
                record_routes=settings.record_routes,
                record_kept=settings.record_kept,
            ),
            replicas,
        )

    def _formed(
        self, role: Role, state: Any, quantization: Quantization, dtype: str
    ) -> tuple[ModelSpec, Any]:
        """The model in generation form, whole on each replica."""
        key = role.name, role.spec, quantization, dtype
        if key not in self._forms:
            made, generation = [], role.generation
            split = generation.size("mlp") > 1

            def form(params: Any) -> Any:
                spec, params = sampling_model(role.spec, params, dtype)
                before, after = (
                    shardings(spec.axes, spec.params, each.mesh, each.rules)
                    for each in (role.layout, generation)
                )
                params = to_layout(params, before, after)
                spec, params = generation_form(
                    spec.of_dtype(dtype), params, quantization, split=split
                )
                made.append(spec)
                return params

            jax.eval_shape(form, params_of(state))
            spec = made[0]
            places = shardings(spec.axes, spec.params, generation.mesh, generation.rules)
            self._forms[key] = spec, jax.jit(form, out_shardings=places)
        spec, program = self._forms[key]
        return spec, program(params_of(state))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A response of one row, as its fields have it."""

    num_prompt: int  # tokens of the prompt
    tokens: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]
    routes: np.ndarray | None = None  # experts of prompt and response, [T, L, K]
    kept: Mapping[int, Any] = field(default_factory=dict)  # ids that filters kept, by column


def routes_of(sequence: Sampled) -> np.ndarray | None:
    """The experts of all ids that were computed; None where none are recorded."""
    parts = sequence.all_routes
    return np.concatenate(parts) if parts and parts[0] is not None else None


def kept_of(sequence: Sampled) -> dict[int, Any]:
    """The ids that filters kept, by the column of the response."""
    return {place - sequence.num_prompt: ids for place, ids in sequence.kept.items()}


def recorded(
    sequences: Sequence[Sampled], places: Sequence[int]
) -> tuple[np.ndarray | None, dict[int, Any]]:
    """The experts of all ids of a sample, -1 where none are known, and kept ids by column.

    A sample has one sequence a row. `places` are the columns at which rows begin, and the end; the
    first is negative, as many as the prompt has ids. The experts are None where none are recorded.
    """
    routes: list[np.ndarray] = []
    kept: dict[int, Any] = {}
    for sequence, (start, end) in zip(sequences, pairwise(places), strict=False):
        kept |= {start + place: ids for place, ids in sequence.kept.items() if start + place < end}
        own = routes_of(sequence)
        if own is not None:
            own = own[: end - start - 1]  # the last id predicts nothing in its row
            routes += [own, np.full((end - start - len(own), *own.shape[1:]), -1, own.dtype)]
    return np.concatenate(routes) if routes else None, kept


def seed_words(how: Generation, step: int) -> np.ndarray:
    """The key of a step as `Engine.add` takes it, uint32 [2]."""
    return np.asarray(jax.random.key_data(how.keys(jnp.int32(step))))


@dataclass(frozen=True, kw_only=True, eq=False)
class SessionStage(Stage):
    """A stage that samples by sessions, on the host; see `Sessions`."""

    model: Role
    how: Generation
    prompt: int  # P
    response: int  # R
    pad_id: int

    generates = True
    name = "gen"
    role = HOST

    @property
    def shares(self) -> tuple[str, ...]:
        return (self.model.name, *((self.model.base,) if self.model.base else ()))

    def shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        blank = jax.eval_shape(lambda: self.blank(rows))
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in blank.items()}

    def blank(self, rows: int) -> dict[str, jax.Array]:
        """The fields of samples without a response."""
        config, settings = self.model.spec.config, self.how.settings
        blank = {
            "responses": jnp.full((rows, self.response), self.pad_id, jnp.int32),
            "response_lengths": jnp.zeros((rows,), jnp.int32),
            "mask": jnp.zeros((rows, self.response), jnp.float32),
            "rollout_logprobs": jnp.zeros((rows, self.response), jnp.float32),
        }
        if settings.record_routes:
            blank[ROUTES] = no_routes(config, rows, self.prompt + self.response)
        if settings.record_kept:
            most = settings.sampling.num_kept(config.vocab_size)
            blank[KEPT] = no_kept(rows, self.response, most)
        return blank


def write_answer(
    fields: Mapping[str, np.ndarray],
    row: int,
    answer: Answer,
    *,
    prompt: int,
) -> None:
    """Write the answer of a row into the fields of `SessionStage.blank`; P is `prompt`."""
    length, own = len(answer.tokens), answer.num_prompt
    fields["responses"][row, :length] = answer.tokens
    fields["response_lengths"][row] = length
    fields["mask"][row, :length] = answer.mask
    fields["rollout_logprobs"][row, :length] = answer.logprobs
    if ROUTES in fields and answer.routes is not None:
        routes = answer.routes[: own + length - 1]
        fields[ROUTES][row, :own] = routes[:own]
        fields[ROUTES][row, prompt : prompt + len(routes) - own] = routes[own:]
    for column, ids in answer.kept.items() if KEPT in fields else ():
        if 0 <= column < length:
            fields[KEPT][row, column] = ids


def check_sessions(sampler: Role, keys: str) -> None:
    """Raises: ConfigError for what sessions do not go with. `keys` are what needs them."""
    # Of all replicas, so that every process refuses the run.
    replicas = replicas_of(sampler.generation)
    is_apart = any(len(processes_of(x.mesh.devices.flat)) > 1 for x in replicas)
    refused = {
        "config.mesh.generation.tensor over several processes": is_apart,
        "config.exact=strict": sampler.forward.strict is not None,
    }
    for key, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{key}: {keys} do not work with it yet; choose another value")
