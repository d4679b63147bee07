"""The roles of a config, placed on its mesh: model, layouts, optimizer, sizes of passes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.arguments import seed_of
from jaxrl_llm.checkpoint.stored_models import BASE, CRITIC_BASE
from jaxrl_llm.config import (
    Config,
    ConfigError,
    MeshConfig,
    ModelSettings,
    OptimizerConfig,
    OwnUpdate,
)
from jaxrl_llm.distributed.gathering import gathering, switch_and_gather
from jaxrl_llm.distributed.layout import (
    Layout,
    generation_layout,
    layouts_of,
    shard_rows,
    shard_stacked,
)
from jaxrl_llm.distributed.multihost import make_global
from jaxrl_llm.distributed.sharding import check_host_memory, replicated, shardings
from jaxrl_llm.distributed.transfer import call
from jaxrl_llm.images import see_images
from jaxrl_llm.kernels.decode_attention import ROWS_HEAD_DIMS, block_entries
from jaxrl_llm.kernels.flash_attention import Implementation, chosen_attention
from jaxrl_llm.kernels.hopper import on_gpu
from jaxrl_llm.kernels.strict import Strict
from jaxrl_llm.learner.data_groups import DataGroups
from jaxrl_llm.learner.forward import ForwardSettings
from jaxrl_llm.learner.micro_batches import MicroBatches, Packed, Padded
from jaxrl_llm.learner.optimizer import Optimizer, make_optimizer
from jaxrl_llm.learner.router_losses import RouterLoss
from jaxrl_llm.learner.train_state import (
    Adapted,
    Params,
    TrainState,
    init_state,
    params_of,
    state_shardings,
)
from jaxrl_llm.models.base import ModelSpec, draw_params, merge_adapters
from jaxrl_llm.models.casting import cast
from jaxrl_llm.models.config import Kind
from jaxrl_llm.models.hf import few_features
from jaxrl_llm.models.lora import HEAD, first_magnitudes, split
from jaxrl_llm.models.pipeline import Pipeline
from jaxrl_llm.models.vision import frozen_parameters
from jaxrl_llm.plan.models import (
    ModelSource,
    base_settings,
    base_spec,
    find_model,
    image_input,
    learner_spec,
    spec_of,
    stop_ids,
)
from jaxrl_llm.tokenizer import Tokenizer, check_vocabulary

TEACHER, REFERENCE = "teacher", "reference"
ROLLOUT_ROLE = "rollout"  # the actor where it generates on devices of its own
STRICT_ROWS, STRICT_ROWS_GPU = 16, 256  # tokens that strict layers compute at a time
# With Gemma's, log-probs differ in the last bits on a CPU. The others are not written strictly.
UNLIKE_ON_CPU = (
    "unit_offset", "activation", "attention_sinks", "expert_bias", "swiglu_limit", "latent",
    "attention_gate", "delta",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Role:
    """One model of the dataflow. `optimizer` is None for a role that never learns."""

    name: str
    spec: ModelSpec
    forward: ForwardSettings  # settings of updates
    passes: ForwardSettings  # settings without a gradient; may have another layout
    layout: Layout  # layout of storage and updates
    generation: Layout
    param_shardings: Params  # in `layout`
    optimizer: Optimizer | None = None
    offload: bool = False  # optimizer state is in host memory between steps
    base: str = ""  # role that keeps the weights below its adapters
    data_groups: DataGroups | None = None  # groups that sum gradients once an optimizer step

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def learning(self) -> Optimizer:
        """The optimizer. Requires: the role learns."""
        assert self.optimizer is not None, self.name
        return self.optimizer

    def groups_for(self, by_sample: bool) -> DataGroups | None:
        """The groups for a loss; None where it compares samples, which may be in other groups."""
        return self.data_groups if by_sample else None

    @property
    def generation_shardings(self) -> Params:
        """Shardings of the parameters in the generation layout."""
        spec = self.spec
        return shardings(spec.axes, spec.params, self.mesh, self.generation.rules)

    @cached_property
    def shardings(self) -> Any:
        """Shardings of what the role keeps between steps: a TrainState, or bare parameters."""
        if self.optimizer is None:
            return self.kept_shardings
        return state_shardings(self._shapes, self.kept_shardings, offload=self.offload)

    def abstract(self) -> Any:
        """Shape, dtype and sharding of what the role keeps, without any array."""
        return self._abstract

    @cached_property  # a start asks for it several times
    def _abstract(self) -> Any:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            self._shapes,
            self.shardings,
        )

    @cached_property
    def _shapes(self) -> Any:
        if self.optimizer is None:
            return self.spec.learned
        return jax.eval_shape(self._init, self.spec.learned)

    def state_of(self, states: Mapping[str, Any]) -> Any:
        """The state of the role, joined to its base if it has one; None without a state."""
        own = states.get(self.name)
        return self.with_base(own, states[self.base]) if self.base else own

    def params_in(self, states: Mapping[str, Any]) -> Params:
        """All parameters of the role, with its base."""
        return params_of(self.state_of(states))

    def with_base(self, own: Any, base: Params) -> Adapted:
        """Adapters joined to their base, which may have another head than the role."""
        wanted = split(self.spec.params)[0]
        return Adapted(own=own, base={name: base[name] for name in wanted})

    def first_adapters(self, base: Params, seed: int) -> Params:
        """New adapters of a base, and the head of a scalar model: the base's, or zeros."""
        spec, lora = self.spec, self.spec.lora
        assert lora is not None

        def make(base: Params, seed: jax.Array) -> Params:
            own = draw_params(spec, spec.learned, jax.random.key(seed))
            own = split(first_magnitudes(self.with_base(own, base).joined, lora))[1]
            if HEAD in own and HEAD in base:
                own |= {HEAD: jax.tree.map(lambda x: x.astype(lora.dtype), base[HEAD])}
            return own

        placed = make_global(seed_of(seed), replicated(self.mesh))
        make = jax.jit(make, out_shardings=self.kept_shardings)
        return call(make, (base, placed), self.mesh)

    @property
    def kept_shardings(self) -> Params:
        """Shardings of the parameters that the role keeps itself."""
        return self.param_shardings if self.spec.lora is None else split(self.param_shardings)[1]

    def state(self, params: Params) -> Any:
        """The state of the role, made of the parameters that it keeps.

        The parameters are consumed: their buffers become the state's. A copy would leave a hole in
        memory, and the temporaries of a program need one piece.
        """
        if self.optimizer is None:
            return params
        make = jax.jit(self._init, donate_argnums=(0,), out_shardings=self.shardings)
        return call(make, (params,), self.mesh)

    def with_optimizer(self, config: OptimizerConfig, total_steps: int) -> "Role":
        """The role with another optimizer, such as the one of a supervised warm-up.

        ConfigError when the optimizer is offloaded and the devices have no host memory.
        """
        if config.offload:
            for device in self.mesh.local_devices[:1]:
                check_host_memory(device)
        axes = self.spec.axes if self.spec.lora is None else split(self.spec.axes)[1]
        frozen = frozen_parameters(self.spec.config.vision, self.spec.params)
        frozen = None if self.spec.lora is not None else frozen  # with adapters it is in the base
        optimizer = make_optimizer(config, total_steps, axes, frozen)
        return replace(self, optimizer=optimizer, offload=config.offload)

    def _init(self, params: Params) -> TrainState:
        assert self.optimizer is not None
        return init_state(params, self.optimizer)


def sampling_model(spec: ModelSpec, params: Params, dtype: str) -> tuple[ModelSpec, Params]:
    """The model that generates, in `dtype`; its adapters are merged, unless they are kept apart."""
    if spec.lora is not None and spec.lora.merge:
        spec, params = merge_adapters(spec, params, dtype)
    return spec, cast(params, dtype, spec.float32_head)


def pass_model(role: Role, state: Any) -> tuple[ModelSpec, Params]:
    """The model of a pass without gradient; its weights are those that an update begins with."""
    spec, params = role.spec, params_of(state)
    if spec.lora is not None and spec.lora.merges_updates:
        spec, params = merge_adapters(spec, params, role.passes.dtype)
    return spec, params


def make_role(
    name: str,
    spec: ModelSpec,
    settings: ModelSettings,
    mesh: Mesh,
    *,
    phases: MeshConfig | None = None,
    exact: bool = False,
    strict: Strict | None = None,
) -> Role:
    """Place a model on the mesh; ValueError when a dim does not divide its mesh axes.

    `phases` has the sizes of the pipeline, and the tensor sizes of generation and of passes without
    a gradient. 0 or None takes the model's own, or else the mesh's. `exact` chooses attention whose
    gradient has the same bits in every run. `strict` is for roles whose log-probs are compared with
    the sampler's.
    """
    phases, own = phases or MeshConfig(), settings.tensor
    layout, passes_layout, generation = layouts_of(
        mesh,
        spec.config.num_kv_heads,
        train=own,
        passes=phases.passes.tensor or own,
        generation=phases.generation.tensor or own,
    )
    pipeline = _pipeline(layout, phases, spec)
    axes, shapes = spec.axes, spec.params
    forward = ForwardSettings(
        dtype=settings.dtype,
        attention="exact" if exact and settings.attention == "auto" else settings.attention,
        remat=settings.remat,
        scan_layers=settings.scan_layers,
        residual_dtype=settings.residual_dtype,
        gather=gathering(layout, axes, shapes),
        layout=layout if mesh.size > 1 else None,
        pipeline=pipeline,
        strict=strict,
    )
    passes = forward
    if passes_layout != layout:
        gather = switch_and_gather(layout, passes_layout, axes, shapes)
        passes = replace(
            forward,
            gather=gather,
            layout=passes_layout,
            pipeline=_pipeline(passes_layout, phases, spec),
        )
    return Role(
        name=name,
        spec=spec,
        forward=forward,
        passes=passes,
        layout=layout,
        generation=generation,
        param_shardings=shardings(axes, shapes, mesh, layout.rules),
        data_groups=_data_groups(layout, spec, forward),
    )


def _data_groups(layout: Layout, spec: ModelSpec, forward: ForwardSettings) -> DataGroups | None:
    """The groups of a layout along `data`; None where every micro-batch sums its gradients.

    So it is without `data`, and with dropout: groups would draw the same mask for other rows. On
    CPUs, groups of several devices need float32: XLA's compiler ends the process with bf16.
    """
    if not layout.data_axes or (spec.lora is not None and spec.lora.dropout):
        return None
    within = layout.of_data_group
    if within is None:
        settings = replace(forward, layout=None, gather=lambda params: params)
        return DataGroups(mesh=layout.mesh, axes=layout.data_axes, settings=settings)
    if layout.mesh.devices.flat[0].platform == "cpu" and forward.dtype != "float32":
        return None
    settings = replace(forward, layout=within)
    return DataGroups(
        mesh=layout.mesh, axes=layout.data_axes, settings=settings, shard=shard_rows(within)
    )


def strict_of(spec: ModelSpec, dtype: str, attention: Implementation) -> Strict:
    """The strict computation that sampler and trainer of a model share, on these devices.

    Raises: ValueError for a model with a sliding window, for adapters that are computed apart, and
        on a GPU for a model that our kernels do not take.
    """
    config = spec.config
    if any(window is not None for window in config.sliding_window):
        raise ValueError(
            "config.exact=strict: the model has layers with a sliding window, whose blocks of keys "
            "depend on the row; take another model, or --config.exact=repeatable"
        )
    few, gpu = few_features(config), on_gpu()
    # On a GPU none of these was compared.
    if unlike := few if gpu else [n for n in few if n in UNLIKE_ON_CPU]:
        raise ValueError(
            f"config.exact=strict: the bits of a {config.family} model with {', '.join(unlike)} "
            "differ from the trainer's, or were not compared on this kind of device; take "
            "another model, or --config.exact=repeatable"
        )
    lora = spec.lora
    if lora is not None and (lora.adapts_tables or not lora.merges_updates):
        raise ValueError(
            "config.exact=strict: sampler and trainer compute the same bits with merged adapters "
            "of projections alone; set lora.targets=all-linear, merge=True, dora=False and "
            "dropout=0, or --config.exact=repeatable"
        )
    if not gpu:
        return Strict(rows=STRICT_ROWS, block=16)
    kernel = chosen_attention(attention, jnp.dtype(dtype), config.head_dim, ranges=True)
    if kernel != "pallas" or config.head_dim not in ROWS_HEAD_DIMS:
        raise ValueError(
            f"config.exact=strict: {kernel} attention of {dtype} with head dim {config.head_dim}; "
            f"on a GPU it takes an H100 or H200, dtype=bfloat16, attention=auto and head dims "
            f"{ROWS_HEAD_DIMS}; --config.exact=repeatable works"
        )
    block = block_entries(config.head_dim)
    return Strict(rows=STRICT_ROWS_GPU, block=block, align=block, kernels=True)


def rollout_role(actor: Role, mesh: Mesh, phases: MeshConfig) -> Role:
    """The actor where it generates on devices of its own; it keeps the generation layout."""
    tensor = phases.generation.tensor or 1
    layout = generation_layout(mesh, actor.spec.config.num_kv_heads, tensor=tensor)
    stored = shardings(actor.spec.axes, actor.spec.params, mesh, layout.rules)
    return Role(
        name="rollout",
        spec=actor.spec,
        forward=actor.forward,
        passes=actor.passes,
        layout=layout,
        generation=layout,
        param_shardings=stored,
    )


def _pipeline(layout: Layout, sizes: MeshConfig, spec: ModelSpec) -> Pipeline | None:
    """The pipeline of a layout. Raises: ValueError for layers that its stages cannot share."""
    stages = layout.size("layers")
    if stages == 1:
        return None
    pipeline = Pipeline(
        stages=stages, rounds=sizes.pipeline_rounds, micro_batches=sizes.pipeline_micro_batches
    )
    pipeline.check(spec.config)
    pipeline.check_adapters(spec.config, spec.params["decoder"]["layers"])
    return pipeline


# ------------------------------------------------------------------------- sizes


@dataclass(frozen=True, kw_only=True)
class UpdateSizes:
    """The cuts of a step's samples for a role; all counts are of the whole mesh."""

    num_mini_batches: int = 1
    num_epochs: int = 1
    update: MicroBatches  # parts of one mini-batch
    passes: MicroBatches  # parts of the whole batch, in passes without a gradient
    shuffle: bool = False  # mini-batches take the samples in a random order


def update_sizes(config: Config, role: Role) -> UpdateSizes:
    """Cut a step's samples for `role` into mini-batches, and into parts that fit.

    The keys are the critic's for the critic, and the actor's for all other roles. A user's model
    that learns has its own epochs. Shuffling spreads
    the samples of a prompt over mini-batches: no row has them together.
    """
    settings = config.critic if role.name == "critic" else config.actor
    samples = config.data.train_batch_size * config.rollout.n
    mini_batch = config.actor.ppo_mini_batch_size * config.rollout.n
    layout, passes_layout = role.layout, role.passes.layout or role.layout
    if settings.micro_batch_tokens:
        update = Packed(
            row_tokens=settings.micro_batch_tokens,
            group=config.rollout.n if settings.share_prompts else 1,
            num_replicas=layout.num_replicas,
            rows=role.forward.rows_of_pass,
            align=role.forward.align,
            shard=shard_rows(layout),
        )
        passes = replace(
            update,
            num_replicas=passes_layout.num_replicas,
            rows=role.passes.rows_of_pass,
            shard=shard_rows(passes_layout),
        )
        if config.actor.shuffle:
            update = replace(update, group=1)
    else:
        micro_batch = settings.micro_batch_size * layout.num_replicas or mini_batch
        pass_size = settings.micro_batch_size * passes_layout.num_replicas or mini_batch
        update = Padded(
            num=mini_batch // micro_batch, align=role.forward.align, shard=shard_stacked(layout)
        )
        passes = replace(update, num=samples // pass_size, shard=shard_stacked(passes_layout))
    return UpdateSizes(
        num_mini_batches=samples // mini_batch,
        num_epochs=(_own_update(config, role.name) or settings).ppo_epochs,
        update=update,
        passes=passes,
        shuffle=config.actor.shuffle,
    )


def _own_update(config: Config, name: str) -> OwnUpdate | None:
    """The update of a user's model; None for a frozen one, and for roles of ours."""
    return next((model.update for model in config.models if model.name == name), None)


# ------------------------------------------------------------------------- of a config


def roles_of(
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    learning: Mapping[str, int],
    role_meshes: Mapping[str, Mesh],
) -> tuple[dict[str, Role], dict[str, ModelSource]]:
    """Every role that the config describes, and where weights come from, if not from the actor.

    `learning` has the number of steps of the run in which each role learns.
    """
    context = config.data.max_row_length
    images = config.data.max_images
    actor = find_model(config.actor, tokenizer, context=context, images=images)
    check_vocabulary(tokenizer, actor.config.vocab_size, stop_ids(config, tokenizer))
    see_images(tokenizer, image_input(actor.config.vision, config.data))
    models: dict[str, tuple[Kind, ModelSettings]] = {
        "actor": ("causal_lm", config.actor),
        "critic": ("scalar", config.critic),
    }
    if config.reward.model is not None:
        models["reward"] = ("scalar", config.reward.model)
    if config.teacher is not None:
        models[TEACHER] = ("causal_lm", config.teacher)
    for model in config.models:
        models[model.name] = (model.kind, model)
    roles, sources = {}, {"actor": actor}
    for name, (kind, settings) in models.items():
        source = actor
        if name != "actor" and (settings.path or settings.hf_config):
            source = find_model(settings, tokenizer, context=context, images=images)
            source = sources[name] = _learning_as_the_actor(source, config)
        elif name == TEACHER:
            sources[name] = actor
        _check_vocabulary(name, source, actor, tokenizer)
        spec = learner_spec(source, kind, settings)
        role = _place_role(name, spec, settings, config, role_meshes.get(name), mesh)
        if spec.lora is not None:
            shared = source is actor and BASE in roles and name not in role_meshes
            base = BASE if name == "actor" or shared else CRITIC_BASE
            if base not in roles:
                frozen = base_settings(settings)
                roles[base] = _place_role(
                    base,
                    base_spec(source, kind, settings),
                    frozen,
                    config,
                    role_meshes.get(name),
                    mesh,
                )
            role = replace(role, base=base)
        roles[name] = role
    for name, number in learning.items():
        own = {"actor": config.actor, "critic": config.critic}.get(name)
        settings = own or _own_update(config, name)
        assert settings is not None, name
        per_epoch = number * update_sizes(config, roles["actor"]).num_mini_batches
        steps = max(per_epoch * settings.ppo_epochs, 1)
        roles[name] = roles[name].with_optimizer(settings.optimizer, steps)
    # The policy before training is the base of its adapters, where the two lie together.
    apart = role_meshes.get(REFERENCE)
    base = None if apart or config.reference.path else roles.get(BASE)
    if config.reference.path:
        sources[REFERENCE] = reference_source(config, actor, tokenizer)
    source = sources.get(REFERENCE, actor)
    roles[REFERENCE] = base or reference_role(config, source, mesh, apart)
    return roles, sources


def _place_role(
    name: str,
    spec: ModelSpec,
    settings: ModelSettings,
    config: Config,
    role_mesh: Mesh | None,
    mesh: Mesh,
) -> Role:
    """A role on a mesh of its own, which has no phases, or on the run's."""
    phases = config.mesh if role_mesh is None else None
    strict = None
    if config.exact == "strict" and spec.kind == "causal_lm":
        strict = strict_of(spec, settings.dtype, settings.attention)
    exact = config.exact != "off"
    return make_role(
        name, spec, settings, role_mesh or mesh, phases=phases, exact=exact, strict=strict
    )


def _check_vocabulary(
    name: str, source: ModelSource, actor: ModelSource, tokenizer: Tokenizer
) -> None:
    """ConfigError when a model's vocabulary is not the actor's: it would read other tokens.

    A critic or reward model may have another padding of its table, as sizes of one family do.
    """
    size, actor_size = source.config.vocab_size, actor.config.vocab_size
    enough = name in ("critic", "reward") and size >= min(actor_size, tokenizer.vocab_size)
    if size != actor_size and not enough:
        raise ConfigError(
            f"config.{name} has a vocabulary of {source.config.vocab_size} tokens and the actor "
            f"one of {actor.config.vocab_size}: take a {name} with the actor's tokenizer"
        )


def _learning_as_the_actor(source: ModelSource, config: Config) -> ModelSource:
    """The source of a model whose image encoder learns as the actor's."""
    if source.config.vision is None:
        return source
    vision = replace(source.config.vision, train=config.actor.vision.train)
    return replace(source, config=replace(source.config, vision=vision))


def reference_source(config: Config, actor: ModelSource, tokenizer: Tokenizer) -> ModelSource:
    """The model of `reference.path`. ConfigError where its vocabulary is not the actor's."""
    settings = replace(config.actor, path=config.reference.path, hf_config={}, params=None)
    images = config.data.max_images
    source = find_model(settings, tokenizer, context=config.data.max_row_length, images=images)
    _check_vocabulary(REFERENCE, source, actor, tokenizer)
    return source


def reference_role(
    config: Config, source: ModelSource, mesh: Mesh, role_mesh: Mesh | None = None
) -> Role:
    """The actor before training, or another model. Its weights have the dtype of computation."""
    settings = ModelSettings(
        dtype=config.actor.dtype,
        param_dtype=config.actor.dtype,
        attention=config.actor.attention,
    )
    spec: ModelSpec = spec_of(source, "causal_lm", settings)
    return _place_role(REFERENCE, spec, settings, config, role_mesh, mesh)


# ------------------------------------------------------------------------- mixtures of experts


def replays_routes(config: Config, actor: Role) -> bool:
    """True if the actor's tokens take the experts in its passes that they had in the rollout."""
    return config.rollout.routing_replay and actor.spec.config.mixture is not None


def router_loss(config: Config, role: Role) -> RouterLoss:
    """The router losses in an update of `role`; the coefficients are the actor's."""
    if role.spec.config.mixture is None or role.name != "actor":
        return RouterLoss()
    actor = config.actor
    return RouterLoss(
        aux_coef=actor.router_aux_loss_coef,
        by_layer=actor.router_aux_loss_by_layer,
        z_coef=actor.router_z_loss_coef,
        bias_rate=actor.router_bias_rate,
    )
