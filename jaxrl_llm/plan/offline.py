"""From a config to the planned program of offline training, before any array exists.

A run may begin with supervised trainings: its warm-up, its teacher's, its reward model's. They are
plans of the same kind, under the algorithms `sft` and `reward_model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.build import build_offline
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.offline import (
    BASELINE,
    LOGPROBS,
    PAIR,
    REFERENCE,
    OfflineAlgorithm,
    groups_of,
)
from jaxrl_llm.config import Config, SupervisedConfig
from jaxrl_llm.distributed.communication import MICRO_BATCHES
from jaxrl_llm.distributed.layout import shard_rows, shard_stacked
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.learner.losses import NONFINITE
from jaxrl_llm.learner.micro_batches import MicroBatches, Packed, Padded
from jaxrl_llm.learner.offline_losses import (
    RecordLoss,
    group_fields,
    means,
    record_fields,
    reference_fields,
    weighted_sums,
)
from jaxrl_llm.learner.rows import Fields
from jaxrl_llm.learner.train_state import Metrics, Params, params_of
from jaxrl_llm.plan.dataflow import OFFLINE, plan, segments
from jaxrl_llm.plan.model_rules import check_roles
from jaxrl_llm.plan.models import (
    ModelSource,
    base_settings,
    base_spec,
    find_model,
    learner_spec,
    warn_of_positions,
)
from jaxrl_llm.plan.roles import (
    BASE,
    Role,
    UpdateSizes,
    make_role,
    reference_role,
    router_loss,
)
from jaxrl_llm.plan.stages import ModelStage, Update
from jaxrl_llm.program.program import Program
from jaxrl_llm.program.segment import Segment
from jaxrl_llm.program.stage import Stage, StageOutput, States
from jaxrl_llm.tokenizer import Tokenizer, check_vocabulary
from jaxrl_llm.types import OFFLINE_FIELDS, OfflineBatch, TokenBatch

TRAIN, HELD_OUT = "train", "held_out"  # the tables of precomputed log-probs
LEARNERS = {"causal_lm": "actor", "scalar": "reward"}  # the role of the model that learns


# ------------------------------------------------------------------------- what is planned


@dataclass(frozen=True, kw_only=True)
class OfflinePlan:
    """Offline training, planned: the roles that it needs and the program of a step."""

    config: Config
    algorithm: OfflineAlgorithm
    learner: Role
    base: Role | None = None  # the frozen weights below the learner's adapters
    reference: Role | None  # None where nobody reads it
    source: ModelSource | None  # of the learner's weights; None where they are given
    micro_batches: MicroBatches
    stages: tuple[Stage, ...]
    program: Program
    batch_size: int  # records

    def at(self, step: int) -> "OfflinePlan":
        """The plan of `step`: every step is the same."""
        return self

    @property
    def learning(self) -> tuple[Segment, ...]:
        """The segments of a step."""
        return self.program.segments

    def begins_program(self, step: int) -> bool:
        """Whether `step` is the first that runs a program, and so may compile."""
        return step == 1

    def enter(self, step: int, states: States) -> States:
        """The states that `step` begins with."""
        return states

    @property
    def roles(self) -> dict[str, Role]:
        """The roles with a gradient."""
        return {self.learner.name: self.learner}

    @property
    def frozen(self) -> list[str]:
        """Names of the states that no step changes: saved once a run."""
        found = [*self.bases]
        if self.reference is not None and (self.precomputed or self.base is None):
            found.append("reference")
        return [name for name in found if name not in self.reloaded]

    @property
    def bases(self) -> dict[str, Role]:
        """The frozen weights below adapters."""
        return {} if self.base is None else {self.base.name: self.base}

    @property
    def reloaded(self) -> dict[str, ModelSource]:
        """Where a run reads again the states that no step changes, by their names."""
        if self.source is None or self.config.warmup is not None:
            return {}
        return dict.fromkeys(self.bases, self.source)

    @property
    def num_devices(self) -> int:
        return self.learner.mesh.size

    @property
    def loss(self) -> RecordLoss:
        """The loss on records of the learner."""
        return RecordLoss(
            algorithm=self.algorithm, spec=self.learner.spec, settings=self.learner.forward
        )

    @property
    def precomputed(self) -> bool:
        """Whether the reference is a table of log-probs instead of a model."""
        return self.reference is not None and self.config.precompute_reference

    @property
    def reads_groups(self) -> list[str]:
        """The groups of rows that some model sees."""
        names, kind = self.algorithm.reads, self.algorithm.records
        own = groups_of(names, kind)
        return list(dict.fromkeys((*own, *groups_of(names, kind, reference=True))))

    def abstract_states(self, sizes: Mapping[str, int]) -> States:
        """Shapes and shardings of everything that the roles keep.

        `sizes` are the numbers of records of TRAIN and HELD_OUT, for precomputed log-probs.
        """
        states: States = {self.learner.name: self.learner.abstract()}
        states |= {name: role.abstract() for name, role in self.bases.items()}
        if self.reference is None:
            return states
        if not self.precomputed:
            return states | {self.reference.name: self.reference.abstract()}
        sharding = replicated(self.learner.mesh)
        states["reference"] = {
            table: {
                name: jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)
                for name in _reference_reads(self.algorithm)
            }
            for table, size in sizes.items()
            if size
        }
        return states

    def abstract_batch(self) -> OfflineBatch:
        """Shapes of the batch that a step begins with."""
        data, rows = self.config.data, self.batch_size
        length = data.max_row_length
        sharding = batch_sharding(self.learner.mesh)

        def array(dtype: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding)

        tokens = TokenBatch(
            tokens=array(jnp.int32, length),
            lengths=array(jnp.int32),
            loss_mask=array(jnp.float32, length),
        )
        kind = self.algorithm.records
        given: dict[str, Any] = dict.fromkeys(kind.groups, tokens)
        given |= dict.fromkeys(kind.numbers, array(jnp.float32))
        return OfflineBatch(index=array(jnp.int32), weights=array(jnp.float32), **given)

    def trace(self, sizes: Mapping[str, int] | None = None) -> OfflineBatch:
        """Trace the program on abstract arrays: shapes and fields that do not fit fail here."""
        if sizes is None:
            sizes = {TRAIN: self.batch_size, HELD_OUT: self.batch_size}
        return self.program.trace(self.abstract_states(sizes), self.abstract_batch())

    @cached_property
    def held_out(self) -> "HeldOut":
        """(states, held-out batch) -> sums of losses and metrics."""
        before = _forward_stages(
            self.algorithm,
            self.learner,
            self.reference,
            self.micro_batches,
            table=HELD_OUT if self.precomputed else None,
        )
        return HeldOut(plan=self, before=tuple(before))

    @cached_property
    def held_out_pairs(self) -> "HeldOutPairs":
        """(states, batch of held-out pairs) -> sums of the metrics of `judge_pairs`."""
        return HeldOutPairs(plan=self)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """Sums of losses and metrics over a batch of held-out records, which `means` divides."""

    plan: OfflinePlan
    before: tuple[Stage, ...]  # what the loss reads and the learner does not compute

    def __call__(self, states: States, batch: OfflineBatch) -> Metrics:
        for stage in self.before:
            given = {name: batch[name] for name in stage.reads}
            output = stage(stage.state_of(states), jnp.int32(0), **given)
            batch = batch.replace(**output.writes)
        plan = self.plan
        return record_sums(plan.loss, plan.learner.params_in(states), batch, plan)


def record_sums(loss: RecordLoss, params: Params, batch: OfflineBatch, plan: OfflinePlan) -> Any:
    """Sums of losses and metrics over all records of a batch."""

    def part_sums(part: Fields) -> Metrics:
        return loss.sums(params, part)

    return plan.micro_batches.sum(part_sums, loss.inputs(batch))


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutPairs:
    """Sums of what `judge_pairs` says of a batch of held-out pairs."""

    plan: OfflinePlan

    def __call__(self, states: States, batch: OfflineBatch) -> Metrics:
        plan, judge = self.plan, self.plan.algorithm.judge_pairs
        assert judge is not None
        rows: Fields = {group: batch[group] for group in PAIR}
        params = plan.learner.params_in(states)
        known = _forward(plan.learner, params, rows, plan.micro_batches)
        if plan.reference is not None:
            found = _forward(
                plan.reference, plan.reference.params_in(states), rows, plan.micro_batches
            )
            known |= reference_fields(found)
        return weighted_sums(judge(*(known[name] for name in field_names(judge))), batch.weights)


# ------------------------------------------------------------------------- planning


def plan_offline(config: Config, tokenizer: Tokenizer, mesh: Mesh) -> OfflinePlan:
    """Roles, stages and the program of `config`.

    Raises ValueError where the algorithm's fields contradict each other or the config, or a dim
    does not divide its mesh axes.
    """
    algorithm = build_offline(config.algorithm)
    _check(config, algorithm)
    source = find_model(config.actor, tokenizer, context=config.data.max_row_length)
    check_vocabulary(tokenizer, source.config.vocab_size)
    warn_of_positions(source, config.data.max_row_length)
    kind = algorithm.model_kind
    spec, base = learner_spec(source, kind, config.actor), None
    how: dict[str, Any] = {"phases": config.mesh, "exact": config.exact != "off"}
    learner = make_role(LEARNERS[kind], spec, config.actor, mesh, **how)
    if spec.lora is not None:
        frozen = base_settings(config.actor)
        base = make_role(BASE, base_spec(source, kind, config.actor), frozen, mesh, **how)
        learner = replace(learner, base=BASE)
    learner = learner.with_optimizer(config.actor.optimizer, config.total_steps)
    reference = None
    if algorithm.reads_reference:
        # The model before training is the base of its adapters.
        reference = base or reference_role(config, source, mesh)
    micro_batches = _micro_batches(config, learner)
    precomputed = reference is not None and config.precompute_reference
    catalogue = _forward_stages(
        algorithm, learner, reference, micro_batches, table=TRAIN if precomputed else None
    )
    name = f"update_{learner.name}"
    catalogue.append(_update(learner, algorithm, micro_batches, name, config, seed=config.seed))
    check_roles(config, {learner.name: learner})
    stages = plan(catalogue, fields=OFFLINE)
    return OfflinePlan(
        config=config,
        algorithm=algorithm,
        learner=learner,
        base=base,
        reference=reference,
        source=source,
        micro_batches=micro_batches,
        stages=stages,
        program=Program(
            segments(stages, fuse=config.fuse_stages),
            mesh=mesh,
            state_shardings={learner.name: learner.shardings},
            overlap=config.fuse_stages,
        ),
        batch_size=config.data.train_batch_size,
    )


def plan_supervised(
    config: Config,
    training: SupervisedConfig,
    role: Role,
    algorithm: OfflineAlgorithm,
    *,
    prefix: str,
) -> OfflinePlan:
    """A training that a run begins with, on the parameters of `role`.

    `prefix` names its metrics: sft | teacher | reward_model.
    """
    learner = role.with_optimizer(training.optimizer, training.steps)
    size = training.batch_size
    rows = training.micro_batch_size * role.layout.num_replicas or size
    micro_batches = Padded(num=size // rows, shard=shard_stacked(role.layout))
    name = f"update_{prefix}"
    stages = plan(
        [_update(learner, algorithm, micro_batches, name, config, prefix)], fields=OFFLINE
    )
    return OfflinePlan(
        config=config,
        algorithm=algorithm,
        learner=learner,
        reference=None,
        source=None,
        micro_batches=micro_batches,
        stages=stages,
        program=Program(
            segments(stages),
            mesh=role.mesh,
            state_shardings={learner.name: learner.shardings},
            supervised=True,
        ),
        batch_size=size,
    )


def _check(config: Config, algorithm: OfflineAlgorithm) -> None:
    kind = algorithm.records
    if config.actor.micro_batch_tokens and len(groups_of(algorithm.update_reads, kind)) > 1:
        raise ValueError(
            f"config.actor.micro_batch_tokens={config.actor.micro_batch_tokens}: packing could "
            f"part the rows of a record ({', '.join(kind.groups)}), which the loss compares; set "
            "it to 0 and give config.actor.micro_batch_size"
        )
    if algorithm.model_kind == "scalar" and config.warmup is not None:
        raise ValueError(
            "config.warmup trains a language model, and this run a scalar one: leave the warm-up "
            "out, and name a warmed-up model by config.actor.path"
        )
    mismatched = "mismatched" in groups_of(algorithm.reads, kind)
    if mismatched and config.data.train_batch_size < 2:
        raise ValueError(
            "config.data.train_batch_size=1: a completion is also given to the prompt of another "
            "record of its batch; 64 works"
        )
    if mismatched and config.precompute_reference:
        raise ValueError(
            "config.precompute_reference=True: which completion a prompt is mismatched with "
            "changes with every batch, so its log-prob cannot be computed before; set it to False"
        )
    if algorithm.judge_pairs is not None and config.precompute_reference:
        raise ValueError(
            "config.precompute_reference=True: held-out pairs are judged by the reference model, "
            "of which only the log-probs of single completions would be kept; set it to False"
        )


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


# ------------------------------------------------------------------------- stages


def _reference_reads(algorithm: OfflineAlgorithm) -> tuple[str, ...]:
    return tuple(name for name in algorithm.reads if name.startswith(REFERENCE))


def _forward_stages(
    algorithm: OfflineAlgorithm,
    learner: Role,
    reference: Role | None,
    micro_batches: MicroBatches,
    *,
    table: str | None,
) -> list[Stage]:
    """What is computed before an update, in order; `table` is that of a precomputed reference."""
    stages: list[Stage] = []
    if table is not None:
        writes = _reference_reads(algorithm)
        stages.append(PrecomputedLogprobs(table=table, writes=writes))
    elif reference is not None:
        stages.append(reference_stage(reference, algorithm, micro_batches))
    if algorithm.baseline is not None:
        stages.append(Baseline(model=learner, algorithm=algorithm, micro_batches=micro_batches))
    return stages


def reference_stage(
    role: Role, algorithm: OfflineAlgorithm, micro_batches: MicroBatches
) -> "ReferenceLogprobs":
    """The stage that gives the log-probs which `algorithm` reads of its reference."""
    writes = _reference_reads(algorithm)
    return ReferenceLogprobs(
        model=role,
        groups=tuple(groups_of(writes, algorithm.records, reference=True)),
        writes=writes,
        micro_batches=micro_batches,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceLogprobs(ModelStage):
    """Log-probs of the frozen reference model, summed over each completion."""

    groups: tuple[str, ...]  # of rows that it sees
    writes: tuple[str, ...]
    micro_batches: MicroBatches

    name = "ref"

    @property
    def reads(self) -> tuple[str, ...]:
        return self.groups

    def __call__(self, state: Any, step: jax.Array, **rows: jax.Array) -> StageOutput:
        known = reference_fields(_forward(self.model, state, rows, self.micro_batches))
        return StageOutput({name: known[name] for name in self.writes})


@dataclass(frozen=True, kw_only=True, eq=False)
class PrecomputedLogprobs(Stage):
    """`ReferenceLogprobs` that were computed before the first step, looked up."""

    table: str
    writes: tuple[str, ...]

    name = "ref"
    role = "reference"

    def __call__(self, state: Any, step: jax.Array, *, index: jax.Array) -> StageOutput:
        return StageOutput({name: state[self.table][name][index] for name in self.writes})


@dataclass(frozen=True, kw_only=True, eq=False)
class Baseline(ModelStage):
    """The algorithm's baseline, from the whole batch under the parameters before the update."""

    algorithm: OfflineAlgorithm
    micro_batches: MicroBatches

    name = BASELINE
    writes = (BASELINE,)

    @property
    def reads(self) -> tuple[str, ...]:
        given = (name for name in self._names if name in OFFLINE_FIELDS)
        return (*self._groups, *given)

    def __call__(self, state: Any, step: jax.Array, **fields: jax.Array) -> StageOutput:
        assert self.algorithm.baseline is not None
        rows = {name: fields[name] for name in self._groups}
        known = fields | _forward(self.model, params_of(state), rows, self.micro_batches)
        return StageOutput({BASELINE: self.algorithm.baseline(*(known[n] for n in self._names))})

    @property
    def _names(self) -> tuple[str, ...]:
        assert self.algorithm.baseline is not None
        return field_names(self.algorithm.baseline)

    @property
    def _groups(self) -> list[str]:
        return groups_of(self._names, self.algorithm.records)


def _forward(role: Role, params: Any, rows: dict[str, Any], micro_batches: MicroBatches) -> Fields:
    """`<group>_logprobs` of some groups of rows, without gradient.

    One group follows the other, so that each may be packed.
    """
    found: Fields = {}
    for group, tokens in rows.items():

        def run(part: Fields, group: str = group) -> Any:
            fields = record_fields(
                params, part, (group,), (), spec=role.spec, settings=role.forward
            )
            return fields[group + LOGPROBS]

        found[group + LOGPROBS] = micro_batches.join(run, group_fields(tokens))
    return found


def _update(
    role: Role,
    algorithm: OfflineAlgorithm,
    micro_batches: MicroBatches,
    name: str,
    config: Config,
    prefix: str = "",
    seed: int = 0,
) -> "RecordUpdate":
    return RecordUpdate(
        model=role,
        name=name,
        prefix=prefix,
        loss=RecordLoss(
            algorithm=algorithm,
            spec=role.spec,
            settings=role.forward,
            router=router_loss(config, role),
        ),
        sizes=UpdateSizes(update=micro_batches, passes=micro_batches),
        seed=seed,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordUpdate(Update):
    """One optimizer step on a batch of records. Metrics have TRL's names, or a `prefix`."""

    prefix: str = ""

    @property
    def loop_metrics(self) -> Mapping[str, str]:
        return {MICRO_BATCHES: f"{self.prefix}/micro_batches" if self.prefix else "micro_batches"}

    def summary(self, steps: Metrics) -> Metrics:
        assert isinstance(self.loss, RecordLoss)
        metrics = means(self.loss.algorithm, {name: x[0] for name, x in steps.items()})
        flags = metrics.pop(NONFINITE)
        if self.prefix:
            metrics = {f"{self.prefix}/{name}": x for name, x in metrics.items()}
        else:
            metrics["learning_rate"] = metrics.pop("lr")
        return metrics | {f"{self.role}/{NONFINITE}": flags}
