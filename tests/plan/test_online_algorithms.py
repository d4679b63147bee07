"""Every online algorithm through a planned iteration: what it pulls in, and what comes out."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from further import further
from tiny import EXPERTS, GPT_OSS
from tiny_iteration import (
    MODEL,
    PROMPTS,
    N,
    even_tokens,
    first_states,
    open_iteration,
    packed,
    run_step,
)
from tiny_iteration import tiny_config as with_sizes

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.config import ALGORITHMS, Config, ConfigError, Custom, Online
from jaxrl_llm.plan.online import _corrected

ALIASES = {
    name: {"dro": {"beta": 0.1}, "pair": {"adv_estimator": "rloo", "loss_mode": "gspo"}}.get(
        name, {}
    )
    for name in (
        "ppo grpo dr_grpo dapo grpo_passk gdpo rloo reinforce_plus_plus "
        "reinforce_plus_plus_baseline remax opo optimal_token_baseline gspo cispo sapo gmpo "
        "clip_cov kl_cov dppo_tv dppo_kl dro gpg pair"
    ).split()
}
KINDS = {cls.kind: cls for cls in ALGORITHMS}
# What each asks for in addition to GRPO's: no critic, no reference, no greedy rollout.
ADDED = {
    "ppo": {"values", "update_critic"},
    "grpo": {"ref"},
    "remax": {"gen_max", "reward_max"},
}
GRPO_STAGES = {"gen", "old_log_prob", "reward", "kl", "adv", "update_actor"}


FIRST = ("dro", "gdpo", "optimal_token_baseline", "pair")  # configs/ has most of the others


def config_of(name: str, **settings) -> Config:
    """Two mini-batches of one epoch, a Python reward."""
    config = with_sizes(model_reward=False)
    return replace(
        config,
        actor=replace(config.actor, ppo_epochs=1),
        critic=replace(config.critic, ppo_epochs=1),
        algorithm=KINDS[name](**ALIASES.get(name, {}) | settings),
    )


def stages_of(config: Config) -> set[str]:
    return {stage.name for stage in open_iteration(config).stages}


@pytest.mark.parametrize("name", ALIASES)
def test_each_plans_what_its_signatures_ask_for(name):
    expected = GRPO_STAGES | ADDED.get(name, set())
    if name == "gpg":
        expected -= {"old_log_prob"}  # a loss without a ratio needs no old policy
    assert stages_of(config_of(name)) == expected


@pytest.mark.parametrize("name", further(sorted(ALIASES, key=FIRST.__contains__, reverse=True), 4))
def test_each_traces(name):
    batch = open_iteration(config_of(name)).trace()
    assert batch.advantages.shape == (PROMPTS * N, 5)
    assert batch.advantages.dtype == batch.scores.dtype == np.float32
    assert (batch.sum_pi_squared is not None) == (name == "optimal_token_baseline")


def test_there_is_no_algorithm_that_is_not_tested():
    online = {kind for kind, cls in KINDS.items() if issubclass(cls, Online)}
    # Algorithms of tests/trainer/test_composed.py, which need a teacher or keep samples.
    others = {"rejection_sampling", "distillation", "distillation_top_k"}
    # Algorithms of tests/plan/test_turn_credit.py.
    others |= {"turn_ppo", "turn_baseline", "discounted_turns", "mt_grpo", "gigpo"}
    assert online - others == ALIASES.keys()


def run(config: Config):
    iteration = open_iteration(config)
    states = first_states(iteration)
    before = jax.tree.map(np.array, states["actor"].params)
    states, batch, metrics = run_step(iteration, states, 1)
    change = jax.tree.map(
        lambda a, b: np.abs(a - np.array(b)).max(), before, states["actor"].params
    )
    return batch, metrics, max(jax.tree.leaves(change)), states


def by_group(x):
    return np.asarray(x).reshape(PROMPTS, N, *np.shape(x)[1:])


def test_remax_compares_with_a_greedy_answer_to_the_same_prompt():
    batch, metrics, change, _ = run(config_of("remax"))
    assert change > 0
    lengths, greedy = by_group(batch.greedy_lengths), by_group(batch.greedy_scores)
    assert (lengths[:, 0] > 0).all() and not lengths[:, 1:].any()
    np.testing.assert_array_equal(greedy[:, 0], greedy[:, 1])
    answers = by_group(batch.greedy_responses)[:, 0]
    scores = even_tokens(answers, lengths[:, 0])
    np.testing.assert_allclose(greedy[:, 0], scores, rtol=1e-6)
    np.testing.assert_allclose(metrics["critic/greedy_score/mean"], scores.mean(), rtol=1e-6)
    found = np.asarray(batch.advantages)[:, 0]
    np.testing.assert_allclose(found, batch.scores - greedy.reshape(-1), atol=1e-6)
    # Greedy twice is the same; the samples are not all greedy.
    assert (by_group(batch.responses)[:, 0] != answers).any()


@pytest.mark.slow
def test_a_reward_model_scores_greedy_answers_as_it_scores_samples():
    config = replace(config_of("remax"), reward=with_sizes(model_reward=True).reward)
    config = packed(config, 33)
    iteration = open_iteration(config)
    assert {"gen_max", "reward_max"} <= {stage.name for stage in iteration.stages}
    _, batch, metrics = run_step(iteration, first_states(iteration), 1)
    greedy = by_group(batch.greedy_scores)
    np.testing.assert_array_equal(greedy[:, 0], greedy[:, 1])
    samples, answers = by_group(batch.responses), by_group(batch.greedy_responses)[:, :1]
    lengths = by_group(batch.greedy_lengths)[:, :1, None]
    ends, masks = by_group(batch.mask), np.arange(samples.shape[2]) < lengths
    same = (samples * ends == answers * masks).all(axis=2) & (ends == masks).all(axis=2)
    assert same.any()  # where a sample is the greedy answer, so is its score
    np.testing.assert_allclose(by_group(batch.scores)[same], greedy[same], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["critic/greedy_score/mean"], greedy.mean(), rtol=1e-5)


@pytest.mark.slow
def test_squared_probabilities_are_those_of_the_old_policy():
    batch, _, change, _ = run(config_of("optimal_token_baseline", rollout_is="token"))
    assert change > 0
    mask = np.asarray(batch.mask) > 0
    squares, p = (
        np.asarray(batch.sum_pi_squared)[mask],
        np.exp(np.asarray(batch.old_logprobs)[mask]),
    )
    assert (squares >= p**2 - 1e-6).all() and (squares <= 1.0).all()
    assert (squares >= 1 / MODEL["vocab_size"] - 1e-6).all() and squares.std() > 0
    assert "importance_weights" in field_names(
        build_online(c.OptimalTokenBaseline(rollout_is="token")).advantage
    )


def test_gdpo_reads_the_parts_of_the_reward():
    batch = open_iteration(config_of("gdpo")).trace()
    assert batch.reward_parts.shape == (PROMPTS * N, 1)
    assert batch.reward_parts.dtype == np.float32
    with pytest.raises(ValueError, match="2 reward_weights for 1 reward functions"):
        open_iteration(config_of("gdpo", reward_weights=(1.0, 2.0))).trace()
    model = replace(config_of("gdpo"), reward=with_sizes(model_reward=True).reward)
    with pytest.raises(ValueError, match="reads 'reward_parts', which no stage writes"):
        open_iteration(model)


def test_two_policies_leave_out_the_old_one_and_correct_from_the_start():
    names = stages_of(config_of("grpo", bypass_mode=True, use_kl_loss=False))
    assert names == GRPO_STAGES - {"old_log_prob"}
    settings = {"bypass_mode": True, "rollout_rs": "token_k2", "rollout_rs_threshold": 1e-12}
    config = config_of("gpg", rollout_is="token", **settings)
    batch, metrics, change, _ = run(config)
    assert batch.old_logprobs is None and change > 0
    # Sampler and trainer differ by rounding: all weights are near 1, a few tokens are rejected.
    np.testing.assert_allclose(metrics["rollout_corr/rollout_is_mean"], 1.0, atol=0.2)
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("quantization", "model", "rank", "least", "most"),
    [
        ("float8", {}, 0, 1e-3, 0.3),
        pytest.param("float8", GPT_OSS, 0, 1e-3, 0.3, marks=pytest.mark.slow),
        pytest.param("float8", EXPERTS, 2, 1e-3, 0.3, marks=pytest.mark.slow),
        pytest.param("none", {}, 0, 0, 1e-4, marks=pytest.mark.slow),
    ],
    ids=["float8", "gpt_oss in float8", "merged adapters of experts in float8", "full"],
)
def test_a_rollout_is_corrected_by_importance(
    quantization: str, model: dict[str, Any], rank: int, least: float, most: float
):
    """The weights of the update are the sampler's own distance from the trainer, cut."""
    config = config_of("grpo", rollout_is="token", rollout_is_threshold=1.01, use_kl_loss=False)
    config = replace(config, rollout=replace(config.rollout, quantization=quantization))
    lora = c.LoraConfig(rank=rank)
    actor = replace(config.actor, hf_config=config.actor.hf_config | model, lora=lora)
    config = replace(config, actor=actor)
    iteration = open_iteration(config)
    _, batch, metrics = run_step(iteration, first_states(iteration), 1)
    real = np.asarray(batch.mask) > 0
    ratio = np.exp(np.asarray(batch.old_logprobs) - np.asarray(batch.rollout_logprobs))
    weights = np.asarray(batch.importance_weights)
    np.testing.assert_allclose(weights[real], np.minimum(ratio, 1.01)[real], rtol=1e-5)
    mean = metrics["rollout_corr/rollout_is_mean"]
    np.testing.assert_allclose(mean, weights[real].mean(), rtol=1e-5)
    assert least <= np.abs(np.log(ratio[real])).mean() < most


@pytest.mark.parametrize(("given", "found"), [(None, 10.0), (2.0, 2.0), (3.0, 3.0)])
def test_a_threshold_that_is_given_counts_for_stale_samples(given: float | None, found: float):
    config = config_of("grpo", rollout_is_threshold=given)
    weighted = _corrected(replace(config, max_staleness=2)).algorithm
    assert weighted.rollout_is == "sequence" and weighted.rollout_is_threshold == found


def test_rejected_tokens_are_in_no_loss_and_no_count():
    settings = {"use_kl_loss": False, "rollout_rs": "token_k2", "rollout_rs_threshold": 1e-12}
    config = config_of("grpo", rollout_is="token", **settings)
    config = replace(config, actor=replace(config.actor, ppo_mini_batch_size=PROMPTS))
    iteration = open_iteration(config)
    assert "rollout_corr" in {stage.name for stage in iteration.stages}
    _, batch, metrics = run_step(iteration, first_states(iteration), 1)
    mask, kept = np.asarray(batch.mask), np.asarray(batch.loss_mask)
    assert 0 < kept.sum() < mask.sum() and (kept <= mask).all()
    d = np.asarray(batch.old_logprobs) - np.asarray(batch.rollout_logprobs)
    np.testing.assert_array_equal(kept, mask * (0.5 * d**2 <= 1e-12))
    share = metrics["rollout_corr/rollout_rs_masked_fraction"]
    np.testing.assert_allclose(share, 1 - kept.sum() / mask.sum(), rtol=1e-5)
    # Before the only update the ratio is 1: the loss is -A w, a mean over what is kept.
    weighed = np.asarray(batch.advantages) * np.asarray(batch.importance_weights)
    expected = -(weighed * kept).sum() / kept.sum()
    np.testing.assert_allclose(metrics["actor/pg_loss"], expected, rtol=1e-4, atol=1e-6)
    assert abs(expected + (weighed * mask).sum() / mask.sum()) > 1e-4  # another over all tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gspo", "gmpo", "sapo", "opo"])
def test_packed_rows_give_the_padded_update(name):
    """A response lies whole in one row either way, so a ratio over responses is the same.

    In mini-batches of samples in random order, the same one either way; packed, no row then takes
    samples for the group of which they are not.
    """
    config = config_of(name)
    config = replace(config, actor=replace(config.actor, shuffle=True))
    _, padded_metrics, change, padded = run(config)
    _, packed_metrics, _, states = run(packed(config, 33))
    assert change > 0
    for key in ("actor/pg_loss", "actor/grad_norm"):
        np.testing.assert_allclose(packed_metrics[key], padded_metrics[key], rtol=2e-3, atol=1e-5)
    for a, b in zip(
        jax.tree.leaves(padded["actor"].params),
        jax.tree.leaves(states["actor"].params),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=2e-3)


@pytest.mark.parametrize("name", ALIASES)
def test_estimators_of_groups_refuse_one_sample(name):
    config = config_of(name)
    config = replace(config, rollout=replace(config.rollout, n=1))
    if name in ("ppo", "reinforce_plus_plus", "remax"):
        open_iteration(config)
        return
    with pytest.raises(ValueError, match=r"rollout.n=1 makes one: config.rollout.n=8"):
        open_iteration(config)


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"top_k": 1}, {"min_p": 1.0}])
def test_greedy_answers_are_not_compared(how):
    for name in ("grpo", "remax"):
        config = config_of(name)
        config = replace(config, rollout=replace(config.rollout, **how))
        with pytest.raises(ConfigError, match=f"config.rollout.{[*how][0]}=.* is greedy"):
            open_iteration(config)


MISSING = """
from dataclasses import replace
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.config import GRPO


def asks_for_weights() -> Algorithm:
    def loss(logprobs, old_logprobs, advantages, mask, importance_weights):
        return logprobs * importance_weights, {}

    return replace(build_online(GRPO(use_kl_loss=False)), policy_loss=loss)
"""


def test_a_loss_whose_field_nobody_writes_is_refused_with_the_fields_there_are(tmp_path):
    (tmp_path / "missing.py").write_text(MISSING)
    algorithm = Custom(path=f"{tmp_path}/missing.py:asks_for_weights")
    with pytest.raises(
        ValueError, match="'importance_weights', which no stage writes; add a stage"
    ):
        open_iteration(replace(config_of("grpo"), algorithm=algorithm))


CLASHES = """
from dataclasses import replace
import jax, jax.numpy as jnp
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.config import GRPO, PPO


def renames():
    def loss(logprobs, advantages, mask):
        return -logprobs * advantages, {"actor/pg_loss": logprobs}

    return replace(build_online(GRPO()), policy_loss=loss)


def replaced():
    def loss(logprobs, advantages, mask):
        return -logprobs * advantages, {"actor/grad_norm": logprobs}

    return replace(build_online(GRPO()), policy_loss=loss)


def required(scale):
    return build_online(GRPO())


def fixed(*, kl=False):
    def loss(advantages, old_logprobs, mask):
        return -old_logprobs * advantages, {}

    return replace(build_online(GRPO(use_kl_loss=kl)), policy_loss=loss)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("renames", "'actor/pg_loss', which the trainer writes itself; take another name"),
        ("replaced", "'actor/grad_norm', which the trainer writes itself; take another name"),
        ("required", "'scale', which is no setting: make it keyword-only"),
    ],
)
def test_functions_that_would_fail_in_a_step_are_refused_before_it(tmp_path, name, message):
    (tmp_path / "own.py").write_text(CLASHES)
    algorithm = Custom(path=f"{tmp_path}/own.py:{name}")
    with pytest.raises(ValueError, match=message):
        iteration = open_iteration(replace(config_of("grpo"), algorithm=algorithm))
        run_step(iteration, first_states(iteration), 1)


@pytest.mark.nightly
def test_a_loss_of_the_kl_alone_learns(tmp_path):
    (tmp_path / "own.py").write_text(CLASHES)
    algorithm = Custom(path=f"{tmp_path}/own.py:fixed", settings={"kl": True})
    iteration = open_iteration(replace(config_of("grpo"), algorithm=algorithm))
    _, _, metrics = run_step(iteration, first_states(iteration), 1)
    assert metrics["actor/kl_loss"] >= 0


def test_groups_without_variance_are_reported_and_teach_nothing():
    """A constant reward: every advantage is exactly 0, the update finite, the share 1."""
    config = config_of("grpo", use_kl_loss=False)
    iteration = open_iteration(config, reward=lambda responses, _: np.full(len(responses), 0.7))
    states = first_states(iteration)
    states, batch, metrics = run_step(iteration, states, 1)
    assert metrics["frac_reward_zero_std"] == 1.0
    np.testing.assert_array_equal(batch.advantages, 0.0)
    assert metrics["actor/grad_norm"] == 0.0 and metrics["actor/pg_loss"] == 0.0
    assert all(np.isfinite(value).all() for value in metrics.values())
