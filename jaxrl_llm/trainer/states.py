"""The first states of a run's roles, and their shape in a checkpoint."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.offline_alias import reward_model, sft
from jaxrl_llm.config import Config
from jaxrl_llm.learner.micro_batches import Padded
from jaxrl_llm.learner.offline_losses import means
from jaxrl_llm.learner.train_state import Params, TrainState, cast
from jaxrl_llm.models.base import scalar_params_from
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.evaluate import Validator
from jaxrl_llm.trainer.initialise import load_params
from jaxrl_llm.trainer.offline import (
    RecordValidator,
    Supervised,
    held_out_sums,
    train_supervised,
)
from jaxrl_llm.trainer.online import Iteration
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.trainer.program import States
from jaxrl_llm.trainer.roles import Role
from jaxrl_llm.trainer.run_data import preference_data, sft_batches
from jaxrl_llm.trainer.stages import KL_CONTROLLER

OPTIMIZER = "_optimizer"  # suffix of the checkpoint item beside a learning role's parameters
SEEDS = {"actor": 0, "critic": 1, "reward": 2, "teacher": 3}  # streams of the run's seed


def first_states(
    iteration: Iteration, tokenizer: Tokenizer, validator: Validator, output: RunOutput
) -> States:
    """Weights loaded or drawn, the actor warmed up, the reward model trained, the rest derived.

    The reference is the actor after its warm-up; so is the critic's decoder, unless the config
    gives the critic its own model.
    """
    config, roles = iteration.config, iteration.roles
    actor = load_params(roles["actor"], iteration.sources["actor"], role_seed(config, "actor"))
    if config.warmup is not None:
        actor = warm_up(config, roles["actor"], actor, tokenizer, validator, output)
    states: States = {KL_CONTROLLER: iteration.controller_state()}
    for name, role in roles.items():
        if name == "actor":
            continue  # the last: until then others are derived from its parameters
        if name == "reference":
            states[name] = derive_reference(role, actor)
        elif name == "teacher":
            states[name] = role.state(_teacher(iteration, role, tokenizer, validator, output))
        else:
            params = _scalar_params(iteration, role, actor)
            if name == "reward":
                params = _train_reward_model(iteration, role, params, tokenizer, output)
            states[name] = role.state(params)
    states["actor"] = roles["actor"].state(actor)
    return states


def frozen_roles(iteration: Iteration) -> list[str]:
    """Roles that no step changes: saved once a run."""
    return [name for name, role in iteration.roles.items() if role.optimizer is None]


def to_items(states: States, frozen: list[str]) -> dict[str, Any]:
    """States as checkpoint items: parameters apart from optimizers, so an export reads one item."""
    items: dict[str, Any] = {}
    for name, state in states.items():
        if name in frozen:
            continue
        if isinstance(state, TrainState):
            items[name] = state.params
            items[name + OPTIMIZER] = {"opt_state": state.opt_state, "step": state.step}
        else:
            items[name] = {"state": state}
    return items


def from_items(items: dict[str, Any], frozen: dict[str, Params]) -> States:
    """The inverse of `to_items`."""
    states: States = dict(frozen)
    for name, item in items.items():
        if name.endswith(OPTIMIZER):
            continue
        optimizer = items.get(name + OPTIMIZER)
        states[name] = item["state"] if optimizer is None else TrainState(params=item, **optimizer)
    return states


def derive_reference(role: Role, params: Params) -> Params:
    """The reference's parameters: a copy of the actor's, in the dtype that they are stored in."""

    def derive(params: Params) -> Params:
        # Without the copy, what is not cast would be the same buffers.
        return jax.tree.map(jnp.copy, cast(params, role.spec.dtype))

    return jax.jit(derive, out_shardings=role.param_shardings)(params)


def role_seed(config: Config, role: str) -> int:
    """Of a role's first weights."""
    return config.seed * len(SEEDS) + SEEDS[role]


def warm_up(
    config: Config,
    role: Role,
    params: Params,
    tokenizer: Tokenizer,
    validator: Validator | None,
    output: RunOutput,
) -> Params:
    """Supervised training of the actor before the run; judged by its answers, if by anything."""
    assert config.warmup is not None

    def judge(params: Params, step: int) -> dict[str, float]:
        return {} if validator is None else {"accuracy": validator.run(params, step).accuracy}

    task = Supervised(
        prefix="sft",
        algorithm=sft(),
        batches=sft_batches(config, config.warmup, tokenizer, output.run_dir),
        evaluate=judge,
    )
    report = output.supervised("warmup", config.warmup.steps)
    return train_supervised(role, params, task, config.warmup, report=report)


def _teacher(
    iteration: Iteration, role: Role, tokenizer: Tokenizer, validator: Validator, output: RunOutput
) -> Params:
    """The teacher's weights, trained in the run if the config says so."""
    config = iteration.config
    assert config.teacher is not None
    params = load_params(role, iteration.sources["teacher"], role_seed(config, "teacher"))
    training = config.teacher.training
    if training is None:
        return params
    judge = validator.of(role)
    task = Supervised(
        prefix="teacher",
        algorithm=sft(),
        batches=sft_batches(config, training, tokenizer, output.run_dir),
        evaluate=lambda params, step: {"accuracy": judge.run(params, step).accuracy},
    )
    report = output.supervised("teacher", training.steps)
    return train_supervised(role, params, task, training, report=report)


def _train_reward_model(
    iteration: Iteration, role: Role, params: Params, tokenizer: Tokenizer, output: RunOutput
) -> Params:
    config = iteration.config
    assert config.reward.model is not None
    training = config.reward.model.training
    if training is None:
        return params
    batches, held_out = preference_data(config, training, tokenizer, output.run_dir)
    algorithm = reward_model(center=config.reward.model.center)
    judge = RecordValidator(
        held_out_sums(role, algorithm, Padded()), partial(means, algorithm), held_out, role.mesh
    )
    task = Supervised(
        prefix="reward_model",
        algorithm=algorithm,
        batches=batches,
        evaluate=lambda params, step: judge.run(params),
    )
    report = output.supervised("reward_model", training.steps)
    return train_supervised(role, params, task, training, report=report)


def _scalar_params(iteration: Iteration, role: Role, actor: Params) -> Params:
    seed = role_seed(iteration.config, role.name)
    if role.name in iteration.sources:
        return load_params(role, iteration.sources[role.name], seed)

    def derive(actor: Params) -> Params:
        # Without the copy, the decoder would be the actor's own buffers.
        return jax.tree.map(jnp.copy, scalar_params_from(actor, role.spec, jax.random.key(seed)))

    return jax.jit(derive, out_shardings=role.param_shardings)(actor)
