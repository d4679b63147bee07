"""Environments of other packages, each with the real package: scripts/test_adapters.sh."""

import re
from types import SimpleNamespace

import pytest
from agents.fake_engine import FakeEngine, sample_of

from jaxrl_llm.agents.setup import open_driver
from jaxrl_llm.config import load_config
from jaxrl_llm.tokenizer import CharTokenizer

CHAR = CharTokenizer()


def opened(environment):
    keys = {"rollout.environment": environment, "rollout.num_tool_workers": 1}
    keys |= {"data.max_response_length": 4000, "data.max_prompt_length": 8000}
    return open_driver(load_config("ppo", keys), CHAR, max_context=12_000)


def run(environment, samples):
    driver = opened(environment)
    try:
        return driver.run(FakeEngine(CHAR, driver.stop_ids(plain=True)), samples)
    finally:
        driver.close()


def test_reasoning_gym():
    """The question is the package's own, and a right second answer has the difference."""
    package = pytest.importorskip("reasoning_gym")
    settings = {"min_word_len": 3, "max_word_len": 6, "seed": 7}
    entry = package.create_dataset("spell_backward", size=10_000, **settings)[4]
    environment = {
        "kind": "custom",
        "path": "reasoning_gym:spell_backward",
        "settings": {**settings, "attempts": 2},
    }
    turns = ["0", f"So: <answer> {entry['answer']}</answer>"]
    (right, lost) = run(
        environment,
        [sample_of(CHAR, i, "Q: ", turn, index=4) for i, turn in enumerate([turns, ["0", "0"]])],
    )
    assert CHAR.decode(right.prompt_ids) == f"Q: {entry['question']}"
    assert (right.stop_reason, len(right.turns)) == ("env_done", 2)
    assert right.reward == pytest.approx(1.0) and lost.reward < 0.5
    with pytest.raises(ValueError, match="not registered"):
        opened("reasoning_gym:spell_backwards")


def test_textarena():
    """Bisection wins. Two games of a prompt are the same, though they draw from one generator."""
    pytest.importorskip("textarena")
    path, low, high, said = "textarena:GuessTheNumber-v0", 1, 20, []
    while len(said) < 5:
        said.append((low + high) // 2)
        turns = [f"[{number}]" for number in said] + ["[1]"] * 20
        games = run(path, [sample_of(CHAR, i, "Play.", turns) for i in (0, 1)])
        assert games[0].response_ids == games[1].response_ids
        hints = re.findall("target number is (higher|lower)", CHAR.decode(games[0].response_ids))
        if games[0].reward == 1.0:
            break
        lower = hints[len(said) - 1] == "lower"
        low, high = (low, said[-1] - 1) if lower else (said[-1] + 1, high)
    assert "between 1 and 20" in CHAR.decode(games[0].prompt_ids)
    assert (games[0].stop_reason, games[0].reward, len(games[0].turns)) == (
        "env_done",
        1.0,
        len(said),
    )
    with pytest.raises(ValueError, match="not found in registry"):
        opened("textarena:GuessTheNumbers-v0")


def test_skyrl_gym():
    """Each turn has the package's own reward, and the last observation is left out."""
    pytest.importorskip("skyrl_gym")
    turns = ["I think #### 41", "No, #### 42"]
    columns = {"ground_truth": "42", "extra_info": {"max_turns": 4}}
    (trajectory,) = run(
        "skyrl_gym:gsm8k_multi_turn", [sample_of(CHAR, 0, "17+25?", turns, **columns)]
    )
    assert [turn.reward for turn in trajectory.turns] == [0.05, 1.0]
    assert trajectory.stop_reason == "env_done"
    assert "tentative numeric answer" in trajectory.messages[1]["content"]
    with pytest.raises(ValueError, match="no 'gsm8'; did you mean 'gsm8k'"):
        opened("skyrl_gym:gsm8")


TASKSET = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Reverse(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 5)

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)


class ReverseTaskset(vf.Taskset[Reverse]):
    def load(self):
        for word in ("abc", "hello"):
            yield Reverse(Data(prompt=f"Reverse {word}.", answer=word[::-1]), self.config.task)


__all__ = ["ReverseTaskset"]
"""


def test_verifiers(tmp_path, monkeypatch):
    """A taskset of ours, whose rewards have weights."""
    pytest.importorskip("verifiers")
    (tmp_path / "reverse_words.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    answers = [("cba", 0, 2.5), ("abc", 0, 0.5), ("olleh", 1, 2.0), ("wrong", 1, 0.0)]
    samples = [sample_of(CHAR, i, "Do it. ", [a[0]], index=a[1]) for i, a in enumerate(answers)]
    done = run("verifiers:reverse_words", samples)
    assert [t.reward for t in done] == [answer[2] for answer in answers]
    assert CHAR.decode(done[2].prompt_ids) == "Do it. Reverse hello."
    with pytest.raises(ValueError, match="reverse_wordz"):
        opened("verifiers:reverse_wordz")


def test_an_adapter_keeps_the_sampled_answer():
    from jaxrl_llm.agents.adapters import SkyRLGym

    environment = object.__new__(SkyRLGym)
    environment._id = "odd"
    answer = {"postprocessed_action": "other", "observations": [], "reward": 0.0, "done": True}
    environment._environment = SimpleNamespace(step=lambda action: answer)
    with pytest.raises(ValueError, match="changes the answer"):
        environment.step("this")
