"""Filters of sampling in whole iterations: the trainer has the policy that was sampled from."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from further import further
from tiny_iteration import first_states, open_iteration, packed, run_step, tiny_config

from jaxrl_llm.config import Config, LoraConfig
from jaxrl_llm.learner.forward import ForwardSettings, row_logprobs
from jaxrl_llm.learner.rows import KEPT

TOP_K = 6


def config_of(**changes) -> Config:
    """The tiny config with filters; the KL to the reference is a part of the loss."""
    config = tiny_config(
        model_reward=False,
        algorithm={"use_kl_in_reward": False, "use_kl_loss": True, "kl_loss_coef": 0.1},
    )
    rollout = replace(config.rollout, top_k=TOP_K, top_p=0.9, temperature=0.8)
    return replace(config, rollout=rollout, **changes)


@cache
def iterate(kind):
    config = config_of()
    if kind == "packed":
        config = packed(config, 33)
    elif kind == "one step":
        actor = replace(config.actor, ppo_mini_batch_size=16, ppo_epochs=1)
        config = replace(config, actor=actor)
    elif kind == "lora":
        config = replace(config, actor=replace(config.actor, lora=LoraConfig(rank=2)))
    elif kind == "no filter":
        config = replace(config, rollout=replace(config.rollout, top_k=0, top_p=1.0))
    iteration = open_iteration(config)
    states = first_states(iteration)
    if kind == "lora":
        # As large as the base they would be all of its output, and amplify its rounding: log-probs
        # then differ by 2.5e-5, with filters and without.
        small = jax.tree.map(lambda x: x * np.float32(0.1), states["actor"].params)
        states["actor"] = replace(states["actor"], params=small)
    before = jax.tree.map(np.asarray, iteration.roles["actor"].params_in(states))
    return iteration, before, *run_step(iteration, states, 1)[1:]


@pytest.mark.parametrize("kind", further(["padded", "packed", "one step", "lora"]))
def test_the_sampler_and_the_trainer_have_one_policy(kind):
    """Before, the trainer's log-probs were of the whole softmax, and no metric saw the difference.

    The metrics would see it now, as the sampler's log-probs are of its own distribution.
    """
    *_, metrics = iterate(kind)
    _, _, _, without = iterate("no filter")
    assert metrics["training/rollout_probs_diff_max"] < 2e-6
    assert metrics["actor/entropy"] < 0.9 * without["actor/entropy"]


def test_the_first_ratio_is_exactly_one():
    """A single optimizer step computes its own old log-probs, over the kept tokens too."""
    *_, metrics = iterate("one step")
    assert metrics["actor/ppo_kl"] == 0.0 and metrics["actor/pg_clipfrac"] == 0.0


def test_log_probs_of_policy_and_reference_by_hand():
    """From whole rows of log-probs of each kept token: renormalised over those that were kept."""
    iteration, params, batch, _ = iterate("padded")
    actor, kept = iteration.roles["actor"], np.asarray(batch[KEPT])
    assert kept.shape == (*batch.responses.shape, TOP_K)
    scaled = {
        "old_logprobs": params,
        "reference_logprobs": jax.tree.map(lambda x: x * np.float32(0.95), params),
    }

    @jax.jit
    def logprobs(params, rows):
        return row_logprobs(params, rows, spec=actor.spec, settings=ForwardSettings())

    for sample, place in ((0, 0), (3, 1), (7, 2), (11, 0)):
        if not batch.mask[sample, place]:
            continue
        length = batch.prompt_lengths[sample]
        begin = [*batch.prompts[sample, :length], *batch.responses[sample, :place]]
        ids = kept[sample, place][kept[sample, place] >= 0]
        assert batch.responses[sample, place] in ids and 0 < len(ids) <= TOP_K
        rows = np.array([[*begin, token] for token in ids], np.int32)
        for name, weights in scaled.items():
            # At temperature 1 log-probs differ from the logits by a constant.
            z = np.asarray(logprobs(weights, rows))[:, -1].astype(np.float64) / 0.8
            expected = z - np.log(np.exp(z).sum())
            at = ids.tolist().index(batch.responses[sample, place])
            found = getattr(batch, name)[sample, place]
            np.testing.assert_allclose(found, expected[at], atol=1e-4, err_msg=name)


def test_a_run_without_filters_has_no_such_field():
    iteration, _, batch, _ = iterate("no filter")
    assert batch[KEPT] is None
    assert all(KEPT not in (*stage.reads, *stage.writes) for stage in iteration.stages)
