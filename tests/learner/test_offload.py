"""Moments in the host's memory: the same bits, in place, saved and restored, or refused."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.config import ConfigError, OptimizerConfig
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.sharding import check_host_memory
from jaxrl_llm.learner.losses import NONFINITE
from jaxrl_llm.learner.optimizer import AT_ONCE, make_optimizer, schedule
from jaxrl_llm.learner.train_state import init_state, state_shardings
from jaxrl_llm.learner.train_step import apply_gradients
from jaxrl_llm.models.config import BALANCE

SHAPES = {"a": (3,), "b": (8, 6), "c": (), "d": (5, 7), "e": (6, 8)}  # more than are there at once


class Updates:
    """A state whose moments are in one memory or the other, and the jitted update of it."""

    def __init__(self, *, offload: bool, moment_dtype: str = "float32"):
        assert len(SHAPES) > 2 * AT_ONCE
        config = OptimizerConfig(learning_rate=0.1, warmup_steps=2, moment_dtype=moment_dtype)
        optimizer = make_optimizer(config, 10)
        mesh = make_mesh(devices=jax.devices()[:1])
        rng = np.random.default_rng(0)
        params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}
        whole = NamedSharding(mesh, PartitionSpec())
        init = partial(init_state, optimizer=optimizer)
        placed = state_shardings(
            jax.eval_shape(init, params), jax.tree.map(lambda _: whole, params), offload=offload
        )
        self.abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(init, params),
            placed,
        )
        self.state = jax.jit(init, out_shardings=placed)(params)
        update = partial(
            apply_gradients,
            optimizer=optimizer,
            learning_rate=schedule(config, 10),
            max_grad_norm=1.0,
        )
        self._update = jax.jit(update, donate_argnums=0, out_shardings=(placed, whole))

    def step(self, number: int, value: float | None = None) -> dict[str, jax.Array]:
        """Random gradients; `value` takes the place of one number of them."""
        rng = np.random.default_rng(number)
        gradients = {k: np.asarray(rng.normal(size=s), np.float32) for k, s in SHAPES.items()}
        if value is not None:
            gradients["d"][2, 3] = value
        self.state, metrics = self._update(self.state, gradients)
        return metrics

    def moments(self) -> list[jax.Array]:
        adam = self.state.opt_state[0]
        return jax.tree.leaves((adam.mu, adam.nu))

    def addresses(self) -> list[int]:
        return [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in self.moments()]

    def numpy(self):
        return jax.tree.map(np.array, self.state)


def test_moments_wait_for_others_also_behind_a_bias_that_has_none():
    """A barrier has two moments, and what they wait for."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1), 10)
    params = {name: jnp.ones((2, 3)) for name in ("a", "m", "n", "o", "p")}
    params |= {"layers": {"0": {BALANCE: jnp.ones(3)}}}
    state = jax.eval_shape(partial(init_state, optimizer=optimizer), params)
    mesh = make_mesh(devices=jax.devices()[:1])
    whole = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), params)
    placed = state_shardings(state, whole, offload=True)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed
    )
    made = jax.make_jaxpr(
        partial(
            apply_gradients, optimizer=optimizer, learning_rate=lambda _: 0.1, max_grad_norm=1.0
        )
    )(state, params)
    barriers = [e for e in made.jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    assert len(barriers) == 5
    assert all(len(e.invars) > 2 for e in barriers)


def assert_same(first, second) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
def test_the_same_bits_wherever_the_moments_lie(moment_dtype):
    there = Updates(offload=False, moment_dtype=moment_dtype)
    away = Updates(offload=True, moment_dtype=moment_dtype)
    assert {x.sharding.memory_kind for x in away.moments()} == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(away.state.params)} == {"device"}
    for number in range(1, 4):
        there.step(number)
        away.step(number)
    assert {x.dtype.name for x in away.moments()} == {moment_dtype}
    assert {x.sharding.memory_kind for x in away.moments()} == {"pinned_host"}
    assert_same(there.numpy(), away.numpy())


def test_a_gradient_that_is_not_finite_leaves_the_moments_of_the_host_as_they_were():
    updates = Updates(offload=True)
    updates.step(1)
    for number, value in enumerate((np.nan, np.inf), start=2):
        before = updates.numpy()
        metrics = updates.step(number, value)
        assert bool(metrics[NONFINITE].any())
        assert_same(before, updates.numpy())
    updates.step(4)
    again = Updates(offload=True)
    again.step(1)
    again.step(4)
    assert_same(again.numpy(), updates.numpy())


def test_donated_moments_stay_where_they_are():
    updates = Updates(offload=True)
    updates.step(1)
    old, places = updates.moments(), updates.addresses()
    updates.step(2)
    assert all(x.is_deleted() for x in old)
    assert updates.addresses() == places


@pytest.mark.parametrize("offload", [False, True])
def test_saved_from_one_memory_and_restored_to_either(tmp_path, offload):
    updates = Updates(offload=offload)
    updates.step(1)
    manager = CheckpointManager(
        tmp_path, keep_latest=2, keep_best=0, best_metric="", asynchronous=True
    )
    places = updates.addresses()
    manager.save(1, {"actor": {"state": updates.state}}, {}, {})
    # The next steps write over what is saved; no view of it stays behind, which a GPU refuses.
    updates.step(2)
    updates.step(3)
    if offload:
        assert updates.addresses() == places
    manager.wait()
    for target in (False, True):
        again = Updates(offload=target)
        items, _ = manager.restore(1, {"actor": {"state": again.abstract}})
        again.state = items["actor"]["state"]
        kinds = {x.sharding.memory_kind for x in again.moments()}
        assert kinds == {"pinned_host" if target else "device"}
        again.step(2)
        again.step(3)
        assert_same(again.numpy(), updates.numpy())
    manager.close()


def test_devices_that_cannot_reach_the_memory_are_refused():
    def device(*kinds: str):
        memories = [SimpleNamespace(kind=kind) for kind in kinds]
        return SimpleNamespace(device_kind="Some Chip", addressable_memories=lambda: memories)

    check_host_memory(jax.devices()[0])
    check_host_memory(device("device", "pinned_host"))
    check_host_memory(device())  # for the compiler only
    with pytest.raises(ConfigError, match="Some Chip .* device, unpinned_host only: set it to Fal"):
        check_host_memory(device("device", "unpinned_host"))
