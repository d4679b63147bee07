"""The train step: accumulation, clipping, bad gradients, schedules; and updates in an iteration."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from further import further
from jax.sharding import NamedSharding, PartitionSpec
from tiny import model_config
from tiny_iteration import (
    PROMPTS,
    N,
    first_states,
    open_iteration,
    packed,
    random_params,
    run_step,
    tiny_config,
)

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.algorithms.value_losses import clipped_value_loss
from jaxrl_llm.config import Custom, OptimizerConfig
from jaxrl_llm.distributed.layout import train_layout
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.learner import optimizer as optimizer_module
from jaxrl_llm.learner.forward import ForwardSettings, response_values
from jaxrl_llm.learner.losses import NONFINITE, PolicyLoss, ValueLoss, with_counts
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.learner.optimizer import make_optimizer, schedule
from jaxrl_llm.learner.rows import rows_of
from jaxrl_llm.learner.train_state import CastAhead, init_state, state_shardings
from jaxrl_llm.learner.train_step import (
    accumulate,
    apply_gradients,
    mini_batches,
    train_step,
)
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import Projection, Weight
from jaxrl_llm.numerics import round_by_chance
from jaxrl_llm.supervision.nonfinite import NonFiniteGradients, check_gradients
from jaxrl_llm.trainer.states import to_items

MODEL = ModelConfig(
    family="llama",
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)
B, P, R = 16, 4, 6
SETTINGS = ForwardSettings()


def whole(tree):
    """The constraint of a mesh of one device: none."""
    return tree


def rollout(seed: int = 0) -> dict[str, jax.Array]:
    """Fields of an update; responses are from 0 to R tokens long."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, R + 1, B)
    lengths[3], lengths[4:8] = 0, R  # an empty response, and a micro-batch of long ones
    mask = (np.arange(R) < lengths[:, None]).astype(np.float32)

    def tokens(*shape):
        return rng.integers(0, MODEL.vocab_size, shape).astype(np.int32)

    def numbers(scale):
        return (scale * rng.normal(size=(B, R)) * mask).astype(np.float32)

    fields = {
        "group_ids": np.arange(B, dtype=np.int32) % 5,  # in several micro-batches
        "prompts": tokens(B, P),
        "prompt_lengths": rng.integers(1, P + 1, B).astype(np.int32),
        "responses": tokens(B, R),
        "response_lengths": lengths.astype(np.int32),
        "mask": mask,
        "old_logprobs": numbers(0.3) - 3.2 * mask,
        "reference_logprobs": numbers(0.3) - 3.2 * mask,
        "advantages": numbers(1.0),
        "values": numbers(1.0),
        "returns": numbers(1.0),
    }
    return {name: jnp.asarray(x) for name, x in fields.items()}


def make_policy_loss(**settings):
    spec = model_spec(MODEL)
    algorithm = build_online(c.PPO(**settings))
    return spec, PolicyLoss(algorithm=algorithm, spec=spec, settings=SETTINGS, temperature=0.9)


def cases():
    everything = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01}
    for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "prompt-mean"):
        yield f"policy {name}", *make_policy_loss(loss_aggregation=name, **everything), rollout()
    spec = model_spec(MODEL, "scalar")
    algorithm = build_online(c.PPO())
    yield "value", spec, ValueLoss(algorithm=algorithm, spec=spec, settings=SETTINGS), rollout()


CASES = {name: case for name, *case in cases()}


@pytest.mark.parametrize(
    "name",
    further(
        pytest.param(name, marks=[pytest.mark.slow] if name.endswith("token-sum") else [])
        for name in CASES
    ),
)
def test_accumulation_equals_the_full_batch(name):
    """The micro-batches hold very different numbers of tokens: 1e-6 of the gradient's size."""
    spec, loss, fields = CASES[name]
    params = random_params(spec.params, seed=1, scale=0.05)

    def gradients(params, fields, parts):
        batch = loss.inputs(fields, jnp.bool_(False))
        return accumulate(
            loss, params, batch, cast_ahead=SETTINGS.cast_ahead, micro_batches=Padded(num=parts)
        )

    run = jax.jit(gradients, static_argnums=2)
    grads, metrics = run(params, fields, 1)
    found, found_metrics = run(params, fields, 4)
    assert norm(jax.tree.map(np.subtract, found, grads)) <= 1e-6 * norm(grads)
    assert (metrics.pop("micro_batches"), found_metrics.pop("micro_batches")) == (1, 4)
    for key, value in metrics.items():
        np.testing.assert_allclose(found_metrics[key], value, rtol=1e-6, atol=1e-6)
    assert norm(grads) > 1e-3


def norm(tree) -> float:
    """Of all leaves together, without a program for each shape."""
    return float(np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in jax.tree.leaves(tree))))


def test_the_critic_learns_nothing_from_rejected_tokens():
    spec = model_spec(MODEL, "scalar")
    algorithm = build_online(c.PPO(rollout_rs="token_k2", rollout_rs_threshold=0.1))
    loss = ValueLoss(algorithm=algorithm, spec=spec, settings=SETTINGS)
    fields = rollout()
    kept = fields["mask"] * (jnp.arange(R) % 2)
    assert set(loss.reads) <= {*fields, "loss_mask"} and "loss_mask" in loss.reads

    @jax.jit
    def both(params, fields):
        """The loss, and the mean of the formula over the tokens that are kept."""
        new = response_values(params, rows_of(fields), spec=spec, settings=SETTINGS)
        each, _ = clipped_value_loss(new, fields["values"], fields["returns"], kept)
        batch = loss.inputs(fields | {"loss_mask": kept}, jnp.bool_(False))
        return loss(params, batch)[0], each.sum() / kept.sum()

    found, expected = both(random_params(spec.params, seed=1, scale=0.05), fields)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


CASTS = [
    CastAhead(dtype="bfloat16", float32_gradients=float32_gradients)
    for float32_gradients in (True, False)
]


@pytest.mark.parametrize("cast_ahead", CASTS)
def test_parts_are_computed_in_bf16_and_summed_in_float32(cast_ahead):
    """A sum of 256 and 1 in bf16 is 256."""

    def loss(params, part):
        weights = params["w"][...]
        assert weights.dtype == jnp.bfloat16
        return (weights * part["x"].astype(jnp.bfloat16)).astype(jnp.float32).sum(), {}

    loss.spec = model_spec(model_config())
    x, ones = jnp.array([256.0, 1.0, 1.0, 1.0]), jnp.ones((4, 1), jnp.int32)
    fields = {
        "x": x,
        "prompts": ones,
        "responses": ones,
        "prompt_lengths": ones[:, 0],
        "response_lengths": ones[:, 0],
    }
    params = {"w": jnp.array([1 + 2.0**-12])}
    grads, metrics = accumulate(
        loss, params, fields, cast_ahead=cast_ahead, micro_batches=Padded(num=4)
    )
    assert grads["w"].dtype == jnp.float32 and grads["w"] == 259
    assert metrics["loss"] == 259


@pytest.mark.parametrize("contract, bias", [(1, True), (2, False)])
def test_a_kernels_gradient_is_not_rounded_where_parts_are_added_up(contract, bias):
    """It is a sum of products of bf16 numbers, each exact in float32."""
    shape = (6, 4, 8)
    draws = iter(jax.random.split(jax.random.key(0), 4))
    layer = Projection(
        shape, ("embed", "q_heads", "head_dim"), contract=contract, bias=bias, dtype=jnp.float32
    )
    x = jax.random.normal(next(draws), (2, 5, *shape[:contract]), jnp.bfloat16)
    cotangent = jax.random.normal(next(draws), (2, 5, *shape[contract:]), jnp.bfloat16)
    graphdef, params = nnx.split(layer)
    params = jax.tree.map(lambda p: jax.random.normal(next(draws), p.shape), params)
    copies = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def output(x, params):
        return nnx.merge(graphdef, params)(x)

    def of_weights(x, stored):
        return output(x, jax.tree.map(Weight, stored, copies))

    out, pull = jax.vjp(of_weights, x, params)
    plain_out, plain_pull = jax.vjp(output, x, copies)
    np.testing.assert_array_equal(out, plain_out)
    (dx, grads), (plain_dx, plain_grads) = pull(cotangent), plain_pull(cotangent)
    np.testing.assert_array_equal(dx, plain_dx)
    wide = (np.asarray(a, np.float64).reshape(10, -1) for a in (x, cotangent))
    exact = np.einsum("td,tf->df", *wide).reshape(shape)
    kernel, plain = (np.asarray(g["kernel"][...], np.float64) for g in (grads, plain_grads))
    np.testing.assert_allclose(kernel, exact, rtol=1e-5, atol=1e-5)
    assert np.abs(plain - exact).max() > 1e-3
    if bias:
        np.testing.assert_array_equal(
            np.float32(grads["bias"][...]), np.float32(plain_grads["bias"][...])
        )


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "projections"])
def test_gradients_of_stored_weights_are_those_of_their_copies(remat):
    """With several parts, where each projection's is float32, and the sum of each part alone."""
    two = dict(num_layers=2, sliding_window=(None, None))
    spec = model_spec(replace(MODEL, family="qwen2", attention_bias=True, **two))
    settings = ForwardSettings(dtype="bfloat16", remat=remat)
    assert settings.cast_ahead == CastAhead(dtype="bfloat16", float32_gradients=True)
    algorithm = build_online(c.PPO())
    loss = PolicyLoss(algorithm=algorithm, spec=spec, settings=settings, temperature=1.0)
    params = random_params(spec.params, seed=1, scale=0.05)
    batch = jax.tree.map(np.asarray, with_counts(rollout(), jnp.bool_(False)))
    run = jax.jit(
        partial(accumulate, loss, params, cast_ahead=settings.cast_ahead),
        static_argnames="micro_batches",
    )
    found, _ = run(batch, micro_batches=Padded(num=4))
    alone = [
        run(jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batch), micro_batches=Padded())[0]
        for i in range(4)
    ]
    expected = jax.tree.map(lambda *parts: sum(map(np.asarray, parts)), *alone)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == jnp.float32
        error = norm(np.subtract(ours, theirs)) / norm(theirs)
        assert error < 2e-2  # bf16's rounding; most are below 0.7 %
    assert norm(jax.tree.map(np.subtract, found, expected)) > 0


def test_what_several_devices_or_scanned_layers_send_is_not_float32():
    layout = train_layout(make_mesh(devices=jax.devices()[:1]), 1)
    for settings in (ForwardSettings(layout=layout), ForwardSettings(scan_layers=True)):
        assert settings.cast_ahead == CastAhead(dtype="float32", float32_gradients=False)
    assert ForwardSettings(remat="full").cast_ahead is None


@pytest.mark.parametrize("cast_ahead", CASTS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_gradients_of_biases_and_norms_are_not_summed_in_bf16(family, cast_ahead):
    """No sum of the whole program is."""
    bias, norm = family == "qwen2", family == "qwen3"
    model = replace(MODEL, family=family, attention_bias=bias, qk_norm=norm)
    spec, settings = model_spec(model), ForwardSettings(dtype="bfloat16")
    algorithm = build_online(c.PPO())
    loss = PolicyLoss(algorithm=algorithm, spec=spec, settings=settings, temperature=1.0)

    def gradients(params, fields):
        batch = loss.inputs(fields, jnp.bool_(False))
        micro_batches = Packed(row_tokens=64, group=2)
        return accumulate(loss, params, batch, cast_ahead=cast_ahead, micro_batches=micro_batches)

    sums = [
        equation.outvars[0].aval
        for equation in equations(jax.make_jaxpr(gradients)(spec.params, rollout()).jaxpr)
        if equation.primitive.name == "reduce_sum"
    ]
    assert len(sums) > 10
    assert not [aval for aval in sums if aval.dtype == jnp.bfloat16]


def equations(jaxpr):
    """All of a program's, its loops' and calls' among them."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_only_the_first_mini_batch_has_a_ratio_of_one():
    """old_logprobs come from another compilation, and are off by as much as 0.3 here on top."""
    spec, loss = make_policy_loss()
    optimizer = optax.adam(1e-2)
    batches = mini_batches(rollout(), num_mini_batches=4, num_epochs=2, shard=whole)
    step = partial(
        train_step,
        batches=batches,
        loss=loss,
        optimizer=optimizer,
        learning_rate=lambda _: 1e-2,
        max_grad_norm=1.0,
        cast_ahead=SETTINGS.cast_ahead,
        micro_batches=Padded(num=2),
    )
    update = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(8)))
    state = init_state(random_params(spec.params, seed=1), optimizer)
    state, metrics = update(state)
    assert int(state.step) == 8
    assert metrics["actor/ppo_kl"][0] == 0.0
    assert metrics["actor/pg_clipfrac"][0] == 0.0
    assert np.all(np.asarray(metrics["actor/ppo_kl"][1:]) != 0.0)
    # At a ratio of one the loss is minus the mean advantage.
    mask, advantages = (np.asarray(rollout()[k][: B // 4]) for k in ("mask", "advantages"))
    np.testing.assert_allclose(
        metrics["actor/pg_loss"][0], -(advantages * mask).sum() / mask.sum(), rtol=1e-6
    )


def test_shuffled_mini_batches_take_every_sample_once_an_epoch():
    """In another order each epoch, fields together; without a key in the order of the batch."""

    @jax.jit
    def run(key):
        batch = {"ids": jnp.arange(12), "twice": 2 * jnp.arange(12)}
        sizes = dict(num_mini_batches=3, num_epochs=2, shard=whole)
        batches = mini_batches(batch, **sizes, shuffle_key=key)
        return jax.lax.map(batches.at, jnp.arange(6))

    def taken(key):
        found = run(key)
        np.testing.assert_array_equal(found["twice"], 2 * found["ids"])
        return np.asarray(found["ids"]).reshape(2, 12)

    in_order = np.arange(12)
    np.testing.assert_array_equal(taken(None), [in_order, in_order])
    one, other = taken(jax.random.key(0)), taken(jax.random.key(1))
    for epochs in (one, other):
        np.testing.assert_array_equal(np.sort(epochs, axis=1), [in_order, in_order])
    orders = [in_order, *one, *other]
    assert len({tuple(order) for order in orders}) == 5
    np.testing.assert_array_equal(taken(jax.random.key(0)), one)


# ------------------------------------------------------------------------- applying gradients


def apply(grads, max_grad_norm=1.0):
    params = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
    optimizer = optax.sgd(1.0, momentum=0.9)
    state = init_state(params, optimizer)
    grads = {"a": jnp.array(grads[:2]), "b": jnp.array(grads[2:])}
    new, metrics = apply_gradients(
        state,
        grads,
        optimizer=optimizer,
        learning_rate=lambda _: 1.0,
        max_grad_norm=max_grad_norm,
    )
    return state, new, metrics


def test_gradients_are_clipped_by_their_global_norm():
    old, new, metrics = apply([3.0, 0.0, 4.0])
    np.testing.assert_allclose(metrics["grad_norm"], 5.0)  # as it was before the clip
    np.testing.assert_allclose(new.params["a"], [1.0 - 0.6, 2.0], rtol=1e-6)
    np.testing.assert_allclose(new.params["b"], [3.0 - 0.8], rtol=1e-6)
    assert int(new.step) == int(old.step) + 1
    _, new, metrics = apply([0.3, 0.0, 0.4])
    np.testing.assert_array_equal(new.params["a"], np.float32([1.0 - np.float32(0.3), 2.0]))
    np.testing.assert_allclose(metrics["grad_norm"], 0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_gradient_changes_nothing_and_is_named(bad):
    old, new, metrics = apply([0.3, bad, 0.4])
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(before, after)
    assert metrics[NONFINITE].tolist() == [True, False]
    found = {f"actor/{NONFINITE}": np.asarray(metrics[NONFINITE])}
    with pytest.raises(NonFiniteGradients, match=r"step 7: the gradient of .* in a\. That update"):
        check_gradients(dict(found), {"actor": old.params}, 7)
    others = {"critic/score/mean": 1.0, "critic/advantages/mean": np.float32(bad)}
    with pytest.raises(NonFiniteGradients, match=r"a\. Nor .* critic/advantages/mean:"):
        check_gradients(found | others, {"actor": old.params}, 7)


def test_a_gradient_that_overflows_the_norm_alone_is_also_refused():
    """Or the run would go on without ever learning again."""
    for grads, named in ([1e30, 0.0, 1.0], [True, False]), ([1e19, 1e19, 1.5e19], [True, True]):
        old, new, metrics = apply(grads)
        np.testing.assert_array_equal(old.params["a"], new.params["a"])
        assert int(new.step) == 0
        assert metrics[NONFINITE].tolist() == named


# ------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {0: 8.0, 5: 8.0, 99: 8.0}),
        ({"warmup_steps": 4}, {0: 2.0, 1: 4.0, 2: 6.0, 3: 8.0, 4: 8.0, 50: 8.0}),
        ({"warmup_steps": 1}, {0: 8.0, 1: 8.0}),
        (
            {"schedule": "linear", "warmup_steps": 2},
            {0: 4.0, 1: 8.0, 2: 8.0, 4: 6.0, 6: 4.0, 10: 0.0, 11: 0.0},
        ),
        (
            {"schedule": "linear", "total_steps": 4, "min_learning_rate_ratio": 0.5},
            {0: 8.0, 1: 7.0, 4: 4.0, 9: 4.0},
        ),
        ({"schedule": "cosine"}, {0: 8.0, 5: 4.0, 10: 0.0, 12: 0.0}),
        (
            {"schedule": "cosine", "warmup_steps": 2, "min_learning_rate_ratio": 0.25},
            {1: 8.0, 2: 8.0, 4: 2 + 6 * (0.5 + 0.5 * np.cos(np.pi / 4)), 6: 5.0, 10: 2.0, 30: 2.0},
        ),
    ],
)
def test_schedules_by_hand(changes, expected):
    """A peak of 8 over 10 steps, unless the config says another number."""
    rate = schedule(OptimizerConfig(learning_rate=8.0, **changes), total_steps=10)
    for step, value in expected.items():
        np.testing.assert_allclose(rate(jnp.int32(step)), value, atol=1e-6, err_msg=str(step))


def test_adam_is_traced_once_a_shape_and_rounds_each_parameter_by_its_own_chances(monkeypatch):
    rounded = []

    def counted(x, step, stream):
        rounded.append(x.shape)
        return round_by_chance(x, step, stream)

    monkeypatch.setattr(optimizer_module, "round_by_chance", counted)
    optimizer = make_optimizer(OptimizerConfig(moment_dtype="bfloat16"), 10)
    gradient = jnp.linspace(0.1, 0.9, 64)
    gradients = {"a": gradient, "b": gradient, "c": gradient.reshape(8, 8)}
    state = optimizer.init(gradients)
    _, (adam, *_) = optimizer.update(gradients, state, gradients)
    assert rounded == [(64,)] * 2 + [(8, 8)] * 2  # both moments
    assert not np.array_equal(adam.mu["a"], adam.mu["b"])
    assert not np.array_equal(adam.nu["a"], adam.nu["b"])
    np.testing.assert_allclose(adam.mu["a"], adam.mu["b"], rtol=2**-7)


def test_the_optimizer_follows_the_schedule_that_is_reported():
    """Adam's first updates are the learning rate times the gradient's sign."""
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=2, weight_decay=0.0)
    state = init_state({"w": jnp.zeros(())}, make_optimizer(config, 10))
    for expected in (0.25, 0.5):
        before = state.params["w"]
        state, metrics = apply_gradients(
            state,
            {"w": jnp.float32(0.5)},
            optimizer=make_optimizer(config, 10),
            learning_rate=schedule(config, 10),
            max_grad_norm=1.0,
        )
        np.testing.assert_allclose(metrics["lr"], expected)
        np.testing.assert_allclose(before - state.params["w"], expected, rtol=1e-4)


def test_the_optimizer_is_adamw():
    """Against optax's, over steps of uneven size."""
    config = OptimizerConfig(
        learning_rate=0.1, b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.3, warmup_steps=3
    )
    ours = make_optimizer(config, 10)
    theirs = optax.adamw(schedule(config, 10), 0.8, 0.95, 1e-3, weight_decay=0.3)
    first = second = {"w": jnp.linspace(-1, 1, 24).reshape(4, 6)}
    states = [ours.init(first), theirs.init(second)]
    rng = np.random.default_rng(0)
    for scale in (1.0, 10.0, 0.1, 1.0, 0.0):
        gradients = {"w": jnp.asarray(scale * rng.normal(size=(4, 6)), jnp.float32)}
        updates, states[0] = ours.update(gradients, states[0], first)
        first = optax.apply_updates(first, updates)
        updates, states[1] = theirs.update(gradients, states[1], second)
        second = optax.apply_updates(second, updates)
    np.testing.assert_allclose(first["w"], second["w"], rtol=1e-5, atol=1e-6)


def test_moments_are_of_their_own_dtype_whatever_the_gradients_are():
    """In bfloat16 a b2 of 0.999 rounds to 1, and the second moment would never fall."""
    optimizer = make_optimizer(OptimizerConfig(b2=0.999), 1000)
    weights = {"w": jnp.ones(4, jnp.bfloat16)}
    state, update = optimizer.init(weights), jax.jit(optimizer.update)
    nu = 0.0
    for scale in [1.0] * 20 + [0.01] * 200:
        gradients = {"w": jnp.full(4, scale, jnp.bfloat16)}
        _, state = update(gradients, state, weights)
        nu = 0.999 * nu + 0.001 * float(gradients["w"][0]) ** 2
    assert state[0].mu["w"].dtype == state[0].nu["w"].dtype == jnp.float32
    np.testing.assert_allclose(state[0].nu["w"], nu, rtol=1e-4)


def test_bfloat16_moments_follow_float32_ones():
    """Over 400 steps the second moment falls 300-fold, by less than a bfloat16 step each time."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        optimizer = make_optimizer(OptimizerConfig(moment_dtype=dtype, b2=0.99), 1000)
        params = {"w": jnp.ones((32, 32))}
        state = optimizer.init(params)
        update = jax.jit(optimizer.update)
        rng = np.random.default_rng(0)
        for i in range(400):
            scale = 10.0 if i < 100 else 0.1
            grads = {"w": jnp.asarray(scale * rng.normal(size=(32, 32)), jnp.float32)}
            _, state = update(grads, state, params)
        found[dtype] = state[0]
    assert found["bfloat16"].nu["w"].dtype == jnp.bfloat16 == found["bfloat16"].mu["w"].dtype
    exact, half = (np.asarray(found[k].nu["w"], np.float64) for k in ("float32", "bfloat16"))
    np.testing.assert_allclose(half.mean(), exact.mean(), rtol=0.02)
    np.testing.assert_allclose(half, exact, rtol=0.3)


def test_moments_lie_as_their_parameters_do():
    for dtype in ("float32", "bfloat16"):
        optimizer = make_optimizer(OptimizerConfig(moment_dtype=dtype), 10)
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        there = {"w": NamedSharding(mesh, PartitionSpec("data"))}
        shapes = jax.eval_shape(partial(init_state, optimizer=optimizer), {"w": jnp.ones(4)})
        placed = state_shardings(shapes, there, offload=False)
        assert placed.opt_state[0].mu == placed.opt_state[0].nu == there
        assert placed.opt_state[0].count.is_fully_replicated


# ------------------------------------------------------------------------- in an iteration


@pytest.fixture(scope="module")
def calm():
    """One epoch of one mini-batch, adaptive KL, and a critic that learns alone for two steps."""
    adaptive = {"kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 100.0}
    config = tiny_config(model_reward=False, algorithm=adaptive, num_layers=2)
    config = replace(
        config,
        actor=replace(config.actor, ppo_mini_batch_size=PROMPTS, ppo_epochs=1, micro_batch_size=8),
        critic=replace(config.critic, ppo_epochs=1, warmup_steps=2),
    )
    return open_iteration(config)


def test_iterations(calm):
    """ppo_kl is exactly 0, the actor rests while the critic warms up, the KL controller moves."""
    states = first_states(calm)
    coefficient, target, horizon = 0.05, 0.01, 100.0
    for step in range(1, 5):
        before = jax.tree.map(np.array, {k: states[k] for k in ("actor", "critic")})
        states, _, metrics = run_step(calm, states, step)
        check_gradients(metrics, {n: r.spec.params for n, r in calm.roles.items()}, step)
        assert not same(before["critic"].params, states["critic"].params)
        if step <= 2:
            assert same(before["actor"], states["actor"])
            assert "actor/ppo_kl" not in metrics and "actor/grad_norm" not in metrics
        else:
            assert metrics["actor/ppo_kl"] == 0.0
            assert not same(before["actor"].params, states["actor"].params)
            assert metrics["actor/grad_norm"] > 0.0
        # Ziegler et al. 2019, in numpy.
        np.testing.assert_allclose(metrics["actor/reward_kl_penalty_coeff"], coefficient, rtol=1e-6)
        error = np.clip(metrics["actor/reward_kl_penalty"] / target - 1, -0.2, 0.2)
        coefficient *= 1 + error * PROMPTS * N / horizon
    assert abs(coefficient / 0.05 - 1) > 0.05
    saved = to_items(states, ["reference"])["kl_controller"]["state"]
    np.testing.assert_allclose(saved, coefficient, rtol=1e-5)


def same(first, second) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_groups_of_one_are_refused_with_the_remedy():
    config = tiny_config(model_reward=False)
    config = replace(
        config,
        rollout=replace(config.rollout, n=1),
        algorithm=c.GRPO(),
    )
    with pytest.raises(ValueError, match=r"rollout.n=1 makes one: config.rollout.n=8"):
        open_iteration(config)


def test_a_kl_horizon_that_is_too_short_is_refused_by_the_plan():
    """32 samples an iteration want one above 6.4."""
    adaptive = {"kl_controller": "adaptive", "kl_horizon": 6.0}
    with pytest.raises(ValueError, match="a horizon above 6.4, e.g. 32"):
        open_iteration(tiny_config(model_reward=False, algorithm=adaptive)).trace()


@pytest.mark.nightly
def test_grpo_has_no_critic_and_learns_on_packed_rows():
    config = packed(tiny_config(model_reward=False), 33)
    # A critic's, for which nothing waits here.
    config = replace(config, critic=replace(config.critic, warmup_steps=5))
    grpo = c.GRPO(kl_loss_coef=0.0)
    iteration = open_iteration(replace(config, algorithm=grpo))
    assert set(iteration.roles) == {"actor"}
    states = first_states(iteration)
    before = jax.tree.map(np.array, states["actor"].params)
    states, batch, metrics = run_step(iteration, states, 1)
    assert not same(before, states["actor"].params) and metrics["actor/grad_norm"] > 0
    # Of two samples one is as far above the mean as the other below: half of sqrt(2) deviations.
    found = np.unique(np.abs(np.asarray(batch.advantages)[:, 0]).round(3))
    np.testing.assert_allclose(found, [0.0, 0.707], atol=1e-3)


POISONED = """
from dataclasses import replace
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.config import PPO


def poisoned(*, lam: float = 1.0) -> Algorithm:
    algorithm = build_online(PPO(lam=lam))

    def loss(logprobs, old_logprobs, advantages, mask):
        per_token, metrics = algorithm.policy_loss(logprobs, old_logprobs, advantages, mask)
        return per_token * float("nan"), metrics

    return replace(algorithm, policy_loss=loss)
"""


def test_an_iteration_with_nan_keeps_the_state(tmp_path):
    file = tmp_path / "poisoned.py"
    file.write_text(POISONED)
    config = tiny_config(model_reward=False)
    config = replace(config, algorithm=Custom(path=f"{file}:poisoned"))
    iteration = open_iteration(config)
    states = first_states(iteration)
    before = jax.tree.map(np.array, states["actor"])
    states, _, metrics = run_step(iteration, states, 3)
    assert same(before, states["actor"])
    trees = {name: role.spec.params for name, role in iteration.roles.items()}
    with pytest.raises(NonFiniteGradients, match="step 3.*actor.*decoder.embed"):
        check_gradients(metrics, trees, 3)
