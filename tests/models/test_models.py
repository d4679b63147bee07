"""Every family against transformers' stored logits; parameters, names and configs of the models."""

import json
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import HYBRID, MODEL
from tiny_models import CONFIGS, our_params, their_tensors, with_rule

from jaxrl_llm.kernels.decode_attention import DecodeInputs, prefix_decode_attention
from jaxrl_llm.kernels.flash_attention import attention
from jaxrl_llm.kernels.float8 import FLOAT8, FLOAT8_MAX, to_float8
from jaxrl_llm.models import families
from jaxrl_llm.models.base import (
    ModelConfig,
    bind,
    init_params,
    init_sharded,
    merge_projections,
    model_spec,
    quantize_projections,
    scalar_params_from,
)
from jaxrl_llm.models.layers import Projection, multiply
from jaxrl_llm.models.rope import LinearRope
from jaxrl_llm.models.shapes import num_parameters

GOLDENS = [  # named by their family; the folder holds other goldens too
    path
    for path in sorted((Path(__file__).parents[1] / "golden").glob("*.npz"))
    if path.stem.startswith(tuple(families.FAMILIES))
]
TINY = ModelConfig(
    family="llama",
    vocab_size=11,
    hidden_size=12,
    intermediate_size=16,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=4,
)
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | {
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


def full_attention(q, k, v, layer_cache, /, **how):
    return attention(q, k, v, **how), layer_cache


@partial(jax.jit, static_argnames=("spec", "remat", "scan", "residual_dtype"))
def head_output(spec, params, tokens, **options):
    """Logits or scores [B, T, ...] of whole rows, float32."""
    model = bind(spec, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model(tokens, positions, attend=with_rule(full_attention), **options)
    return model.logits(hidden) if spec.kind == "causal_lm" else model.scores(hidden)[..., None]


@lru_cache
def fresh(spec, seed=0):
    """Initial parameters; tests share them and must not donate them."""
    return jax.jit(lambda key: init_params(spec, key))(jax.random.key(seed))


def leaves(tree):
    """Flat {path of strings: leaf}; a tuple counts as a leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return {tuple(entry.key for entry in path): leaf for path, leaf in flat}


def params_from_hf(names, weights):
    params = {}
    for path, value in our_params(names, weights).items():
        node = params
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = jnp.asarray(value)
    return params


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_logits_equal_those_of_transformers(path):
    golden = np.load(path)
    hf = json.loads(str(golden["config"]))
    weights = {k.removeprefix("weights/"): golden[k] for k in golden if k.startswith("weights/")}
    _, kind = families.find_architecture(hf)
    config = families.config_from_hf(hf).for_context(golden["tokens"].shape[1])
    names = families.hf_names(config, kind)
    assert {part.name for tensor in names.values() for part in tensor.parts} == set(weights)

    spec = model_spec(config, kind)
    params = params_from_hf(names, weights)
    output = head_output(spec, params, golden["tokens"])
    np.testing.assert_allclose(output, golden["logits"], atol=1e-4)

    own = {path: np.asarray(leaf) for path, leaf in leaves(params).items()}
    back = their_tensors(names, own)  # bit for bit
    assert back.keys() == weights.keys()
    for name, value in back.items():
        np.testing.assert_array_equal(value, weights[name])


def test_goldens_cover_every_family():
    found = (json.loads(str(np.load(path)["config"])) for path in GOLDENS)
    assert {families.find_architecture(hf)[0] for hf in found} == set(families.FAMILIES)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss"])
def test_a_model_without_windows_has_the_size_that_transformers_asks_for(name):
    """It makes the mask of a window in every pass, and refuses null there."""
    hf = json.loads(str(np.load(GOLDENS[0].with_stem(name))["config"]))
    config = families.config_from_hf(hf | {"layer_types": ["full_attention"] * 2})
    assert config.sliding_window == (None, None)
    written = families.to_hf_config(config)
    assert isinstance(written["sliding_window"], int)
    assert families.config_from_hf(written) == config


@pytest.mark.parametrize("kind", ["causal_lm", "scalar"])
@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_config_survives_the_way_to_hugging_face_and_back(path, kind):
    config = families.config_from_hf(json.loads(str(np.load(path)["config"])))
    if kind not in families.FAMILIES[config.family].ARCHITECTURES:
        with pytest.raises(ValueError, match="no scalar model"):
            families.check_kind(config, kind)
        return
    hf = json.loads(json.dumps(families.to_hf_config(config, kind)))
    assert families.config_from_hf(hf) == config
    assert families.find_architecture(hf) == (config.family, kind)


@pytest.mark.parametrize("kind", ["causal_lm", "scalar"])
@pytest.mark.parametrize("tied", [True, False])
def test_spec_names_axes_and_params_agree(kind, tied):
    config = families.config_from_hf({**LLAMA, "tie_word_embeddings": tied})
    spec = model_spec(config, kind)
    shapes, axes = leaves(spec.params), leaves(spec.axes)
    assert shapes.keys() == axes.keys() == leaves(spec.init).keys()
    assert all(len(axes[path]) == leaf.ndim for path, leaf in shapes.items())
    names = families.hf_names(config, kind)
    assert {path: leaf.shape for path, leaf in shapes.items()} == {
        path: tensor.our_shape for path, tensor in names.items()
    }
    assert axes["decoder", "layers", "1", "attention", "q", "kernel"] == (
        "embed",
        "q_heads",
        "head_dim",
    )
    assert (("head", "table") in shapes) == (kind == "causal_lm" and not tied)
    assert spec.num_params == sum(np.prod(leaf.shape) for leaf in shapes.values())


def test_specs_are_equal_and_hash_by_what_they_describe():
    assert model_spec(TINY) == model_spec(TINY, dtype=jnp.float32)
    assert hash(model_spec(TINY)) == hash(model_spec(TINY))
    assert model_spec(TINY) != model_spec(TINY, "scalar")
    assert model_spec(TINY) != model_spec(TINY, dtype="bfloat16")


def test_a_layer_is_shapes_until_it_is_bound():
    layer = Projection((2, 3), ("embed", "mlp"), dtype="bfloat16")
    assert layer.kernel.get_value() == jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    assert jax.tree.leaves(layer) == [layer]  # nor is it a pytree, which would cost more


def test_a_caller_cannot_change_the_spec_of_others():
    spec, structure = model_spec(TINY), jax.tree.structure(model_spec(TINY).params)
    for tree in (spec.params, spec.axes, spec.init):
        del tree["decoder"]["layers"]["0"]
    assert jax.tree.structure(model_spec(TINY).params) == structure
    assert set(spec.axes["decoder"]["layers"]) == set(spec.init["decoder"]["layers"]) == {"0", "1"}


def test_init_is_a_pure_function_of_the_key():
    spec = model_spec(TINY)
    init = jax.jit(lambda key: init_params(spec, key))
    first = init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, first, init(jax.random.key(0)))
    eager = init_params(spec, jax.random.key(0))  # unfused: the last bit may differ
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), first, eager)
    other = leaves(init(jax.random.key(1)))
    for path, leaf in leaves(first).items():
        if path[-1] == "scale":
            assert (leaf == 1).all()
        else:
            assert not np.array_equal(leaf, other[path]), path
            assert 0.01 < leaf.std() < 0.03, path
    where = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), spec.params)
    by_kind = init_sharded(spec, jax.random.key(0), where)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), first, by_kind)
    kernels = [leaf for path, leaf in leaves(first).items() if path[-2:] == ("up", "kernel")]
    assert not np.array_equal(*kernels)  # two layers, two draws


def test_logits_are_causal_and_remat_changes_nothing():
    spec = model_spec(TINY)
    params = fresh(spec)
    tokens = jnp.arange(10).reshape(2, 5)
    plain = head_output(spec, params, tokens)
    changed = head_output(spec, params, tokens.at[:, 3:].set(7))
    np.testing.assert_array_equal(plain[:, :3], changed[:, :3])
    assert not np.array_equal(plain[:, 3:], changed[:, 3:])

    def loss(params, **options):
        return jnp.mean(jax.nn.log_softmax(head_output(spec, params, tokens, **options)) ** 2)

    def gradients(**options):
        program = jax.make_jaxpr(jax.grad(partial(loss, **options)))(params)
        return products_of(program.jaxpr), jax.jit(jax.grad(partial(loss, **options)))(params)

    stored, expected = gradients(remat="none")
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(expected))
    counts = {}
    for remat in ("projections", "attention", "full"):
        counts[remat], found = gradients(remat=remat)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    # The scores of each layer, which XLA's attention needs again; then the projections too.
    assert stored < counts["projections"] < counts["attention"] <= counts["full"]
    products, found = gradients(remat="full", scan=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    assert products < counts["full"]


def products_of(jaxpr) -> int:
    """Matrix products of a program as it is computed: a function of two calls counts twice."""
    count = 0
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            count += products_of(inner) if hasattr(inner, "eqns") else 0
    return count


def test_layers_of_unlike_windows_are_not_scanned():
    config = families.config_from_hf(
        {
            **LLAMA,
            "architectures": ["Qwen2ForCausalLM"],
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 1,
        }
    )
    spec = model_spec(config)
    with pytest.raises(ValueError, match="scan_layers"):
        head_output(spec, fresh(spec), jnp.zeros((1, 4), jnp.int32), scan=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_parameters_are_those_of_the_model(name):
    assert num_parameters(CONFIGS[name]) == model_spec(CONFIGS[name]).num_params


def test_a_scan_runs_a_pattern_of_layers_and_what_remains():
    """Five layers in periods of two: the last one has no whole period."""
    config = replace(
        CONFIGS["gemma3"], num_layers=5, sliding_window=(3, None, 3, None, 3), intermediate_size=8
    )
    spec = model_spec(config)
    tokens = jnp.arange(12).reshape(2, 6)
    params = jax.tree.map(lambda x: x * 9, fresh(spec))
    expected = head_output(spec, params, tokens)
    assert jnp.abs(expected).max() > 0.1
    scanned = head_output(spec, params, tokens, scan=True)
    np.testing.assert_allclose(scanned, expected, atol=1e-5)


@pytest.mark.parametrize("hybrid", [False, True])
def test_merged_projections_compute_the_same(hybrid):
    """Of attention with biases, and of a gated delta rule."""
    attention = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1}
    config = families.config_from_hf(MODEL | HYBRID if hybrid else attention)
    spec = model_spec(config)
    params = jax.tree.map(lambda x: x + 0.1, fresh(spec))
    merged_spec, merged = merge_projections(spec, params)
    jax.tree.map(lambda x, y: np.testing.assert_equal(x.shape, y.shape), merged, merged_spec.params)
    tokens = jnp.arange(10).reshape(2, 5)
    np.testing.assert_allclose(
        head_output(merged_spec, merged, tokens), head_output(spec, params, tokens), atol=1e-5
    )
    assert merged_spec != spec and merged_spec.num_params == spec.num_params


def test_float8_projections_are_near_the_bf16_ones():
    config = families.config_from_hf(
        {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1}
    )
    spec = model_spec(config, dtype="bfloat16")
    params = jax.tree.map(lambda x: x + jnp.bfloat16(0.01), fresh(spec))
    merged_spec, merged = merge_projections(spec, params)
    small_spec, small = quantize_projections(merged_spec, merged)
    jax.tree.map(
        lambda x, y: np.testing.assert_equal((x.shape, x.dtype), (y.shape, y.dtype)),
        small,
        small_spec.params,
    )
    attention = small["decoder"]["layers"]["0"]["attention"]
    assert attention["qkv"]["kernel"].dtype == attention["o"]["kernel"].dtype == FLOAT8
    # The largest weight of each output is the largest float8, so 3 bits of mantissa are kept.
    kernel = attention["o"]["kernel"].astype(jnp.float32)
    np.testing.assert_array_equal(jnp.abs(kernel).max(axis=(1, 2)), FLOAT8_MAX)
    plain = merged["decoder"]["layers"]["0"]["attention"]["o"]["kernel"].astype(jnp.float32)
    whole = jnp.moveaxis(kernel * attention["o"]["scale"][:, None, None], 0, -1)
    error = jnp.linalg.norm(whole - plain) / jnp.linalg.norm(plain)
    assert 0.005 < error < 0.04
    tokens = jnp.arange(10).reshape(2, 5)
    found, expected = (
        head_output(*model, tokens).astype(jnp.float32)
        for model in ((small_spec, small), (merged_spec, merged))
    )
    assert 0 < jnp.linalg.norm(found - expected) < 0.1 * jnp.linalg.norm(expected)


def test_a_float8_input_may_be_zero_or_huge():
    x = jnp.array([[0.0, 0.0], [1e30, -5e29], [1e-30, 0.0]])
    small, scale = to_float8(x, axis=-1)
    np.testing.assert_allclose(small.astype(jnp.float32) * scale, x, rtol=0.04)


def test_a_float32_residual_is_nearer_to_float32_weights():
    exact = model_spec(TINY)
    params = fresh(exact)
    half_spec = model_spec(TINY, dtype="bfloat16")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    tokens = jnp.arange(60).reshape(2, 30) % TINY.vocab_size
    expected = head_output(exact, rounded, tokens)
    errors = [
        float(jnp.abs(head_output(half_spec, half, tokens, residual_dtype=dtype) - expected).mean())
        for dtype in (None, "float32")
    ]
    assert errors[1] < 0.9 * errors[0]


def test_decoding_with_a_cache_equals_whole_rows():
    config = families.config_from_hf(
        {
            **LLAMA,
            "architectures": ["Qwen2ForCausalLM"],
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 1,
        }
    )
    assert config.sliding_window == (None, 3)
    spec = model_spec(config)
    params = fresh(spec)
    tokens = jnp.arange(12).reshape(2, 6) % 11
    cache = tuple(jnp.zeros((2, 1, 2, 6, 4)) for _ in range(2))

    @jax.jit
    def step(cache, t):
        def attend(q, k, v, layer_cache, /, *, window):
            new = jnp.stack([k[:, 0], v[:, 0]], axis=2)
            no_prompt, zeros = jnp.zeros((1, 1, 2, 1, 4)), jnp.zeros((2,), jnp.int32)
            pages = jnp.arange(2)[:, None]
            inputs = DecodeInputs(
                *(q[:, 0], new),
                *(no_prompt, zeros, zeros),
                *(layer_cache, pages, jnp.full(2, t + 1)),
            )
            out, layer_cache = prefix_decode_attention(inputs, window=window)
            return out[:, None], layer_cache

        model = bind(spec, params)
        token = jax.lax.dynamic_slice_in_dim(tokens, t, 1, axis=1)
        hidden, cache = model(token, jnp.full((2, 1), t), attend=attend, cache=cache)
        return model.logits(hidden)[:, 0], cache

    expected = head_output(spec, params, tokens)
    for t in range(6):
        logits, cache = step(cache, t)
        np.testing.assert_allclose(logits, expected[:, t], atol=1e-6)


def test_bf16_model_computes_in_bf16_and_gives_float32_logits():
    spec = model_spec(TINY, dtype="bfloat16")
    params = fresh(spec)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    tokens = jnp.arange(5)[None]
    hidden, _ = bind(spec, params)(tokens, tokens, attend=full_attention)
    assert hidden.dtype == jnp.bfloat16
    logits = head_output(spec, params, tokens)
    assert logits.dtype == jnp.float32
    exact = model_spec(TINY)
    params32 = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    np.testing.assert_allclose(logits, head_output(exact, params32, tokens), atol=0.02)


def test_a_frequent_token_s_gradients_add_up_in_float32():
    """4,096 of them, all alike: a sum in bf16 stays at 256 of the first."""
    spec = model_spec(TINY, dtype="bfloat16")
    tokens = jnp.full((4, 1025), 7).at[:, 0].set(jnp.arange(4))
    weights = jnp.linspace(0.1, 0.3, TINY.hidden_size).astype(jnp.bfloat16)

    def total(params):
        return (bind(spec, params).decoder.embed(tokens) * weights).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(total))(fresh(spec))["decoder"]["embed"]["table"]
    assert gradient.dtype == jnp.bfloat16
    counts = np.bincount(np.asarray(tokens).reshape(-1), minlength=TINY.vocab_size)
    expected = counts[:, None] * np.asarray(weights, np.float64)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, rtol=2**-8)


def test_the_gradient_of_a_kernel_is_the_transposed_input_times_g():
    """jax's own rule transposes g, which XLA's CPU backend writes column by column."""
    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    kernel = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)

    def loss(x, kernel):
        return jnp.sum(jnp.sin(multiply(x, kernel, 1)))

    gradients = jax.grad(loss, (0, 1))
    text = str(jax.make_jaxpr(gradients)(x, kernel))
    assert "f32[3,5] = dot_general" in text and "f32[5,3]" not in text
    g = np.cos(np.float64(x) @ kernel)
    for found, expected in zip(
        gradients(x, jnp.asarray(kernel)),
        (g @ kernel.T, np.einsum("btd,btf->df", x, g)),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_scalar_model_copies_the_decoder_of_a_tied_model_and_starts_at_zero():
    config = families.config_from_hf({**LLAMA, "tie_word_embeddings": True})
    lm = fresh(model_spec(config))
    spec = model_spec(config, "scalar")
    params = scalar_params_from(lm, spec, jax.random.key(1))
    assert jax.tree.structure(params) == jax.tree.structure(spec.params)
    jax.tree.map(np.testing.assert_array_equal, params["decoder"], lm["decoder"])
    tokens = jnp.arange(10).reshape(2, 5)
    assert bind(spec, params).decoder.config == config
    scores = head_output(spec, params, tokens)
    assert scores.shape == (2, 5, 1) and (scores == 0).all()
    # Donating one must leave the other alive.
    before = np.array(lm["decoder"]["embed"]["table"])
    double = jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p), donate_argnums=0)
    double(params)
    np.testing.assert_array_equal(lm["decoder"]["embed"]["table"], before)
    with pytest.raises(ValueError, match="model_spec"):
        scalar_params_from(lm, model_spec(config), jax.random.key(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["Bert"], "model_type": "bert"},
            "Bert is not .*: no file .* deepseek_v3",
        ),
        (
            {"architectures": ["T5"], "is_encoder_decoder": True},
            "T5 is not .*: it has an encoder and",
        ),
        (
            {"architectures": ["Llava"], "text_config": {"model_type": "llama"}},
            "it has an encoder of images .* gemma3, .* language model is a llama, which opens if",
        ),
        ({"architectures": ["LlamaForTokenClassification"]}, "of llama, LlamaForCausalLM and"),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {"model_type": "x"},
            },
            "the language half of this mistral3 model is a 'x'",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_key_value_heads": 2}, "not a multiple of num_kv_heads"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"] * 2},
            "linear_attention",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        families.config_from_hf({**LLAMA, **change})


def test_a_null_flag_of_deepseek_is_off():
    """As transformers reads it; a missing one is on."""
    hf = json.loads(str(np.load(GOLDENS[0].with_stem("deepseek_v3"))["config"]))
    for flag, expected in ((None, False), (True, True)):
        config = families.config_from_hf(hf | {"norm_topk_prob": flag, "rope_interleave": flag})
        assert config.interleaved_rope is config.mixture.normalized is expected


@pytest.mark.parametrize("use", [{}, {"use_sliding_window": False}, {"use_sliding_window": None}])
def test_a_window_of_smollm3_that_attentions_read_differently_is_refused(use):
    """transformers' masks have it, and its flash attention has not."""
    hf = families.to_hf_config(CONFIGS["smollm3"], "causal_lm")
    assert hf["use_sliding_window"] and "sliding_attention" in hf["layer_types"]
    del hf["use_sliding_window"]
    with pytest.raises(ValueError, match="smollm3 with sliding_attention in layer_types with use_"):
        families.config_from_hf(hf | use)
    whole = families.config_from_hf(hf | use | {"layer_types": None})
    assert set(whole.sliding_window) == {None}


def test_the_old_rope_type_of_gemma3_is_refused():
    """transformers 5 reads it as no scaling; earlier ones scaled by it."""
    hf = families.to_hf_config(CONFIGS["gemma3"], "causal_lm")
    del hf["rope_parameters"]
    old = {"type": "linear", "factor": 8.0}
    with pytest.raises(ValueError, match="gemma3_text whose rope_scaling has no rope_type with ty"):
        families.config_from_hf(hf | {"rope_scaling": old})
    scaled = families.config_from_hf(hf | {"rope_scaling": old | {"rope_type": "linear"}})
    assert scaled.rope_scaling == LinearRope(factor=8.0)
    assert families.config_from_hf(hf | {"rope_scaling": {"type": "default"}}).rope_scaling is None


@pytest.mark.parametrize("rope", [{}, {"rope_theta": None}, {"rope_scaling": {"type": "linear"}}])
@pytest.mark.parametrize("family, theta", [("mixtral", 1e6), ("smollm3", 2e6), ("llama", 1e4)])
def test_a_missing_rope_theta_is_the_family_s_with_and_without_scaling(family, theta, rope):
    name = {"mixtral": "mixtral_tied", "llama": "llama_5_5_linear"}.get(family, family)
    hf = json.loads(str(np.load(GOLDENS[0].with_stem(name))["config"])) | {"rope_parameters": None}
    hf |= {key: value and value | {"factor": 2.0} for key, value in rope.items()}
    assert families.config_from_hf(hf).rope_theta == theta


def test_wrong_weights_are_refused_by_name():
    tensor = families.hf_names(TINY, "causal_lm")["decoder", "norm", "scale"]
    with pytest.raises(ValueError, match="model.norm.weight has shape"):
        tensor.to_ours(np.zeros(13))


def test_tensors_that_an_import_may_skip():
    tied = families.config_from_hf({**LLAMA, "tie_word_embeddings": True})
    assert families.ignored_tensor(tied, "causal_lm", "lm_head.weight")
    assert families.ignored_tensor(TINY, "scalar", "lm_head.weight")
    assert not families.ignored_tensor(TINY, "causal_lm", "lm_head.weight")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert families.ignored_tensor(TINY, "causal_lm", name)
