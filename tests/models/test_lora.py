"""Adapters: which modules have one, merged weights, and layers that read a `Weight`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled
from flax import nnx
from further import further
from tiny import model_config
from tiny_iteration import random_params
from tiny_models import CONFIGS, HYBRID_EXPERTS, with_rule

from jaxrl_llm.models.base import (
    bind,
    dense_spec,
    draw_params,
    frozen_spec,
    merge_adapters,
    model_spec,
)
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.frozen import dequantized, is_frozen, quantized_as
from jaxrl_llm.models.layers import Projection
from jaxrl_llm.models.lora import Lora, first_magnitudes, join, merged_ahead, split
from jaxrl_llm.models.lora_targets import chosen_modules
from jaxrl_llm.models.weight import Weight

NAMES = [f"model.layers.{i}.self_attn.{n}_proj.weight" for i in (0, 1) for n in "qo"]
NAMES += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
TOKENS = jnp.arange(10).reshape(2, 5)
# The modules of Qwen3-Next's rule and their leaves. Qwen3.5's share less.
RULE = {"gate": "ab", "k": "b", "q": "b", "v": "b", "decay": "ab", "rate": "b", "o": "ab"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["all-linear"], [n for n in NAMES if "proj" in n]),
        (["q_proj"], [n for n in NAMES if "q_proj" in n]),
        ([r"model\.layers\.1\..*", "lm_head"], [n for n in NAMES if ".1." in n or "head" in n]),
        (["model.layers.0.self_attn.o_proj"], ["model.layers.0.self_attn.o_proj.weight"]),
    ],
)
def test_targets_are_names_or_patterns(targets, expected):
    found = chosen_modules(targets, NAMES)
    assert found == {name.removesuffix(".weight") for name in expected}


@pytest.mark.parametrize("target", ["qproj", "norm", "layers.0", "("])
def test_a_target_that_no_module_has(target):
    with pytest.raises(ValueError, match="lora.targets"):
        chosen_modules([target], NAMES)


def one_layer(**changes):
    return model_config(num_layers=1, sliding_window=(None,), **changes)


def lora_of(config, targets=("all-linear",), **changes):
    modules = chosen_modules(targets, [t.name for t in hf_names(config, "causal_lm").values()])
    return Lora(**{"rank": 2, "alpha": 3.0, "modules": modules} | changes)


def by_operation(spec, params):
    """Logits, each operation rounded as it is written: a program may keep more bits."""

    def attend(q, k, v, cache, **_):
        return jnp.repeat(v, q.shape[2] // v.shape[2], axis=2), cache

    model = bind(spec, params)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    return model.logits(model(TOKENS, positions, attend=with_rule(attend))[0])


logits = jax.jit(by_operation, static_argnums=0)


def merged(spec, params):
    """`merge_adapters` as one program."""
    return dense_spec(spec), compiled(lambda x: merge_adapters(spec, x)[1], params)


@pytest.mark.parametrize(
    ("flags", "targets"),
    [({}, ("all-linear", "embed_tokens", "lm_head")), ({"dora": True}, ("all-linear",))],
    ids=["lora", "dora"],
)
def test_merged_weights_are_the_same_model(flags, targets):
    # As many tokens as hidden sizes: which dim of the head is which, its shape does not say.
    config = one_layer(tie_word_embeddings=False, vocab_size=32)
    check_merged(config, targets, **flags)


@pytest.mark.parametrize(
    ("config", "layer", "modules"),
    further(
        [
            (CONFIGS["phi3"], "1", {"k": "ab", "q": "b", "v": "b", "o": "ab"}),
            (CONFIGS["gpt_oss"], "1", {"gate": "ab", "up": "b"}),
            (CONFIGS["qwen3_5"], "0", RULE | {"k": "ab", "gate": "ab", "rate": "ab"}),
            (HYBRID_EXPERTS, "0", RULE),
        ]
    ),
    ids=["phi3", "gpt_oss", "qwen3_5", "qwen3_next"],
)
def test_modules_of_one_tensor_share_a(config, layer, modules):
    stacks = ("gate_up_proj", "down_proj") if config.family == "gpt_oss" else ()
    spec = check_merged(config, ("all-linear", *stacks))
    layer = spec.learned["decoder"]["layers"][layer]
    found = layer["mlp" if "up" in modules else "attention"]
    assert {module: "".join(sorted(found[module]["adapter"])) for module in modules} == modules


def test_a_hybrid_model_with_new_adapters_is_its_base():
    # New adapters add exactly 0. DoRA divides by norms and multiplies by them: it rounds.
    for flags, error in (({}, 0), ({"dora": True}, 1e-5)):
        config = CONFIGS["qwen3_5"]
        spec = model_spec(config, lora=lora_of(config, **flags))
        base = random_params(model_spec(config).params, 1, 0.1)
        own = draw_params(spec, spec.learned, jax.random.key(0))
        whole = compiled(lambda x, lora=spec.lora: first_magnitudes(x, lora), join(base, own))
        found = logits(spec, whole)
        np.testing.assert_allclose(found, logits(model_spec(config), base), rtol=0, atol=error)
    layer = spec.learned["decoder"]["layers"]["0"]["attention"]
    assert set(layer) == {"q", "k", "v", "gate", "rate", "decay", "o"}
    assert layer["decay"]["adapter"]["magnitude"].shape == (4,)


@pytest.mark.nightly
@pytest.mark.parametrize("merge", [False, True], ids=["apart", "merged"])
def test_gradients_of_the_rule_follow_from_those_of_its_weights(merge):
    """d A = s d W B^T and d B = s A^T d W, added up over the parts of a tensor for their A."""
    spec = model_spec(HYBRID_EXPERTS, lora=lora_of(HYBRID_EXPERTS, (r".*linear_attn\..*",)))
    params = random_params(spec.params, 1, 0.2)
    base, own = split(params)
    dense, weights = merge_adapters(spec, params)
    ahead = merged_ahead(params, spec.lora, "float32") if merge else base

    def total(spec, params):
        return jnp.sin(3 * logits(spec, params)).sum()

    found = jax.jit(jax.grad(lambda own: total(spec, join(ahead, own))))(own)
    of_weights = jax.jit(jax.grad(lambda weights: total(dense, weights)))(weights)
    layer = ("decoder", "layers", "0", "attention")
    found, own, of_weights = (of_layer(tree, layer) for tree in (found, own, of_weights))
    tensors = (("gate", "q", "k", "v"), ("decay", "rate"), ("o",))
    assert set(found) == {part for parts in tensors for part in parts}
    for parts in tensors:
        a, rank = own[parts[0]]["adapter"]["a"], spec.lora.rank
        of_a = 0
        for part in parts:
            b = own[part]["adapter"]["b"].reshape(rank, -1)
            of_kernel = of_weights[part]["kernel"].reshape(a.size // rank, -1)
            of_a += spec.lora.scale * of_kernel @ b.T
            of_b = spec.lora.scale * a.reshape(-1, rank).T @ of_kernel
            one = found[part]["adapter"]["b"].reshape(rank, -1)
            assert np.linalg.norm(one - of_b) <= 1e-4 * np.linalg.norm(of_b), part
        one = found[parts[0]]["adapter"]["a"].reshape(-1, rank)
        assert np.linalg.norm(one - of_a) <= 1e-4 * np.linalg.norm(of_a), parts[0]


def of_layer(tree, path):
    for part in path:
        tree = tree[part]
    return tree


def test_a_hybrid_base_in_float8_equals_one_that_was_dequantised_before():
    """What goes through exp is not in float8."""
    config = CONFIGS["qwen3_5"]
    lora = lora_of(config)
    spec = frozen_spec(config, "causal_lm", "float8", "float32", lora)
    dense = model_spec(config, lora=lora)
    params = random_params(dense.params, 1, 0.2)
    base, own = split(params)
    frozen = compiled(lambda base: quantized_as(split(spec.params)[0], base), base)
    rule = frozen["decoder"]["layers"]["0"]["attention"]
    assert {name for name in rule if is_frozen(rule[name])} == {"q", "k", "v", "gate", "o"}
    before = compiled(lambda frozen: dequantized(frozen, "float32"), frozen)
    assert np.abs(logits(dense, join(before, own)) - logits(dense, params)).max() > 1e-3
    found = logits(spec, join(frozen, own))
    np.testing.assert_allclose(found, logits(dense, join(before, own)), atol=1e-5)
    np.testing.assert_allclose(logits(*merged(spec, join(frozen, own))), found, atol=1e-4)


def check_merged(config, targets, **flags):
    spec = model_spec(config, lora=lora_of(config, targets, **flags))
    atol = 1e-5 if config.delta is None else 1e-4  # units of small keys: rounding grows
    params = random_params(spec.params, 1, 0.2)
    base, own = split(params)
    assert jax.tree.structure(join(base, own)) == jax.tree.structure(params)
    expected = logits(spec, params)
    assert np.abs(expected - logits(model_spec(config), base)).max() > 0.1
    np.testing.assert_allclose(logits(*merged(spec, params)), expected, atol=atol)
    if spec.lora.merges_updates:
        ahead = compiled(lambda x: merged_ahead(x, spec.lora, "float32"), params)
        ahead = join(ahead, own)
        np.testing.assert_allclose(logits(spec, ahead), expected, atol=atol)
    return spec


def test_small_changes_are_not_lost_in_bfloat16():
    """To the nearest, the sum of a weight on the grid and a tenth of a step is the weight."""
    lora = Lora(rank=1, alpha=1.0, modules=frozenset())
    kernel = jnp.full((256, 256), 1.0, jnp.bfloat16)
    adapter = {"a": jnp.full((256, 1), 2.0**-7 * 0.1), "b": jnp.ones((1, 256))}
    module = {"q": {"kernel": kernel, "adapter": adapter}}
    run = jax.jit(lambda module: merged_ahead(module, lora, "bfloat16")["q"]["kernel"].computed)
    found = run(module)
    moved = (found.astype(jnp.float32) - 1.0) / 2.0**-7
    assert set(np.unique(moved)) == {0.0, 1.0}
    np.testing.assert_allclose(moved.mean(), 0.1, atol=0.005)  # 65,536 draws: deviation 0.0012
    np.testing.assert_array_equal(found, run(module))


@pytest.mark.nightly
def test_updates_compute_the_tables_that_generation_has():
    """In bf16 a sum of base and adapter is rounded; both sides read the one of `merged`."""
    config = one_layer(tie_word_embeddings=False, vocab_size=32)
    lora = lora_of(config, ("embed_tokens", "lm_head"))
    spec = model_spec(config, dtype="bfloat16", lora=lora)
    params = random_params(spec.params, 1, 0.2)
    params = jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), params, spec.params)
    base, own = split(params)
    ahead = merged_ahead(params, lora, "bfloat16")

    def total(own):
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), own)
        found = by_operation(spec, join(ahead, low))
        return jnp.square(found).sum(), found

    gradient, found = jax.grad(total, has_aux=True)(own)
    np.testing.assert_array_equal(found, by_operation(*merge_adapters(spec, params, "bfloat16")))
    apart = jax.grad(lambda own: jnp.square(by_operation(spec, join(base, own))).sum())(own)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(apart), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.linalg.norm(one - other) < 0.05 * np.linalg.norm(other)


def test_what_cannot_have_an_adapter():
    tied, own_head = model_config(), model_config(tie_word_embeddings=False)
    with pytest.raises(ValueError, match="also the head of this model"):
        model_spec(tied, lora=lora_of(tied, ["embed_tokens"]))
    with pytest.raises(ValueError, match="lora.dora: lm_head.weight is a table"):
        model_spec(own_head, lora=lora_of(own_head, ["lm_head"], dora=True))


def test_a_projection_with_a_bias_reads_a_weight():
    """Full training in bf16: the shape of the result was asked of the `Weight`."""
    layer = Projection((4, 2, 3), ("embed", "q_heads", "head_dim"), bias=True, dtype="bfloat16")
    graphdef, state = nnx.split(layer)
    values = random_params(nnx.to_pure_dict(state), 0)
    stored = {name: value.astype(np.float32) for name, value in values.items()}
    x = jnp.ones((5, 4), jnp.bfloat16)

    def total(stored):
        weights = {n: Weight(v, jnp.asarray(v, jnp.bfloat16)) for n, v in stored.items()}
        return nnx.merge(graphdef, weights)(x).astype(jnp.float32).sum()

    gradient = compiled(jax.grad(total), stored)
    assert gradient["kernel"].dtype == jnp.float32
    np.testing.assert_array_equal(gradient["kernel"], np.full((4, 2, 3), 5.0))
    np.testing.assert_array_equal(gradient["bias"], np.full((2, 3), 5.0))
