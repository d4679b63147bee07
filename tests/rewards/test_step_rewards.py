"""Rewards of steps: what a function returns, the tokens they fall on, and the rest."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from pieces import Pieces
from test_rewards import make_completion, make_prompt

from jaxrl_llm.algorithms.advantages import score_to_rewards, spread_to_steps
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.kl import kl_in_reward, with_steps
from jaxrl_llm.config import ConfigError, Custom, load_config
from jaxrl_llm.generation.stop_strings import Stops
from jaxrl_llm.rewards.manager import RewardManager
from jaxrl_llm.rewards.steps import Steps, last_tokens, read_steps
from jaxrl_llm.tokenizer import CharTokenizer
from jaxrl_llm.trainer.rewarding import RewardFunctions

FUNCTIONS = '''
def lines(completions):
    """1 for a line with a digit, and -1 for another, each at the end of its line."""
    found = []
    for text in completions:
        scores, ends, end = [], [], 0
        for line in text.split("\\n"):
            end += len(line)
            if line:
                scores.append(1.0 if any(c.isdigit() for c in line) else -1.0)
                ends.append(end)
            end += 1
        found.append({"step_scores": scores, "step_ends": ends, "note": text[:1]})
    return found

def first_token(data_source, solution_str, ground_truth, extra_info):
    return {"step_scores": [0.25], "step_token_ends": [1]}

def beyond(completions):
    return [{"step_scores": [1.0], "step_ends": [len(text) + 1]} for text in completions]
'''


class Bytes(CharTokenizer):
    """Tokens are bytes of UTF-8, so a character may take several."""

    def decode(self, ids, *, skip_special=True):
        return bytes(ids).decode(errors="replace")

    def token_bytes(self):
        return [bytes([i]) for i in range(256)]


class Unknown(Bytes):
    def token_bytes(self):
        raise ValueError("unknown")


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("r") / "own.py"
    file.write_text(FUNCTIONS)
    return lambda name: Custom(path=f"{file}:{name}")


def completion(tokenizer, tokens):
    return make_completion(tokenizer.decode(tokens), tuple(tokens))


def test_rewards_fall_on_the_tokens_that_complete_the_steps():
    pieces = Pieces()
    answer = completion(pieces, [9, 10, 5])  # aab, aba, ab
    steps = Steps(scores=(1.0,) * 5, ends=(1, 3, 4, 6, 8), unit="characters")
    assert last_tokens(steps, answer, pieces) == [0, 0, 1, 1, 2]
    tokens = Steps(scores=(1.0, 2.0), ends=(1, 3), unit="tokens")
    assert last_tokens(tokens, answer, pieces) == [0, 2]


@pytest.mark.parametrize("tokenizer", [Bytes(), Unknown()])
def test_a_step_ends_with_the_last_token_of_its_last_character(tokenizer):
    answer = completion(tokenizer, "aé中b".encode())
    steps = Steps(scores=(1.0,) * 4, ends=(1, 2, 3, 4), unit="characters")
    assert last_tokens(steps, answer, tokenizer) == [0, 2, 5, 6]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"step_scores": [1]}, "need 'step_scores' and one of step_ends, step_token_ends"),
        ({"step_scores": [1], "step_ends": [1], "step_token_ends": [1]}, "one of step_ends"),
        ({"step_scores": [1], "step_ends": [1], "score": 1}, "a function of its own"),
        ({"step_scores": [1, 2], "step_ends": [1]}, "2 step_scores and 1 step_ends"),
        ({"step_scores": [1, 2], "step_ends": [3, 3]}, "that ascend"),
        ({"step_scores": [1], "step_ends": [0]}, "from 1 on"),
        ({"step_scores": [1], "step_ends": [1.5]}, "whole numbers"),
        ({"step_scores": [float("nan")], "step_ends": [1]}, "finite numbers"),
        ({"step_scores": "ab", "step_ends": [1, 2]}, "finite numbers"),
    ],
)
def test_what_is_wrong_is_said(value, message):
    with pytest.raises(ValueError, match=message):
        read_steps(value)


def test_functions_with_weights_reach_the_tokens(functions):
    tokenizer = CharTokenizer()
    answers = [tokenizer.encode("1\nx\n23"), tokenizer.encode("x"), []]
    found = [completion(tokenizer, tokens) for tokens in answers]
    names = ("lines", "first_token")
    with RewardManager([functions(n) for n in names], weights=[2.0, 1.0], num_workers=1) as manager:
        result = manager.score([make_prompt()] * 3, found, step=1)
        graders = RewardFunctions(
            manager=manager, tokenizer=tokenizer, stops=Stops(()), process_rewards=True
        )
        context = SimpleNamespace(reward=result, completions=found)
        dense = graders.step_rewards(context, (3, 7))  # type: ignore[arg-type]
    # The empty response has no first token.
    assert [failure.index for failure in result.failures] == [2]
    assert "ends after 1 tokens of a response of 0" in result.failures[0].message
    np.testing.assert_allclose(result.scores, [2 * (1 - 1 + 1) + 0.25, -2 + 0.25, 0])
    expected = [[2.25, 0, -2, 0, 0, 2, 0], [-1.75, 0, 0, 0, 0, 0, 0], [0] * 7]
    np.testing.assert_allclose(dense, expected)
    assert result.extras[0]["note"] == "1" and result.extras[0]["step_ends"] == [1, 3, 6]


def test_a_step_behind_the_end_is_a_failure(functions):
    with RewardManager([functions("beyond")], num_workers=1) as manager:
        result = manager.score([make_prompt()], [make_completion("ab")], step=1)
    assert result.scores.tolist() == [0.0] and result.steps == [[]]
    assert "ends after 3 characters of a response of 2" in result.failures[0].message


def test_the_rest_of_a_score_stays_at_the_last_token():
    mask = jnp.array([[1, 1, 1, 0], [1, 1, 1, 1.0]])
    steps = jnp.array([[0.5, 0, -0.25, 9], [0, 0, 0, 0.0]])
    scores = jnp.array([1.25, 2.0])  # of them 1 and 2 for the outcome
    rewards = spread_to_steps(score_to_rewards(scores, mask), steps, mask)
    np.testing.assert_allclose(rewards, [[0.5, 0, 0.75, 0], [0, 0, 0, 2]])
    penalised = with_steps(kl_in_reward)
    old, reference = jnp.full((2, 4), -1.0), jnp.full((2, 4), -1.5)
    given = {
        "scores": scores,
        "mask": mask,
        "old_logprobs": old,
        "reference_logprobs": reference,
        "step_rewards": steps,
    }
    found, kl = penalised(*(given[name] for name in field_names(penalised)), coef=jnp.float32(0.1))
    np.testing.assert_allclose(kl, 0.5 * mask)
    np.testing.assert_allclose(found, rewards - 0.05 * mask, rtol=1e-6)


def test_steps_need_a_function():
    keys = {"reward.process_rewards": True, "reward.functions": [], "reward.model": {}}
    with pytest.raises(ConfigError, match="no function that could score steps"):
        load_config("grpo", keys)
