"""The step of offline training: from an algorithm on fixed records to an update and a held-out sum.

The supervised trainings inside an online run, its warm-up and its reward model's, are the same
step under the algorithms `sft` and `reward_model`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms.offline import OfflineAlgorithm, groups_of
from jaxrl_llm.config import SupervisedConfig
from jaxrl_llm.distributed.mesh import num_replicas
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.learner.micro_batches import MicroBatches, Padded
from jaxrl_llm.learner.offline_losses import (
    means,
    offline_loss,
    record_sums,
    row_fields,
    with_record_counts,
)
from jaxrl_llm.learner.rows import Fields
from jaxrl_llm.learner.train_state import Params, TrainState
from jaxrl_llm.learner.train_step import train_step
from jaxrl_llm.trainer.guards import check_gradients, memory_guard
from jaxrl_llm.trainer.roles import Role
from jaxrl_llm.trainer.stages import shard_stacked
from jaxrl_llm.types import OFFLINE_FIELDS, OfflineBatch

Report = Callable[[int, dict[str, float]], None]  # step, metrics
Metrics = dict[str, Any]


# ------------------------------------------------------------------------- one step


def update_batch(
    role: Role, algorithm: OfflineAlgorithm, micro_batches: MicroBatches
) -> Callable[[TrainState, OfflineBatch], tuple[TrainState, Metrics]]:
    """(state, batch) -> (state, metrics): one optimizer step on the records of a batch."""
    assert role.optimizer is not None and role.learning_rate is not None
    step = partial(
        train_step,
        loss=offline_loss(algorithm, spec=role.spec, settings=role.forward),
        optimizer=role.optimizer,
        learning_rate=role.learning_rate,
        max_grad_norm=role.max_grad_norm,
        cast_ahead=role.forward.cast_ahead,
        micro_batches=micro_batches,
    )

    def update(state: TrainState, batch: OfflineBatch) -> tuple[TrainState, Metrics]:
        state, metrics = step(state, update_fields(algorithm, batch))
        return state, means(algorithm, metrics)

    return update


def update_fields(algorithm: OfflineAlgorithm, batch: OfflineBatch) -> Fields:
    """What the update takes from a batch: rows, numbers, and the counts of the whole batch."""
    groups = groups_of(algorithm.update_reads, algorithm.records)
    fields = row_fields(batch, groups) | {"weights": batch.weights}
    for name in algorithm.update_reads:
        if name in OFFLINE_FIELDS:
            fields[name] = getattr(batch, name)
    return with_record_counts(fields, algorithm, groups)


def held_out_sums(
    role: Role, algorithm: OfflineAlgorithm, micro_batches: MicroBatches
) -> Callable[[Params, OfflineBatch], Metrics]:
    """(parameters, batch) -> sums of losses and metrics, which `means` divides."""

    def evaluate(params: Params, batch: OfflineBatch) -> Metrics:
        def run(part: Fields) -> Metrics:
            return record_sums(algorithm, params, part, spec=role.spec, settings=role.forward)

        return micro_batches.sum(run, update_fields(algorithm, batch))

    return evaluate


# ------------------------------------------------------------------------- inside an online run


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """One supervised training: what it learns, from what, and how it is judged."""

    prefix: str  # of the metric names: sft | reward_model
    algorithm: OfflineAlgorithm
    batches: Iterator[OfflineBatch]
    # (parameters, step) -> metrics, of which `accuracy` may end the training early
    evaluate: Callable[[Params, int], dict[str, float]]


def train_supervised(
    role: Role,
    params: Params,
    task: Supervised,
    config: SupervisedConfig,
    *,
    report: Report,
) -> Params:
    """Train `params` (consumed) for `config.steps` steps, or until `stop_at` is reached.

    `report` gets each step's loss, gradient norm and learning rate, and what `evaluate` returned
    at the steps that were evaluated; the last step always is.
    """
    role = role.with_optimizer(config.optimizer, config.steps)
    rows = config.micro_batch_size * num_replicas(role.mesh) or config.batch_size
    micro_batches = Padded(num=config.batch_size // rows, shard=shard_stacked(role.mesh))
    update = jax.jit(
        update_batch(role, task.algorithm, micro_batches),
        donate_argnums=(0,),
        out_shardings=(role.shardings, replicated(role.mesh)),
    )
    state = role.state(params)
    sharding = batch_sharding(role.mesh)
    for step in range(1, config.steps + 1):
        with memory_guard(f"update_{task.prefix}"):
            state, metrics = update(state, make_global(next(task.batches), sharding))
            found = fetch(metrics)
        check_gradients(found, {"": role.spec.params}, step, f"{task.prefix} step")
        values = {f"{task.prefix}/{name}": float(x) for name, x in found.items()}
        due = config.eval_every and step % config.eval_every == 0
        accuracy = 0.0
        if due or step == config.steps:
            judged = task.evaluate(state.params, step)
            accuracy = judged["accuracy"]
            values |= {f"{task.prefix}/eval_{name}": x for name, x in judged.items()}
        report(step, values)
        if config.stop_at and accuracy >= config.stop_at:
            break
    return state.params


class RecordValidator:
    """Losses and metrics over held-out records, by a program that sums each batch of them."""

    def __init__(
        self,
        sums: Callable[..., Metrics],
        means: Callable[[Metrics], Metrics],
        batches: Sequence[OfflineBatch],
        mesh: Mesh,
    ):
        """`sums(state, batch)` is traced here; its first argument is what `run` is given.

        `means` divides its results, added up over the batches.
        """
        self._means = means
        self._sums = jax.jit(sums, out_shardings=replicated(mesh))
        self._batches = batches
        self._sharding = batch_sharding(mesh)

    def run(self, state: Any) -> dict[str, float]:
        """Means over all held-out records."""
        total: dict[str, Any] = {}
        for batch in self._batches:
            found = fetch(self._sums(state, make_global(batch, self._sharding)))
            total = {name: total.get(name, 0.0) + np.float64(x) for name, x in found.items()}
        return {name: float(x) for name, x in self._means(total).items()}
