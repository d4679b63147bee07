"""Prompts of another form are refused before a model answers any."""

from typing import Any

import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.evaluation.answering import prompts_in, read_prompt
from jaxrl_llm.tokenizer import load_tokenizer

MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "the prompts are 3: give a text, or a list of them"),
        ({"prompt": "a"}, "the prompts are {.*}: give a text"),
        ([MESSAGE], r"give a list of it, \[messages\]"),
    ],
)
def test_what_is_no_list_of_prompts(given, message):
    with pytest.raises(ConfigError, match=message):
        prompts_in(given)
    assert prompts_in(["a", [MESSAGE]]) == ["a", [MESSAGE]]


@pytest.mark.parametrize("prompt", [3, None, [], ["hi"], [{"content": "hi"}], [MESSAGE, 3]])
def test_what_is_no_prompt(prompt: Any):
    with pytest.raises(ConfigError, match="is neither a text nor a list of"):
        read_prompt(prompt, load_tokenizer("char"))
