"""A step of adapters: the gradients of merged weights in bf16, and dropout."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import model_config
from tiny_iteration import random_params

from jaxrl_llm.learner.forward import ForwardSettings, prepare, row_logprobs
from jaxrl_llm.learner.micro_batches import Padded
from jaxrl_llm.learner.train_state import CastAhead
from jaxrl_llm.learner.train_step import Base, accumulate
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.lora import Adapter, Lora, split

MODULES = frozenset(
    f"model.layers.{i}.{n}" for i in (0, 1) for n in ("self_attn.q_proj", "mlp.up_proj")
)
LORA = Lora(rank=2, alpha=2.0, modules=MODULES)
TOKENS = np.random.default_rng(0).integers(0, 24, (8, 6)).astype(np.int32)


def gradients(lora, *, dtype="float32", step=0, parts=2):
    """Float32 gradients of a mean of log-probs, summed over micro-batches."""
    spec = model_spec(model_config(), dtype=dtype, lora=lora)
    base, own = split(random_params(spec.params, 1, 0.2))
    settings = ForwardSettings(dtype=dtype)

    def loss(params, part):
        found = row_logprobs(params, part["tokens"], spec=spec, settings=settings)
        return found.sum() / TOKENS.size, {}

    loss.spec = spec

    @jax.jit
    def run(base, own, step):
        frozen = Base(params=base, lora=lora, dtype=dtype, key=jax.random.key(0))
        ahead = CastAhead(dtype=dtype, float32_gradients=True)
        return accumulate(
            loss,
            own,
            dict.fromkeys(("tokens", "responses", "prompts"), jnp.asarray(TOKENS))
            | {"prompt_lengths": jnp.full(8, 6), "response_lengths": jnp.full(8, 6)},
            cast_ahead=ahead,
            micro_batches=Padded(num=parts),
            base=frozen,
            step=step,
        )[0]

    return run(base, own, step)


@pytest.mark.nightly
def test_merged_and_apart_agree_in_bfloat16():
    exact = gradients(LORA)
    for lora in (LORA, replace(LORA, merge=False)):
        found = gradients(lora, dtype="bfloat16")
        assert jax.tree.structure(found) == jax.tree.structure(exact)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
            assert one.dtype == jnp.float32
            assert np.linalg.norm(one - other) <= 0.05 * np.linalg.norm(other)


@pytest.mark.nightly
def test_dropout_depends_on_step_and_micro_batch_alone():
    dropped = replace(LORA, dropout=0.5)
    first, again, later = (gradients(dropped, step=step) for step in (0, 0, 1))
    whole, plain = gradients(dropped, parts=1), gradients(LORA)

    def equal(one, other):
        return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))

    assert equal(first, again)
    assert not equal(first, later) and not equal(first, whole) and not equal(first, plain)


def test_each_adapter_drops_inputs_of_its_own_and_keeps_the_mean():
    spec = model_spec(model_config(), lora=replace(LORA, dropout=0.25))
    params = random_params(spec.params, 1)
    params["dropout"] = jax.random.key(3)
    model = prepare(spec, params, ForwardSettings())
    adapters = [m for _, m in nnx.iter_modules(model) if isinstance(m, Adapter)]
    assert len(adapters) == len(MODULES)
    masks = [np.asarray(adapter._dropped(jnp.ones((200, 200)))) for adapter in adapters]
    for mask in masks:
        assert set(np.unique(mask)) == {0.0, np.float32(1 / 0.75)}
        assert mask.mean() == pytest.approx(1.0, abs=0.02)  # deviation 0.003
    assert not np.array_equal(masks[0], masks[1])
