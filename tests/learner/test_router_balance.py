"""The bias that balances a sigmoid router: its steps by hand, and that nothing else moves it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import on_device
from jax.sharding import NamedSharding, PartitionSpec
from test_train_step import MODEL, SETTINGS, P, R, rollout

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.checkpoint.manager import CheckpointManager, restore
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.learner.losses import PolicyLoss
from jaxrl_llm.learner.micro_batches import Padded
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.router_balance import balanced
from jaxrl_llm.learner.router_losses import RouterLoss
from jaxrl_llm.learner.rows import ROUTES
from jaxrl_llm.learner.train_state import init_state, state_shardings
from jaxrl_llm.learner.train_step import MiniBatches, train_step
from jaxrl_llm.models.base import init_params, model_spec
from jaxrl_llm.models.casting import cast
from jaxrl_llm.models.config import BALANCE, CENTROIDS, Latent, Mixture

MIXTURE = Mixture(
    num_experts=4,
    experts_per_token=1,
    expert_size=8,
    normalized=False,
    scores="sigmoid",
    shared_size=8,
    dense_layers=1,
)
SPEC = model_spec(
    replace(
        MODEL,
        family="deepseek_v3",
        num_layers=2,
        sliding_window=(),
        num_kv_heads=MODEL.num_heads,
        latent=Latent(kv_rank=4, query_rank=None, rope_dim=2, value_dim=4),
        mixture=MIXTURE,
    )
)
PARAMS = jax.jit(lambda: init_params(SPEC, jax.random.key(0)))
LAYER = str(SPEC.config.num_layers - 1)
DECAYING = c.OptimizerConfig(learning_rate=1e-3, weight_decay=0.5)


def router_of(params):
    return params["decoder"]["layers"][LAYER]["mlp"]["router"]


def skewed():
    """A model whose tokens nearly all choose the first expert."""
    params = PARAMS()
    router_of(params)[BALANCE] = on_device(np.array([0.2, 0.0, 0.0, 0.0]), np.float32)
    return params


def test_a_step_is_the_rate_towards_the_mean():
    layers = {str(i): {"router": {BALANCE: jnp.zeros(3)}} for i in (2, 10)}
    params = {"layers": layers, "other": jnp.ones(2)}
    counts = jnp.asarray([[3.0, 1.0, 2.0], [0.0, 0.0, 6.0]])  # of layers 2 and 10
    grown = jax.tree.map(lambda x: x + 5.0, params)
    found = balanced(grown, params, counts, 0.5)
    expected = {"2": [-0.5, 0.5, 0.0], "10": [0.5, 0.5, -0.5]}
    for layer, steps in expected.items():
        np.testing.assert_array_equal(found["layers"][layer]["router"][BALANCE], steps)
    np.testing.assert_array_equal(found["other"], grown["other"])


@pytest.mark.nightly
def test_it_balances_a_skewed_router_and_nothing_else_moves_it():
    policy = PolicyLoss(
        algorithm=build_online(c.PPO()), spec=SPEC, settings=SETTINGS, temperature=1.0
    )
    optimizer = make_optimizer(DECAYING, 50)
    fields = rollout()

    def steps(rate, fields=fields):
        """A compiled function of a state and a number of steps: the state then, and the load."""

        def one(_, carry):
            state, metrics = train_step(
                carry[0],
                0,
                batches=MiniBatches(fields=fields, num=1),
                loss=replace(policy, router=RouterLoss(bias_rate=rate)),
                optimizer=optimizer,
                learning_rate=lambda step: 1e-3,
                max_grad_norm=1.0,
                cast_ahead=None,
                micro_batches=Padded(),
            )
            return state, metrics["router_load"]

        return jax.jit(lambda state, num: jax.lax.fori_loop(0, num, one, (state, jnp.float32(0))))

    first = init_state(skewed(), optimizer)
    resting = steps(0.0)
    fixed, load = resting(first, 2)
    assert load > 3.0  # of 4
    np.testing.assert_array_equal(
        router_of(fixed.params)[BALANCE], router_of(first.params)[BALANCE]
    )
    assert np.abs(fixed.params["decoder"]["norm"]["scale"] - 1).max() > 0  # the others learned
    moments = fixed.opt_state[0]
    assert router_of(moments.mu)[BALANCE] is None and router_of(moments.nu)[BALANCE] is None

    balancing = steps(0.02)
    state, load = balancing(first, 24)
    assert load < 2.0
    moved = (router_of(state.params)[BALANCE] - router_of(first.params)[BALANCE]) / 0.02
    np.testing.assert_allclose(moved, np.round(moved), atol=1e-4)  # whole steps
    assert moved[0] < 0

    half, _ = balancing(balancing(first, 12)[0], 12)
    jax.tree.map(np.testing.assert_array_equal, half, state)

    # Where a rollout's experts are replayed the bias goes by the router's own choice, and stops.
    shape = (*jnp.shape(fields["prompts"])[:1], P + R, 1, 1)
    replayed = fields | {ROUTES: jnp.zeros(shape, jnp.int8)}
    state, load = steps(0.02, replayed)(first, 24)
    assert load == 4.0  # every token is computed by the first expert
    moved = router_of(state.params)[BALANCE]
    assert np.ptp(moved) < 0.1 < 0.2 == np.ptp(router_of(first.params)[BALANCE])
    assert resting(state, 1)[1] < 2.0


def test_a_checkpoint_keeps_it(tmp_path):
    optimizer = make_optimizer(DECAYING, 50)
    state = init_state(skewed(), optimizer)
    manager = CheckpointManager(
        tmp_path, keep_latest=1, keep_best=0, best_metric="", asynchronous=False
    )
    manager.save(1, {"actor": state}, {"step": 1}, {"reward": 0.0})
    manager.close()
    abstract = jax.eval_shape(lambda: init_state(skewed(), optimizer))
    whole = NamedSharding(make_mesh(devices=jax.devices()[:1]), PartitionSpec())
    params = jax.tree.map(lambda _: whole, abstract.params)
    placed = state_shardings(abstract, params, offload=False)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, placed
    )
    found = restore(tmp_path / "global_step_1", {"actor": abstract})[0]["actor"]
    assert jax.tree.structure(found) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)


def test_the_router_stays_float32():
    spec = model_spec(SPEC.config, dtype="bfloat16")
    for params in (cast(skewed(), "bfloat16"), spec.params):
        assert {x.dtype for x in jax.tree.leaves(router_of(params))} == {jnp.dtype("float32")}
        assert set(router_of(params)) == {CENTROIDS, BALANCE}
        assert params["decoder"]["embed"]["table"].dtype == jnp.bfloat16
