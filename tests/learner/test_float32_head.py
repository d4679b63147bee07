"""`actor.head_dtype=float32`: the head of sampler and trainer, against float64 and each other."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from further import further
from tiny import model_config
from tiny_iteration import (
    PROMPTS,
    even_tokens,
    first_states,
    open_iteration,
    run_step,
    tiny_config,
)

from jaxrl_llm import config as c
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.generation.engine import generate
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.session import Engine, EngineSettings
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.kernels.kept_logprob import kept_logprob
from jaxrl_llm.kernels.linear_logprob import linear_logprob, linear_logprob_reference
from jaxrl_llm.kernels.linear_top_k import linear_logprobs_at
from jaxrl_llm.learner.forward import ForwardSettings, hidden_states, prepare, response_logprobs
from jaxrl_llm.learner.rows import padded_rows
from jaxrl_llm.models.base import init_params, model_spec
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.roles import sampling_model
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.states import untrained_states

N, P, R, D, V = 6, 5, 7, 24, 61
SETTINGS = ForwardSettings(dtype="bfloat16")


def spec_of(tied: bool, float32_head: bool):
    config = model_config(
        vocab_size=V,
        hidden_size=D,
        num_layers=1,
        sliding_window=(None,),
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return model_spec(replace(config, float32_head=float32_head))


def samples_of(spec, params):
    """Tokens, mask and log-probs of the sampler, in bfloat16."""
    rng = np.random.default_rng(0)
    prompts, lengths = rng.integers(4, V, (N, P)), rng.integers(1, P + 1, N)
    sampling = SamplingParams(max_new_tokens=R, stop_token_ids=(1,))
    settings = GenerationSettings(sampling=sampling, num_slots=N)

    @jax.jit
    def run(params):
        used, cast = sampling_model(spec, params, "bfloat16")
        key = jax.random.key(1, impl="threefry2x32")
        return generate(used, cast, prompts, lengths, np.arange(N), key, settings)

    found = run(params)
    return prompts, lengths, *(np.asarray(x) for x in (found.tokens, found.mask, found.logprobs))


@pytest.mark.parametrize("tied", further([True, False]))
def test_sampler_and_trainer_take_the_stored_head(tied):
    """Both have the log-probs of hidden states in bfloat16 and the head's own float32 weights."""
    spec = spec_of(tied, True)
    params = init_params(spec, jax.random.key(0))
    prompts, lengths, tokens, mask, sampled = samples_of(spec, params)
    rows = padded_rows(*map(jnp.asarray, (prompts, lengths, tokens)))
    logprobs, _ = response_logprobs(params, rows, spec=spec, settings=SETTINGS)
    model = prepare(spec, params, SETTINGS)
    hidden = rows.predicting(hidden_states(model, rows.tokens, SETTINGS, rows))
    assert hidden.dtype == jnp.bfloat16 and model.unembedding().dtype == jnp.float32
    table = params["decoder"]["embed"]["table"] if tied else params["head"]["table"]
    logits = np.float64(hidden) @ np.float64(table).T
    exact = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    exact = np.take_along_axis(exact, np.asarray(rows.targets)[..., None], axis=-1)[..., 0]
    exact = np.asarray(rows.to_samples(jnp.float32(exact)))
    seen = mask > 0
    np.testing.assert_allclose(np.asarray(logprobs)[seen], exact[seen], atol=5e-6)
    # The layers of the sampler round otherwise than the trainer's, so hidden states differ.
    rounded = spec_of(tied, False)
    other, _ = response_logprobs(params, rows, spec=rounded, settings=SETTINGS)
    other = abs(np.asarray(other) - exact)
    assert abs(sampled - exact)[seen].mean() < other[seen].mean()
    assert other[seen].mean() > 1e-3


def test_a_session_samples_with_the_same_head():
    spec = spec_of(False, True)
    used, cast = sampling_model(spec, init_params(spec, jax.random.key(0)), "bfloat16")
    sampling = SamplingParams(max_new_tokens=R)
    settings = EngineSettings(
        num_slots=2, max_context=P + R, cache_tokens=64, entries=4, sampling=sampling
    )
    engine = Engine(used, cast, settings)
    caches = {x.dtype.name for x in jax.tree.leaves(engine._cache)}
    assert "bfloat16" in caches and "float32" not in caches
    key = np.asarray(jax.random.key_data(jax.random.key(1, impl="threefry2x32")))
    sequence = engine.add([5, 6, 7], limit=R, seed_key=key, sample_id=0)
    while engine.has_work:
        engine.step()
    tokens, start = jnp.array([sequence.tokens]), 3
    hidden = hidden_states(prepare(spec, cast, SETTINGS), tokens, SETTINGS)
    logits = np.float64(hidden)[0] @ np.float64(cast["head"]["table"]).T
    exact = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    exact = exact[np.arange(start - 1, tokens.size - 1), sequence.tokens[start:]]
    np.testing.assert_allclose(sequence.logprobs[start:], exact, atol=0.05)


def arrays(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


KERNELS = {
    "linear_logprob": lambda h, w, t: linear_logprob(h, w, t, chunk=4)[0],
    "kept_logprob": lambda h, w, t: (
        kept_logprob(h, w, t, jnp.broadcast_to(jnp.arange(V), (*t.shape, V)), chunk=4).logprobs
    ),
    "linear_logprobs_at": lambda h, w, t: linear_logprobs_at(h, w, t[:, None], chunk=4)[:, 0],
}


@pytest.mark.parametrize("name", KERNELS)
def test_values_and_gradients_are_of_unrounded_float32(name):
    hidden, weight = jnp.bfloat16(arrays(9, D)), jnp.float32(arrays(V, D, 1)[..., 0])
    targets = jnp.arange(9) * 5
    weights = jnp.float32(arrays(9))

    def loss(run, hidden, weight):
        return (run(hidden, weight, targets) * weights).sum()

    def gradients(run, hidden):
        return jax.jit(jax.value_and_grad(partial(loss, run), (0, 1)))(hidden, weight)

    reference = lambda h, w, t: linear_logprob_reference(h, w, t)[0]  # noqa: E731
    value, (of_hidden, of_weight) = gradients(KERNELS[name], hidden)
    exact, (exact_hidden, exact_weight) = gradients(reference, jnp.float32(hidden))
    np.testing.assert_allclose(value, exact, rtol=1e-5)
    np.testing.assert_allclose(of_weight, exact_weight, atol=2e-5)
    assert of_hidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(of_hidden, exact_hidden, rtol=1e-2, atol=1e-2)


def test_equal_dtypes_keep_their_matmul():
    for dtype in (jnp.float32, jnp.bfloat16):
        hidden, weight = jnp.zeros((3, D), dtype), jnp.zeros((V, D), dtype)
        gradient = jax.grad(lambda h, w: KERNELS["linear_logprob"](h, w, jnp.arange(3)).sum())
        program = str(jax.make_jaxpr(gradient)(hidden, weight))
        assert "dot_general" in program and "HIGHEST" not in program


@pytest.mark.nightly
def test_strictly_sampler_and_trainer_have_the_same_bits():
    config = tiny_config(model_reward=False, algorithm={"use_kl_in_reward": False})
    actor = replace(config.actor, dtype="bfloat16", head_dtype="float32", ppo_epochs=1)
    config = replace(config, algorithm=c.GRPO(use_kl_loss=False), exact="strict", actor=actor)
    iteration = open_iteration(config)
    _, _, metrics = run_step(iteration, first_states(iteration), 1)
    assert metrics["training/rollout_probs_diff_max"] == 0


@pytest.mark.nightly
def test_policy_and_reference_are_equal_before_the_first_update():
    config = tiny_config(model_reward=False, algorithm={"use_kl_in_reward": False})
    config = replace(config, algorithm=c.GRPO(kl_loss_type="k2"))
    actor = replace(config.actor, dtype="bfloat16", ppo_epochs=1, ppo_mini_batch_size=PROMPTS)

    def first_step(head_dtype):
        run = replace(config, actor=replace(actor, head_dtype=head_dtype))
        mesh, reward = make_mesh(devices=jax.devices()[:1]), ArrayReward(even_tokens)
        plan = plan_online(run, load_tokenizer("char"), mesh, reward)
        (iteration,) = plan.phases
        _, _, metrics = run_step(iteration, untrained_states(plan), 1)
        return iteration.roles["reference"].spec, metrics

    spec, metrics = first_step("float32")
    dtypes = jax.tree.map(lambda x: x.dtype.name, spec.params)
    assert dtypes["decoder"].pop("embed") == {"table": "float32"}
    assert {*jax.tree.leaves(dtypes)} == {"bfloat16"}
    assert metrics["actor/kl_loss"] == 0
    plain_spec, plain = first_step("")
    assert {x.dtype.name for x in jax.tree.leaves(plain_spec.params)} == {"bfloat16"}
    gap = "training/rollout_probs_diff_mean"
    assert metrics[gap] < plain[gap] and metrics["actor/entropy"] != plain["actor/entropy"]
