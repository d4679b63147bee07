"""Experts split over devices give the numbers of one device, whatever tokens choose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.distributed.layout import Layout, train_layout
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.models.experts import experts_of_tokens

B, T, D, F, E, K = 8, 6, 8, 4, 8, 3
MESHES = [
    {"expert": 8},
    {"expert": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "expert": 4},
    {"fsdp": 4, "tensor": 2},
]


def operands(routing, dtype=jnp.float32, rows=B):
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(rows, T, D)), rng.uniform(size=(rows, T, K))
    kernels = [rng.normal(size=s) for s in ((E, D, F), (E, D, F), (E, F, D))]
    chosen = np.argsort(rng.normal(size=(rows, T, E)))[..., :K]
    if routing == "all to one":  # the others of a token are its padding
        chosen = np.broadcast_to([5, E, E], (rows, T, K))
    if routing == "padding":
        chosen = np.where(np.arange(T)[:, None] < 4, chosen, E)
    x, *kernels = (jnp.asarray(a, dtype) for a in (x, *kernels))
    return x, jnp.asarray(weights, jnp.float32), tuple(kernels), jnp.asarray(chosen, jnp.int32)


def value_and_gradients(layout: Layout | None, x, weights, kernels, chosen):
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

    def loss(x, weights, kernels):
        y = experts_of_tokens(x, weights, chosen, kernels)
        return (y.astype(jnp.float32) * cotangent).sum(), y

    def run(x, weights, kernels):
        if layout is None:
            return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, kernels)
        with layout.scope():
            return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, kernels)

    if layout is not None:
        x = jax.device_put(x, layout.sharding("batch", "tokens", None))
        into = layout.sharding("expert", "expert_embed", "mlp")
        out = layout.sharding("expert", "mlp", "expert_embed")
        kernels = tuple(map(jax.device_put, kernels, (into, into, out)))
    return jax.jit(run)(x, weights, kernels)


@pytest.mark.parametrize("routing", ["balanced", "all to one", "padding"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_split_experts_equal_those_of_one_device(sizes, routing):
    arguments = operands(routing)
    (_, expected), gradients = value_and_gradients(None, *arguments)
    layout = train_layout(make_mesh(**sizes), 2)
    (_, found), found_gradients = value_and_gradients(layout, *arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(found_gradients), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_rows_that_the_devices_do_not_divide_are_computed_by_all():
    arguments = operands("balanced", rows=3)
    (_, expected), _ = value_and_gradients(None, *arguments)
    layout = train_layout(make_mesh(data=2, expert=4), 2)
    x, weights, kernels, chosen = jax.device_put(arguments, layout.sharding())
    with layout.scope():
        found = jax.jit(experts_of_tokens)(x, weights, chosen, kernels)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_compiles_and_is_close():
    arguments = operands("balanced", jnp.bfloat16)
    (_, expected), gradients = value_and_gradients(None, *arguments)
    layout = train_layout(make_mesh(expert=4, tensor=2), 2)
    (_, found), found_gradients = value_and_gradients(layout, *arguments)
    np.testing.assert_allclose(found, expected, rtol=0.03, atol=0.3)
    assert found_gradients[2][0].dtype == gradients[2][0].dtype == jnp.bfloat16
