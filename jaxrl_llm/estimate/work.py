"""The work of a step: its stages, the models that they run, and the lengths of its samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_llm.config import (
    ActorConfig,
    Config,
    ConfigError,
    CriticConfig,
    MeshConfig,
    ModelSettings,
)
from jaxrl_llm.config.schema import AXES
from jaxrl_llm.generation.filters import num_kept
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.learner.rows import KEPT
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.layers import FROZEN
from jaxrl_llm.models.vision import frozen_parameters
from jaxrl_llm.plan.dataflow import OFFLINE
from jaxrl_llm.plan.generating import Generate
from jaxrl_llm.plan.models import base_settings, find_tokenizer
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.planning import plan_run
from jaxrl_llm.plan.roles import BASE, CRITIC_BASE, Role
from jaxrl_llm.plan.scores import planned_reward
from jaxrl_llm.plan.stages import ModelStage, Update
from jaxrl_llm.program.stage import Stage

Does = Literal["generate", "pass", "update"]
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A role's model and how it is stored and computed."""

    role: str
    config: ModelConfig
    kind: Kind
    settings: ModelSettings
    rows: ActorConfig | CriticConfig  # how its passes cut samples
    learns: bool
    adapters: int = 0  # parameters of a role that keeps adapters, and their base apart
    adapted: float = 0.0  # features in and out of all projections that have adapters
    merges: bool = False  # passes and updates compute with a merged copy of its weights
    generates_merged: bool = False  # the sampler computes with a merged copy
    float8: bool = False  # the projections, or those below its adapters, are frozen in float8
    encoder: int = 0  # parameters of its image encoder
    encoder_learns: int = 0  # parameters of the encoder that an update changes

    @property
    def itemsize(self) -> int:
        """Bytes of a weight in matmuls."""
        return BYTES[self.settings.dtype]

    @property
    def stored_itemsize(self) -> int:
        """Bytes of a stored weight."""
        return BYTES[self.settings.param_dtype]

    @property
    def optimizer(self) -> Any:
        """The OptimizerConfig of a role that learns."""
        return getattr(getattr(self.settings, "update", self.settings), "optimizer", None)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One stage of a step that runs a model."""

    stage: str
    does: Does
    role: str
    epochs: int = 1
    mini_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The lengths of a step's samples. `responses` has a row for each prompt."""

    prompts: np.ndarray  # [groups] tokens
    responses: np.ndarray  # [groups, samples of a prompt] tokens
    longest_prompt: int  # tokens that arrays have room for
    longest_response: int

    @property
    def count(self) -> int:
        return self.responses.size

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of every sample; a prompt counts for each of its samples."""
        return int(self.prompts.sum() * self.responses.shape[1] + self.responses.sum())

    def share(self, replicas: int) -> "Samples":
        """The samples of one replica: the first groups, or a part of one group."""
        groups, n = self.responses.shape
        if groups >= replicas:
            each = math.ceil(groups / replicas)
            return replace(self, prompts=self.prompts[:each], responses=self.responses[:each])
        each = max(1, math.ceil(groups * n / replicas))
        return replace(self, prompts=self.prompts[:1], responses=self.responses[:1, :each])

    def mini_batch(self, count: int) -> "Samples":
        """One of `count` equal parts."""
        return self.share(count)

    def repeated(self, factor: float) -> "Samples":
        """As many groups times `factor`, at least one."""
        count = max(1, round(len(self.prompts) * factor))
        return replace(
            self,
            prompts=np.resize(self.prompts, count),
            responses=np.resize(self.responses, (count, self.responses.shape[1])),
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step of a config, whatever devices run it."""

    config: Config
    models: dict[str, Model]
    jobs: tuple[Job, ...]
    samples: Samples
    share_prompts: bool  # a prompt is in a packed row once
    kept_tokens: int = 0  # ids that the sampler's filters keep of each sampled token
    settings: GenerationSettings | None = None  # settings of the rollout; None without one
    name: str = "run"

    @property
    def online(self) -> bool:
        return any(job.does == "generate" for job in self.jobs)

    @property
    def actor(self) -> Model:
        """The model that is the run's result."""
        return self.models.get("actor") or next(m for m in self.models.values() if m.learns)

    def scaled(self, factor: float) -> "Work":
        """The same work with `factor` times the prompts."""
        return replace(self, samples=self.samples.repeated(factor))


def work_of(
    config: Config,
    *,
    prompt_tokens: int = 0,
    response_tokens: int = 0,
    lengths: Sequence[tuple[int, int]] = (),
) -> Work:
    """The work of a config, planned on one device; nothing is computed.

    Each sample has `prompt_tokens` and `response_tokens`; 0 takes the config's limits.
    `lengths` are (prompt, response) tokens of samples, repeated until a batch is full.

    Raises: ConfigError or ValueError for a config that no run takes.
    """
    plan = _planned_on_one(config)
    stages = plan.phases[-1].stages
    settings: dict[str, Any] = {
        "actor": config.actor,
        "critic": config.critic,
        # Offline, a reward model learns with the settings of the actor.
        "reward": config.actor if plan.learner.name == "reward" else config.reward.model,
        "teacher": config.teacher,
        **{model.name: model for model in config.models},
    }
    frozen = ModelSettings(
        dtype=config.actor.dtype,
        param_dtype=config.actor.dtype,
        attention=config.actor.attention,
    )
    settings |= {"reference": frozen, BASE: base_settings(config.actor)}
    settings[CRITIC_BASE] = base_settings(config.critic)
    roles: dict[str, Any] = {
        stage.role: stage.model for stage in stages if isinstance(stage, ModelStage)
    }
    roles |= {role.base: plan.roles[role.base] for role in roles.values() if role.base}
    rows = dict.fromkeys(roles, config.actor) | {"critic": config.critic}
    models = {name: _model(name, role, settings[name], rows[name]) for name, role in roles.items()}
    rollout, kept_tokens = config.rollout, 0
    if any(KEPT in stage.writes for stage in stages):
        filters = {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
        kept_tokens = num_kept(models["actor"].config.vocab_size, **filters)
    return Work(
        config=config,
        name=config.name,
        models=models,
        jobs=tuple(_jobs(stages)),
        samples=samples_of(
            config,
            _samples_of_a_prompt(plan),
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            lengths=lengths,
        ),
        share_prompts=config.actor.share_prompts and not config.actor.shuffle,
        kept_tokens=kept_tokens,
        settings=next((s.how.settings for s in stages if isinstance(s, Generate)), None),
    )


def _model(
    name: str, role: Role, settings: ModelSettings, rows: ActorConfig | CriticConfig
) -> Model:
    """A role of the plan."""
    spec, lora = role.spec, role.spec.lora
    learned = _size(spec.learned)
    encoder = spec.params.get("vision", {})
    frozen = frozen_parameters(spec.config.vision, {"vision": encoder})
    learns = (
        encoder
        if frozen is None
        else jax.tree.map(lambda x, fixed: None if fixed else x, encoder, frozen["vision"])
    )
    return Model(
        role=name,
        config=spec.config,
        kind=spec.kind,
        settings=settings,
        rows=rows,
        learns=role.optimizer is not None,
        adapters=0 if lora is None else learned,
        adapted=0.0 if lora is None else learned / lora.rank,
        merges=lora is not None and lora.merges_updates,
        generates_merged=lora is not None and lora.merge,
        float8=spec.form == FROZEN,
        encoder=_size(encoder),
        encoder_learns=0 if role.optimizer is None or lora is not None else _size(learns),
    )


def _size(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _planned_on_one(config: Config) -> Plan:
    """The plan of `config` on one device: the same roles and stages as on any mesh."""
    on_one = replace(config, mesh=MeshConfig(), placement={}, node_groups={})
    # Slots and cache are found for the devices of an estimate.
    on_one = replace(on_one, rollout=replace(config.rollout, memory_gb=0.0))
    models = {"actor": replace(on_one.actor, tensor=0), "critic": replace(on_one.critic, tensor=0)}
    on_one = replace(on_one, **models)
    tokenizer = find_tokenizer(config.data.tokenizer, config.actor)
    # Not by `make_mesh`, which asks that several processes use all devices.
    device = np.asarray(jax.local_devices()[:1]).reshape([1] * len(AXES))
    mesh = Mesh(device, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return plan_run(on_one, tokenizer, mesh, planned_reward(config))


def _jobs(stages: Sequence[Stage]) -> list[Job]:
    jobs = []
    for stage in stages:
        if isinstance(stage, Update):
            sizes = stage.sizes
            counts = {"epochs": sizes.num_epochs, "mini_batches": sizes.num_mini_batches}
            jobs.append(Job(stage=stage.name, does="update", role=stage.role, **counts))
        elif isinstance(stage, ModelStage):
            does: Does = "generate" if stage.generates else "pass"
            jobs.append(Job(stage=stage.name, does=does, role=stage.role))
    return jobs


def _samples_of_a_prompt(plan: Plan) -> int:
    """Responses of one prompt; offline, completions of one record."""
    if plan.vocabulary is OFFLINE:
        return len(plan.record_algorithm.records.groups)
    return plan.config.rollout.n


def samples_of(
    config: Config,
    n: int,
    *,
    prompt_tokens: int = 0,
    response_tokens: int = 0,
    lengths: Sequence[tuple[int, int]] = (),
) -> Samples:
    """The lengths of a batch with `n` samples a prompt; see `work_of`."""
    data = config.data
    shape = (data.train_batch_size, n)
    for name, tokens, most in (
        ("--prompt_tokens", prompt_tokens, data.max_prompt_length),
        ("--response_tokens", response_tokens, data.max_response_length),
    ):
        if tokens > most:
            raise ConfigError(f"{name}={tokens} is more than the config's limit of {most} tokens")
    if lengths:
        prompts = np.resize([prompt for prompt, _ in lengths[::n]], shape[0])
        responses = np.resize([response for _, response in lengths], shape)
    else:
        prompts = np.full(shape[0], prompt_tokens or data.max_prompt_length)
        responses = np.full(shape, response_tokens or data.max_response_length)
    return Samples(
        prompts=np.minimum(prompts, data.max_prompt_length),
        responses=np.minimum(responses, data.max_response_length),
        longest_prompt=data.max_prompt_length,
        longest_response=data.max_response_length,
    )
