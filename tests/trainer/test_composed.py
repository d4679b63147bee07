"""Runs made of parts: a teacher, two kinds of rewards, best-of-n, one algorithm after another."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_iteration import (
    MODEL,
    even_tokens,
    first_states,
    open_iteration,
    packed,
    run_step,
    tiny_config,
)
from tiny_run import TinyRun, assert_same_bits

from jaxrl_llm.config import (
    Config,
    ConfigError,
    Custom,
    Distillation,
    RejectionSampling,
    ReMax,
    RewardConfig,
    RewardModelConfig,
    SupervisedConfig,
    TeacherConfig,
    load_config,
)
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.scores import ArrayReward
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.loop import train

ROW_TOKENS = 33
BOTH = """
from jaxrl_llm.algorithms.algorithm import Algorithm, compose
from jaxrl_llm.algorithms.imitation import forward_kl_top_k, teacher_advantage
from jaxrl_llm.config import Composed


def both() -> Algorithm:
    return compose(Composed(), teacher_advantage, forward_kl_top_k)
"""


def changes(before, after) -> np.ndarray:
    """What a step did to the actor, all weights in one array."""
    leaves = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return np.concatenate([(np.asarray(b) - np.asarray(a)).ravel() for a, b in leaves])


def one_step(config: Config):
    """(batch, metrics, what the actor's weights moved by) of the first step."""
    iteration = open_iteration(config)
    states = first_states(iteration)
    before = jax.tree.map(np.asarray, states["actor"].params)
    states, batch, metrics = run_step(iteration, states, 1)
    return iteration, batch, metrics, changes(before, states["actor"].params)


# ------------------------------------------------------------------------- a teacher


def teaching(tmp_path: Path) -> Config:
    file = tmp_path / "both.py"
    file.write_text(BOTH)
    config = replace(tiny_config(model_reward=False), algorithm=Custom(path=f"{file}:both"))
    return replace(config, teacher=TeacherConfig(training=SupervisedConfig(), top_k=6))


@pytest.mark.slow
def test_a_teacher_is_asked_about_every_token(tmp_path):
    config = teaching(tmp_path)
    iteration, batch, metrics, moved = one_step(config)
    names = {stage.name for stage in iteration.stages}
    assert {"teacher", "teacher_top"} <= names and not names & {"values", "ref"}
    mask = np.asarray(batch.mask) > 0
    ids, top = np.asarray(batch.teacher_top_ids)[mask], np.asarray(batch.teacher_top_logprobs)[mask]
    assert ids.shape[1] == 6 and (np.diff(top, axis=1) <= 0).all()
    assert (np.exp(top).sum(axis=1) < 1).all() and ids.max() < MODEL["vocab_size"]
    # Where the sampled token is among the likeliest, both passes say the same of it.
    tokens = np.asarray(batch.responses)[mask]
    sampled = np.asarray(batch.teacher_logprobs)[mask]
    row, column = np.nonzero(ids == tokens[:, None])
    assert row.size > 10
    np.testing.assert_allclose(top[row, column], sampled[row], atol=2e-5)
    assert (sampled[np.setdiff1d(np.arange(len(ids)), row)] <= top.min()).any()
    assert 0 < metrics["distillation/teacher_mass"] < 1

    packed_step = one_step(packed(config, ROW_TOKENS))
    np.testing.assert_array_equal(packed_step[1].responses * mask, batch.responses * mask)
    np.testing.assert_allclose(packed_step[3], moved, atol=2e-4)
    name = "actor/pg_loss"
    np.testing.assert_allclose(packed_step[2][name], metrics[name], rtol=1e-4)


def test_an_algorithm_needs_a_teacher_that_reads_the_same_tokens():
    config = replace(tiny_config(), algorithm=Distillation())
    with pytest.raises(ValueError, match="reads 'teacher_logprobs', which no stage writes"):
        open_iteration(config)
    small = TeacherConfig(hf_config=MODEL | {"vocab_size": 12}, training=SupervisedConfig())
    with pytest.raises(ConfigError, match="vocabulary of 12 tokens and the actor one of 24"):
        open_iteration(replace(config, teacher=small))


# ------------------------------------------------------------------------- best of n


@pytest.mark.slow
def test_rejection_sampling_learns_its_best_samples_alone():
    config = tiny_config(model_reward=False)
    config = replace(config, actor=replace(config.actor, ppo_epochs=1, ppo_mini_batch_size=16))
    config = replace(config, algorithm=RejectionSampling(threshold=0.01))
    iteration, batch, metrics, moved = one_step(config)
    assert {s.name for s in iteration.stages} == {
        *("gen", "reward", "kl", "adv", "rollout_corr", "update_actor")
    }
    scores = np.asarray(batch.scores).reshape(-1, config.rollout.n)
    kept = np.asarray(batch.loss_mask).max(axis=1).reshape(scores.shape)
    assert (kept.sum(axis=1) == (scores.max(axis=1) > 0.01)).all() and 0 < kept.sum() < kept.size
    assert (scores[kept > 0] == scores.max(axis=1)[kept.any(axis=1)]).all()
    np.testing.assert_allclose(metrics["rejection_sampling/kept_fraction"], kept.mean(), rtol=1e-6)
    assert np.abs(moved).max() > 0
    _, _, again, moved_packed = one_step(packed(config, ROW_TOKENS))
    np.testing.assert_allclose(moved_packed, moved, atol=2e-4)
    np.testing.assert_allclose(again["actor/pg_loss"], metrics["actor/pg_loss"], rtol=1e-4)


@pytest.mark.slow
def test_a_round_without_a_sample_that_passes_is_finite():
    config = replace(tiny_config(model_reward=False), algorithm=RejectionSampling(threshold=2.0))
    _, batch, metrics, moved = one_step(config)
    assert not np.asarray(batch.loss_mask).any()
    assert metrics["actor/pg_loss"] == 0 and metrics["actor/grad_norm"] == 0
    assert np.isfinite(moved).all()


# ------------------------------------------------------------------------- two kinds of rewards


@pytest.mark.slow
def test_functions_and_a_model_give_one_score():
    """Of the samples, and of the greedy answers that ReMax asks for."""
    config = replace(tiny_config(), algorithm=ReMax())
    alone = run_step(opened := open_iteration(config), first_states(opened), 1)[1]
    functions = tiny_config(model_reward=False).reward.functions
    reward = RewardConfig(functions=functions, model=RewardModelConfig(weight=0.25))
    (iteration,) = plan_online(
        replace(config, reward=reward),
        load_tokenizer("char"),
        make_mesh(devices=jax.devices()[:1]),
        ArrayReward(even_tokens),
    ).phases
    _, batch, metrics = run_step(iteration, first_states(iteration), 1)
    np.testing.assert_array_equal(batch.responses, alone.responses)
    of_functions = even_tokens(np.asarray(batch.responses), np.asarray(batch.response_lengths))
    np.testing.assert_allclose(batch.function_scores, of_functions, rtol=1e-6)
    np.testing.assert_allclose(batch.model_scores, alone.scores, rtol=1e-4, atol=1e-5)
    total = of_functions + 0.25 * np.asarray(alone.scores)
    np.testing.assert_allclose(batch.scores, total, rtol=1e-4, atol=1e-5)
    assert np.asarray(batch.scores).dtype == np.float32
    found = metrics["rewards/model/mean"], metrics["rewards/model/std"]
    expected = np.mean(alone.scores), np.std(np.asarray(alone.scores), ddof=1)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    greedy = np.asarray(batch.greedy_function_scores) + 0.25 * np.asarray(alone.greedy_scores)
    np.testing.assert_allclose(batch.greedy_scores, greedy, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["critic/greedy_score/mean"], greedy.mean(), rtol=1e-4)


# ------------------------------------------------------------------------- phases

PHASES = [
    {
        "algorithm": {"kind": "rloo", "use_kl_in_reward": True, "kl_coef": 0.3},
        "steps": 2,
    }
]
MAIN = {
    "kind": "ppo",
    "use_kl_in_reward": True,
    "kl_coef": 0.05,
    "kl_controller": "adaptive",
    "kl_horizon": 50.0,
}


def phased(folder: Path, **flags: str) -> Config:
    run = TinyRun(folder)
    settings = {
        "run_dir": str(run.run_dir),
        "total_steps": "4",
        "save_every": "2",
        "validation.every": "0",
        "actor.ppo_epochs": "1",
        "checkpoint.best_metric": "",
        "log.tensorboard": "false",
        "warmup.steps": "2",
        "phases": json.dumps(PHASES),
        "algorithm": json.dumps(MAIN),
    } | {name.replace("__", "."): value for name, value in flags.items()}
    return load_config(str(folder / "tiny.py"), list(settings.items()))


@pytest.mark.slow
def test_one_algorithm_after_another_and_resumed_between(tmp_path, capsys):
    config = phased(tmp_path / "whole")
    train(config)
    assert "it should not" not in capsys.readouterr().err  # what was compiled was to be
    run = written(tmp_path / "whole")
    metrics = run.metrics()
    coefficients = [metrics[step]["actor/reward_kl_penalty_coeff"] for step in (1, 2, 3)]
    np.testing.assert_allclose(coefficients, [0.3, 0.3, 0.05], rtol=1e-6)
    assert metrics[4]["actor/reward_kl_penalty_coeff"] != pytest.approx(0.05, rel=1e-6)
    assert "critic/vf_loss" not in metrics[2] and "critic/vf_loss" in metrics[3]
    first = run.weights(2), run.weights(4)
    critic = [name for name in first[0] if name.startswith("critic[")]
    assert critic and any(not np.array_equal(first[0][n], first[1][n]) for n in critic)

    # The end of the first phase again, and from there on once more.
    again = written(tmp_path / "again")
    shutil.copytree(run.run_dir, again.run_dir)
    shutil.rmtree(again.step_path(4))
    train(replace(config, run_dir=str(again.run_dir)))
    assert again.metrics() == metrics
    assert_same_bits(again.weights(4), first[1])


def written(folder: Path) -> TinyRun:
    """What a run left in its folder, to be read."""
    run = TinyRun.__new__(TinyRun)
    run.folder, run.run_dir = folder, folder / "run"
    return run


# ------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"total_steps": "2"}, "leave none for config.algorithm"),
        ({"phases__0__steps": "0"}, "config.phases.0.steps=0"),
        ({"phases__0__algorithm__kl_coeff": "1.0"}, "kl_coef"),
        (
            {"phases__0__algorithm": "dpo"},
            "phases are of online algorithms",
        ),
        ({"teacher": "{}"}, "config.teacher: it has no path and no training"),
        ({"teacher": '{"training": {}, "top_k": 0}'}, "config.teacher.top_k=0"),
    ],
)
def test_a_config_that_cannot_work_is_refused(flags, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        phased(tmp_path, **flags)
