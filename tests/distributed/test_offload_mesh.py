"""Moments in the host's memory on a mesh: the actor's update computes the same."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_iteration import FAST, MODEL, PROMPTS, N, open_iteration, random_params, tiny_config

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import make_global
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.program.segment import _from_its_first_step


@pytest.mark.nightly
def test_updates_with_moments_in_the_host_memory():
    """Two epochs of two mini-batches in a loop, under the condition that the critic is warm."""
    rng, rows = np.random.default_rng(0), PROMPTS * N
    numbers = {
        "prompts": rng.integers(8, 24, (rows, 6)).astype(np.int32),
        "prompt_lengths": rng.integers(1, 7, rows).astype(np.int32),
        "responses": rng.integers(8, 24, (rows, 5)).astype(np.int32),
        "response_lengths": np.full(rows, 5, np.int32),
        "mask": np.ones((rows, 5), np.float32),
    }
    for name in ("old_logprobs", "advantages"):
        numbers[name] = (0.1 * rng.normal(size=(rows, 5))).astype(np.float32)

    def run(offload: bool):
        config, model = tiny_config(), MODEL | {"num_hidden_layers": 1}
        config = replace(
            config,
            mesh=MeshConfig(data=2, fsdp=2, tensor=2),
            actor=replace(config.actor, hf_config=model, optimizer=replace(FAST, offload=offload)),
            critic=replace(config.critic, warmup_steps=1),
        )
        iteration = open_iteration(config, make_mesh(data=2, fsdp=2, tensor=2))
        (stage,) = (stage for stage in iteration.stages if stage.name == "update_actor")
        role = iteration.roles["actor"]
        fields = make_global(
            {name: numbers[name] for name in stage.reads}, batch_sharding(role.mesh)
        )
        update = jax.jit(
            lambda state, step, fields: _from_its_first_step(stage, state, step, fields).state,
            donate_argnums=0,
            out_shardings=role.shardings,
        )
        params = random_params(role.spec.params, 0)
        state = role.state(make_global(params, role.param_shardings))
        for step in (1, 2):
            state = update(state, make_global(np.int32(step), replicated(role.mesh)), fields)
            adam = state.opt_state[0]
            moments = jax.tree.leaves((adam.mu, adam.nu))
            assert {x.sharding.memory_kind for x in moments} == {
                "pinned_host" if offload else "device"
            }
            assert any("fsdp" in x.sharding.spec for x in moments)
            assert any(np.asarray(x).any() for x in moments) == (step > 1)
        return jax.tree.map(np.asarray, state)

    def assert_close(first, second):
        # To rounding: the compiler may join what makes a gradient with what applies it.
        assert np.linalg.norm(first - second) <= 1e-5 * np.linalg.norm(first)

    jax.tree.map(assert_close, run(False), run(True))
