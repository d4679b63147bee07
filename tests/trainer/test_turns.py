"""Runs whose answers have several turns: fields, masks, rewards, and the batch loop's tokens."""

import json

import numpy as np
import pytest

import jaxrl_llm as rl

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
    file.write_text("from jaxrl_llm.agents.environments import Step\n\n" + text)
    return f"{file}:{name}"


def run(folder, **changes):
    config = rl.load_config("grpo", SIZES | {"run_dir": str(folder)} | changes)
    rl.train(config, train_data=ROWS)
    lines = [x for f in sorted((folder / "trace").glob("train*")) for x in f.open()]
    return [(x := json.loads(line)) | x["extras"] for line in lines]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_turn_has_the_tokens_of_the_batch_loop(tmp_path):
    plain = run(tmp_path / "plain", **{"reward.functions": ["exact_answer"], "total_steps": 1})
    one = run(
        tmp_path / "one",
        **{"rollout.environment": [environment(tmp_path, ENDS)], "total_steps": 1},
    )
    assert [x["tokens"] for x in one] == [x["tokens"] for x in plain]
    assert {x["stop_reason"] for x in one} <= {"env_done", "max_tokens"}


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
