"""One iteration of RL in this process: a config, its programs, first states and a batch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tiny import MODEL

from jaxrl_llm import config as c
from jaxrl_llm.config import (
    ActorConfig,
    Config,
    CriticConfig,
    DataConfig,
    OptimizerConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
)
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.plan import Phase
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.program.stage import States
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.types import RolloutBatch

PROMPTS, N = 16, 2
# How many decode steps there are depends on how many slots and samples a replica has.
OF_THE_DECODE_LOOP = {
    f"rollout/{name}" for name in ("decode_steps", "prefills", "slot_use", "slots_waiting")
}
FAST = OptimizerConfig(learning_rate=3e-3)


def tiny_config(
    *,
    model_reward: bool = True,
    algorithm: dict[str, Any] | None = None,
    num_layers: int = 1,  # a second one doubles what is compiled
) -> Config:
    """Two epochs of two mini-batches of two micro-batches; a model or Python gives the reward."""
    function = c.ExactAnswer()
    model = MODEL | {"num_hidden_layers": num_layers}
    return Config(
        total_steps=8,
        data=DataConfig(
            tokenizer="char",
            train_batch_size=PROMPTS,
            max_prompt_length=6,
            max_response_length=5,
        ),
        actor=ActorConfig(hf_config=model, ppo_mini_batch_size=8, ppo_epochs=2, optimizer=FAST),
        critic=CriticConfig(ppo_epochs=2, optimizer=FAST),
        rollout=RolloutConfig(n=N, num_slots=3, stop_token_ids=(2, 5, 7)),
        reward=RewardConfig(model=RewardModelConfig())
        if model_reward
        else RewardConfig(functions=(function,)),
        algorithm=c.PPO(**{"use_kl_in_reward": True, "kl_coef": 0.05} | (algorithm or {})),
    )


def in_micro_batches(config: Config, actor: int) -> Config:
    """`config` with that many samples a device and forward pass."""
    return replace(
        config,
        actor=replace(config.actor, micro_batch_size=actor),
        critic=replace(config.critic, micro_batch_size=actor),
    )


def packed(config: Config, tokens: int) -> Config:
    """`config` with samples packed into rows of `tokens`, the prompts of a group shared."""
    return replace(
        config,
        actor=replace(config.actor, micro_batch_size=0, micro_batch_tokens=tokens),
        critic=replace(config.critic, micro_batch_size=0, micro_batch_tokens=tokens),
    )


def even_tokens(responses: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The share of even tokens."""
    mask = (np.arange(responses.shape[1]) < lengths[:, None]).astype(np.float32)
    return ((responses % 2 == 0) * mask).sum(axis=1) / mask.sum(axis=1)


def open_iteration(
    config: Config,
    mesh: Mesh | None = None,
    reward: Callable[..., np.ndarray] = even_tokens,
    role_meshes: Mapping[str, Mesh] | None = None,
) -> Phase:
    """The planned programs of `config`, by default on one device; roles on meshes of their own."""
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    host = None if config.reward.model is not None else ArrayReward(reward)
    tokenizer = load_tokenizer("char")
    (phase,) = plan_online(config, tokenizer, mesh, host, role_meshes=role_meshes).phases
    return phase


def random_params(shapes: Any, seed: int, scale: float = 0.3) -> Any:
    """Weights that do not depend on the mesh; norms near one, and heads that are not zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: (scale * rng.normal(size=x.shape) + (x.ndim == 1)).astype(x.dtype), shapes
    )


def first_states(iteration: Phase, scale: float = 0.3) -> States:
    """Every role with random weights of its own; the reference is close to the actor."""
    states = iteration.controller_state()
    for name, role in iteration.roles.items():
        shapes = role.spec.learned
        seed = len(name) if name != "reference" else len("actor")
        params = random_params(shapes, seed, scale)
        if name == "reference":
            params = jax.tree.map(lambda x: x * np.float32(0.95), params)
        states[name] = role.state(make_global(params, role.kept_shardings))
    return states


def prompts(config: Config) -> RolloutBatch:
    """Random prompts of uneven lengths, in numpy."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(8, MODEL["vocab_size"], (PROMPTS, config.data.max_prompt_length))
    lengths = rng.integers(1, config.data.max_prompt_length + 1, PROMPTS)
    fields: dict[str, Any] = {
        "prompts": tokens.astype(np.int32).repeat(N, axis=0),
        "prompt_lengths": lengths.astype(np.int32).repeat(N),
        "sample_ids": np.arange(PROMPTS * N, dtype=np.uint32),
        "group_ids": np.arange(PROMPTS, dtype=np.int32).repeat(N),
    }
    return RolloutBatch(**fields)


def run_step(
    iteration: Phase, states: States, step: int
) -> tuple[States, RolloutBatch, dict[str, Any]]:
    """One iteration: new states, the whole batch and the metrics in numpy."""
    batch = make_global(prompts(iteration.config), batch_sharding(iteration.mesh))
    states, batch, metrics = iteration.program.run(states, batch, step, None, Timer())
    return states, fetch(batch), fetch(metrics)
