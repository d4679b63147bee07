"""Algorithms whose stages are their own, on a mesh of several devices and on one: the same step."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_iteration import (
    OF_THE_DECODE_LOOP,
    PROMPTS,
    first_states,
    open_iteration,
    packed,
    run_step,
    tiny_config,
)

from jaxrl_llm.config import ALGORITHMS, Config, MeshConfig
from jaxrl_llm.distributed.mesh import make_mesh

pytestmark = pytest.mark.slow


def config_of(name: str, **settings) -> Config:
    """Two mini-batches of one epoch, a Python reward."""
    config = tiny_config(model_reward=False)
    (kind,) = (cls for cls in ALGORITHMS if cls.kind == name)
    return replace(
        config,
        actor=replace(config.actor, ppo_epochs=1),
        algorithm=kind(**settings),
    )


def single(config: Config) -> Config:
    """`config` with all samples in one mini-batch."""
    return replace(config, actor=replace(config.actor, ppo_mini_batch_size=PROMPTS))


def step(config, mesh):
    iteration = open_iteration(config, mesh)
    return run_step(iteration, first_states(iteration), 1)[1:]


def test_a_step_is_the_same_on_four_replicas():
    weighed = {"rollout_is": "sequence"}
    rejected = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 1.0}
    filtered = config_of("grpo")
    filtered = replace(filtered, rollout=replace(filtered.rollout, top_p=0.7))
    cases = {
        "remax": config_of("remax"),
        # With seed 0 a token's advantage is 0 on one device and 1e-8 on four: it counts as clipped.
        "optimal_token_baseline": replace(config_of("optimal_token_baseline", **weighed), seed=1),
        "gspo": config_of("gspo", **rejected),
        "a single update": single(config_of("grpo")),
        "a single update, packed": packed(single(config_of("grpo")), 33),
        "filters": packed(single(filtered), 33),
    }
    for name, config in cases.items():
        batch, metrics = step(config, make_mesh(devices=jax.devices()[:1]))
        config = replace(config, mesh=MeshConfig(data=2, fsdp=2))
        mesh = make_mesh(2, 2, 1, devices=jax.devices()[:4])
        spread, found = step(config, mesh)
        np.testing.assert_array_equal(spread.responses, batch.responses)
        assert found["training/rollout_probs_diff_max"] < 2e-6
        np.testing.assert_allclose(spread.advantages, batch.advantages, atol=1e-4)
        # On a mesh, packed passes count their parts as well.
        passes = {f"{name}/micro_batches" for name in ("old_log_prob", "ref")}
        assert found.keys() - passes == metrics.keys()
        # As many replicas as fill rows take fewer parts.
        for key in metrics.keys() - OF_THE_DECODE_LOOP - {"actor/micro_batches", "actor/row_use"}:
            np.testing.assert_allclose(
                found[key], metrics[key], rtol=1e-3, atol=1e-4, err_msg=f"{name} {key}"
            )
