"""The experts' layer against a loop over tokens in float64, and the losses of its router."""

import copy
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_iteration import random_params
from tiny_models import tiny_config

from jaxrl_llm.kernels.flash_attention import attention_reference
from jaxrl_llm.kernels.grouped_matmul import grouped_matmul
from jaxrl_llm.learner.router_losses import RouterLoss, load_balance, load_metrics, z_loss
from jaxrl_llm.models import expert_rows
from jaxrl_llm.models.base import bind, init_params, model_spec
from jaxrl_llm.models.config import Mixture
from jaxrl_llm.models.experts import Experts, Routed, Router, Routing
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.flops import forward_flops
from jaxrl_llm.models.lora import Lora, attach, join, merged_ahead, split
from jaxrl_llm.models.lora_targets import chosen_modules
from jaxrl_llm.models.shapes import SHAPES, active_parameters, num_parameters

MIXTURE = Mixture(num_experts=4, experts_per_token=2, expert_size=5, normalized=True)
CONFIG = tiny_config("qwen3_moe", qk_norm=True, hidden_size=6, num_heads=2, mixture=MIXTURE)
B, T, D = 2, 7, 6


def experts(mixture=MIXTURE, seed=0, config=CONFIG):
    layer = Experts(config, mixture, form="separate", dtype="float32")
    graphdef, state = nnx.split(layer)
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), state)
    x = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    return graphdef, state, x


@partial(jax.jit, static_argnums=0)
def run(graphdef, state, x, routing=None):
    return nnx.merge(graphdef, state)(x, routing)


def by_hand(state, x, mixture, real=None, chosen=None):
    """Output and chosen experts, token by token in float64."""
    weights = {p[-2]: np.asarray(v, np.float64) for p, v in flat(state).items()}
    out = np.zeros((B, T, D))
    taken = np.full((B, T, mixture.experts_per_token), mixture.num_experts)
    for b, t in np.ndindex(B, T):
        if real is not None and not real[b, t]:
            continue
        token = np.asarray(x[b, t], np.float64)
        logits = token @ weights["router"]
        probs = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-probs)[: mixture.experts_per_token]
        taken[b, t] = best if chosen is None else chosen[b, t]
        total = probs[taken[b, t]].sum() if mixture.normalized else 1.0
        for e in taken[b, t]:
            gate, up = token @ weights["gate"][e], token @ weights["up"][e]
            hidden = gate / (1 + np.exp(-gate)) * up
            out[b, t] += probs[e] / total * (hidden @ weights["down"][e])
    return out, taken


def flat(state):
    return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


@pytest.mark.parametrize("normalized", [True, False])
def test_output_and_choice_are_those_of_a_loop_over_tokens(normalized):
    mixture = replace(MIXTURE, normalized=normalized)
    graphdef, state, x = experts(mixture)
    real = np.arange(T) < np.array([[5], [7]])
    y, routed = run(graphdef, state, x, Routing(real_BT=jnp.asarray(real)))
    expected, taken = by_hand(state, x, mixture, real)
    np.testing.assert_allclose(y, expected, atol=1e-4)  # 0 for padding
    np.testing.assert_array_equal(routed.chosen_BTK, taken)
    np.testing.assert_array_equal(routed.counts_E, np.bincount(taken.ravel(), minlength=5)[:4])
    assert routed.tokens == 12


def test_a_sigmoid_router_chooses_within_open_groups():
    """By hand, in float64: the bias is in the choice of groups and experts, not in the weights."""
    mixture = Mixture(
        num_experts=6,
        experts_per_token=3,
        expert_size=5,
        normalized=True,
        scores="sigmoid",
        num_groups=3,
        groups_per_token=2,
        scaling=2.5,
        shared_size=4,
    )
    graphdef, state, x = experts(mixture)
    y, routed = run(graphdef, state, x)
    weights = {p: np.asarray(v, np.float64) for p, v in flat(state).items()}
    silu = lambda z: z / (1 + np.exp(-z))  # noqa: E731
    for b, t in np.ndindex(B, T):
        token = np.asarray(x[b, t], np.float64)
        scores = 1 / (1 + np.exp(-token @ weights["router", "centroids"]))
        choice = scores + weights["router", "balance"]
        groups = [np.sort(choice[2 * g : 2 * g + 2]).sum() for g in range(3)]
        closed = int(np.argmin(groups))
        choice[2 * closed : 2 * closed + 2] = -np.inf
        best = np.argsort(-choice)[:3]
        np.testing.assert_array_equal(routed.chosen_BTK[b, t], best)
        out = 0.0
        for e in best:
            hidden = silu(token @ weights["gate", "kernel"][e]) * (
                token @ weights["up", "kernel"][e]
            )
            share = 2.5 * scores[e] / scores[best].sum()
            out = out + share * (hidden @ weights["down", "kernel"][e])
        shared = {name: weights["shared", name, "kernel"] for name in ("gate", "up", "down")}
        out += (silu(token @ shared["gate"]) * (token @ shared["up"])) @ shared["down"]
        np.testing.assert_allclose(y[b, t], out, rtol=1e-4, atol=1e-4)
    probs = routed.probs_E.sum() / routed.tokens
    np.testing.assert_allclose(probs, 1.0, rtol=1e-5)


def test_a_sigmoid_router_of_a_bfloat16_model_computes_in_float32():
    """Its choice differs between experts whose centroids are equal in bfloat16."""
    mixture = replace(MIXTURE, experts_per_token=1, scores="sigmoid")
    layer = Router(CONFIG, mixture, dtype="bfloat16")
    graphdef, state = nnx.split(layer)
    centroids = jnp.ones((D, 4)).at[:, 2].add(1e-3)
    state["centroids"].set_value(centroids)
    state["balance"].set_value(jnp.zeros(4))
    choice = nnx.merge(graphdef, state)(jnp.ones((1, 1, D), jnp.bfloat16), Routing())
    np.testing.assert_array_equal(choice.chosen_BTK, [[[2]]])
    np.testing.assert_allclose(choice.logits_BTE[0, 0], D * centroids[0], rtol=1e-6)


def test_all_tokens_may_choose_one_expert():
    mixture = replace(MIXTURE, experts_per_token=1, normalized=False)
    graphdef, state, x = experts(mixture)
    chosen = jnp.full((B, T, 1), 2, jnp.int8)
    y, routed = run(graphdef, state, x, Routing(chosen_BTLK=chosen))
    np.testing.assert_allclose(y, by_hand(state, x, mixture, chosen=chosen)[0], atol=1e-4)
    np.testing.assert_array_equal(routed.counts_E, [0, 0, 14, 0])


def test_gradients_are_those_of_computing_every_expert():
    graphdef, state, x = experts()
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

    def dense(state, x):
        layer = nnx.merge(graphdef, state)
        choice = layer.router(x, Routing())
        chosen = jax.nn.one_hot(choice.chosen_BTK, 4)
        share = jnp.einsum("BTKE,BTK->BTE", chosen, choice.weights_BTK)
        gate = jnp.einsum("BTD,EDF->BTEF", x, layer.gate.kernel[...])
        up = jnp.einsum("BTD,EDF->BTEF", x, layer.up.kernel[...])
        hidden = jax.nn.silu(gate) * up
        return jnp.einsum("BTEF,EFD,BTE->BTD", hidden, layer.down.kernel[...], share)

    ours = jax.grad(lambda s, x: (run(graphdef, s, x)[0] * cotangent).sum(), (0, 1))(state, x)
    theirs = jax.jit(jax.grad(lambda s, x: (dense(s, x) * cotangent).sum(), (0, 1)))(state, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, theirs)


def test_biases_and_clamped_values_and_their_gradients(monkeypatch):
    """Against computing every expert, although the matmuls leave NaN in rows of no expert."""
    monkeypatch.setattr(expert_rows, "grouped_matmul", leaving_nan)
    config = replace(CONFIG, family="gpt_oss", expert_bias=True, swiglu_limit=0.8)
    graphdef, state, x = experts(config=config)
    real = jnp.arange(T) < jnp.array([[5], [7]])
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

    def dense(state, x):
        layer = nnx.merge(graphdef, state)
        assert layer.router.bias is not None
        logits = x @ layer.router.kernel[...] + layer.router.bias[...]
        best = jax.nn.one_hot(jax.lax.top_k(logits, 2)[1], 4).sum(axis=2)
        share = jnp.where(best > 0, jnp.exp(logits), 0) * real[..., None]
        share /= jnp.where(best > 0, jnp.exp(logits), 0).sum(axis=-1, keepdims=True)

        def every(stack, x, form):
            return jnp.einsum(form, x, stack.kernel[...]) + stack.bias[...]

        gate = jnp.minimum(every(layer.gate, x, "BTD,EDF->BTEF"), 0.8)
        up = jnp.clip(every(layer.up, x, "BTD,EDF->BTEF"), -0.8, 0.8)
        hidden = (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))
        out = every(layer.down, hidden, "BTEF,EFD->BTED")
        return jnp.einsum("BTED,BTE->BTD", out, share)

    def ours(state, x):
        return run(graphdef, state, x, Routing(real_BT=real))[0]

    @jax.jit
    def results(state, x):
        both = [jax.vjp(function, state, x) for function in (ours, dense)]
        return [(y, *pull(cotangent)) for y, pull in both]

    found, expected = results(state, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


def leaving_nan(x, kernel, sizes):
    """The matmul, with NaN in rows after the last expert's in both passes, as kernels may leave."""
    unused = (jnp.arange(len(x)) >= sizes.sum())[:, None]
    return jnp.where(unused, jnp.nan, grouped_matmul(nan_gradient(x, unused), kernel, sizes))


@jax.custom_vjp
def nan_gradient(x, where):
    return x


nan_gradient.defvjp(
    lambda x, where: (x, where),
    lambda where, gradient: (jnp.where(where, jnp.nan, gradient), None),
)


def test_minus_one_leaves_the_choice_to_the_router():
    graphdef, state, x = experts()
    own = run(graphdef, state, x)[1].chosen_BTK
    given = jnp.where(jnp.arange(T)[:, None] < 3, -1, jnp.array([0, 3])).astype(jnp.int16)
    given = jnp.broadcast_to(given, own.shape)
    chosen = run(graphdef, state, x, Routing(chosen_BTLK=given))[1].chosen_BTK
    np.testing.assert_array_equal(chosen[:, :3], own[:, :3])
    np.testing.assert_array_equal(chosen[:, 3:], given[:, 3:])


def test_replayed_experts_without_probability_have_the_softmax_of_their_logits():
    """The rollout's weights chose experts whose probability is 0 in float32 under the new ones."""
    graphdef, state, x = experts()
    # Every token gets the logits 0, -250, -251, -252: the last three have probability 0.
    logits = jnp.array([0.0, -250.0, -251.0, -252.0])
    state["router"]["kernel"].set_value(jnp.zeros((D, 4)).at[0].set(logits))
    x = x.at[..., 0].set(1.0)
    chosen = jnp.broadcast_to(jnp.array([1, 2], jnp.int16), (B, T, 2))

    def total(state, x):
        out, _ = nnx.merge(graphdef, state)(x, Routing(chosen_BTLK=chosen))
        return out.sum(), out

    (_, out), gradient = jax.value_and_grad(total, argnums=1, has_aux=True)(state, x)
    weights = {p[-2]: np.asarray(v, np.float64) for p, v in flat(state).items()}
    token = np.asarray(x[0, 0], np.float64)
    shares = np.exp([0.0, -1.0]) / np.exp([0.0, -1.0]).sum()
    expected = np.zeros(D)
    for share, e in zip(shares, (1, 2), strict=True):
        gate, up = token @ weights["gate"][e], token @ weights["up"][e]
        expected += share * (gate / (1 + np.exp(-gate)) * up) @ weights["down"][e]
    np.testing.assert_allclose(out[0, 0], expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(gradient).all()


ROUTED = Routed(  # of two layers, three tokens and two experts, of which each token has one
    counts_E=jnp.array([[3.0, 0.0], [1.0, 2.0]]),
    probs_E=jnp.array([[2.5, 0.5], [1.25, 1.75]]),
    squares=jnp.array([6.0, 9.0]),
    tokens=jnp.array([3.0, 3.0]),
    chosen_BTK=jnp.zeros((2, 1, 3, 1), jnp.int32),
)


def test_losses_of_the_router():
    balance = 2 * (4 / 6 * 3.75 / 6 + 2 / 6 * 2.25 / 6)
    np.testing.assert_allclose(load_balance(ROUTED), balance, rtol=1e-6)
    np.testing.assert_allclose(z_loss(ROUTED), 15 / 6, rtol=1e-6)
    total, metrics = RouterLoss(aux_coef=0.5, z_coef=0.1)(ROUTED, jnp.float32(0.25))
    np.testing.assert_allclose(total, 0.25 * (0.5 * balance + 0.1 * 2.5), rtol=1e-6)
    np.testing.assert_allclose(metrics["router_aux_loss"], 0.25 * balance, rtol=1e-6)
    found = load_metrics(ROUTED.counts_E)
    assert found["router_load"] == 2.0  # the first layer: 3 tokens, on average 1.5
    np.testing.assert_allclose(found["router_load_mean"], (2 + 4 / 3) / 2, rtol=1e-6)
    assert found["router_dead_experts"] == 1


def test_loads_that_cancel_over_layers_cost_by_layer():
    opposite = Routed(
        counts_E=jnp.array([[3.0, 0.0], [0.0, 3.0]]),
        probs_E=jnp.array([[2.4, 0.6], [0.6, 2.4]]),
        squares=jnp.zeros(2),
        tokens=jnp.array([3.0, 3.0]),
        chosen_BTK=jnp.zeros((2, 1, 3, 1), jnp.int32),
    )
    np.testing.assert_allclose(load_balance(opposite), 1.0, rtol=1e-6)  # as if all were equal
    _, metrics = RouterLoss(aux_coef=1.0, by_layer=True)(opposite, jnp.float32(1))
    np.testing.assert_allclose(metrics["router_aux_loss"], 2 * 0.8, rtol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_adapters_of_experts_are_merged_or_apart(monkeypatch, padded):
    """The layer has W + scale * A B of each expert; both forms give the same gradients."""
    names = [tensor.name for tensor in hf_names(CONFIG, "causal_lm").values()]
    modules = chosen_modules(["gate_proj", "down_proj"], names)
    lora = Lora(rank=2, alpha=3.0, modules=modules)
    graphdef, _, x = experts()
    layer = nnx.merge(graphdef, experts()[1])
    paths = {("gate", "kernel"): "model.layers.0.mlp.experts.0.gate_proj.weight"}
    paths |= {("down", "kernel"): "model.layers.0.mlp.experts.0.down_proj.weight"}
    attach(layer, paths, lora)
    graphdef, state = nnx.split(layer)
    params = random_params(nnx.to_pure_dict(state), 1, 0.4)
    base, own = split(params)
    merged_by_hand = copy.deepcopy(base)
    for name in ("gate", "down"):
        adapter = own[name]["adapter"]
        for e in range(4):
            change = 1.5 * adapter["a"][e] @ adapter["b"][e]
            merged_by_hand[name]["kernel"][e] += change
    plain = experts()[0]
    expected, _ = jax.jit(lambda weights: nnx.merge(plain, weights)(x))(merged_by_hand)

    def loss(own, base):
        y, _ = nnx.merge(graphdef, join(base, own))(x)
        return (y**2).sum(), y

    # As on a GPU, where the rank is padded to a tile of the kernel.
    monkeypatch.setattr(expert_rows, "on_hopper", lambda: padded)
    forms = (base, merged_ahead(params, lora, "float32"))
    results = [jax.jit(jax.value_and_grad(loss, has_aux=True))(own, form) for form in forms]
    for (_, y), gradient in results:
        np.testing.assert_allclose(y, expected, atol=1e-5)
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4),
            gradient,
            results[0][1],
        )
    gradient = jax.jit(jax.grad(lambda weights: (nnx.merge(plain, weights)(x)[0] ** 2).sum()))
    by_weights = gradient(merged_by_hand)
    of_w, adapter = by_weights["down"]["kernel"], own["down"]["adapter"]
    of_b = 1.5 * jnp.einsum("edr,edf->erf", adapter["a"], of_w)
    np.testing.assert_allclose(results[0][1]["down"]["adapter"]["b"], of_b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("setting", [{"dora": True}, {"dropout": 0.1}])
def test_experts_have_neither_dora_nor_dropout(setting):
    lora = Lora(rank=2, alpha=3.0, modules=frozenset({"a.experts.0.up_proj"}), **setting)
    with pytest.raises(ValueError, match="adapters of experts.*targets=q_proj"):
        lora.check()


def test_every_expert_starts_with_its_own_weights():
    params = init_params(model_spec(CONFIG), jax.random.key(0))
    gate = params["decoder"]["layers"]["0"]["mlp"]["gate"]["kernel"]
    assert gate.shape == (4, 6, 5)
    assert not np.allclose(gate[0], gate[1])


def test_parameters_and_flops_count_the_experts_of_a_token():
    assert num_parameters(CONFIG) == model_spec(CONFIG).num_params
    olmoe = replace(CONFIG, family="olmoe", qk_norm=True, qk_norm_whole=True, head_dim=4)
    olmoe = replace(olmoe, num_kv_heads=1, hidden_size=8, intermediate_size=5)
    assert num_parameters(olmoe) == model_spec(olmoe).num_params
    # As the files of Qwen/Qwen3-30B-A3B have them; its page says 3.3 billion active ones.
    assert num_parameters(SHAPES["qwen3-30b-a3b"]) == 30_532_122_624
    assert 3.3e9 < active_parameters(SHAPES["qwen3-30b-a3b"]) < 3.4e9
    # 20.9 billion parameters, 3.6 billion active ones without the embedding (arXiv:2508.10925).
    oss = SHAPES["gpt-oss-20b"]
    assert num_parameters(oss) == model_spec(oss).num_params
    assert round(num_parameters(oss) / 1e9, 1) == 20.9
    assert round((active_parameters(oss) - oss.vocab_size * oss.hidden_size) / 1e9, 1) == 3.6
    # Two experts of size 5, of four, cost what a dense layer of size 10 costs, and a router.
    dense = replace(CONFIG, family="qwen3", mixture=None, intermediate_size=10)
    router = 2 * CONFIG.num_layers * 6 * 4
    assert forward_flops(CONFIG, (3, 4)) == forward_flops(dense, (3, 4)) + router * 7


def test_scanned_and_recomputed_layers_route_the_same():
    config = replace(CONFIG, head_dim=4, num_kv_heads=1)
    spec = model_spec(config)
    params = init_params(spec, jax.random.key(1))
    tokens = jnp.arange(10).reshape(2, 5)
    chosen = jnp.full((2, 5, 2, 2), -1).at[:, 2:, 1].set(jnp.array([3, 1]))
    routing = Routing(real_BT=jnp.arange(5) < jnp.array([[4], [5]]), chosen_BTLK=chosen)

    def run(params, **how):
        def attend(q, k, v, cache, /, *, window):
            return attention_reference(q, k, v, causal=True, window=window), cache

        positions = jnp.broadcast_to(jnp.arange(5), tokens.shape)
        model = bind(spec, params)
        hidden, _, routed = model.routed(tokens, positions, attend=attend, routing=routing, **how)
        assert routing.real_BT is not None
        return (hidden * routing.real_BT[..., None]).sum() + z_loss(routed), routed

    plain, again = (
        jax.jit(jax.value_and_grad(partial(run, **how), has_aux=True))(params)
        for how in ({}, {"scan": True, "remat": "full"})
    )
    routed = plain[0][1]
    assert routed.chosen_BTK.shape == (2, 2, 5, 2)
    np.testing.assert_array_equal(routed.chosen_BTK[1, 1, 2:], [[3, 1]] * 3)
    np.testing.assert_array_equal(routed.chosen_BTK[:, 0, 4], np.full((2, 2), 4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, again)
