"""Losses, gradients, values and a whole iteration on eight devices equal those on one."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL
from tiny_iteration import (
    OF_THE_DECODE_LOOP,
    first_states,
    in_micro_batches,
    open_iteration,
    packed,
    random_params,
    run_step,
    tiny_config,
)
from tiny_models import tiny_config as tiny_model_config

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.config import MeshConfig, PhaseMeshConfig
from jaxrl_llm.distributed.layout import mesh_of, train_layout
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.learner.forward import head_logprobs
from jaxrl_llm.models.base import bind, model_spec

MESHES = ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
B, P, R, V = 16, 6, 5, 24
ALGORITHM = build_online(c.PPO(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01))


def fields() -> dict[str, np.ndarray]:
    """An update's fields, with responses of uneven lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, R + 1, B)
    mask = (np.arange(R) < lengths[:, None]).astype(np.float32)
    floats = ("old_logprobs", "reference_logprobs", "advantages", "values", "returns")
    out = {name: rng.normal(size=(B, R)).astype(np.float32) * mask for name in floats}
    for name in floats[:2]:
        out[name] = out[name] - 3 * mask
    return out | {
        "prompts": rng.integers(0, V, (B, P)).astype(np.int32),
        "prompt_lengths": rng.integers(1, P + 1, B).astype(np.int32),
        "responses": rng.integers(0, V, (B, R)).astype(np.int32),
        "response_lengths": lengths.astype(np.int32),
        "mask": mask,
    }


def test_gradients_of_embeddings_in_bf16_are_counts():
    """Of a token that occurs 1,024 times on each of eight devices, and of one on a single one."""
    spec = model_spec(tiny_model_config(), dtype="bfloat16")
    tokens = jnp.full((8, 1025), 3).at[5, 0].set(1)
    for sizes in MESHES:
        mesh = make_mesh(**sizes)

        def total(params, tokens, mesh=mesh):
            with train_layout(mesh, spec.config.num_kv_heads).scope():
                out = bind(spec, params).decoder.embed(tokens)
            return out.astype(jnp.float32).sum() * 0.375

        params = jax.device_put(random_params(spec.params, seed=0, scale=0.1), replicated(mesh))
        rows = jax.device_put(tokens, batch_sharding(mesh))
        table = fetch(jax.jit(jax.grad(total))(params, rows))["decoder"]["embed"]["table"]
        counts = np.bincount(np.asarray(tokens).reshape(-1), minlength=len(table))
        expected = np.broadcast_to(0.375 * counts[:, None], table.shape)
        np.testing.assert_allclose(table.astype(np.float64), expected, rtol=2**-7)


def test_gradient_of_the_head_in_bfloat16():
    """The partitioner's sums in bfloat16 compile on CPUs, a shard_map's do not."""
    rng = np.random.default_rng(2)
    hidden = rng.normal(size=(16, 4, 8)).astype(jnp.bfloat16)
    weight = rng.normal(size=(32, 8)).astype(jnp.bfloat16)
    targets = rng.integers(0, 32, (16, 4)).astype(np.int32)

    def gradient(mesh):
        def loss(weight, hidden, targets):
            layout = None if mesh is None else train_layout(mesh, 1)
            return head_logprobs(hidden, weight, targets, layout)[0].sum()

        arguments = weight, hidden, targets
        if mesh is not None:
            by_row = batch_sharding(mesh)
            arguments = make_global(weight, replicated(mesh)), *make_global(arguments[1:], by_row)
        return fetch(jax.jit(jax.grad(loss))(*arguments)).astype(np.float32)

    found, expected = gradient(make_mesh(fsdp=4, tensor=2)), gradient(None)
    assert np.linalg.norm(found - expected) <= 0.01 * np.linalg.norm(expected)


@functools.cache
def one_device():
    """What each mesh must equal."""
    return iterate({})


def iterate(sizes, *, row_tokens=0, critic=0):
    """Batch, metrics and learnt parameters after two iterations of the planned program.

    `critic` is the critic's own tensor size.
    """
    mesh = MeshConfig(**sizes)
    # Eight samples a pass, on one device as on the replicas of a mesh together.
    config = in_micro_batches(tiny_config(), 8 // mesh.num_replicas)
    if row_tokens:
        config = packed(config, row_tokens)
    config = replace(config, mesh=mesh, critic=replace(config.critic, tensor=critic))
    iteration = open_iteration(config, mesh_of(mesh, [MODEL["num_key_value_heads"]], [critic]))
    states = first_states(iteration)
    for step in (1, 2):
        states, batch, metrics = run_step(iteration, states, step)
    params = {name: fetch(states[name].params) for name in ("actor", "critic")}
    return batch, metrics, params


def constant_groups(batch) -> float:
    """The share of the groups whose scores are all the same to the last bit."""
    groups = [batch.scores[batch.group_ids == group] for group in np.unique(batch.group_ids)]
    return float(np.mean([np.ptp(scores) == 0 for scores in groups]))


def check_iteration(sizes, **settings):
    batch, metrics, params = iterate(sizes, **settings)
    expected_batch, expected_metrics, expected_params = one_device()
    for name in ("responses", "mask"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(expected_batch, name))
    for name in ("rollout_logprobs", "old_logprobs", "reference_logprobs", "values", "scores"):
        found, expected = getattr(batch, name), getattr(expected_batch, name)
        if found.ndim == 2:  # what a padded row holds past its response is no one's
            found, expected = found * batch.mask, expected * batch.mask
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=name)
    # Passes report their micro-batches where they are packed, on several devices.
    metrics, expected_metrics = (
        {name: x for name, x in found.items() if not name.endswith("/micro_batches")}
        for found in (metrics, expected_metrics)
    )
    assert metrics.keys() == expected_metrics.keys()
    # Two equal responses on two devices get scores of a model that are equal to rounding only.
    expected_metrics = expected_metrics | {"frac_reward_zero_std": constant_groups(batch)}
    counts = {f"{role}/{n}" for role in ("actor", "critic") for n in ("micro_batches", "row_use")}
    for name in metrics.keys() - counts - OF_THE_DECODE_LOOP:
        np.testing.assert_allclose(
            metrics[name], expected_metrics[name], rtol=1e-3, atol=1e-4, err_msg=name
        )
    for one, other in zip(*map(jax.tree.leaves, (params, expected_params)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(other)


@pytest.mark.nightly
def test_each_phase_and_the_critic_in_a_layout_of_its_own():
    """Training on three axes, generation by four devices, passes and the critic by one."""
    phases = {"generation": PhaseMeshConfig(tensor=4), "passes": PhaseMeshConfig(tensor=1)}
    check_iteration({"data": 2, "fsdp": 2, "tensor": 2} | phases, row_tokens=24, critic=1)


@pytest.mark.slow
def test_larger_tensor_sizes_in_every_phase():
    """Training in 8 shards, generation and the critic by pairs of devices, passes by fours."""
    phases = {"generation": PhaseMeshConfig(tensor=2), "passes": PhaseMeshConfig(tensor=4)}
    check_iteration({"fsdp": 8} | phases, row_tokens=24, critic=2)


@pytest.mark.slow
def test_a_smaller_tensor_size_in_every_phase():
    phases = {"generation": PhaseMeshConfig(tensor=1), "passes": PhaseMeshConfig(tensor=2)}
    check_iteration({"fsdp": 2, "tensor": 4} | phases, critic=2)
