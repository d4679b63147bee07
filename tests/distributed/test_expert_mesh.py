"""Experts split over devices give the numbers of one device, whatever tokens choose."""

import dataclasses
import functools
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import further
from test_offline_mesh import OPTIMIZER
from tiny import DEEPSEEK, EXPERTS, GPT_OSS, HYBRID, MODEL
from tiny_iteration import (
    first_states,
    in_micro_batches,
    open_iteration,
    run_step,
    tiny_config,
)

from jaxrl_llm import config as c
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.distributed.communication import collectives
from jaxrl_llm.distributed.device_groups import MeshAxes
from jaxrl_llm.distributed.layout import Layout, train_layout
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import fetch
from jaxrl_llm.models.expert_dispatch import exchanges_rows
from jaxrl_llm.models.expert_rows import Stacked
from jaxrl_llm.models.experts import experts_of_tokens

B, T, D, F, E, K = 8, 6, 8, 4, 8, 3
MESHES = [
    {"expert": 8},
    {"expert": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "expert": 4},
    {"data": 2, "expert": 2, "fsdp": 2},
    {"fsdp": 4, "tensor": 2},
    {"expert": 2, "sequence": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "sequence": 2},
]


def operands(routing, dtype=jnp.float32, rows=B):
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(rows, T, D)), rng.uniform(size=(rows, T, K))
    kernels = [rng.normal(size=s) for s in ((E, D, F), (E, D, F), (E, F, D))]
    chosen = np.argsort(rng.normal(size=(rows, T, E)))[..., :K]
    if routing == "all to one":  # the others of a token are its padding
        chosen = np.broadcast_to([5, E, E], (rows, T, K))
    if routing == "all to one device":  # which has two experts
        chosen = np.broadcast_to([4, 5, E], (rows, T, K))
    if routing == "padding":
        chosen = np.where(np.arange(T)[:, None] < 4, chosen, E)
    x, *kernels = (jnp.asarray(a, dtype) for a in (x, *kernels))
    return x, jnp.asarray(weights, jnp.float32), tuple(kernels), jnp.asarray(chosen, jnp.int32)


def value_and_gradients(layout: Layout | None, limit: float | None = None):
    """A compiled function of the operands: the output, and the gradients of all but the choice."""
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, D)), jnp.float32)

    def run(x, weights, kernels, chosen):
        def loss(x, weights, kernels):
            stacks = list(map(Stacked, kernels[:3]))
            for i, bias in enumerate(kernels[3:]):  # of gate and up
                stacks[i] = dataclasses.replace(stacks[i], bias=bias, limit=limit)
            y = experts_of_tokens(x, weights, chosen, tuple(stacks))
            return (y.astype(jnp.float32) * cotangent).sum(), y

        with nullcontext() if layout is None else layout.scope():
            (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
                x, weights, kernels
            )
        return y, gradients

    if layout is None:
        return jax.jit(run)
    into = layout.sharding("expert", "expert_embed", "mlp")
    kernels = (into, into, layout.sharding("expert", "mlp", "expert_embed"))
    if limit is not None:  # with biases
        kernels += (layout.sharding("expert", "mlp"),) * 2
    rows = layout.sharding("batch", "tokens", None)
    return jax.jit(run, in_shardings=(rows, rows, kernels, rows))


on_one_device = value_and_gradients(None)


@pytest.mark.parametrize(
    ("sizes", "tensor"),
    further([*((sizes, 0) for sizes in MESHES), ({"expert": 4, "tensor": 2}, 4)], 3),
    ids=str,
)
def test_split_experts_equal_those_of_one_device(sizes, tensor):
    """A phase with a larger tensor size takes a part of the axis expert for it."""
    mesh = make_mesh(**sizes, cuts=[tensor] if tensor else [])
    split = value_and_gradients(train_layout(mesh, 2, tensor=tensor))
    for routing in ("balanced", "all to one", "all to one device", "padding"):
        arguments = operands(routing)
        jax.tree.map(
            lambda found, expected: np.testing.assert_allclose(
                found, expected, rtol=1e-5, atol=1e-5
            ),
            split(*arguments),
            on_one_device(*arguments),
        )


def test_biases_are_split_with_their_experts():
    x, weights, kernels, chosen = operands("padding")
    rng = np.random.default_rng(2)
    kernels += tuple(jnp.asarray(rng.normal(size=(E, F)), jnp.float32) for _ in range(2))
    layout = train_layout(make_mesh(expert=2, fsdp=2, tensor=2), 2)
    jax.tree.map(
        lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5),
        value_and_gradients(layout, limit=0.8)(x, weights, kernels, chosen),
        value_and_gradients(None, limit=0.8)(x, weights, kernels, chosen),
    )


@pytest.mark.parametrize("merged", further([False, True]), ids=["apart", "merged"])
def test_adapters_of_split_experts_equal_those_of_one_device(merged):
    """Devices along `tensor` share the matrices of an adapter that have no inner dim."""
    x, weights, kernels, chosen = operands("balanced")
    rng = np.random.default_rng(2)
    own = [
        [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((E, n, 2), (E, 2, m))]
        for _, n, m in (k.shape for k in kernels)
    ]

    def loss(own, x, *, layout):
        stacks = [Stacked(k, *ab, 0.5, merged) for k, ab in zip(kernels, own, strict=True)]
        with layout.scope() if layout else nullcontext():
            return (experts_of_tokens(x, weights, chosen, tuple(stacks)) ** 2).sum()

    def gradient(layout):
        whole = {} if layout is None else {"in_shardings": layout.sharding()}
        run = jax.value_and_grad(partial(loss, layout=layout), (0, 1))
        return jax.jit(run, **whole)(own, x)

    expected, close = gradient(None), partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for num in (4, 2):  # an all-to-all, and a gather
        found = gradient(train_layout(make_mesh(expert=num, tensor=2), 2))
        jax.tree.map(close, found, expected)


def test_an_exchange_moves_the_bytes_that_the_page_says():
    """A round has 1.25 * K * N / G rows: here 3 of 8 numbers, to 7 others, there and back."""
    mesh = make_mesh(expert=8)
    arguments = operands("balanced")
    program = value_and_gradients(train_layout(mesh, 2)).lower(*arguments).compile()
    axes = MeshAxes(names=mesh.axis_names, sizes=mesh.axis_sizes)
    moved = collectives(program.as_text(), axes, ())
    rows = [each for each in moved if each.kind == "all-to-all" and "f32" in each.shape]
    assert sum(each.bytes for each in rows) == 5 * (7 * 3 * 8 * 4)  # 2 forward, 3 backward
    assert not any(each.kind in ("all-gather", "reduce-scatter") for each in moved)


def test_the_cheaper_way_is_chosen():
    """8 experts of a token: from 8 devices on. 2 experts: from 2 devices on."""
    for experts_of_token, first in ((8, 8), (2, 2), (1, 2)):
        chosen = [n for n in (2, 4, 8, 16) if exchanges_rows(4096, experts_of_token, n, 2)]
        assert chosen == [n for n in (2, 4, 8, 16) if n >= first]


def test_bfloat16_compiles_and_is_close():
    arguments = operands("balanced", jnp.bfloat16)
    split = value_and_gradients(train_layout(make_mesh(expert=4, tensor=2), 2))
    (found, gradients), (expected, _) = split(*arguments), on_one_device(*arguments)
    np.testing.assert_allclose(found, expected, rtol=0.03, atol=0.3)
    assert gradients[2][0].dtype == jnp.bfloat16


def test_rows_that_the_devices_do_not_divide_are_computed_by_all():
    x, weights, kernels, chosen = operands("balanced", rows=3)
    kernels = tuple(map(Stacked, kernels))
    expected = jax.jit(experts_of_tokens)(x, weights, chosen, kernels)
    layout = train_layout(make_mesh(data=2, expert=4), 2)
    whole = jax.device_put((x, weights, chosen, kernels), layout.sharding())
    with layout.scope():
        found = jax.jit(lambda *operands: experts_of_tokens(*operands))(*whole)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------- whole iterations

NEXT = {"model_type": "qwen3_next", "shared_expert_intermediate_size": 24}
MODELS = {
    "qwen3_moe": (EXPERTS, {"router_z_loss_coef": 0.1}),
    "deepseek_v3": (DEEPSEEK, {"router_bias_rate": 0.1}),
    "gpt_oss": (GPT_OSS, {"router_z_loss_coef": 0.1}),
    "qwen3_next": (EXPERTS | HYBRID | NEXT, {"router_z_loss_coef": 0.1}),
    "shared A": (
        GPT_OSS,
        {"router_aux_loss_coef": 0.0, "lora": c.LoraConfig(rank=2, targets=("gate_up_proj",))},
    ),
}


def iterate(family="qwen3_moe", **sizes):
    """Batch, metrics and weights after an iteration of GRPO on a mesh of these sizes."""
    model, router = MODELS[family]
    mesh, config = MeshConfig(**sizes), tiny_config(model_reward=False)
    actor = replace(
        config.actor,
        hf_config=MODEL | model,
        ppo_epochs=1,
        optimizer=OPTIMIZER,
        **({"router_aux_loss_coef": 0.1} | router),
    )
    config = replace(config, actor=actor, algorithm=c.GRPO(use_kl_loss=True), mesh=mesh)
    config = in_micro_batches(config, 8 // mesh.num_replicas)
    iteration = open_iteration(config, make_mesh(**mesh.sizes))
    states, batch, metrics = run_step(iteration, first_states(iteration), 1)
    return batch, metrics, fetch(states["actor"].params)


one_device = functools.cache(iterate)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", {"expert": 2, "fsdp": 2, "tensor": 2}),
        ("qwen3_moe", {"data": 2, "expert": 4}),
        ("qwen3_moe", {"data": 2, "fsdp": 2}),
        ("deepseek_v3", {"expert": 2, "fsdp": 2, "tensor": 2}),
        ("gpt_oss", {"expert": 2, "fsdp": 2, "tensor": 2}),
        ("qwen3_next", {"expert": 2, "fsdp": 2, "tensor": 2}),
        ("shared A", {"expert": 2, "fsdp": 2, "tensor": 2}),
        ("qwen3_moe", {"expert": 2, "sequence": 2, "tensor": 2}),
        ("qwen3_moe", {"pipeline": 2, "expert": 2, "fsdp": 2}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_an_iteration_equals_one_device(family, sizes):
    batch, metrics, params = iterate(family, **sizes)
    expected_batch, expected_metrics, expected_params = one_device(family)
    np.testing.assert_array_equal(batch.responses, expected_batch.responses)
    names = [n for n in expected_metrics if n.endswith(("_loss", "grad_norm", "router_load"))]
    of_router = {"actor/router_aux_loss", "actor/router_z_loss"}
    assert {"actor/pg_loss", *(() if family == "shared A" else of_router)} <= set(names)
    for name in names:
        np.testing.assert_allclose(
            metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    for one, other in zip(*map(jax.tree.leaves, (params, expected_params)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
