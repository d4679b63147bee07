"""Optimizers by name, by path and as objects: their updates, where their state lies, resume."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import model_config
from tiny_run import TinyRun, assert_same_bits

from jaxrl_llm.config import ConfigError, OptimizerConfig, as_dict, load_config
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.learner.losses import NONFINITE
from jaxrl_llm.learner.optimizer import make_optimizer, schedule
from jaxrl_llm.learner.train_state import init_state, state_shardings
from jaxrl_llm.learner.train_step import apply_gradients
from jaxrl_llm.models.base import model_spec

SPEC = model_spec(model_config())
AXES = {"decoder": {"layers": {"0": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}}}}
OWN = """
import optax

def optimizer(rate):
    return optax.chain(optax.scale_by_adam(0.8, 0.9), optax.scale_by_learning_rate(rate))

def falling(peak, steps):
    return lambda step: peak / (step + 1)
"""


def weights(seed: int = 0):
    rng = np.random.default_rng(seed)
    kernel, bias = rng.normal(size=(8, 6)), rng.normal(size=6)
    layer = {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}
    return {"decoder": {"layers": {"0": layer}}}


def after(optimizer, steps: int = 4):
    params = weights()
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(weights(step + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    "name, theirs",
    [
        ("lion", lambda rate: optax.lion(rate, 0.9, 0.99, weight_decay=0.1)),
        ("sgd", lambda rate: optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.1),
                                         optax.scale_by_learning_rate(rate))),
        ("adafactor", lambda rate: optax.adafactor(rate, multiply_by_parameter_scale=False)),
    ],
)  # fmt: skip
def test_named_optimizers_are_those_of_optax(name, theirs):
    decay = 0.0 if name == "adafactor" else 0.1  # optax's decay is not times the rate
    config = OptimizerConfig(name=name, learning_rate=0.01, weight_decay=decay, warmup_steps=2)
    ours, expected = (after(x) for x in (make_optimizer(config, 10), theirs(schedule(config, 10))))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), ours, expected)


def test_muon_orthogonalizes_whole_matrices_of_layers():
    """By hand, in numpy: five Newton-Schulz steps of Nesterov's momentum; q has heads apart."""
    layer = SPEC.params["decoder"]["layers"]["0"]["attention"]
    config = OptimizerConfig(name="muon", learning_rate=0.1, weight_decay=0.0)
    optimizer = make_optimizer(config, 10, SPEC.axes)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), SPEC.params)
    updates, state = optimizer.update(grads, optimizer.init(SPEC_ZEROS), SPEC_ZEROS)
    for name, inputs in (("q", 1), ("o", 2)):
        shape = layer[name]["kernel"].shape
        at = lambda tree, n=name: tree["decoder"]["layers"]["0"]["attention"][n]["kernel"]  # noqa: E731
        rows = int(np.prod(shape[:inputs]))
        gradient = np.asarray(at(grads), np.float64).reshape(rows, -1)
        x = gradient.T if rows > gradient.shape[1] else gradient
        x = x / np.linalg.norm(x)  # the first momentum points as the gradient does
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.T if rows > gradient.shape[1] else x
        expected = -0.1 * 0.2 * np.sqrt(max(gradient.shape)) * x
        np.testing.assert_allclose(at(updates).reshape(rows, -1), expected, rtol=2e-3, atol=1e-5)
    adam = updates["decoder"]["embed"]["table"]
    # Adam's first update is the sign; Nesterov's momentum adds the second one's share.
    np.testing.assert_allclose(np.abs(adam), 0.1 * (1 + 0.9 * 0.1 / 0.19), rtol=1e-2)


SPEC_ZEROS = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), SPEC.params)


def test_state_lies_as_its_parameters_do():
    mesh = make_mesh(fsdp=2, devices=jax.devices()[:2])
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = {"a": jnp.zeros((4, 6)), "b": jnp.zeros(4)}
    placed = jax.tree.map(lambda _: split, params)

    def both(params):  # moments, a matrix of its own for each parameter, and a number
        extra = {name: jnp.zeros((3, 8)) for name in params}
        return {"mu": params, "nested": ({"nu": params},), "gram": extra, "count": jnp.zeros(())}

    shapes = jax.eval_shape(
        partial(init_state, optimizer=optax.GradientTransformation(both, None)), params
    )  # pyright: ignore
    state = state_shardings(shapes, placed, offload=True).opt_state
    for moments in (state["mu"], state["nested"][0]["nu"]):
        assert {x.memory_kind for x in moments.values()} == {"pinned_host"}
        assert {x.spec for x in moments.values()} == {PartitionSpec("fsdp")}
    assert {x.spec for x in state["gram"].values()} == {PartitionSpec(None, "fsdp")}
    assert state["count"].is_fully_replicated


@pytest.mark.parametrize("name", ["muon", "lion", "sgd", "adafactor"])
def test_the_same_bits_with_offloaded_state_and_after_a_gradient_that_is_not_finite(name):
    config = OptimizerConfig(name=name, learning_rate=0.1)
    optimizer = make_optimizer(config, 10, AXES)
    whole = NamedSharding(make_mesh(devices=jax.devices()[:1]), PartitionSpec())
    init = partial(init_state, optimizer=optimizer)
    ends = []
    for offload in (False, True):
        shapes = jax.eval_shape(init, weights())
        placed = state_shardings(shapes, jax.tree.map(lambda _: whole, weights()), offload=offload)
        state = jax.jit(init, out_shardings=placed)(weights())
        step = partial(
            apply_gradients,
            optimizer=optimizer,
            learning_rate=schedule(config, 10),
            max_grad_norm=1.0,
        )
        step = jax.jit(step, out_shardings=(placed, whole))
        for number in (1, 2, 3):
            wrong = jnp.nan if number == 2 else 1.0
            gradients = jax.tree.map(lambda x, wrong=wrong: wrong * x, weights(number))
            state, metrics = step(state, gradients)
            assert bool(metrics[NONFINITE].any()) == (number == 2)
        assert int(state.step) == 2
        ends.append(jax.tree.map(np.array, state))
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_optimizers_and_schedules_of_yours(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    config = OptimizerConfig(
        name=f"{file}:optimizer", schedule=f"{file}:falling", learning_rate=0.5, warmup_steps=2
    )
    rate = schedule(config, 10)
    rates = [rate(jnp.int32(step)) for step in range(5)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.5, 0.25, 0.5 / 3])
    by_path = after(make_optimizer(config, 10))
    mine = optax.chain(optax.scale_by_adam(0.8, 0.9), optax.scale_by_learning_rate(rate))
    jax.tree.map(np.testing.assert_array_equal, by_path, after(mine))
    as_object = OptimizerConfig(name=mine)
    jax.tree.map(np.testing.assert_array_equal, by_path, after(make_optimizer(as_object, 10)))


def test_objects_differ_in_the_config_where_their_numbers_do():
    names = [
        as_dict(OptimizerConfig(name=x))["name"]["digest"]
        for x in (optax.sgd(0.1), optax.sgd(0.1), optax.sgd(0.2))
    ]
    assert names[0] == names[1] != names[2]
    stored = {"actor.optimizer.name": as_dict(OptimizerConfig(name=optax.sgd(0.1)))["name"]}
    with pytest.raises(ConfigError, match=r"rl.load_config\(config, \{'actor.optimizer.name': "):
        load_config("grpo", stored)
    with pytest.raises(ConfigError, match="there is no adam; did you mean 'adamw'"):
        load_config("grpo", {"actor.optimizer.name": "adam"})


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["muon", "lion", "own.py:optimizer"])
def test_a_resumed_run_has_the_same_bits(tmp_path, name):
    """Six steps at once, or killed within the fifth after a save of the fourth."""
    flags = ["--config.total_steps=6", "--config.warmup=none", "--config.algorithm=grpo"]
    flags += ["--config.data.val_tasks=[]", "--config.checkpoint.best_metric="]
    runs = []
    for folder in ("whole", "killed"):
        path = tmp_path / folder
        path.mkdir()
        (path / "own.py").write_text(OWN)
        named = f"{path}/{name}" if ":" in name else name
        lora = ["--config.actor.lora.rank=2"] if name == "muon" else []
        runs.append(TinyRun(path, *flags, *lora, f"--config.actor.optimizer.name={named}"))
    whole, killed = runs
    whole.finish()
    killed.pause_at(5)
    killed.kill_when(lambda: killed.paused() and killed.step_path(4).exists())
    killed.unpause()
    assert "resumed from" in killed.finish()
    assert killed.metrics() == whole.metrics()
    assert_same_bits(killed.weights(6), whole.weights(6))
