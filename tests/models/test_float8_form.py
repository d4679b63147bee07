"""Which weights of a model are in float8 in generation, and what they are."""

import itertools
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from tiny import DEEPSEEK, EXPERTS, GPT_OSS, MODEL
from tiny_iteration import random_params
from tiny_models import HYBRID_EXPERTS

from jaxrl_llm.distributed.layout import train_layout
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.sharding import shardings
from jaxrl_llm.models.base import merge_projections, model_spec, quantize_projections
from jaxrl_llm.models.experts import Experts
from jaxrl_llm.models.families import config_from_hf

CONFIGS = {
    "experts": config_from_hf(MODEL | EXPERTS),
    "gpt_oss": config_from_hf(MODEL | GPT_OSS),
    "deepseek": config_from_hf(MODEL | DEEPSEEK),
    "hybrid": HYBRID_EXPERTS,
}
ATTENTION = ("attention/qkv", "attention/o")
STACKS = ("mlp/gate", "mlp/up", "mlp/down")
SHARED = ("mlp/shared/gate", "mlp/shared/up", "mlp/shared/down")
# Of each layer: projections, and weights of experts. Latent attention and rules have none.
IN_FLOAT8 = {
    "experts": [(ATTENTION, STACKS)] * 2,
    "gpt_oss": [(ATTENTION, STACKS)] * 2,
    "deepseek": [(("mlp/gate_up", "mlp/down"), ()), (SHARED, STACKS)],
    "hybrid": [(SHARED, STACKS), (ATTENTION + SHARED, STACKS)],
}


def projection(kernel, inputs):
    """In float8 with the inputs, the first dims, as the last ones; and the scales of outputs."""
    scale = np.abs(kernel).max(axis=tuple(range(inputs))) / np.float32(448)
    values = (kernel / scale).astype(ml_dtypes.float8_e4m3fn)
    return np.moveaxis(values, range(inputs), range(-inputs, 0)), scale


def stack(kernel):
    """In float8 with powers of two as the scales of each expert's outputs."""
    peak = np.abs(kernel).max(axis=1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(peak / 448)))
    return (kernel / scale).astype(ml_dtypes.float8_e4m3fn), scale


def flat(tree, *path):
    if not isinstance(tree, dict):
        return {"/".join(path): np.asarray(tree)}
    parts = (flat(value, *path, name).items() for name, value in tree.items())
    return dict(itertools.chain.from_iterable(parts))


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_rounded_for_each_output_or_stay_as_they_are(name):
    spec = model_spec(CONFIGS[name])
    merged_spec, merged = merge_projections(spec, random_params(spec.params, 0))
    found = jax.jit(lambda params: quantize_projections(merged_spec, params)[1])(merged)
    expected = flat(merged)
    for i, (projections, stacks) in enumerate(IN_FLOAT8[name]):
        for path in (*projections, *stacks):
            module = f"decoder/layers/{i}/{path}"
            kernel, inputs = expected[f"{module}/kernel"], 2 if path == "attention/o" else 1
            rounded = stack(kernel) if path in stacks else projection(kernel, inputs)
            expected[f"{module}/kernel"], expected[f"{module}/scale"] = rounded
    found, abstract = flat(found), flat(model_spec(spec.config, form="float8").params)
    assert set(found) == set(expected) == set(abstract)
    for path, value in expected.items():
        one, other = (x.astype(np.float32) for x in (found[path], value))
        rtol = 2e-7 if path.endswith("/scale") else 0  # XLA divides by 448 in another way
        np.testing.assert_allclose(one, other, rtol=rtol, err_msg=path)
        assert abstract[path].item().shape == value.shape, path
        assert abstract[path].item().dtype == value.dtype, path


@pytest.mark.parametrize("name", ["experts", "gpt_oss"])
def test_experts_read_inputs_that_are_not_rounded(name):
    """With weights that were rounded before, they are experts as in any other model."""
    config = CONFIGS[name]
    plain, small = (
        nnx.split(Experts(config, config.mixture, form=form, dtype="float32"))
        for form in ("merged", "float8")
    )
    given = random_params(nnx.to_pure_dict(plain[1]), 0)
    in_float8 = dict(given)
    for part in ("gate", "up", "down"):
        values, scale = stack(given[part]["kernel"])
        in_float8[part] = given[part] | {"kernel": values, "scale": scale}
        given[part] = given[part] | {"kernel": values.astype(np.float32) * scale}
    x = np.random.default_rng(1).normal(size=(2, 5, config.hidden_size)).astype(np.float32)

    @partial(jax.jit, static_argnums=0)
    def run(graphdef, params, x):
        return nnx.merge(graphdef, params)(x)[0]

    expected = run(plain[0], given, x)
    np.testing.assert_allclose(run(small[0], in_float8, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt_oss", "hybrid"])
def test_weights_on_a_mesh_have_the_bits_of_one_device(name):
    spec = model_spec(CONFIGS[name])
    given = random_params(spec.params, 0)
    run = jax.jit(lambda params: quantize_projections(spec, params)[1])
    small = model_spec(spec.config, form="float8_separate")
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    rules = train_layout(mesh, spec.config.num_kv_heads).rules
    before, after = (shardings(s.axes, s.params, mesh, rules) for s in (spec, small))
    split = jax.jit(run, in_shardings=(before,), out_shardings=after)(jax.device_put(given, before))
    scale = split["decoder"]["layers"]["1"]["mlp"]["up"]["scale"]
    E, _, F = scale.shape
    assert scale.sharding.shard_shape(scale.shape) == (E // 2, 1, F // 2)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, split), run(given))
