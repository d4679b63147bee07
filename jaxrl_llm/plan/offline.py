"""From a config to the plan of offline training.

A run may begin with supervised trainings: its warm-up, its teacher's, its reward model's. They are
plans of the same kind, under the algorithms `sft` and `reward_model`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.build import build_offline
from jaxrl_llm.algorithms.offline import OfflineAlgorithm, groups_of
from jaxrl_llm.arguments import seed_of
from jaxrl_llm.config import Config, ConfigError, SupervisedConfig
from jaxrl_llm.distributed.layout import shard_rows, shard_stacked
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.images import see_images
from jaxrl_llm.learner.micro_batches import MicroBatches, Packed, Padded
from jaxrl_llm.learner.offline_losses import RecordLoss
from jaxrl_llm.plan.dataflow import OFFLINE, plan, segments
from jaxrl_llm.plan.model_rules import check_roles
from jaxrl_llm.plan.models import (
    base_settings,
    base_spec,
    find_model,
    image_fields,
    image_input,
    learner_spec,
)
from jaxrl_llm.plan.offline_stages import (
    HELD_OUT,
    TRAIN,
    Baseline,
    HeldOut,
    HeldOutPairs,
    RecordUpdate,
    ReferenceTables,
    reference_stage,
)
from jaxrl_llm.plan.plan import Phase, Plan, check_reference
from jaxrl_llm.plan.roles import (
    BASE,
    REFERENCE,
    Role,
    UpdateSizes,
    make_role,
    reference_role,
    reference_source,
    router_loss,
)
from jaxrl_llm.plan.stages import ModelStage
from jaxrl_llm.program.program import Program, by_mesh
from jaxrl_llm.program.stage import Stage
from jaxrl_llm.tokenizer import Tokenizer, check_vocabulary
from jaxrl_llm.types import OfflineBatch, TokenBatch

LEARNERS = {"causal_lm": "actor", "scalar": "reward"}  # the role of the model that learns


def plan_offline(
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    *,
    role_meshes: Mapping[str, Mesh] | None = None,
) -> Plan:
    """Roles, stages and the program of `config`.

    `role_meshes` has the mesh of a reference on devices of its own.

    Raises ValueError where the algorithm's fields contradict each other or the config, or a dim
    does not divide its mesh axes.
    """
    algorithm = build_offline(config.algorithm)
    _check(config, algorithm)
    images = config.data.max_images
    source = find_model(config.actor, tokenizer, context=config.data.max_row_length, images=images)
    check_vocabulary(tokenizer, source.config.vocab_size)
    see_images(tokenizer, image_input(source.config.vision, config.data))
    kind = algorithm.model_kind
    spec, base = learner_spec(source, kind, config.actor), None
    how: dict[str, Any] = {"phases": config.mesh, "exact": config.exact != "off"}
    learner = make_role(LEARNERS[kind], spec, config.actor, mesh, **how)
    if spec.lora is not None:
        frozen = base_settings(config.actor)
        base = make_role(BASE, base_spec(source, kind, config.actor), frozen, mesh, **how)
        learner = replace(learner, base=BASE)
    learner = learner.with_optimizer(config.actor.optimizer, config.total_steps)
    reference, sources = None, {learner.name: source}
    apart = (role_meshes or {}).get(REFERENCE)
    if algorithm.reads_reference:
        if config.reference.path:
            sources[REFERENCE] = reference_source(config, source, tokenizer)
        # The model before training is the base of its adapters.
        shared = None if apart or config.reference.path else base
        other = sources.get(REFERENCE, source)
        reference = shared or reference_role(config, other, mesh, apart)
    elif apart:
        raise ConfigError(
            f"config.placement.reference: config.algorithm={config.algorithm.label} reads no "
            "reference, and its devices would be idle; leave it out"
        )
    if apart and algorithm.judge_pairs is not None:
        raise ConfigError(
            f"config.placement.reference: config.algorithm={config.algorithm.label} judges "
            "held-out pairs with policy and reference in one program; leave it out"
        )
    own_meshes = {REFERENCE: apart} if apart else {}
    roles = {role.name: role for role in (learner, base, reference) if role is not None}
    check_roles(config, roles)
    micro_batches, tables = _micro_batches(config, learner), None
    before: list[Stage] = []
    held_out: list[Stage] = []
    elsewhere: tuple[ModelStage, ...] = ()
    if reference is not None:
        stage = reference_stage(reference, algorithm, _micro_batches(config, reference))
        before, held_out = [stage], [] if apart else [stage]
        elsewhere = (stage,) if apart else ()
        if config.precompute_reference:
            size = config.data.train_batch_size
            tables = ReferenceTables(stage=stage, sizes={TRAIN: size, HELD_OUT: size})
            before, held_out = [tables.lookup(TRAIN)], [tables.lookup(HELD_OUT)]
    if algorithm.baseline is not None:
        baseline = Baseline(model=learner, algorithm=algorithm, micro_batches=micro_batches)
        before, held_out = [*before, baseline], [*held_out, baseline]
    update = RecordUpdate(
        model=learner,
        name=f"update_{learner.name}",
        loss=_loss(config, algorithm, learner),
        optimizer=learner.learning,
        sizes=UpdateSizes(update=micro_batches, passes=micro_batches),
        seed=seed_of(config.seed),
    )
    stages = plan([*before, update], fields=OFFLINE)
    phase = Phase(
        config=config,
        algorithm=algorithm,
        roles=roles,
        stages=stages,
        program=Program(
            segments(stages, fuse=config.fuse_stages, place=by_mesh(own_meshes)),
            mesh=mesh,
            role_meshes=own_meshes,
            state_shardings={learner.name: learner.shardings},
            overlap=config.fuse_stages,
        ),
        batch=_abstract_batch(config, algorithm, learner, config.data.train_batch_size),
        tables=tables,
    )
    pairs = None
    if algorithm.judge_pairs is not None:
        pairs = HeldOutPairs(
            learner=learner,
            reference=reference,
            algorithm=algorithm,
            micro_batches=micro_batches,
        )
    plan_of_run = Plan(
        config=config,
        phases=(phase,),
        learner=learner,
        sources=sources,
        vocabulary=OFFLINE,
        held_out=replace(
            _held_out(algorithm, learner, micro_batches, held_out), elsewhere=elsewhere
        ),
        held_out_pairs=pairs,
    )
    check_reference(config, plan_of_run)
    return plan_of_run


def plan_supervised(
    config: Config,
    training: SupervisedConfig,
    role: Role,
    algorithm: OfflineAlgorithm,
    *,
    prefix: str,
) -> Plan:
    """A training that a run begins with, on the parameters of `role`.

    `prefix` names its metrics: sft | teacher | reward_model.
    """
    learner = role.with_optimizer(training.optimizer, training.steps)
    size = training.batch_size
    rows = training.micro_batch_size * role.layout.num_replicas or size
    micro_batches = Padded(num=size // rows, shard=shard_stacked(role.layout))
    update = RecordUpdate(
        model=learner,
        name=f"update_{prefix}",
        prefix=prefix,
        loss=_loss(config, algorithm, learner),
        optimizer=learner.learning,
        sizes=UpdateSizes(update=micro_batches, passes=micro_batches),
    )
    stages = plan([update], fields=OFFLINE)
    phase = Phase(
        config=config,
        algorithm=algorithm,
        roles={learner.name: learner},
        stages=stages,
        program=Program(
            segments(stages),
            mesh=role.mesh,
            state_shardings={learner.name: learner.shardings},
            supervised=True,
        ),
        batch=_abstract_batch(config, algorithm, role, size),
    )
    return Plan(
        config=config,
        phases=(phase,),
        learner=learner,
        sources={},
        vocabulary=OFFLINE,
        held_out=_held_out(algorithm, learner, Padded()),
    )


def _held_out(
    algorithm: OfflineAlgorithm,
    learner: Role,
    micro_batches: MicroBatches,
    before: Sequence[Stage] = (),
) -> HeldOut:
    """The program for held-out records: stages `before`, then the losses of the learner."""
    loss = RecordLoss(algorithm=algorithm, spec=learner.spec, settings=learner.forward)
    return HeldOut(learner=learner, loss=loss, micro_batches=micro_batches, before=tuple(before))


def _loss(config: Config, algorithm: OfflineAlgorithm, role: Role) -> RecordLoss:
    """The loss of an update."""
    router = router_loss(config, role)
    return RecordLoss(algorithm=algorithm, spec=role.spec, settings=role.forward, router=router)


def _abstract_batch(
    config: Config, algorithm: OfflineAlgorithm, role: Role, size: int
) -> OfflineBatch:
    """Shapes of the batch that a step begins with."""
    length, sharding = config.data.max_row_length, batch_sharding(role.mesh)

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((size, *shape), dtype, sharding=sharding)

    tokens = TokenBatch(
        tokens=array(jnp.int32, length),
        lengths=array(jnp.int32),
        loss_mask=array(jnp.float32, length),
        **image_fields(config, role.spec.config.vision, length, array),
    )
    fields: dict[str, Any] = dict.fromkeys(algorithm.records.groups, tokens)
    fields |= dict.fromkeys(algorithm.records.numbers, array(jnp.float32))
    return OfflineBatch(index=array(jnp.int32), weights=array(jnp.float32), **fields)


def _check(config: Config, algorithm: OfflineAlgorithm) -> None:
    """ConfigError for settings under which the loss would not be the algorithm's."""
    kind, actor = algorithm.records, config.actor
    groups = groups_of(algorithm.update_reads, kind)
    mismatched = "mismatched" in groups_of(algorithm.reads, kind)
    precomputes = "config.precompute_reference=True"
    refused = {
        f"config.actor.micro_batch_tokens={actor.micro_batch_tokens}: packing could part the rows "
        f"of a record ({', '.join(kind.groups)}), which the loss compares; set it to 0 and give "
        "config.actor.micro_batch_size": actor.micro_batch_tokens and len(groups) > 1,
        "config.warmup trains a language model, and this run a scalar one: name a warmed-up model "
        "by config.actor.path": algorithm.model_kind == "scalar" and config.warmup is not None,
        "config.data.train_batch_size=1: a completion is also given to the prompt of another "
        "record of its batch; 64 works": mismatched and config.data.train_batch_size < 2,
        f"{precomputes}: every batch gives a prompt another mismatched completion, so its log-prob "
        "cannot be computed before": mismatched and config.precompute_reference,
        f"{precomputes}: the reference model judges held-out pairs, and only log-probs of single "
        "completions would be kept": algorithm.judge_pairs and config.precompute_reference,
    }
    for why in (why for why, holds in refused.items() if holds):
        raise ConfigError(why)


def _micro_batches(config: Config, role: Role) -> MicroBatches:
    actor, layout = config.actor, role.layout
    replicas = layout.num_replicas
    if actor.micro_batch_tokens:
        return Packed(
            row_tokens=actor.micro_batch_tokens,
            num_replicas=replicas,
            rows=role.forward.rows_of_pass,
            shard=shard_rows(layout),
        )
    batch = config.data.train_batch_size
    rows = actor.micro_batch_size * replicas or batch
    return Padded(num=batch // rows, shard=shard_stacked(layout))
