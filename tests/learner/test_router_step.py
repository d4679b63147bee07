"""Router losses in an update: they reach the gradient, add up over micro-batches, are measured."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_train_step import MODEL, SETTINGS, rollout

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.build import build_offline, build_online
from jaxrl_llm.learner.forward import response_statistics
from jaxrl_llm.learner.losses import PolicyLoss, with_counts
from jaxrl_llm.learner.micro_batches import Padded
from jaxrl_llm.learner.offline_losses import RecordLoss
from jaxrl_llm.learner.router_losses import ROUTER_METRICS, RouterLoss, load_balance, z_loss
from jaxrl_llm.learner.rows import rows_of
from jaxrl_llm.learner.train_step import accumulate
from jaxrl_llm.models.base import init_params, model_spec
from jaxrl_llm.models.config import Mixture
from jaxrl_llm.types import OfflineBatch, TokenBatch

SPEC = model_spec(
    replace(
        MODEL,
        family="qwen3_moe",
        qk_norm=True,
        mixture=Mixture(num_experts=4, experts_per_token=2, expert_size=8, normalized=True),
    )
)
ROUTER = RouterLoss(aux_coef=0.5, z_coef=0.25)


@pytest.fixture(scope="module")
def params():
    return init_params(SPEC, jax.random.key(0))


@pytest.mark.nightly
def test_router_losses_reach_the_gradient_and_add_up(params):
    fields = with_counts(rollout(), jnp.bool_(False))
    policy = PolicyLoss(
        algorithm=build_online(c.PPO()), spec=SPEC, settings=SETTINGS, temperature=1.0
    )

    @jax.jit
    def gradients(params, fields, aux_coef, z_coef):
        loss = replace(policy, router=RouterLoss(aux_coef=aux_coef, z_coef=z_coef))
        parts = Padded(num=2)
        return accumulate(loss, params, fields, cast_ahead=None, micro_batches=parts)

    @jax.jit
    def expected(params):
        """Both losses of each micro-batch, weighted by its response tokens."""
        total = jnp.float32(0)
        for rows in (slice(0, 8), slice(8, 16)):
            part = jax.tree.map(lambda x, rows=rows: x[rows], fields)
            found = response_statistics(params, rows_of(part), spec=SPEC, settings=SETTINGS)
            share = part["mask"].sum() / fields["mask"].sum()
            total += share * (0.5 * load_balance(found.routed) + 0.25 * z_loss(found.routed))
        return total

    with_losses, metrics = gradients(params, fields, 0.5, 0.25)
    without, same = gradients(params, fields, 0.0, 0.0)
    value, gradient = jax.value_and_grad(expected)(params)
    added = jax.tree.map(jnp.subtract, with_losses, without)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), added, gradient)
    router = gradient["decoder"]["layers"]["0"]["mlp"]["router"]["kernel"]
    assert np.abs(router).max() > 1e-3
    found = 0.5 * metrics["router_aux_loss"] + 0.25 * metrics["router_z_loss"]
    np.testing.assert_allclose(found, value, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"] - same["loss"], value, rtol=1e-4)
    assert 1.0 <= metrics["router_load"] <= 4.0
    assert metrics["router_dead_experts"] == 0


def test_supervised_updates_have_the_losses_too(params):
    algorithm = build_offline(c.SFT())
    loss = RecordLoss(algorithm=algorithm, spec=SPEC, settings=SETTINGS, router=ROUTER)
    tokens = np.random.default_rng(0).integers(0, 24, (4, 9)).astype(np.int32)
    lengths = np.array([9, 5, 3, 7])
    mask = (np.arange(9) > 0) & (np.arange(9) < lengths[:, None])
    rows = TokenBatch(tokens=tokens, lengths=lengths, loss_mask=mask.astype(np.float32))
    group = loss.groups[0]
    given = {group: rows, "index": np.arange(4), "weights": np.ones(4, np.float32)}
    batch = loss.inputs(OfflineBatch(**given))

    @jax.jit
    def run(params):
        return accumulate(loss, params, batch, cast_ahead=None, micro_batches=Padded())[1]

    metrics = run(params)
    assert metrics.keys() >= set(ROUTER_METRICS)
    plain = metrics["record_loss"] if "record_loss" in metrics else metrics["nll_loss"]
    added = 0.5 * metrics["router_aux_loss"] + 0.25 * metrics["router_z_loss"]
    weights = next(v for k, v in metrics.items() if k.startswith("weight of "))
    np.testing.assert_allclose(metrics["loss"], plain / weights + added, rtol=1e-5)


@pytest.mark.slow
def test_gradients_in_bfloat16_are_near_those_in_float32(params):
    """Weights are cast once a step; each micro-batch adds float32 gradients of the cast ones."""
    fields = with_counts(rollout(), jnp.bool_(False))

    def gradients(dtype):
        settings = replace(SETTINGS, dtype=dtype)
        loss = PolicyLoss(
            algorithm=build_online(c.PPO()), spec=SPEC, settings=settings, temperature=1.0
        )
        how = {"cast_ahead": settings.cast_ahead, "micro_batches": Padded(num=2)}
        return jax.jit(lambda p: accumulate(loss, p, fields, **how)[0])(params)

    exact, rounded = gradients("float32"), gradients("bfloat16")
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(rounded))
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, rounded, exact))
    assert 0 < difference < 0.1 * optax.tree.norm(exact)
