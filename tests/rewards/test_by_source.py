"""Each data source has its own grader."""

import pytest

from jaxrl_llm.config import GSM8K, Config, Custom, ExactAnswer, SourceGrader, load_config
from jaxrl_llm.rewards.by_source import SourceGraders
from jaxrl_llm.rewards.manager import RewardManager
from jaxrl_llm.types import Completion, Prompt

HALF = """
def half(solution_str):
    if solution_str == "#### 3":
        raise ValueError("no")
    return 0.5
"""


def answers(*samples: tuple[str, str]) -> tuple[list[Prompt], list[Completion]]:
    """Samples as (source, text); 2 is right."""
    prompts = [
        Prompt(token_ids=(1,), text="1+1=", ground_truth="2", data_source=source)
        for source, _ in samples
    ]
    return prompts, [
        Completion(tokens=(2,), text=text, logprobs=(0.0,), finished=True) for _, text in samples
    ]


def test_each_source_has_its_grader(tmp_path):
    (tmp_path / "own.py").write_text(HALF)
    samples = [("a", "2"), ("gsm8k", "2"), ("own", "2"), ("gsm8k", "#### 2"), ("own", "#### 3")]
    own = Custom(path=f"{tmp_path / 'own.py'}:half")
    with (
        RewardManager([ExactAnswer()]) as exact,
        RewardManager([GSM8K()]) as gsm8k,
        RewardManager([own], failure_value=0.0, num_workers=1) as half,
    ):
        graders = SourceGraders(default=exact, by_source={"gsm8k": gsm8k, "own": half})
        found = graders.score(*answers(*samples), step=1)
        assert found.scores.tolist() == [1.0, 0.0, 0.5, 1.0, 0.0]
        assert [failure.index for failure in found.failures] == [4]
        assert "no '#### <number>'" in found.extras[1]["gsm8k/reason"]


def test_graders_that_do_not_fit_the_rows_are_refused(tmp_path):
    (tmp_path / "own.py").write_text("def hard(completions, level):\n    return level\n")
    with (
        RewardManager([ExactAnswer()]) as exact,
        RewardManager([Custom(path=f"{tmp_path / 'own.py'}:hard")], num_workers=1) as hard,
    ):
        graders = SourceGraders(default=exact, by_source={"own": hard})
        with pytest.raises(ValueError, match="source 'own'.*did you mean 'owner'"):
            graders.check({"owner": ["level"], "b": ["answer"]})
        with pytest.raises(ValueError, match="hard asks for 'level'.*Add the column"):
            graders.check({"own": [], "b": ["level", "answer"]})
        with pytest.raises(ValueError, match="no row has one: name the column ground_truth, ans"):
            graders.check({"own": ["level"], "b": ["level"]})
        graders.check({"own": ["level"], "b": ["answer"]})
        with pytest.raises(ValueError, match="asks for 'level'; the rows have: comp"):
            SourceGraders(default=hard, by_source={"b": exact}).check({"a": [], "b": ["answer"]})


def test_graders_of_sources_are_set_on_the_command_line():
    value = "[{source: math, grader: {kind: gsm8k, method: flexible}}]"
    config: Config = load_config("ppo", [("validation.graders", value)])
    expected = SourceGrader(source="math", grader=GSM8K(method="flexible"))
    assert config.validation.graders == (expected,)
