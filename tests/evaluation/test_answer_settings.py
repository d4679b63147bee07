"""Settings of answers: their names, bounds and messages."""

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.evaluation.answer_settings import (
    AnswerKeys,
    AnswerSettings,
    StreamKeys,
    StreamSettings,
    read_settings,
)
from jaxrl_llm.typed_records.record import fields_of


def test_keyword_arguments_are_the_settings():
    assert set(fields_of(AnswerSettings)) == set(AnswerKeys.__annotations__)
    assert set(fields_of(StreamSettings)) == set(StreamKeys.__annotations__)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1}, "unknown key generate.temprature; did you mean 'generate.temperature'"),
        ({"temperature": -1}, "generate.temperature=-1: must be 0 or more; 1 works"),
        ({"temperature": "warm"}, "generate.temperature='warm': expected a number"),
        ({"top_p": 0}, "generate.top_p=0: must be above 0; 1 works"),
        ({"stop": [""]}, "generate.stop.0='': must have at least 1 character"),
        ({"chat": 3}, "generate.chat=3: expected true or false"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        read_settings(AnswerSettings, given, "generate")


def test_numbers_of_numpy_are_numbers():
    given = {"seed": np.int64(3), "temperature": np.float32(0.5), "stop": "x"}
    found = read_settings(AnswerSettings, given, "generate")
    assert (found.seed, found.temperature, found.stop) == (3, 0.5, ("x",))
