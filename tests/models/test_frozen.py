"""Projections that are frozen in float8: their values, their first draw, and their gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compiled import compiled
from further import further
from tiny import EXPERTS, GPT_OSS, MODEL, model_config
from tiny_iteration import random_params

from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.models.base import (
    bind,
    frozen_spec,
    init_params,
    merge_adapters,
    model_spec,
    scalar_params_from,
)
from jaxrl_llm.models.families import config_from_hf
from jaxrl_llm.models.frozen import (
    FEW_ROWS,
    dequantized,
    quantize,
    quantized_as,
    quantized_matmul,
)
from jaxrl_llm.models.lora import Lora, join, split

TOKENS = jnp.arange(10).reshape(2, 5)
MODULES = frozenset(f"model.layers.0.{n}" for n in ("self_attn.o_proj", "mlp.up_proj"))
CONFIG = model_config(num_layers=1, sliding_window=(None,))
ONE = {"num_hidden_layers": 1}
OF_EXPERTS, WITH_BIASES = (config_from_hf(MODEL | kind | ONE) for kind in (EXPERTS, GPT_OSS))
OF_EACH = (f"mlp.experts.{e}.{n}_proj" for e in range(4) for n in ("up", "down"))
ALL = frozenset(f"model.layers.0.{name}" for name in ("self_attn.o_proj", *OF_EACH))
LORA = Lora(rank=2, alpha=2.0, modules=MODULES)


def test_values_are_near_and_exact_in_bfloat16():
    kernel = np.random.default_rng(0).normal(size=(4, 16, 8)).astype(np.float32)
    kernel[..., 1] = 0
    kernel[..., 2] *= 1e-6
    found = jax.jit(quantize, static_argnums=1)(kernel, 2)
    values, scale = (np.asarray(x) for x in (found.values, found.scale))
    assert values.dtype == ml_dtypes.float8_e4m3fn and scale.dtype == np.float32
    assert np.all(np.frexp(scale)[0] == 0.5)  # powers of two
    weights = values.astype(np.float64) * scale
    peak = np.abs(kernel).max(axis=(0, 1))
    assert np.all(np.abs(weights - kernel) <= 2**-4 * np.abs(kernel) + peak * 2**-17)
    for dtype in (jnp.bfloat16, jnp.float32):
        np.testing.assert_array_equal(np.asarray(found.astype(dtype), np.float64), weights)


@pytest.mark.parametrize("contract", [1, 2])
def test_the_gradient_of_x_goes_through_the_same_weights(contract):
    rng = np.random.default_rng(1)
    x, kernel = rng.normal(size=(3, 4, 6)), rng.normal(size=(*(4, 6)[-contract:], 5, 2))
    found = quantize(jnp.asarray(kernel, jnp.float32), contract)
    weights = np.asarray(found.astype(jnp.float32), np.float64)
    y, back = jax.vjp(lambda x: quantized_matmul(found, x, contract), jnp.float32(x))
    np.testing.assert_allclose(y, np.tensordot(x, weights, contract), atol=1e-5)
    g = rng.normal(size=y.shape)
    expected = np.tensordot(g, weights, axes=((-2, -1), (-2, -1)))
    np.testing.assert_allclose(back(jnp.float32(g))[0], expected, atol=1e-5)
    # Neither x nor weights in another dtype are kept for the backward pass.
    kept = jax.tree.leaves(back)
    assert {str(k.dtype) for k in kept if k.ndim > 2} <= {"float8_e4m3fn"}


@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_outputs_have_the_bits_of_weights_that_were_dequantised_before(rows, dtype):
    rng = np.random.default_rng(2)
    kernel = rng.normal(size=(96, 40)) * np.exp2(rng.integers(-20, 4, 40))
    found = quantize(jnp.asarray(kernel, jnp.float32), 1)
    x = jnp.asarray(rng.normal(size=(rows, 96)), dtype)
    y = jax.jit(lambda x: quantized_matmul(found, x, 1))(x)
    expected = jax.jit(jnp.tensordot, static_argnums=2)(x, found.astype(dtype), 1)
    assert y.dtype == expected.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(y, expected)


def test_first_weights_are_those_of_a_dense_model_quantised():
    spec = frozen_spec(CONFIG, "causal_lm", "float8", "bfloat16")
    dense = init_params(model_spec(CONFIG, dtype="bfloat16"), jax.random.key(3))
    found = jax.jit(init_params, static_argnums=0)(spec, jax.random.key(3))
    expected = jax.jit(lambda x: quantized_as(spec.params, x))(dense)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    sizes = {}
    for path, x in jax.tree_util.tree_leaves_with_path(found):
        kind = "kernel" if path[-1].key == "kernel" else path[-1].key
        sizes[kind] = sizes.get(kind, 0) + x.nbytes
        assert (x.dtype == FLOAT8) == (kind == "kernel"), path
        assert x.dtype in (FLOAT8, jnp.bfloat16) or (kind == "scale" and x.dtype == jnp.float32)
    kernels = [x for p, x in jax.tree_util.tree_leaves_with_path(dense) if p[-1].key == "kernel"]
    assert 2 * sizes["kernel"] == sum(x.nbytes for x in kernels)


@pytest.mark.parametrize(
    ("config", "changes"),
    further(
        [
            (CONFIG, {"merge": False}),
            (CONFIG, {"dora": True}),
            (OF_EXPERTS, {"merge": False, "modules": ALL}),
            (WITH_BIASES, {"merge": False}),  # without adapters of experts
        ]
    ),
    ids=["apart", "dora", "experts", "biases of experts"],
)
def test_a_model_equals_one_whose_kernels_were_dequantised_before(config, changes):
    lora = replace(LORA, **changes)
    spec = frozen_spec(config, "causal_lm", "float8", "float32", lora)
    plain = model_spec(config, lora=lora)
    base, own = split(random_params(plain.params, 1, 0.2))
    base = compiled(lambda base: quantized_as(split(spec.params)[0], base), base)
    dense = compiled(lambda base: dequantized(base, "float32"), base)

    def attend(q, k, v, cache, **_):
        return jnp.repeat(v, q.shape[2] // v.shape[2], axis=2), cache

    def total(own, spec, base):
        model = bind(spec, join(base, own))
        positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
        logits = model.logits(model(TOKENS, positions, attend=attend, remat="projections")[0])
        return (logits * jnp.sin(jnp.arange(logits.size)).reshape(logits.shape)).sum(), logits

    run = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    found, expected = run(own, spec, base), run(own, plain, dense)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())

    def merge(params):
        merged_spec, merged = merge_adapters(spec, params, "bfloat16")
        assert merged_spec == model_spec(config)
        return merged

    merged = compiled(merge, join(base, own))
    flat = dict(jax.tree_util.tree_leaves_with_path(merged))
    frozen = {p for p, x in jax.tree_util.tree_leaves_with_path(base) if x.dtype == FLOAT8}
    assert len(frozen) >= 4 and {str(flat[path].dtype) for path in frozen} == {"bfloat16"}
    assert all(x.dtype != FLOAT8 for x in flat.values())


@pytest.mark.parametrize(("of", "to"), [("float8", "float32"), ("float32", "float8")])
def test_a_scalar_model_is_made_of_either_kind_of_decoder(of, to):
    language = frozen_spec(CONFIG, "causal_lm", of, "float32")
    scalar = frozen_spec(CONFIG, "scalar", to, "float32")
    params = random_params(language.params, 1)
    key = jax.random.key(0)
    found = compiled(lambda params, key: scalar_params_from(params, scalar, key), params, key)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(
        lambda x: (x.shape, x.dtype), scalar.params
    )
    up, theirs = (x["decoder"]["layers"]["0"]["mlp"]["up"] for x in (found, params))
    float8, dense = (up, theirs) if to == "float8" else (theirs, up)
    weights = np.float32(float8["kernel"]) * float8["scale"]
    np.testing.assert_allclose(weights, dense["kernel"], rtol=2**-4, atol=1e-3)
