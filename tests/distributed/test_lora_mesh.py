"""An iteration with adapters on several devices equals that on one."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny import DEEPSEEK, EXPERTS, MODEL
from tiny_iteration import (
    first_states,
    in_micro_batches,
    open_iteration,
    random_params,
    run_step,
    tiny_config,
)

from jaxrl_llm.config import GRPO, LoraConfig, MeshConfig, PhaseMeshConfig
from jaxrl_llm.distributed.layout import mesh_of
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.models.base import frozen_spec
from jaxrl_llm.models.frozen import dequantized
from jaxrl_llm.plan.models import open_meshes
from jaxrl_llm.tokenizer import load_tokenizer

pytestmark = pytest.mark.nightly

LORA = LoraConfig(rank=2, alpha=1.0)
ONE_LAYER = {"num_hidden_layers": 1}
LATENT = DEEPSEEK | {"num_hidden_layers": 2}


def iterate(sizes, lora, *, critic, base="", dense=False, model=ONE_LAYER):
    """The batch, and what actor and critic learned, after one iteration; with one update or PPO.

    `dense`: the base has the weights of one in float8, dequantised to float32 before.
    """
    mesh = MeshConfig(**sizes)
    config = in_micro_batches(tiny_config(model_reward=critic), 8 // mesh.num_replicas)
    learners = ["actor"]
    actor = replace(config.actor, lora=lora, base_dtype=base, hf_config=MODEL | model)
    config = replace(config, mesh=mesh, actor=actor)
    if critic:
        learners.append("critic")
        config = replace(config, critic=replace(config.critic, lora=lora, base_dtype=base))
    else:
        actor = replace(config.actor, ppo_epochs=1, ppo_mini_batch_size=16)
        config = replace(config, actor=actor, algorithm=GRPO())
    iteration = open_iteration(config, mesh_of(mesh, [MODEL["num_key_value_heads"]]))
    states = first_states(iteration)
    if dense:
        float8 = frozen_spec(iteration.roles["base"].spec.config, "causal_lm", "float8", "float32")
        states["base"] = jax.jit(lambda: dequantized(random_params(float8.params, 4), "float32"))()
    states, batch, _ = run_step(iteration, states, 1)
    assert {"actor", "base"} <= set(states) and "reference" not in states
    return batch, {name: fetch(states[name].params) for name in learners}


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("model", [{}, EXPERTS, LATENT], ids=["dense", "experts", "latent"])
def test_a_base_in_float8_equals_one_that_was_dequantised_before(model, merge):
    lora, model = replace(LORA, merge=merge), ONE_LAYER | model
    found, learned = iterate({}, lora, critic=False, base="float8", model=model)
    expected, dense = iterate({}, lora, critic=False, base="float32", dense=True, model=model)
    np.testing.assert_array_equal(found.responses, expected.responses)
    for name in ("rollout_logprobs", "reference_logprobs", "advantages"):
        one, other = (getattr(each, name) * each.mask for each in (found, expected))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=name)
    for one, other in zip(*map(jax.tree.leaves, (learned, dense)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(
    ("sizes", "lora", "critic", "base", "model"),
    [
        pytest.param(
            {"expert": 2, "fsdp": 2, "tensor": 2},
            replace(LORA, merge=False),
            False,
            "float8",
            EXPERTS | ONE_LAYER,
            id="experts in float8",
        ),
        pytest.param(
            {"fsdp": 4, "tensor": 2, "passes": PhaseMeshConfig(tensor=4)},
            LORA,
            True,
            "",
            ONE_LAYER,
            id="ppo",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data": 2, "fsdp": 2, "tensor": 2},
            replace(LORA, dora=True),
            False,
            "",
            ONE_LAYER,
            id="dora",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_iteration(sizes, lora, critic, base, model):
    batch, learned = iterate(sizes, lora, critic=critic, base=base, model=model)
    expected, alone = iterate({}, lora, critic=critic, base=base, model=model)
    np.testing.assert_array_equal(batch.responses, expected.responses)
    names = ("old_logprobs", "values") if critic else ()
    for name in ("rollout_logprobs", "reference_logprobs", *names):
        found, one = (getattr(each, name) * each.mask for each in (batch, expected))
        np.testing.assert_allclose(found, one, rtol=1e-4, atol=1e-4, err_msg=name)
    # The reference is the base, so it is far from the adapted actor.
    of_base, of_actor = expected.reference_logprobs, expected.rollout_logprobs
    assert np.abs(np.subtract(of_base, of_actor)).max() > 0.01
    for one, other in zip(*map(jax.tree.leaves, (learned, alone)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)


def _as_stored(role, params):
    """`params` without float8 where the role is dense: a reference apart is."""
    dense = dequantized(params, "float32") if role.name == "reference" else params
    return {name: dense[name] for name in role.spec.params}


APART = {"rollout": "4-7"}, {"critic": "4-5", "reference": "critic", "rollout": "6-7"}


@pytest.mark.parametrize("placement", APART, ids=["rollout", "three groups"])
@pytest.mark.parametrize("base", ["", "float8"])
def test_roles_on_other_devices_have_the_adapters_of_one_group(placement, base):
    """The base goes to the rollout once, and then adapters alone."""
    config = tiny_config(model_reward=True, algorithm={"use_kl_loss": True})
    actor = replace(config.actor, lora=LORA, base_dtype=base, hf_config=MODEL | ONE_LAYER)
    critic = replace(config.critic, lora=LORA, base_dtype=base)
    config = replace(config, actor=actor, critic=critic, mesh=MeshConfig(fsdp=4))
    found = {}
    for where in ({}, placement):
        meshes = open_meshes(replace(config, placement=where), load_tokenizer("char"))
        iteration = open_iteration(
            replace(config, placement=where), meshes.pop("actor"), role_meshes=meshes
        )
        states, rows = first_states(iteration), []
        for name in ("reference", "critic_base") if "critic" in where else ():
            role, base = iteration.roles[name], fetch(states["base"])
            params = {**fetch(states[name]), "decoder": base["decoder"]}
            places = role.param_shardings
            states[name] = make_global(_as_stored(role, params), places)
        for step in (1, 2):
            states, batch, metrics = run_step(iteration, states, step)
            rows.append((batch.responses, metrics))
        adapters = sum(x.nbytes for x in jax.tree.leaves(states["actor"].params))
        found[bool(where)] = rows, fetch(states["actor"].params)
    for (ids, one), (others, metrics) in zip(found[True][0], found[False][0], strict=True):
        np.testing.assert_array_equal(ids, others)
        for name in ("actor/pg_loss", "actor/kl_loss", "critic/vf_loss"):
            np.testing.assert_allclose(one[name], metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)
    for one, other in zip(*map(jax.tree.leaves, (found[True][1], found[False][1])), strict=True):
        assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)
    first, second = (float(metrics["perf/rollout_weights_gb"]) for _, metrics in found[True][0])
    assert second == pytest.approx(meshes["rollout"].size * adapters / 1e9)
    assert first > 2 * second
