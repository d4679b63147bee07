"""What PPO composes, what it reads from the batch, and that docs/add-an-algorithm.md holds."""

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled

from jaxrl_llm import config as c
from jaxrl_llm.algorithms import (
    advantages,
    aggregation,
    group_advantages,
    kl,
    policy_losses,
    sequence_losses,
)
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.algorithms.fields import UPDATE_FIELDS, field_names, pair_of
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.plan.models import find_tokenizer
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward

DOCS = Path(__file__).parents[2] / "docs" / "add-an-algorithm.md"


def reads(algorithm):
    """Every batch field that some function of the algorithm asks for."""
    fns = (
        algorithm.advantage,
        algorithm.policy_loss,
        algorithm.value_loss,
        algorithm.kl_reward,
        algorithm.kl_loss,
        algorithm.importance,
    )
    return {name for fn in fns if fn is not None for name in field_names(fn)}


def test_default_ppo():
    algorithm = build_online(c.PPO())
    assert field_names(algorithm.advantage) == ("rewards", "values", "mask")
    assert field_names(algorithm.policy_loss) == (
        "logprobs",
        "old_logprobs",
        "advantages",
        "mask",
    )
    assert field_names(algorithm.value_loss) == ("new_values", "values", "returns", "mask")
    assert algorithm.aggregate is aggregation.token_mean
    assert algorithm.importance is None and algorithm.entropy_coef == 0.0
    assert reads(algorithm) - set(UPDATE_FIELDS) == {
        "rewards",
        "values",
        "mask",
        "old_logprobs",
        "advantages",
        "returns",
    }


def test_default_grpo():
    algorithm = build_online(c.GRPO())
    assert field_names(algorithm.advantage) == ("rewards", "mask", "group_ids")
    assert algorithm.value_loss is None and algorithm.kl_reward is None
    assert "reference_logprobs" in reads(algorithm) and algorithm.kl_loss_coef == 0.001
    assert "values" not in reads(algorithm)
    assert "reference_logprobs" not in reads(build_online(c.GRPO(kl_loss_coef=0.0)))
    corrected = build_online(c.GRPO(rollout_is="token"))
    assert "importance_weights" in field_names(corrected.policy_loss)


def test_the_reference_is_asked_for_only_when_a_kl_term_counts():
    assert "reference_logprobs" in reads(build_online(c.PPO(use_kl_loss=True)))
    assert "reference_logprobs" in reads(build_online(c.PPO(use_kl_in_reward=True)))
    for settings in (
        {},
        {"use_kl_loss": True, "kl_loss_coef": 0.0},
        {"use_kl_in_reward": True, "kl_coef": 0.0},
        {"use_kl_in_reward": True, "kl_coef": 0.0, "kl_controller": "adaptive"},
    ):
        assert "reference_logprobs" not in reads(build_online(c.PPO(**settings)))


def test_kl_in_the_reward_and_its_controller():
    algorithm = build_online(
        c.PPO(use_kl_in_reward=True, kl_reward_type="k2", kl_controller="adaptive", kl_coef=0.2)
    )
    assert algorithm.kl_controller == kl.AdaptiveKL(0.2, horizon=10000.0, target=0.1)
    names = field_names(algorithm.kl_reward)
    assert names == ("scores", "mask", "old_logprobs", "reference_logprobs")
    mask, coef = np.ones((1, 2), np.float32), algorithm.kl_controller.init()
    arrays = np.float32([1.0]), mask, -mask, -2 * mask
    rewards, penalty = compiled(algorithm.kl_reward, *arrays, coef=coef)
    np.testing.assert_allclose(penalty, [[0.5, 0.5]])
    np.testing.assert_allclose(rewards, [[-0.1, 0.9]], rtol=1e-6)
    assert build_online(c.PPO(kl_coef=0.2)).kl_controller.init() == 0.0


def test_kl_in_the_loss_by_name():
    algorithm = build_online(c.PPO(use_kl_loss=True, kl_loss_type="k1", kl_loss_coef=0.02))
    assert algorithm.kl_loss is kl.kl_k1 and algorithm.kl_loss_coef == 0.02


def test_importance_correction_adds_the_field():
    algorithm = build_online(c.PPO(rollout_is="token", rollout_is_threshold=3.0))
    assert field_names(algorithm.importance) == ("old_logprobs", "rollout_logprobs", "mask")
    assert field_names(algorithm.policy_loss)[-1] == "importance_weights"
    ones = np.ones((1, 1), np.float32)
    weights, _ = compiled(algorithm.importance, 8 * ones, ones, ones)
    np.testing.assert_allclose(weights, [[3.0]])
    half, _ = compiled(algorithm.policy_loss, ones, ones, ones, ones, ones / 2)
    np.testing.assert_allclose(half, [[-0.5]])


def test_settings_reach_the_functions():
    algorithm = build_online(
        c.PPO(
            lam=0.0,
            clip_high=0.5,
            cliprange_value=9.0,
            loss_aggregation="seq-mean-token-sum-norm",
            loss_scale=10,
        )
    )
    ones = np.ones((1, 2), np.float32)
    _, returns = compiled(algorithm.advantage, 0 * ones, np.float32([[1.0, 3.0]]), ones)
    np.testing.assert_allclose(returns, [[3.0, 0.0]])  # lam 0: the return is V of the next token
    ratio = np.log(np.float32([[1.4, 1.6]]))
    loss, _ = compiled(algorithm.policy_loss, ratio, 0 * ones, ones, ones)
    np.testing.assert_allclose(loss, [[-1.4, -1.5]], rtol=1e-6)
    loss, _ = compiled(algorithm.value_loss, 8 * ones, 0 * ones, 0 * ones, ones)
    np.testing.assert_allclose(loss, [[32.0, 32.0]])
    counts = {"global_tokens": 2.0, "global_sequences": 1.0}
    total = compiled(algorithm.aggregate, loss, ones, **counts)
    np.testing.assert_allclose(total, 6.4, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_c": 0.5}, "clip_c\n.*greater than 1"),
        ({"gamma": 2.0}, "gamma\n.*less than or equal to 1"),
        ({"cliprange_value": -1.0}, "cliprange_value\n.*greater than 0"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.0}, "importance threshold"),
        ({"kl_controller": "adaptve"}, "'fixed' or 'adaptive'"),
        ({"use_kl_loss": True, "kl_loss_type": "k4"}, "kl_loss_type"),
        ({"loss_aggregation": "token-men"}, "loss_aggregation"),
    ],
)
def test_bad_settings_are_refused_when_composed(settings, message):
    with pytest.raises(ValueError, match=message):
        build_online(c.PPO(**settings))


def test_unknown_fields_are_refused_with_the_nearest_name():
    def misspelt(logprobs, old_logprob, advantages, mask): ...

    parts = {"advantage": advantages.gae, "aggregate": aggregation.token_mean}
    with pytest.raises(ValueError, match="'old_logprob'.* did you mean 'old_logprobs'"):
        Algorithm(policy_loss=misspelt, **parts)
    with pytest.raises(ValueError, match="new_values"):  # no advantage may read the update's
        Algorithm(policy_loss=policy_losses.ppo_clip, **parts | {"advantage": lambda new_values: 0})
    with pytest.raises(ValueError, match="give both"):
        Algorithm(policy_loss=policy_losses.ppo_clip, kl_loss=kl.kl_k3, **parts)


def test_a_kl_in_rewards_that_nobody_reads_is_refused():
    """GDPO reads what each reward function said; the reference would run for nothing."""
    assert build_online(c.RLOO(use_kl_in_reward=True)).kl_reward is not None
    assert build_online(c.GDPO(use_kl_loss=True)).kl_loss is not None
    for settings in ({}, {"kl_controller": "adaptive"}):
        with pytest.raises(ValueError, match="use_kl_loss=True"):
            build_online(c.GDPO(use_kl_in_reward=True, **settings))


def parts(fn):
    """A partial as its function and settings."""
    return (fn.func, fn.keywords) if isinstance(fn, partial) else (fn, {})


OWN_PAIRS = [
    ("gae", "vanilla", c.PPO()),
    ("grpo", "vanilla", c.GRPO(use_kl_loss=False)),
    ("grpo", "gspo", c.GSPO()),
    ("grpo", "geo_mean", c.GMPO()),
    ("grpo", "cispo", c.CISPO()),
    ("remax", "vanilla", c.ReMax()),
    ("gpg", "gpg", c.GPG()),
    ("optimal_token_baseline", "vanilla", c.OptimalTokenBaseline()),
]


@pytest.mark.parametrize("adv_estimator, loss_mode, settings", OWN_PAIRS)
def test_a_pair_of_two_that_belong_together_is_that_algorithm(adv_estimator, loss_mode, settings):
    made = build_online(c.Pair(adv_estimator=adv_estimator, loss_mode=loss_mode))
    expected = build_online(settings)
    for name in ("advantage", "policy_loss", "value_loss", "aggregate"):
        assert parts(getattr(made, name)) == parts(getattr(expected, name)), name
    assert made.kl_loss is made.kl_reward is None


def test_the_token_baseline_of_a_pair_has_the_weights():
    weighted = {"rollout_is": "token"}
    made = build_online(c.Pair(adv_estimator="optimal_token_baseline", **weighted))
    expected = build_online(c.OptimalTokenBaseline(**weighted))
    assert parts(made.advantage) == parts(expected.advantage)
    assert "importance_weights" in field_names(made.advantage)
    # In bypass mode there are none before the update.
    settings = {"loss_mode": "gpg", "bypass_mode": True} | weighted
    bypassing = build_online(c.Pair(adv_estimator="optimal_token_baseline", **settings))
    assert "importance_weights" not in field_names(bypassing.advantage)


def test_each_estimator_and_each_loss_has_its_place():
    estimators, losses = (get_args(hint) for hint in pair_settings())
    # Each of both at least once: the two are put together whatever they are.
    for adv_estimator, loss_mode in zip(estimators, itertools.cycle(losses), strict=False):
        made = build_online(
            c.Pair(
                adv_estimator=adv_estimator,
                loss_mode=loss_mode,
                rollout_is="token",
                use_kl_loss=True,
            )
        )
        assert "importance_weights" in field_names(made.policy_loss) and made.kl_loss is not None
    mixed = build_online(
        c.Pair(adv_estimator="rloo", loss_mode="gspo", loss_aggregation="token-sum")
    )
    assert parts(mixed.advantage)[0] is group_advantages.rloo
    assert parts(mixed.policy_loss)[0] is sequence_losses.gspo
    assert mixed.aggregate is aggregation.token_sum


def pair_settings():
    hints = get_type_hints(c.Pair)
    return hints["adv_estimator"], hints["loss_mode"]


def test_one_update_of_a_batch_in_micro_batches_equals_the_whole():
    """Policy, KL and value terms together, in float32, to 1e-6 of the gradient's size."""
    algorithm = build_online(
        c.PPO(use_kl_loss=True, kl_loss_type="k2", kl_loss_coef=0.1, rollout_is="token")
    )
    rng = np.random.default_rng(0)
    names = ("logprobs", "old_logprobs", "advantages", "reference_logprobs", "importance_weights")
    fields = {name: jnp.array(rng.normal(size=(8, 5)), jnp.float32) for name in names}
    lengths = np.array([5, 1, 0, 3, 4, 2, 5, 1])
    fields["mask"] = jnp.array(np.arange(5) < lengths[:, None], jnp.float32)
    tokens, sequences = aggregation.global_counts(fields["mask"])
    aggregate = partial(algorithm.aggregate, global_tokens=tokens, global_sequences=sequences)

    def loss(scale, fields):
        fields = fields | {"logprobs": scale * fields["logprobs"]}
        per_token, _ = algorithm.policy_loss(
            *(fields[n] for n in field_names(algorithm.policy_loss))
        )
        penalty = algorithm.kl_loss(*(fields[n] for n in field_names(algorithm.kl_loss)))
        terms = aggregate(per_token, fields["mask"]), aggregate(penalty, fields["mask"])
        return terms[0] + algorithm.kl_loss_coef * terms[1]

    gradient_of = jax.jit(jax.grad(loss))
    gradient = gradient_of(1.0, fields)
    for size in (1, 2, 4):
        parts = [{k: v[i : i + size] for k, v in fields.items()} for i in range(0, 8, size)]
        total = sum(gradient_of(1.0, part) for part in parts)
        np.testing.assert_allclose(total, gradient, rtol=1e-6)


def doc_blocks():
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def test_the_page_on_adding_an_algorithm_works(monkeypatch, tmp_path):
    """Its function, alias, config and test, and the run that they plan: every program is traced."""
    function, composition, config, test = doc_blocks()
    first = {}
    exec(function, first)
    monkeypatch.setattr(
        advantages, "weighted_reinforce", first["weighted_reinforce"], raising=False
    )
    exec(test, first)
    first["test_weighted_reinforce_by_hand"]()

    (tmp_path / "mine.py").write_text(composition)
    second = {}
    exec(composition, second)
    make = second["weighted_reinforce"]
    assert "values" not in reads(make()) and "reference_logprobs" not in reads(make())
    assert "reference_logprobs" in reads(make(use_kl_in_reward=True))
    assert make(use_kl_in_reward=True).kl_controller.coef == 0.01

    third = {}
    exec(config, third)
    made = third["get_config"]()
    assert made.rollout.n == 4 and made.algorithm.path == "mine.py:weighted_reinforce"
    by_file = replace(made.algorithm, path=f"{tmp_path}/mine.py:weighted_reinforce")
    assert build_online(by_file).value_loss is None
    made = replace(made, algorithm=by_file)
    tokenizer = find_tokenizer(made.data.tokenizer, made.actor)
    reward = ArrayReward(lambda *_: None, ("score",))
    (iteration,) = plan_online(made, tokenizer, make_mesh(), reward).phases
    assert "critic" not in iteration.roles and "reference" not in iteration.roles
    rows = made.data.train_batch_size * 4
    assert iteration.trace().advantages.shape == (rows, made.data.max_response_length)


MASK = np.ones((4, 3))


@pytest.mark.parametrize(
    ("result", "metrics", "words"),
    [
        ((MASK, MASK[:, 0]), False, r"'returns' of shape \(4,\); .* `mask`, \(4, 3\): one value"),
        ((MASK[:, :1], MASK), False, r"'advantages' of shape \(4, 1\)"),  # it would broadcast
        ((MASK.mean(), {}), True, r"'loss' of shape \(\); .*no mean over them"),
        ((MASK, {"m": MASK[:, 0]}), True, r"'m' of shape \(4,\)"),
    ],
)
def test_what_a_function_returns_has_a_value_for_each_token(result, metrics, words):
    with pytest.raises(ValueError, match=f"^the loss returned {words}"):
        pair_of("the loss", result, MASK, metrics=metrics)


def test_what_a_function_should_return_is_taken():
    assert pair_of("loss", (MASK, {}), MASK, metrics=True) == (MASK, {})
    for metric in (MASK, MASK.mean(), 1, True):
        assert pair_of("loss", (MASK, {"m": metric}), MASK, metrics=True)[1] == {"m": metric}
    assert pair_of("advantage", [MASK, MASK], MASK) == (MASK, MASK)
