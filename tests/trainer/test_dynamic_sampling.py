"""Dynamic sampling: which groups are learned from, in which order, and that a resume repeats it."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_run import TinyRun, assert_same_bits

from jaxrl_llm.config import ConfigError, FilterGroupsConfig, load_config
from jaxrl_llm.distributed.multihost import fetch
from jaxrl_llm.program.program import Program
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.batches import GroupFilter, means_of
from jaxrl_llm.trainer.loop import train
from jaxrl_llm.types import RolloutBatch

N = 2


def round_of(prompts: list[int], scores: list[list[float]], first: int) -> RolloutBatch:
    """Groups of two: prompt p has the token p, and so has each of its responses."""
    tokens = np.array(prompts, np.int32).repeat(N)
    fields = {
        "prompts": tokens[:, None],
        "prompt_lengths": np.ones_like(tokens),
        "sample_ids": np.arange(first, first + len(tokens), dtype=np.uint32),
        "group_ids": np.arange(len(prompts), dtype=np.int32).repeat(N),
        "responses": np.stack([tokens, np.arange(len(tokens)) % N], axis=1),
        "scores": np.array(scores, np.float32).reshape(-1),
        "reward_parts": np.array([[x, np.nan] for pair in scores for x in pair], np.float32),
    }
    return RolloutBatch(**fields)


def filtered(num_groups: int, rounds: int = 3, **settings) -> GroupFilter:
    config = FilterGroupsConfig(enable=True, max_num_gen_batches=rounds, **settings)
    return GroupFilter(config=config, num_groups=num_groups, group=N)


def test_groups_that_vary_are_taken_in_order_until_there_are_enough():
    groups = filtered(3)  # without a sharding: all stays on the host
    groups.add(round_of([7, 3, 9], [[1, 1], [0, 1], [0, 0]], 0))
    assert not groups.complete
    groups.add(round_of([5, 2, 8], [[1, 0], [0.5, 0.4], [1, 0]], 6))
    assert groups.complete
    batch = groups.batch()
    # 3 from the first round, then 5 and 2; 8 is one too many
    np.testing.assert_array_equal(batch.prompts[:, 0], [3, 3, 5, 5, 2, 2])
    np.testing.assert_array_equal(batch.responses[:, 0], batch.prompts[:, 0])
    np.testing.assert_array_equal(batch.responses[:, 1], [0, 1] * 3)
    np.testing.assert_array_equal(batch.sample_ids, [2, 3, 6, 7, 8, 9])
    np.testing.assert_array_equal(batch.group_ids, [0, 0, 1, 1, 2, 2])
    np.testing.assert_allclose(batch.scores, [0, 1, 1, 0, 0.5, 0.4])
    assert batch.scores.dtype == np.float32
    assert batch.values is None
    assert {type(x) for x in jax.tree.leaves(batch)} == {np.ndarray}
    assert groups.metrics() == {
        "train/num_gen_batches": 2.0,
        "rollout/groups_generated": 6.0,
        "rollout/groups_varied": 4.0,
        "rollout/groups_filled": 0.0,
        "frac_reward_zero_std": 2 / 6,
    }


def test_samples_that_are_left_out_make_no_group_vary():
    """A failed sample's score says nothing, and one sample alone does not vary."""
    batch = round_of([7, 3, 9, 5], [[1, 0], [0, 1], [0, 1], [1, 1]], 0)
    left_out = np.array([0, 1, 0, 0, 1, 1, 0, 0], np.float32)
    for fields in ({"left_out": left_out}, {"sample_mask": 1 - left_out}):
        groups = filtered(2, shortage="fill")
        groups.add(batch.replace(**fields))
        assert groups.metrics()["rollout/groups_varied"] == 1.0 and not groups.complete
        np.testing.assert_array_equal(groups.batch().prompts[:, 0], [3, 3, 7, 7])


def test_metrics_of_rounds_are_means_and_failures_are_counts():
    first = {"rewards/f/mean": 0.5, "rewards/f/failures": 3.0, "rewards/failures": 4.0}
    second = {"rewards/f/mean": 1.0, "rewards/f/failures": 0.0, "rewards/failures": 1.0, "x": 2.0}
    assert means_of([first, second]) == {
        "rewards/f/mean": 0.75,
        "rewards/f/failures": 3.0,
        "rewards/failures": 5.0,
        "x": 2.0,
    }


def test_too_few_groups_stop_the_run_or_are_filled_up():
    for shortage in ("error", "fill"):
        groups = filtered(2, rounds=1, shortage=shortage)
        groups.add(round_of([4, 6], [[1, 1], [0, 1]], 0))
        assert groups.complete
        if shortage == "error":
            with pytest.raises(ValueError, match="only 1 of 2 groups vary.*shortage=fill"):
                groups.batch()
        else:
            np.testing.assert_array_equal(groups.batch().prompts[:, 0], [6, 6, 4, 4])
            assert groups.metrics()["rollout/groups_filled"] == 1.0


def test_a_part_that_applies_to_nobody_does_not_vary():
    groups = replace(filtered(1), column=1)
    groups.add(round_of([1], [[0, 1]], 0))
    assert groups.metrics()["rollout/groups_varied"] == 0.0


REWARD = """
def parity(prompts, completion_ids):
    # odd prompts get one reward for all of their answers; of the others the first letter decides
    return [1.0 if int(p[0]) % 2 else c[0] % 3 / 3 for p, c in zip(prompts, completion_ids)]
"""


class Filtered:
    """A run of three steps that keeps the groups of even prompts."""

    def __init__(self, folder):
        self.run = TinyRun(folder)
        (folder / "parity.py").write_text(REWARD)
        self.flags = {
            "total_steps": "3",
            "save_every": "2",
            "warmup.steps": "1",
            "actor.ppo_epochs": "1",
            "algorithm": "dapo",
            "algorithm.use_kl_in_reward": "false",
            "data.val_tasks": "[]",
            "checkpoint.best_metric": "",
            "log.tensorboard": "false",
            "data.train_batch_size": "8",
            "actor.ppo_mini_batch_size": "4",
            "reward.functions": f"[{folder}/parity.py:parity]",
            "rollout.filter_groups.enable": "true",
            "rollout.filter_groups.metric": "parity",
            "rollout.filter_groups.max_num_gen_batches": "12",
        }

    def config(self, **more):
        changes = self.flags | {"run_dir": str(self.run.run_dir)} | more
        return load_config(str(self.run.folder / "tiny.py"), list(changes.items()))


@pytest.fixture
def batches(monkeypatch):
    """The batches that a run's updates were made on."""
    found, run = [], Program.run

    def recording(*args):
        states, batch, metrics = run(*args)
        if isinstance(batch, RolloutBatch) and batch.advantages is not None:
            found.append(fetch(batch))
        return states, batch, metrics

    monkeypatch.setattr(Program, "run", recording)
    return found


def assert_group_order(batch):
    """A sample's prompt, response, log-probs, score and advantage belong together.

    The prompts are shuffled, three slots take sixteen samples, and the groups of several rounds
    are put together.
    """
    assert batch.scores.dtype == batch.rewards.dtype == batch.advantages.dtype == np.float32
    scores = np.asarray(batch.scores).reshape(-1, N)
    np.testing.assert_array_equal(batch.group_ids, np.arange(len(scores)).repeat(N))
    tokenizer = load_tokenizer("char")
    for i, prompt in enumerate(np.asarray(batch.prompts)):
        np.testing.assert_array_equal(prompt, batch.prompts[i - i % N])
        text = tokenizer.decode(prompt[: batch.prompt_lengths[i]].tolist())
        assert int(text[0]) % 2 == 0
        assert batch.scores[i] == np.float32(batch.responses[i, 0] % 3 / 3)
    assert len(set(np.asarray(batch.sample_ids).tolist())) == len(batch.sample_ids)
    of_group = (scores - scores.mean(axis=1, keepdims=True)) / (
        scores.std(axis=1, ddof=1, keepdims=True) + 1e-6
    )
    expected = of_group.reshape(-1, 1) * batch.mask
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-4)
    sampled, computed = (
        np.asarray(x) * batch.mask for x in (batch.rollout_logprobs, batch.old_logprobs)
    )
    assert sampled.any()
    np.testing.assert_allclose(sampled, computed, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(batch.rewards).sum(axis=1), batch.scores)


@pytest.mark.nightly
def test_a_run_refills_and_traces_what_it_generated(batches, tmp_path):
    filtered = Filtered(tmp_path)
    train(filtered.config())
    assert len(batches) == 3
    for batch in batches:
        assert_group_order(batch)
    assert any(x % 1 for batch in batches for x in batch.scores)  # no integers on the way
    metrics = filtered.run.metrics()
    kept = [metrics[step] for step in (1, 2, 3)]
    assert any(row["train/num_gen_batches"] > 1 for row in kept)
    assert all(row["rollout/groups_varied"] >= 8 for row in kept)
    assert kept[0]["actor/grad_norm"] > 0
    # Every sample that was generated is in the trace, of every round, once.
    samples = filtered.run.samples("train")
    assert len(samples) == sum(row["rollout/groups_generated"] for row in kept) * 2
    odd = [s for s in samples.values() if int(s["prompt"][0]) % 2]
    assert odd and all(s["score"] == 1.0 for s in odd)


@pytest.mark.slow
def test_a_resumed_run_generates_the_same_rounds(tmp_path):
    whole, again = Filtered(tmp_path / "whole"), Filtered(tmp_path / "again")
    train(whole.config())
    shutil.copytree(whole.run.run_dir, again.run.run_dir)
    shutil.rmtree(again.run.step_path(3))
    (again.run.run_dir / "config.json").unlink()  # it names the other folder's reward
    train(again.config())
    assert again.run.metrics() == whole.run.metrics()
    assert again.run.samples("train") == whole.run.samples("train")
    assert_same_bits(again.run.weights(3), whole.run.weights(3))


def test_filters_that_cannot_work_are_refused(tmp_path):
    filtered = Filtered(tmp_path)
    with pytest.raises(ConfigError, match="n=1: a group of one sample never"):
        filtered.config(**{"rollout.n": "1"})
    with pytest.raises(ValueError, match="can be filtered by score, parity"):
        train(filtered.config(**{"rollout.filter_groups.metric": "acc"}))
