"""An iteration of one optimizer step: the update's forward pass gives the old log-probs too."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from compiled import compiled
from test_online_algorithms import config_of, stages_of
from tiny_iteration import PROMPTS, first_states, in_micro_batches, open_iteration, packed, run_step

from jaxrl_llm.algorithms.mismatch import mismatch_metrics
from jaxrl_llm.config import Config, LoraConfig
from jaxrl_llm.learner.forward import response_logprobs
from jaxrl_llm.learner.rows import SAMPLE_ROWS, rows_of
from jaxrl_llm.plan.online_stages import OnlineStages


def single(config: Config) -> Config:
    """`config` with all samples in one mini-batch."""
    return replace(config, actor=replace(config.actor, ppo_mini_batch_size=PROMPTS))


ROWS = {
    "one part": lambda config: config,
    "four parts": lambda config: in_micro_batches(config, 8),
    "packed": lambda config: packed(config, 33),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param("grpo", "one part", marks=pytest.mark.slow),
        pytest.param("ppo", "four parts", marks=pytest.mark.slow),
        ("grpo", "packed"),
    ],
)
def test_it_is_the_step_with_a_pass_of_its_own(name, rows, monkeypatch):
    """The same weights and the same metrics; the metrics are right by a forward pass by hand."""
    config = ROWS[rows](single(config_of(name)))

    def step():
        iteration = open_iteration(config)
        first = first_states(iteration)
        before = jax.tree.map(np.array, first["actor"].params)
        names = {stage.name for stage in iteration.stages}
        states, batch, metrics = run_step(iteration, first, 1)
        after = jax.tree.map(np.array, states["actor"].params)
        return names, batch, metrics, iteration.roles["actor"], before, after

    names, batch, metrics, role, before, after = step()
    assert "old_log_prob" not in names and batch.old_logprobs is None

    fields = {name: getattr(batch, name) for name in SAMPLE_ROWS}
    logprobs, entropy = compiled(
        partial(response_logprobs, spec=role.spec, settings=role.forward, with_entropy=True),
        before,
        rows_of(fields),
    )
    expected = compiled(mismatch_metrics, logprobs, batch.rollout_logprobs, batch.mask)
    expected["actor/entropy"] = (entropy * batch.mask).sum() / batch.mask.sum()
    for key, value in expected.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
    assert metrics["actor/ppo_kl"] == 0 and metrics["actor/pg_clipfrac"] == 0

    catalogue = OnlineStages.catalogue
    monkeypatch.setattr(
        OnlineStages, "catalogue", lambda self, own_logprobs: catalogue(self, own_logprobs=False)
    )
    names, _, found, _, _, by_pass = step()
    assert "old_log_prob" in names
    assert found.keys() == metrics.keys()
    for key in found:
        np.testing.assert_allclose(metrics[key], found[key], rtol=1e-4, atol=1e-5, err_msg=key)
    for left, right in zip(jax.tree.leaves(after), jax.tree.leaves(by_pass), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
    moved = [
        np.abs(x - y).max() for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True)
    ]
    assert max(moved) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["packed", "four parts"])
def test_quantiles_of_the_ratio_are_those_of_all_tokens_of_both_epochs(rows):
    """The ratios by forward passes by hand, before and after the first optimizer step."""
    config = ROWS[rows](single(config_of("grpo")))
    two_epochs = replace(config, actor=replace(config.actor, ppo_epochs=2))

    def step(config):
        iteration = open_iteration(config)
        first = first_states(iteration)
        before = jax.tree.map(np.array, first["actor"].params)
        states, batch, metrics = run_step(iteration, first, 1)
        return iteration.roles["actor"], before, states["actor"].params, batch, metrics

    role, before, after, batch, single_metrics = step(config)
    assert not [name for name in single_metrics if "ratio_p" in name]
    *_, metrics = step(two_epochs)
    rows_in = rows_of({name: getattr(batch, name) for name in SAMPLE_ROWS})
    old, new = (
        np.array(response_logprobs(params, rows_in, spec=role.spec, settings=role.forward)[0])
        for params in (before, after)
    )
    tokens = np.array(batch.mask) != 0
    ratios = np.exp(np.concatenate([np.zeros(tokens.sum()), (new - old)[tokens]]))
    expected = np.quantile(ratios, [0.01, 0.5, 0.99], method="inverted_cdf")
    found = [metrics[f"actor/ratio_{p}"] for p in ("p01", "p50", "p99")]
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert found[0] < 0.999 and found[2] > 1.001


def test_a_pass_of_its_own_where_something_else_reads_them_or_there_are_more_steps():
    grpo = single(config_of("grpo"))
    assert "old_log_prob" not in stages_of(grpo)
    assert "old_log_prob" in stages_of(config_of("grpo"))
    twice = replace(grpo, actor=replace(grpo.actor, ppo_epochs=2))
    assert "old_log_prob" in stages_of(twice)
    for settings in (
        {"rollout_is": "token"},
        {"rollout_rs": "token_k2", "rollout_rs_threshold": 1.0},
        {"use_kl_in_reward": True},
    ):
        name = "ppo" if "use_kl_in_reward" in settings else "grpo"
        assert "old_log_prob" in stages_of(single(config_of(name, **settings)))


def test_a_pass_of_its_own_with_dropout():
    """The sampler has none: its distance from a pass with dropout would show the dropout."""
    grpo = single(config_of("grpo"))
    for dropout in (0.0, 0.1):
        lora = LoraConfig(rank=2, dropout=dropout)
        names = stages_of(replace(grpo, actor=replace(grpo.actor, lora=lora)))
        assert ("old_log_prob" in names) == (dropout > 0)


def test_a_pass_of_its_own_where_only_the_critic_learns_at_first():
    """The update is left out meanwhile, and the sampler's distance is to be seen all the same."""
    ppo = single(config_of("ppo", use_kl_in_reward=False))
    assert "old_log_prob" not in stages_of(ppo)
    warmed = replace(ppo, critic=replace(ppo.critic, warmup_steps=2))
    assert "old_log_prob" in stages_of(warmed)
