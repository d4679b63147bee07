"""Adapters in the stages of a pipeline: iterations, steps and passes equal one device's."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_offline_mesh import OPTIMIZER
from test_offline_mesh import assert_same as assert_same_step
from test_offline_mesh import step as offline_step
from tiny import EXPERTS, MODEL, model_config
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
from jaxrl_llm.config import LoraConfig, MeshConfig, ModelSettings
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.learner.forward import ForwardSettings, hidden_states, prepare, row_logprobs
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.lora import DROPOUT, Adapter, DropoutKey, Lora, join, split
from jaxrl_llm.models.pipeline import Pipeline
from jaxrl_llm.plan.roles import make_role

TWO = {"pipeline": 2}
ROUNDS = {"data": 2, "pipeline": 2, "pipeline_rounds": 2}
MIX = {"pipeline": 2, "fsdp": 2, "tensor": 2}
PARTS = {"pipeline": 2, "sequence": 2, "fsdp": 2, "pipeline_micro_batches": 2}
OF_EXPERTS = {"pipeline": 2, "expert": 2, "tensor": 2}
LORA = LoraConfig(rank=2, alpha=1.0)
APART = replace(LORA, merge=False)


def iterate(algorithm, sizes, *, model, rows=0, **actor):
    """Batch, metrics and what actor and critic learned, after an iteration on such a mesh."""
    mesh, config = MeshConfig(**sizes), tiny_config(model_reward=False)
    learners = {"actor": config.actor, "critic": config.critic}
    model = MODEL | {"num_hidden_layers": 2} | model
    of_both = {"ppo_epochs": 1, "optimizer": OPTIMIZER, **actor}
    learners = {name: replace(each, **of_both) for name, each in learners.items()}
    learners["actor"] = replace(learners["actor"], hf_config=model)
    config = replace(config, algorithm=algorithm, mesh=mesh, **learners)
    config = packed(config, rows) if rows else in_micro_batches(config, 8 // mesh.num_replicas)
    iteration = open_iteration(config, make_mesh(**mesh.sizes))
    states, batch, metrics = run_step(iteration, first_states(iteration), 1)
    return batch, metrics, {name: fetch(states[name].params) for name in learners if name in states}


PPO = c.PPO(use_kl_in_reward=True, kl_coef=0.05, use_kl_loss=True, kl_loss_coef=0.1)
GRPO = c.GRPO(use_kl_loss=True, kl_loss_coef=0.1)
FOUR = {"num_hidden_layers": 4}
FLOAT8 = {"lora": APART, "base_dtype": "float8", "remat": "full"}
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("algorithm", "sizes", "model", "more"),
    [
        SLOW(GRPO, TWO, {}, {"lora": LORA, "rows": 24, "scan_layers": True}, id="grpo"),
        SLOW(PPO, MIX, {}, FLOAT8, id="float8"),
        SLOW(GRPO, PARTS, {}, {"lora": replace(LORA, dora=True), "rows": 24}, id="dora"),
        SLOW(GRPO, ROUNDS, FOUR, {"lora": APART, "rows": 24, "scan_layers": True}, id="apart"),
        SLOW(GRPO, OF_EXPERTS, EXPERTS, {"lora": LORA, "rows": 24}, id="experts"),
        SLOW(PPO, OF_EXPERTS, EXPERTS, FLOAT8 | {"scan_layers": True}, id="float8 experts"),
    ],
)
def test_an_iteration_equals_one_device(algorithm, sizes, model, more):
    batch, metrics, learned = iterate(algorithm, sizes, model=model, **more)
    expected_batch, expected_metrics, expected = iterate(algorithm, {}, model=model, **more)
    np.testing.assert_array_equal(batch.responses, expected_batch.responses)
    for name in ("old_logprobs", "reference_logprobs", "values", "advantages"):
        found, one = getattr(batch, name), getattr(expected_batch, name)
        if one is not None:
            np.testing.assert_allclose(
                found * batch.mask, one * batch.mask, rtol=1e-4, atol=2e-5, err_msg=name
            )
    names = [name for name in expected_metrics if "/router_" not in name]  # those are of a pass
    losses = [name for name in names if name.endswith(("_loss", "grad_norm"))]
    assert {"actor/pg_loss", "actor/kl_loss", "actor/grad_norm"} <= set(losses)
    for name in losses:
        np.testing.assert_allclose(
            metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    assert metrics["actor/pipeline_bubble"] > 0
    for one, other in zip(*map(jax.tree.leaves, (learned, expected)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.slow
def test_a_step_of_dpo_equals_one_device():
    expected = offline_step("dpo", MeshConfig(), 2, lora=APART)
    found = offline_step("dpo", MeshConfig(**TWO), 2, micro_batch_size=8, lora=APART)
    assert_same_step(found, expected)
    assert found[1]["pipeline_bubble"] == pytest.approx(1 / 3)


# ------------------------------------------------------------------------- passes


def program(lora, sizes=TWO, **settings):
    """What a role of such adapters computes with, its parameters, and rows of tokens."""
    spec = model_spec(model_config(), lora=lora)
    mesh = MeshConfig(**sizes)
    devices = make_mesh(**mesh.sizes)
    role = make_role("actor", spec, ModelSettings(**settings), devices, phases=mesh)
    params = make_global(random_params(spec.params, 3), role.param_shardings)
    tokens = np.random.default_rng(0).integers(0, spec.config.vocab_size, (4, 6))
    return role, params, jnp.asarray(tokens, jnp.int32)


MODULES = [f"model.layers.{i}.{n}" for i in (0, 1) for n in ("self_attn.q_proj", "mlp.up_proj")]
ADAPTERS = Lora(rank=2, alpha=2.0, modules=frozenset(MODULES), merge=False)


@pytest.mark.nightly
def test_the_inputs_of_each_micro_batch_are_dropped_by_a_mask_of_its_own():
    """On one device, with the key of each micro-batch."""
    role, params, tokens = program(replace(ADAPTERS, dropout=0.5))
    key = jax.random.key(1)

    def of_stages(params):
        model = prepare(role.spec, params | {DROPOUT: key}, role.forward)
        return hidden_states(model, tokens, role.forward)

    def alone(params):
        found = []
        for number, rows in enumerate(jnp.split(tokens, 2)):  # a stage's rows
            model = prepare(role.spec, params | {DROPOUT: key}, ForwardSettings())
            for _, module in nnx.iter_modules(model):
                if isinstance(module, Adapter):
                    own = jax.random.fold_in(jax.random.wrap_key_data(module.key[...]), number)
                    module.key = DropoutKey(jax.random.key_data(own))
            found.append(hidden_states(model, rows, ForwardSettings()))
        return jnp.concatenate(found)

    def with_gradients(run, params):
        base, own = split(params)
        return jax.jit(jax.value_and_grad(lambda own: jnp.square(run(join(base, own))).sum()))(own)

    found, expected = with_gradients(of_stages, params), with_gradients(alone, fetch(params))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


def test_frozen_weights_have_no_gradient():
    """A matmul with a weight's shape would be its gradient."""
    role, params, tokens = program(ADAPTERS, remat="full")
    base, own = split(params)

    def loss(own, base):
        params = join(base, own)
        return row_logprobs(params, tokens, spec=role.spec, settings=role.forward).sum()

    D, F = (role.spec.config.hidden_size, role.spec.config.intermediate_size)
    shape = f"-> tensor<{D}x{F}xf32>"
    of_own = jax.jit(jax.grad(loss)).lower(own, base).as_text()
    of_all = jax.jit(jax.grad(loss, (0, 1))).lower(own, base).as_text()
    gradients = [
        [x for x in t.splitlines() if "dot_general" in x and shape in x] for t in (of_own, of_all)
    ]
    assert gradients[1] and not gradients[0]


def test_adapters_that_groups_of_layers_cannot_share():
    first = replace(ADAPTERS, modules=frozenset(MODULES[:2]))
    with pytest.raises(
        ValueError, match="adapters of the same modules .* groups of 1 .*pipeline=1"
    ):
        program(first)
    layers = model_spec(model_config(), lora=first).params["decoder"]["layers"]
    Pipeline(stages=1).check_adapters(model_config(), layers)
