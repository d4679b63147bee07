"""Runs of several turns that are killed within a turn, and go on."""

import json
import signal
import subprocess
import sys

import pytest
from tiny_run import TinyRun, assert_same_bits
from trainer.test_conversing import ROWS, SIZES

import jaxrl_llm as rl

# The environment kills the trainer in the middle of the third turn of a sample, once, when the step
# that the file `kill` names has begun.
ENVIRONMENT = """
import os, random, signal
from pathlib import Path
from jaxrl_llm.agents.environments import Step

KILL = Path(__file__).with_name("kill")


class Talks:
    stop = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

    def reset(self, prompt, seed):
        self.turns, self.said = 0, RANDOM

    def step(self, action):
        self.turns += 1
        if self.turns == 3 and KILL.exists() and Path(KILL.read_text()).exists():
            KILL.unlink()
            os.kill(os.getppid(), signal.SIGKILL)
        self.said.seed(f"{action}{self.turns}" if DETERMINISTIC else None)
        text = str(self.said.randrange(10, 99))
        return Step(text, self.said.random() + len(action), self.turns == 5, {})
"""
SCRIPT = """
import json, sys
import jaxrl_llm as rl

if __name__ == "__main__":
    rl.train(rl.load_config("grpo", json.loads(sys.argv[1])), train_data=json.loads(sys.argv[2]))
"""
STEPS, KILLED = 4, 3


def keys_of(folder, **changes):
    sizes = {"total_steps": STEPS, "save_every": 1, "data.max_response_length": 40}
    environment = {"rollout.environment": [f"{folder}/talks.py:Talks"]}
    return SIZES | sizes | {"run_dir": f"{folder}/run"} | environment | changes


def write(folder, *, deterministic):
    folder.mkdir()
    known = f"DETERMINISTIC, RANDOM = {deterministic}, random.Random()\n\n\nclass"
    (folder / "talks.py").write_text(ENVIRONMENT.replace("class", known, 1))


def kill_in_a_turn(folder, keys):
    """Run until the environment kills the run."""
    observed = folder / "run" / "observations" / "process0" / f"step_{KILLED}.jsonl"
    (folder / "kill").write_text(str(observed))
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "train.py"), json.dumps(keys), json.dumps(ROWS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return [x for line in observed.read_text().splitlines() if (x := json.loads(line))]


def read(folder):
    """Metrics without times, samples without times, and weights."""
    run = TinyRun(folder)
    timed = ("env_s/", "rollout/decode_steps", "env/differs")
    metrics = {
        step: {name: value for name, value in row.items() if not name.startswith(timed)}
        for step, row in run.metrics().items()
    }
    samples = run.samples("train")
    for sample in samples.values():
        for part in (sample["extras"], *sample["extras"]["turns"]):
            del part["tool_s"]
    return metrics, samples, run.weights(STEPS)


@pytest.mark.nightly  # plain: agents/test_driver.py reads recorded observations, learning/ kills
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_killed_in_a_turn_ends_with_the_same_bits(tmp_path, staleness):
    """With staleness 1 a checkpoint holds the conversations of the next step."""
    changes = {"max_staleness": staleness}
    write(tmp_path / "whole", deterministic=True)
    rl.train(rl.load_config("grpo", keys_of(tmp_path / "whole", **changes)), train_data=ROWS)
    write(tmp_path / "cut", deterministic=True)
    keys = keys_of(tmp_path / "cut", **changes)
    assert kill_in_a_turn(tmp_path / "cut", keys)
    rl.train(rl.load_config("grpo", keys), train_data=ROWS)
    (metrics, samples, weights), expected = read(tmp_path / "cut"), read(tmp_path / "whole")
    assert metrics == expected[0]
    assert samples == expected[1]
    assert_same_bits(weights, expected[2])
    versions = {step: sample["policy_version"] for (step, _), sample in samples.items()}
    assert versions == {step: max(0, step - 1 - staleness) for step in range(1, STEPS + 1)}
    assert max(len(sample["extras"]["turns"]) for sample in samples.values()) >= 3


@pytest.mark.nightly
def test_recorded_observations_count_where_an_environment_answers_otherwise(tmp_path):
    folder = tmp_path / "random"
    write(folder, deterministic=False)
    keys = keys_of(folder)
    recorded = kill_in_a_turn(folder, keys)
    rl.train(rl.load_config("grpo", keys), train_data=ROWS)
    metrics = TinyRun(folder).metrics()
    assert metrics[KILLED]["env/differs"] > 0 == metrics[KILLED + 1]["env/differs"]
    samples = TinyRun(folder).samples("train")
    steps = [x for x in recorded if "step" in x["value"]]
    assert steps
    for line in steps:
        sample, number = map(int, line["key"].split("/"))
        extras = samples[KILLED, sample]["extras"]
        turn = extras["turns"][number - 1]  # number 0 is `reset`
        assert turn["reward"] == line["value"]["step"]["reward"]
        said = [m["content"] for m in extras["messages"] if m["role"] == "user"]
        if len(said) >= number:
            assert said[number - 1] == line["value"]["step"]["observation"]
