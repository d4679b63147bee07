"""Moments in the host's memory, in updates compiled for H200s: what is where, and for how long."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from further import further
from jax.sharding import NamedSharding, PartitionSpec
from target import h200_mesh, in_memory, moments_in_memory, needs_compiler

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.learner.optimizer import make_optimizer, schedule
from jaxrl_llm.learner.train_state import init_state, state_shardings
from jaxrl_llm.learner.train_step import apply_gradients, mini_batches

pytestmark = needs_compiler

PARAMETERS, SHAPE = 16, (2048, 2048)
SIZE = 4 * SHAPE[0] * SHAPE[1]  # bytes of one parameter, and of one of its moments


def memory(kind, *, fsdp, num_epochs):
    """Of `num_epochs` updates, with the moments in a memory of that kind."""
    mesh = h200_mesh((1, fsdp, 1))
    config = OptimizerConfig()
    optimizer = make_optimizer(config, 10)
    params = {f"{i:02}": jax.ShapeDtypeStruct(SHAPE, jnp.float32) for i in range(PARAMETERS)}
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    shapes = jax.eval_shape(partial(init_state, optimizer=optimizer), params)
    placed = state_shardings(shapes, jax.tree.map(lambda _: split, params), offload=False)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, placed
    )
    state = moments_in_memory(state, kind)

    def step(state, batch):
        gradients = jax.tree.map(lambda p, x: jnp.sin(p) * x.sum(), state.params, batch)
        return apply_gradients(
            state,
            gradients,
            optimizer=optimizer,
            learning_rate=schedule(config, 10),
            max_grad_norm=1.0,
        )

    def program(state, batch):
        sizes = dict(num_mini_batches=1, num_epochs=num_epochs, shard=lambda x: x)
        batches = mini_batches(batch, **sizes)
        if num_epochs == 1:
            return step(state, batches.at(0))
        return jax.lax.scan(lambda s, i: step(s, batches.at(i)), state, jnp.arange(num_epochs))

    batch = {name: jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split) for name in params}
    lowered = jax.jit(program, donate_argnums=0).lower(state, in_memory(batch))
    return lowered.compile().memory_analysis()


@pytest.mark.parametrize(("fsdp", "num_epochs"), further([(1, 1), (2, 2)]))
def test_moments_visit_the_card_in_turn(fsdp, num_epochs):
    there = memory("device", fsdp=fsdp, num_epochs=num_epochs)
    away = memory("pinned_host", fsdp=fsdp, num_epochs=num_epochs)
    whole, moments = PARAMETERS * SIZE / fsdp, 2 * PARAMETERS * SIZE / fsdp
    small = 2**16  # counters and metrics
    assert there.host_argument_size_in_bytes == 0
    assert abs(there.argument_size_in_bytes - whole - moments) < small
    # The host's memory holds the moments once: the new ones are where the old ones were.
    assert away.host_argument_size_in_bytes == moments == away.host_alias_size_in_bytes
    assert away.host_temp_size_in_bytes == 0
    assert abs(away.argument_size_in_bytes - whole) < small
    # At most three parameters' moments are on the card, on the way in or out.
    more = away.temp_size_in_bytes - there.temp_size_in_bytes
    assert more <= 3 * 2 * SIZE / fsdp + small
