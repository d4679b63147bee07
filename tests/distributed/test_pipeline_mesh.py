"""Layers as a pipeline: losses, gradient norms and updated weights equal one device's."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_offline_mesh import OPTIMIZER
from test_offline_mesh import assert_same as assert_same_step
from test_offline_mesh import step as offline_step
from tiny import MODEL, model_config
from tiny_iteration import (
    first_states,
    in_micro_batches,
    open_iteration,
    packed,
    random_params,
    run_step,
    tiny_config,
)

from jaxrl_llm import config as c
from jaxrl_llm.config import Config, MeshConfig, ModelSettings
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.learner.forward import row_logprobs
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.pipeline import Pipeline
from jaxrl_llm.plan.roles import make_role

TWO_ROUNDS = {"data": 2, "pipeline": 2, "pipeline_rounds": 2}
MIX = {"pipeline": 2, "fsdp": 2, "tensor": 2}
LONGER = {"pipeline": 4, "data": 2, "pipeline_micro_batches": 2}
OF_PARTS = {"pipeline": 2, "sequence": 2, "fsdp": 2, "pipeline_micro_batches": 2}
ALTERNATING = {"pipeline": 2, "pipeline_micro_batches": 4}


def online(algorithm: Any, **actor: Any) -> Config:
    """A run in float32, whose updates Adam does not make noisy."""
    config = tiny_config(model_reward=False)
    return replace(
        config,
        actor=replace(config.actor, ppo_epochs=1, optimizer=OPTIMIZER, **actor),
        critic=replace(config.critic, ppo_epochs=1, optimizer=OPTIMIZER),
        algorithm=algorithm,
    )


CONFIGS = {
    "ppo": online(
        c.PPO(use_kl_in_reward=True, kl_coef=0.05, use_kl_loss=True, kl_loss_coef=0.1),
        remat="full",
    ),
    "grpo": online(c.GRPO(use_kl_loss=True, kl_loss_coef=0.1), scan_layers=True),
}


def iterate(kind: str, num_layers: int, sizes: dict[str, int]) -> Any:
    """Batch, metrics and weights after an iteration on a mesh of these sizes."""
    mesh, config = MeshConfig(**sizes), CONFIGS[kind]
    model = MODEL | {"num_hidden_layers": num_layers}
    config = replace(config, actor=replace(config.actor, hf_config=model))
    config = in_micro_batches(config, 8 // mesh.num_replicas)
    if kind == "grpo":
        config = packed(config, 24)
    iteration = open_iteration(replace(config, mesh=mesh), make_mesh(**mesh.sizes))
    states, batch, metrics = run_step(iteration, first_states(iteration), 1)
    roles = ("actor", "critic") if kind == "ppo" else ("actor",)
    return batch, metrics, {name: fetch(states[name].params) for name in roles}


one_device = functools.cache(lambda kind, num_layers: iterate(kind, num_layers, {}))


def check_iteration(kind: str, num_layers: int, sizes: dict[str, int]) -> None:
    """Samples, passes, losses and updated weights equal one device's."""
    batch, metrics, params = iterate(kind, num_layers, sizes)
    expected_batch, expected_metrics, expected_params = one_device(kind, num_layers)
    np.testing.assert_array_equal(batch.responses, expected_batch.responses)
    for name in ("old_logprobs", "reference_logprobs", "values", "advantages"):
        field, expected = getattr(batch, name), getattr(expected_batch, name)
        if expected is not None:
            np.testing.assert_allclose(
                field * batch.mask, expected * batch.mask, rtol=1e-4, atol=2e-5, err_msg=name
            )
    losses = [name for name in expected_metrics if name.endswith(("_loss", "grad_norm"))]
    assert {"actor/pg_loss", "actor/kl_loss", "actor/grad_norm"} <= set(losses)
    for name in losses:
        np.testing.assert_allclose(
            metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert "actor/pipeline_bubble" not in expected_metrics
    if "pipeline" in sizes:
        stages, rounds = sizes["pipeline"], sizes.get("pipeline_rounds", 1)
        ticks = stages * sizes.get("pipeline_micro_batches", 1) * rounds + stages - 1
        assert metrics["actor/pipeline_bubble"] == pytest.approx((stages - 1) / ticks)
    for one, other in zip(*map(jax.tree.leaves, (params, expected_params)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.slow  # test_mixes.py has the cases of two layers
@pytest.mark.parametrize(
    ("kind", "num_layers", "sizes"),
    [
        ("ppo", 4, TWO_ROUNDS),
        ("grpo", 4, TWO_ROUNDS),
        ("ppo", 4, {"pipeline": 4}),
        ("grpo", 4, LONGER),
        ("grpo", 2, OF_PARTS),
    ],
)
def test_an_iteration_equals_one_device(kind, num_layers, sizes):
    check_iteration(kind, num_layers, sizes)


@pytest.mark.slow
def test_a_packed_step_of_kto_equals_one_device():
    expected = offline_step("kto", MeshConfig(), 2)
    mesh = MeshConfig(**MIX, pipeline_micro_batches=2)
    step = offline_step("kto", mesh, 2, micro_batch_tokens=16)
    assert_same_step(step, expected)
    assert step[1]["pipeline_bubble"] == pytest.approx(1 / 5)


@pytest.mark.slow
def test_gradients_in_bfloat16():
    """Idle stages add nothing."""
    check_bfloat16(ALTERNATING)


def check_bfloat16(sizes: dict[str, int]) -> None:
    """A mesh is as far from float32 as one device is, by the rounding of bf16."""
    exact, one, found = rounded({}, "float32"), rounded({}, "bfloat16"), rounded(sizes, "bfloat16")
    distances = [
        [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(each, exact, strict=True)]
        for each in (one, found)
    ]
    assert max(distances[0]) > 1e-3
    for of_one, of_mesh in zip(*distances, strict=True):
        assert of_mesh <= 2 * of_one + 1e-3  # a sum over devices rounds once more


@functools.cache
def _rounded(sizes: tuple[tuple[str, int], ...], dtype: str) -> list[np.ndarray]:
    run, params = program(dict(sizes), dtype)
    return jax.tree.leaves(fetch(run(params)))


def rounded(sizes: dict[str, int], dtype: str) -> list[np.ndarray]:
    """Sum of weighted log-probs, computed in `dtype`, and its gradients."""
    return _rounded(tuple(sizes.items()), dtype)


def program(sizes: dict[str, int], dtype: str = "bfloat16") -> Any:
    """The program of `rounded`, and its parameters. Windows alternate."""
    spec = model_spec(model_config(num_layers=4, sliding_window=(None, 5, None, 5)))
    config = MeshConfig(**sizes)
    mesh = make_mesh(**config.sizes)
    settings = ModelSettings(dtype=dtype, residual_dtype=dtype)
    role = make_role("actor", spec, settings, mesh, phases=config)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, spec.config.vocab_size, (16, 12)).astype(np.int32)
    weights = rng.normal(size=tokens.shape).astype(np.float32)

    def loss(params: Any) -> jax.Array:
        logprobs = row_logprobs(params, jnp.asarray(tokens), spec=spec, settings=role.forward)
        return (logprobs * weights).sum()

    params = make_global(random_params(spec.params, 3), role.param_shardings)
    return jax.jit(jax.value_and_grad(loss)), params


def test_one_stage_is_no_pipeline():
    """Without stages nothing of the schedule is in the program."""
    of_stages = ("collective_permute", "all_to_all")
    for sizes, expected in (({"fsdp": 4, "tensor": 2}, False), ({"pipeline": 2}, True)):
        run, params = program(sizes)
        text = run.lower(params).as_text()
        assert [name in text for name in of_stages] == [expected] * 2


def test_a_tick_keeps_no_weights():
    """Of three ticks there would be three copies of each."""
    run, params = program({"pipeline": 2}, "float32")
    text = run.lower(params).as_text()
    shapes = (MODEL["hidden_size"], MODEL["intermediate_size"])
    for D, F in (shapes, shapes[::-1]):
        assert f"tensor<1x{D}x{F}xf32>" in text and f"tensor<3x{D}x{F}xf32>" not in text


def test_layers_that_stages_cannot_share():
    config = model_config(num_layers=6, sliding_window=(None,) * 5 + (4,))
    with pytest.raises(ValueError, match="4 groups of layers.* 6"):
        Pipeline(stages=2, rounds=2).check(replace(config, sliding_window=()))
    with pytest.raises(ValueError, match="groups of 2 .* differ "):
        Pipeline(stages=3).check(config)
    Pipeline(stages=3).check(replace(config, sliding_window=(None, 4) * 3))


@pytest.mark.parametrize(("rounds", "idle"), [(1, 1 / 3), (2, 1 / 5)])
def test_rounds_share_the_time_in_which_a_stage_is_idle(rounds, idle):
    """Two stages and two micro-batches: one step of 2 * rounds + 1."""
    assert Pipeline(stages=2, rounds=rounds).bubble == pytest.approx(idle)


def test_stages_whose_rope_differs_are_refused():
    config = model_config(num_layers=6)
    without_rope = replace(config, sliding_window=(), rope_layers=(True,) * 5 + (False,))
    with pytest.raises(ValueError, match="rope tables .* groups of 2 .* differ"):
        Pipeline(stages=3).check(without_rope)
