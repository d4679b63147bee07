"""The stages of offline training, and the programs that measure held-out records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.offline import (
    BASELINE,
    LOGPROBS,
    PAIR,
    REFERENCE,
    OfflineAlgorithm,
    groups_of,
)
from jaxrl_llm.arguments import Numbered
from jaxrl_llm.distributed.communication import MICRO_BATCHES
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.learner.losses import NONFINITE
from jaxrl_llm.learner.micro_batches import MicroBatches
from jaxrl_llm.learner.offline_losses import (
    RecordLoss,
    group_fields,
    means,
    record_fields,
    reference_fields,
    weighted_sums,
)
from jaxrl_llm.learner.rows import Fields
from jaxrl_llm.learner.train_state import Metrics, params_of
from jaxrl_llm.plan.roles import Role
from jaxrl_llm.plan.stages import ModelStage, Update
from jaxrl_llm.program.stage import Stage, StageOutput, States
from jaxrl_llm.types import OFFLINE_FIELDS, OfflineBatch

TRAIN, HELD_OUT = "train", "held_out"  # the tables of precomputed log-probs


def reference_stage(
    role: Role, algorithm: OfflineAlgorithm, micro_batches: MicroBatches
) -> "ReferenceLogprobs":
    """The stage that gives the log-probs which `algorithm` reads of its reference."""
    writes = tuple(name for name in algorithm.reads if name.startswith(REFERENCE))
    return ReferenceLogprobs(
        model=role,
        groups=tuple(groups_of(writes, algorithm.records, reference=True)),
        writes=writes,
        micro_batches=micro_batches,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceLogprobs(ModelStage):
    """Log-probs of the frozen reference model, summed over each completion."""

    groups: tuple[str, ...]  # groups of rows that it sees
    writes: tuple[str, ...]
    micro_batches: MicroBatches

    name = "ref"

    @property
    def reads(self) -> tuple[str, ...]:
        return self.groups

    def __call__(self, state: Any, step: jax.Array, **rows: jax.Array) -> StageOutput:
        known = reference_fields(forward_groups(self.model, state, rows, self.micro_batches))
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
    numbers = ("algorithm",)

    @property
    def reads(self) -> tuple[str, ...]:
        fields = (name for name in self._names if name in OFFLINE_FIELDS)
        return (*self._groups, *fields)

    def __call__(self, state: Any, step: jax.Array, **fields: jax.Array) -> StageOutput:
        assert self.algorithm.baseline is not None
        rows = {name: fields[name] for name in self._groups}
        known = fields | forward_groups(self.model, params_of(state), rows, self.micro_batches)
        return StageOutput({BASELINE: self.algorithm.baseline(*(known[n] for n in self._names))})

    @property
    def _names(self) -> tuple[str, ...]:
        assert self.algorithm.baseline is not None
        return field_names(self.algorithm.baseline)

    @property
    def _groups(self) -> list[str]:
        return groups_of(self._names, self.algorithm.records)


def forward_groups(
    role: Role, params: Any, rows: dict[str, Any], micro_batches: MicroBatches
) -> Fields:
    """`<group>_logprobs` of some groups of rows, without gradient.

    One group follows the other, so that each may be packed.
    """
    logprobs: Fields = {}
    for group, tokens in rows.items():

        def run(part: Fields, group: str = group) -> Any:
            fields = record_fields(
                params, part, (group,), (), spec=role.spec, settings=role.forward
            )
            return fields[group + LOGPROBS]

        logprobs[group + LOGPROBS] = micro_batches.join(run, group_fields(tokens))
    return logprobs


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
        elif "lr" in metrics:
            metrics["learning_rate"] = metrics.pop("lr")
        return metrics | {f"{self.role}/{NONFINITE}": flags}


# ------------------------------------------------------------------------- precomputed log-probs


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceTables:
    """The reference's log-probs of every record, computed once and kept, not its weights."""

    stage: ReferenceLogprobs  # stage that computes them
    sizes: Mapping[str, int]  # numbers of records, of TRAIN and HELD_OUT

    role = PrecomputedLogprobs.role

    def lookup(self, table: str) -> PrecomputedLogprobs:
        """The stage that reads them."""
        return PrecomputedLogprobs(table=table, writes=self.stage.writes)

    def abstract(self) -> Any:
        """Shapes and shardings; every device keeps all of them."""
        sharding = replicated(self.stage.model.mesh)
        return {
            table: {
                name: jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)
                for name in self.stage.writes
            }
            for table, size in self.sizes.items()
            if size
        }


# ------------------------------------------------------------------------- held-out records


def program_of(stage: ModelStage) -> Any:
    """(state, fields) -> what a stage writes, as a program of its devices."""

    def run(state: Any, fields: Fields) -> Fields:
        return dict(stage(state, jnp.int32(0), **fields).writes)

    return jax.jit(run, out_shardings=batch_sharding(stage.model.mesh))


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut(Numbered):
    """(states, batch of held-out records) -> sums of losses and metrics, which `means` divides."""

    learner: Role
    loss: RecordLoss
    micro_batches: MicroBatches
    before: tuple[Stage, ...] = ()  # stages of what the learner does not compute
    elsewhere: tuple[ModelStage, ...] = ()  # stages of a model on other devices; they run first

    numbers = ("loss",)

    def __call__(self, states: States, batch: OfflineBatch) -> Metrics:
        for stage in self.before:
            fields = {name: batch[name] for name in stage.reads}
            output = stage(stage.state_of(states), jnp.int32(0), **fields)
            batch = batch.replace(**output.writes)
        params = self.learner.params_in(states)

        def part_sums(part: Fields) -> Metrics:
            return self.loss.sums(params, part)

        return self.micro_batches.sum(part_sums, self.loss.inputs(batch))


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutPairs(Numbered):
    """(states, batch of held-out pairs) -> sums of the metrics of `judge_pairs`."""

    learner: Role
    reference: Role | None
    algorithm: OfflineAlgorithm
    micro_batches: MicroBatches

    numbers = ("algorithm",)

    def __call__(self, states: States, batch: OfflineBatch) -> Metrics:
        judge = self.algorithm.judge_pairs
        assert judge is not None
        rows: Fields = {group: batch[group] for group in PAIR}
        params = self.learner.params_in(states)
        fields = forward_groups(self.learner, params, rows, self.micro_batches)
        if self.reference is not None:
            params = self.reference.params_in(states)
            logprobs = forward_groups(self.reference, params, rows, self.micro_batches)
            fields |= reference_fields(logprobs)
        return weighted_sums(judge(*(fields[name] for name in field_names(judge))), batch.weights)
