"""Runs whose answers have several turns: fields, masks, rewards, and the batch loop's tokens."""

import json
import shutil

import numpy as np
import pytest

import jaxrl_llm as rl
from jaxrl_llm.agents.driver import Driver
from jaxrl_llm.plan.conversing import STATE_KEYS, Converse
from jaxrl_llm.supervision import signals

ROWS = [{"prompt": f"{a}*{b}=", "ground_truth": str(a * b)} for a in range(2, 9) for b in (3, 7)]
SIZES = {
    "actor.hf_config.num_hidden_layers": 1,
    "total_steps": 2,
    "data.max_response_length": 12,
    "data.max_prompt_length": 8,
    "data.train_batch_size": 4,
    "actor.ppo_mini_batch_size": 4,
    "rollout.n": 2,
    "reward.functions": [],
    "warmup": None,
    "validation.every": 0,
    "validation.grader": None,
    "validation.graders": [],
}

ENDS = """
class Ends:
    stop = ()

    def reset(self, prompt):
        return None

    def step(self, action):
        return Step(None, float(len(action) % 3), True, {})
"""
TALKS = """
class Talks:
    stop = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

    def reset(self, prompt):
        self.turns = 0

    def step(self, action):
        self.turns += 1
        return Step("12", 0.5 * len(action), self.turns == 3, {})
"""


def environment(tmp_path, text):
    name = text.split()[1].rstrip(":")
    file = tmp_path / f"{name.lower()}.py"
    file.write_text(f"import os, time\nfrom jaxrl_llm.agents.environments import Step\n{text}")
    return f"{file}:{name}"


def run(folder, rows=ROWS, val_data=None, **changes):
    config = rl.load_config("grpo", SIZES | {"run_dir": str(folder)} | changes)
    rl.train(config, train_data=rows, val_data=val_data)
    lines = [x for f in sorted((folder / "trace").glob("train*")) for x in f.open()]
    return [(x := json.loads(line)) | x["extras"] for line in lines]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_one_turn_has_the_tokens_of_the_batch_loop(tmp_path):
    plain = run(tmp_path / "plain", **{"reward.functions": ["exact_answer"], "total_steps": 1})
    one = run(
        tmp_path / "one",
        **{"rollout.environment": [environment(tmp_path, ENDS)], "total_steps": 1},
    )
    assert [x["tokens"] for x in one] == [x["tokens"] for x in plain]
    assert {x["stop_reason"] for x in one} <= {"env_done", "max_tokens"}


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", [1, 0])
def test_conversations_on_devices_of_their_own_are_the_same(tmp_path, staleness):
    """With staleness a thread holds them while the actor learns, and a checkpoint has them."""
    changes = {"rollout.environment": [environment(tmp_path, TALKS)], "max_staleness": staleness}
    changes |= {"total_steps": 3, "save_every": 2, "validation.every": 1}
    one = run(tmp_path / "one", val_data=ROWS[:4], **changes)
    changes |= {"placement.rollout": "1"}
    apart = run(tmp_path / "apart", val_data=ROWS[:4], **changes)
    held_out = [
        {name: value for name, value in row.items() if name.startswith("val")}
        for folder in ("one", "apart")
        for row in metrics(tmp_path / folder)
    ]
    assert any(held_out) and held_out[: len(held_out) // 2] == held_out[len(held_out) // 2 :]
    names = ("step", "tokens", "score", "policy_version")
    assert [[x[name] for name in names] for x in apart] == [[x[n] for n in names] for x in one]
    assert {x["policy_version"] for x in apart} == {max(0, s - 1 - staleness) for s in (1, 2, 3)}
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "apart", again)
    shutil.rmtree(again / "checkpoints" / "global_step_3")
    (again / "config.json").unlink()
    resumed = run(again, val_data=ROWS[:4], **changes)
    assert [x["tokens"] for x in resumed] == [x["tokens"] for x in apart]


def test_a_stop_request_does_not_wait_for_tools(tmp_path, monkeypatch):
    seen, answer = [], Driver.run

    def run_driver(*arguments):
        seen.append(signals._host_work)
        return answer(*arguments)

    monkeypatch.setattr(Driver, "run", run_driver)
    changes = {"rollout.environment": [environment(tmp_path, ENDS)], "total_steps": 1}
    run(tmp_path / "run", **changes)
    assert seen == [1] and signals._host_work == 0


def test_observations_are_not_learned_from(tmp_path):
    folder = tmp_path / "talks"
    samples = run(
        folder,
        **{
            "rollout.environment": [environment(tmp_path, TALKS)],
            "reward.process_rewards": True,
            "algorithm": {"kind": "turn_baseline"},
        },
    )
    assert max(len(x["turns"]) for x in samples) == 3
    for sample in samples:
        sampled = [turn["end"] - turn["start"] for turn in sample["turns"]]
        observed = len(sample["tokens"]) - sum(sampled)
        assert observed == 2 * (len(sample["turns"]) - 1)
        rewards = [turn["reward"] for turn in sample["turns"] if turn["reward"] is not None]
        assert sample["score"] == pytest.approx(sum(rewards))
    for step in metrics(folder):
        if "num_turns/mean" in step:
            rows = [x for x in samples if x["step"] == step["training/global_step"]]
            assert step["num_turns/mean"] == np.mean([len(x["turns"]) for x in rows])
            assert step["env/masked_frac"] == 0


FAILS = """
class Fails:
    stop = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

    def reset(self, prompt, seed):
        self.turns, self.kind = 0, KIND
        if self.kind == 4:
            raise ValueError("it fails at once")

    def step(self, action):
        self.turns += 1
        print("x" * 100_000)
        if self.kind == 8:
            raise KeyError("it raises at once")
        if self.turns == 2:
            if self.kind == 0:
                raise KeyError("it raises")
            if self.kind == 1:
                time.sleep(60)
            if self.kind == 2:
                os._exit(3)
            if self.kind == 3:
                return Step("1", float("nan"), False, {})
        return Step("12", 0.5 * len(action), self.turns == 3, {})
"""
LIMITS = {"rollout.tool_timeout_s": 0.7, "rollout.n": 4, "log.trace_details": 16}


@pytest.mark.nightly
def test_turns_with_the_same_knowledge_have_equal_keys(tmp_path, monkeypatch):
    """Guess names its state; of the others, what was observed is the state."""
    seen, call = [], Converse.__call__

    def kept(self, context, step, *, sample_ids, group_ids, states):
        inputs = {"sample_ids": sample_ids, "group_ids": group_ids, "states": states}
        out = call(self, context, step, **inputs)
        seen.append((context.trajectories, out.writes[STATE_KEYS]))
        return out

    monkeypatch.setattr(Converse, "__call__", kept)
    changes = {"rollout.environment": "guess", "rollout.max_turn_tokens": 3}
    changes |= {"reward.process_rewards": True, "algorithm": "gigpo", "total_steps": 1}
    changes |= {"rollout.in_graph": False}
    run(tmp_path, **changes | {"data.max_response_length": 40})
    keys = {}
    for trajectories, written in seen:
        for trajectory, row in zip(trajectories, written, strict=True):
            for turn in trajectory.turns:
                (key,) = set(row[turn.start : turn.end].tolist())
                assert keys.setdefault(turn.state, key) == key
    assert len(set(keys.values())) == len(keys)


@pytest.mark.nightly  # plain: test_failing_rewards.py
@pytest.mark.parametrize("on_failure", ["mask", "value"])
def test_samples_that_fail_are_no_rewards(tmp_path, on_failure):
    """Advantages by hand: of the others alone, or with the value."""
    folder = tmp_path / "fails"
    samples = run(
        folder,
        **{
            "rollout.environment": [environment(tmp_path, FAILS.replace("KIND", "seed % 8"))],
            "reward.on_failure": on_failure,
            "total_steps": 1,
        },
        **({"reward.failure_value": -1.0} if on_failure == "value" else {}),
        **LIMITS,
    )
    (step,) = [x for x in metrics(folder) if "num_turns/mean" in x]
    failed = [x["stop_reason"] in ("failed", "timeout") for x in samples]
    assert 3 < sum(failed) < len(samples) - 3
    assert step["env/masked_frac"] == sum(failed) / len(samples)
    assert step["rewards/environment/failures"] == step["rewards/failures"] == sum(failed)
    # One that failed at once has no token that could carry a value.
    left_out = [not x["tokens"] if on_failure == "value" else x["score"] is None for x in samples]
    assert step["reward/masked_frac"] == sum(left_out) / len(samples) > 0
    assert step["env/failures/timeout"] == [x["stop_reason"] for x in samples].count("timeout") > 0
    for first in range(0, len(samples), 4):
        group = samples[first : first + 4]
        scores = np.array([x["score"] for x in group], np.float64)
        valid = [not x for x in left_out[first : first + 4]]
        if on_failure == "mask":
            assert valid == [not x for x in failed[first : first + 4]]
        else:
            assert (scores[failed[first : first + 4]] == -1).all()
        known = scores[valid]
        wanted = np.zeros(4)
        if len(known) > 1:
            wanted[valid] = (known - known.mean()) / (known.std(ddof=1) + 1e-6)
        for sample, advantage in zip(group, wanted, strict=True):
            own = np.zeros(len(sample["tokens"]))
            for turn in sample["turns"]:
                own[turn["start"] : turn["end"]] = advantage
            np.testing.assert_allclose(sample["details"]["advantages"], own, atol=1e-5)
    if on_failure == "value":  # what led to a failure is learned from
        assert any(x["tokens"] for x, bad in zip(samples, failed, strict=True) if bad)


def test_a_run_whose_every_sample_fails_ends_with_the_first_error(tmp_path):
    named = environment(tmp_path, FAILS.replace("KIND", "8"))
    with pytest.raises(
        ValueError, match=r"steps 1 to 2 failed.*environment: failed:.*it raises at once"
    ):
        run(tmp_path / "run", **{"rollout.environment": [named]}, **LIMITS)


def test_a_row_that_names_no_environment_here_is_refused_before_the_first_step(tmp_path):
    rows = [row | {"environment": "maze"} for row in ROWS]
    changes = {"run_dir": str(tmp_path / "run"), "rollout.environment": "guess"}
    config = rl.load_config("grpo", SIZES | changes)
    with pytest.raises(ValueError, match="environment 'maze'.*has: guess"):
        rl.train(config, train_data=rows)
