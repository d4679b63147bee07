"""Prompts of another form are refused, and batches of prompts do not change their answers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import model_config

from jaxrl_llm.config import ConfigError
from jaxrl_llm.evaluation import answering
from jaxrl_llm.evaluation.answering import OpenModel, prompts_in, read_prompt
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.rope import LongRope
from jaxrl_llm.tokenizer import load_tokenizer

MESSAGE = {"role": "user", "content": "hi"}


def test_one_conversation_is_not_a_list_of_prompts():
    with pytest.raises(ConfigError, match=r"give a list of it, \[messages\]"):
        prompts_in([MESSAGE])
    assert prompts_in(["a", [MESSAGE]]) == ["a", [MESSAGE]]


@pytest.mark.parametrize("prompt", [3, None, [], ["hi"], [{"content": "hi"}], [MESSAGE, 3]])
def test_what_is_no_prompt(prompt: Any):
    with pytest.raises(ConfigError, match="is neither a text nor a list of"):
        read_prompt(prompt, load_tokenizer("char"))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_all_batches_of_a_call_have_the_rope_of_its_longest_row(monkeypatch, batch_size):
    """Factors of longrope depend on the longest row. A short row alone would have others."""
    scaling = LongRope(
        factor=2.0,
        short_factor=(1.0,) * 4,
        long_factor=(3.0,) * 4,
        original_max_position_embeddings=16,
    )
    config = model_config(rope_scaling=scaling, max_position_embeddings=32)
    model = OpenModel(spec=model_spec(config), params=None, tokenizer=load_tokenizer("char"))
    factors = []

    def program(model: OpenModel, how: Any) -> Any:
        factors.append(model.spec.config.for_context(how.longest).rope_scaling.short_factor)
        empty = np.zeros((how.shape[0], 1))
        return lambda *_: SimpleNamespace(
            tokens=empty, lengths=empty[:, 0].astype(int), logprobs=empty
        )

    monkeypatch.setattr(answering, "_program", program)
    assert len(model.generate(["1+2=", "1+2+3+4+5+6="], max_new_tokens=6, batch_size=batch_size))
    assert factors == [(3.0,) * 4] * (2 // batch_size)
    model.generate("1+2=", max_new_tokens=6)
    assert factors[-1] == (1.0,) * 4
