"""Supervised training: the SFT warm-up of the actor and the training of a reward model.

Both are the learner's one train step under another loss, on batches of a grain loader.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.config import SupervisedConfig
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.learner.losses import (
    preference_fields,
    reward_model_loss,
    supervised_fields,
    supervised_loss,
    with_counts,
)
from jaxrl_llm.learner.micro_batches import Padded
from jaxrl_llm.learner.rows import Fields
from jaxrl_llm.learner.train_state import Params, TrainState
from jaxrl_llm.learner.train_step import Loss, train_step
from jaxrl_llm.trainer.guards import check_gradients
from jaxrl_llm.trainer.roles import Role
from jaxrl_llm.trainer.stages import shard_stacked

Report = Callable[[int, dict[str, float]], None]  # step, metrics


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """One supervised training: what it learns, from what, and how it is judged."""

    prefix: str  # of the metric names: sft | reward_model
    loss: Loss
    fields: Callable[[Any], Fields]  # a batch of the loader -> the fields of the loss
    batches: Iterator[Any]
    # (parameters, step) -> metrics, of which `accuracy` may end the training early
    evaluate: Callable[[Params, int], dict[str, float]]


def sft(role: Role, batches: Iterator[Any], evaluate: Any) -> Supervised:
    """Next-token training of the actor on completions."""
    loss = supervised_loss(spec=role.spec, settings=role.forward)
    return Supervised(
        prefix="sft", loss=loss, fields=supervised_fields, batches=batches, evaluate=evaluate
    )


def reward_modelling(
    role: Role, batches: Iterator[Any], evaluate: Any, *, center: float
) -> Supervised:
    """Bradley-Terry training of a scalar model on preference pairs."""
    loss = reward_model_loss(spec=role.spec, settings=role.forward, center=center)
    return Supervised(
        prefix="reward_model",
        loss=loss,
        fields=preference_fields,
        batches=batches,
        evaluate=evaluate,
    )


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
    step_fn = _compile_step(role, task, config)
    state = role.state(params)
    sharding = batch_sharding(role.mesh)
    for step in range(1, config.steps + 1):
        state, metrics = step_fn(state, make_global(task.fields(next(task.batches)), sharding))
        found = fetch(metrics)
        check_gradients(found, {"": role.spec.params}, step, f"{task.prefix} step")
        values = {f"{task.prefix}/{name.rpartition('/')[2]}": float(x) for name, x in found.items()}
        due = config.eval_every and step % config.eval_every == 0
        accuracy = 0.0
        if due or step == config.steps:
            judged = task.evaluate(state.params, step)
            accuracy = judged["accuracy"]
            values |= {f"{task.prefix}/heldout_{name}": x for name, x in judged.items()}
        report(step, values)
        if config.stop_at and accuracy >= config.stop_at:
            break
    return state.params


def _compile_step(role: Role, task: Supervised, config: SupervisedConfig) -> Any:
    assert role.optimizer is not None and role.learning_rate is not None
    replicas = role.mesh.shape["data"] * role.mesh.shape["fsdp"]
    rows = config.micro_batch_size * replicas or config.batch_size
    step = partial(
        train_step,
        loss=task.loss,
        optimizer=role.optimizer,
        learning_rate=role.learning_rate,
        max_grad_norm=role.max_grad_norm,
        micro_batches=Padded(num=config.batch_size // rows, shard=shard_stacked(role.mesh)),
    )

    def supervised_step(state: TrainState, fields: Fields) -> tuple[TrainState, dict[str, Any]]:
        return step(state, with_counts(fields, jnp.bool_(True)))

    return jax.jit(
        supervised_step,
        donate_argnums=(0,),
        out_shardings=(role.shardings, replicated(role.mesh)),
    )
