"""From a config to the planned program of an offline step, before any array exists."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.offline import (
    BASELINE,
    LOGPROBS,
    PAIR,
    REFERENCE,
    OfflineAlgorithm,
    groups_of,
)
from jaxrl_llm.config import Config, FunctionConfig
from jaxrl_llm.data.sources import load_attribute
from jaxrl_llm.distributed.mesh import num_replicas
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.learner.micro_batches import MicroBatches, Packed, Padded
from jaxrl_llm.learner.offline_losses import (
    group_fields,
    record_fields,
    reference_fields,
    weighted_sums,
)
from jaxrl_llm.learner.rows import Fields
from jaxrl_llm.learner.train_state import TrainState
from jaxrl_llm.learner.train_step import NONFINITE
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.dataflow import OFFLINE, Stage, StageOutput, plan, segments
from jaxrl_llm.trainer.initialise import ModelSource, find_model, spec_of
from jaxrl_llm.trainer.offline import Metrics, held_out_sums, update_batch
from jaxrl_llm.trainer.online import reference_role
from jaxrl_llm.trainer.program import Program, States
from jaxrl_llm.trainer.roles import Role, make_role, params_of
from jaxrl_llm.trainer.stages import shard_rows, shard_stacked
from jaxrl_llm.types import OFFLINE_FIELDS, OfflineBatch, TokenBatch

TRAIN, HELD_OUT = "train", "held_out"  # the tables of precomputed log-probs
LEARNERS = {"causal_lm": "actor", "scalar": "reward"}  # the role of the model that learns


@dataclass(frozen=True, kw_only=True)
class OfflineIteration:
    """One offline step, planned: the roles that it needs and the programs that run it."""

    config: Config
    algorithm: OfflineAlgorithm
    learner: Role
    reference: Role | None  # None where nobody reads it
    source: ModelSource
    micro_batches: MicroBatches
    stages: tuple[Stage, ...]
    program: Program

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

    def abstract_states(self, num_train: int, num_held_out: int) -> States:
        """Shapes and shardings of everything that the roles keep, for so many records."""
        states: States = {self.learner.name: self.learner.abstract()}
        if self.reference is None:
            return states
        if not self.precomputed:
            return states | {"reference": self.reference.abstract()}
        sharding = replicated(self.learner.mesh)
        sizes = {TRAIN: num_train, HELD_OUT: num_held_out}
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
        data, rows = self.config.data, self.config.data.train_batch_size
        length = data.max_prompt_length + data.max_response_length
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

    def trace(self) -> OfflineBatch:
        """Trace the program on abstract arrays: shapes and fields that do not fit fail here."""
        size = self.config.data.train_batch_size
        batch: Any = self.abstract_batch()
        traced: Any = self.program.trace(self.abstract_states(size, size), batch)
        return traced

    def held_out(self) -> Callable[[States, OfflineBatch], Metrics]:
        """(states, held-out batch) -> sums of losses and metrics."""
        sums = held_out_sums(self.learner, self.algorithm, self.micro_batches)
        before = _forward_stages(self, HELD_OUT)

        def evaluate(states: States, batch: OfflineBatch) -> Metrics:
            for stage in before:
                reads = [getattr(batch, name) for name in stage.reads]
                out = stage.fn(states[stage.role], jnp.int32(0), *reads)
                batch = batch.replace(**dict(zip(stage.writes, out.writes, strict=True)))
            return sums(params_of(states[self.learner.name]), batch)

        return evaluate

    def held_out_pairs(self) -> Callable[[States, OfflineBatch], Metrics]:
        """(states, batch of held-out pairs) -> sums of the metrics of `judge_pairs`."""
        algorithm, micro_batches = self.algorithm, self.micro_batches
        assert algorithm.judge_pairs is not None
        judge, names = algorithm.judge_pairs, field_names(algorithm.judge_pairs)

        def evaluate(states: States, batch: OfflineBatch) -> Metrics:
            rows: Fields = {group: getattr(batch, group) for group in PAIR}
            known = _forward(
                self.learner, params_of(states[self.learner.name]), rows, micro_batches
            )
            if self.reference is not None:
                found = _forward(self.reference, states["reference"], rows, micro_batches)
                known |= reference_fields(found)
            return weighted_sums(judge(*(known[name] for name in names)), batch.weights)

        return evaluate


def plan_offline(config: Config, tokenizer: Tokenizer, mesh: Mesh) -> OfflineIteration:
    """Roles, stages and the program of `config`.

    Raises ValueError where the algorithm's fields contradict each other or the config, or a dim
    does not divide its mesh axes.
    """
    algorithm = build_offline_algorithm(config.algorithm)
    _check(config, algorithm)
    source = find_model(config.actor, tokenizer)
    kind = algorithm.model_kind
    spec = spec_of(source, kind, config.actor)
    learner = make_role(LEARNERS[kind], spec, config.actor, mesh, exact=config.exact)
    learner = learner.with_optimizer(config.actor.optimizer, config.total_steps)
    reads_reference = algorithm.reads_reference
    reference = reference_role(config, source, mesh) if reads_reference else None
    micro_batches = _micro_batches(config, mesh)
    precomputed = reads_reference and config.precompute_reference
    catalogue = _forward_stages_of(
        algorithm, learner, reference, micro_batches, table=TRAIN if precomputed else None
    )
    catalogue.append(_update_stage(learner, algorithm, micro_batches))
    stages = plan(catalogue, fields=OFFLINE)
    shardings = {learner.name: learner.shardings}
    return OfflineIteration(
        config=config,
        algorithm=algorithm,
        learner=learner,
        reference=reference,
        source=source,
        micro_batches=micro_batches,
        stages=stages,
        program=Program(
            segments(stages, fuse=config.fuse_stages),
            mesh=mesh,
            state_shardings=shardings,
            overlap=config.fuse_stages,
        ),
    )


def build_offline_algorithm(config: FunctionConfig) -> OfflineAlgorithm:
    """Call the function that the config names. ValueError when it gives no OfflineAlgorithm."""
    algorithm = load_attribute(config.path)(**config.settings)
    if not isinstance(algorithm, OfflineAlgorithm):
        raise ValueError(
            f"{config.path} is annotated to return an OfflineAlgorithm and returned "
            f"{type(algorithm).__name__}"
        )
    return algorithm


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


def _micro_batches(config: Config, mesh: Mesh) -> MicroBatches:
    actor, replicas = config.actor, num_replicas(mesh)
    if actor.micro_batch_tokens:
        return Packed(
            row_tokens=actor.micro_batch_tokens, num_replicas=replicas, shard=shard_rows(mesh)
        )
    batch = config.data.train_batch_size
    rows = actor.micro_batch_size * replicas or batch
    return Padded(num=batch // rows, shard=shard_stacked(mesh))


# ------------------------------------------------------------------------- stages


def _reference_reads(algorithm: OfflineAlgorithm) -> tuple[str, ...]:
    return tuple(name for name in algorithm.reads if name.startswith(REFERENCE))


def _forward_stages(iteration: OfflineIteration, table: str) -> tuple[Stage, ...]:
    """What is computed before an update, in order; `table` is that of a precomputed reference."""
    return tuple(
        _forward_stages_of(
            iteration.algorithm,
            iteration.learner,
            iteration.reference,
            iteration.micro_batches,
            table=table if iteration.precomputed else None,
        )
    )


def _forward_stages_of(
    algorithm: OfflineAlgorithm,
    learner: Role,
    reference: Role | None,
    micro_batches: MicroBatches,
    *,
    table: str | None,
) -> list[Stage]:
    stages = []
    if table is not None:
        stages.append(_table_stage(algorithm, table))
    elif reference is not None:
        stages.append(reference_stage(reference, algorithm, micro_batches))
    if algorithm.baseline is not None:
        stages.append(_baseline_stage(learner, algorithm, micro_batches))
    return stages


def reference_stage(role: Role, algorithm: OfflineAlgorithm, micro_batches: MicroBatches) -> Stage:
    """Log-probs of the frozen reference model, summed over each completion."""
    writes = _reference_reads(algorithm)
    groups = groups_of(writes, algorithm.records, reference=True)

    def fn(state: Any, step: jax.Array, *rows: Any) -> StageOutput:
        found = _forward(role, state, dict(zip(groups, rows, strict=True)), micro_batches)
        known = reference_fields(found)
        return StageOutput(writes=tuple(known[name] for name in writes), metrics={})

    return Stage(name="ref", fn=fn, reads=tuple(groups), writes=writes, role="reference")


def _table_stage(algorithm: OfflineAlgorithm, table: str) -> Stage:
    """The same, looked up."""
    writes = _reference_reads(algorithm)

    def fn(state: Any, step: jax.Array, index: jax.Array) -> StageOutput:
        return StageOutput(writes=tuple(state[table][name][index] for name in writes), metrics={})

    return Stage(name="ref", fn=fn, reads=("index",), writes=writes, role="reference")


def _baseline_stage(role: Role, algorithm: OfflineAlgorithm, micro_batches: MicroBatches) -> Stage:
    """The algorithm's baseline, from the whole batch under the parameters before the update."""
    assert algorithm.baseline is not None
    baseline, names = algorithm.baseline, field_names(algorithm.baseline)
    groups = groups_of(names, algorithm.records)
    given = tuple(name for name in names if name in OFFLINE_FIELDS)
    reads = (*groups, *given)

    def fn(state: TrainState, step: jax.Array, *values: Any) -> StageOutput:
        known = dict(zip(reads, values, strict=True))
        rows = {name: known[name] for name in groups}
        known |= _forward(role, params_of(state), rows, micro_batches)
        return StageOutput(writes=(baseline(*(known[name] for name in names)),), metrics={})

    return Stage(name=BASELINE, fn=fn, reads=reads, writes=(BASELINE,), role=role.name)


def _forward(role: Role, params: Any, rows: dict[str, Any], micro_batches: MicroBatches) -> Fields:
    """`<group>_logprobs` of some groups of rows, without gradient; one group after the other, so
    that each may be packed."""
    found: Fields = {}
    for group, tokens in rows.items():

        def run(part: Fields, group: str = group) -> Any:
            fields = record_fields(
                params, part, (group,), (), spec=role.spec, settings=role.forward
            )
            return fields[group + LOGPROBS]

        found[group + LOGPROBS] = micro_batches.join(run, group_fields(tokens))
    return found


def _update_stage(role: Role, algorithm: OfflineAlgorithm, micro_batches: MicroBatches) -> Stage:
    update = update_batch(role, algorithm, micro_batches)
    groups = groups_of(algorithm.update_reads, algorithm.records)
    given = tuple(name for name in algorithm.update_reads if name in OFFLINE_FIELDS)
    reads = tuple(dict.fromkeys((*groups, "weights", "index", *given)))

    def fn(state: TrainState, step: jax.Array, *values: Any) -> StageOutput:
        batch = OfflineBatch(**dict(zip(reads, values, strict=True)))
        state, metrics = update(state, batch)
        metrics["learning_rate"] = metrics.pop("lr")
        metrics[f"{role.name}/{NONFINITE}"] = metrics.pop(NONFINITE)
        return StageOutput(metrics=metrics, state=state)

    name = f"update_{role.name}"
    return Stage(name=name, fn=fn, reads=reads, role=role.name, updates=True)
