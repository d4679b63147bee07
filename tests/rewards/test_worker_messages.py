"""The pipe of a reward worker: types that it carries, and answers that are refused."""

import datetime
import enum
import math
import random
from collections import namedtuple
from decimal import Decimal

import numpy as np
import pytest

from jaxrl_llm import config as c
from jaxrl_llm.rewards.calling import CallError, Graded, Reply
from jaxrl_llm.rewards.manager import RewardManager
from jaxrl_llm.rewards.steps import Steps
from jaxrl_llm.rewards.workers.messages import pack_replies, replies_of
from jaxrl_llm.rewards.workers.wire import (
    LENGTH,
    Malformed,
    pack_answer,
    pack_request,
    unpack_answer,
    unpack_request,
)
from jaxrl_llm.types import Completion, Prompt

FORGE = """
import os, stat, struct, time

def channel():
    for number in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                return number
        except OSError:
            pass

def forge(solution_str, *, hexed):
    if solution_str == "forge":
        os.write(channel(), bytes.fromhex(hexed))
        time.sleep(30)
    return 1.0

def show(solution_str, extra_info):
    return {"score": 1.0, "seen": repr(extra_info)}

def ignores(solution_str):
    return 1.0

def odd(solution_str):
    return {"score": 1.0, "deep": deep(2000), "huge": 10**5000, "text": "\\ud800"}

def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value

def long(solution_str):
    return {"score": 1.0, "text": "x" * (70 * 2**20 if solution_str == "long" else 1)}
"""


@pytest.fixture
def grade(tmp_path):
    """Grade texts with a function of FORGE."""
    file = tmp_path / "forge.py"
    file.write_text(FORGE)

    def run(name, *texts, extra_info=None, timeout=5.0, **settings):
        prompt = Prompt(token_ids=(1,), text="p", columns={"extra_info": extra_info})
        answers = [Completion(tokens=(1,), text=t, logprobs=(0.0,), finished=True) for t in texts]
        function = c.Custom(path=f"{file}:{name}", settings=settings)
        with RewardManager(
            [function], timeout=timeout, num_workers=1, failure_value=-1.0
        ) as manager:
            return manager.score([prompt] * len(answers), answers, step=1)

    return run


Point = namedtuple("Point", "x y")
Colour = enum.Enum("Colour", {"RED": "red"}, type=str)


@pytest.mark.parametrize(
    "value",
    [
        None, True, -(2**63), 2**5000, 0.1, math.inf, "é\ud800", b"\x00\xff",
        (1, (2,), [3]), {1: "a", ("b",): {2.5: None}}, {1, 2}, Decimal("1.10"),
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC), datetime.date(2026, 1, 2),
        datetime.time(1, 2, 3), datetime.timedelta(days=-1, microseconds=7),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_request_keeps_value_and_type(value):
    back = unpack_request(pack_request([value]))[0]
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        (np.str_("a"), "a"),
        (Point(1, 2), (1, 2)),
        (Colour.RED, "red"),
    ],
)
def test_a_request_makes_other_types_plain(value, back):
    got = unpack_request(pack_request([value]))[0]
    assert got == back and type(got) is type(back)


def test_a_value_that_cannot_be_sent_is_refused_by_name(grade):
    with pytest.raises(ValueError, match=r"cannot get 'extra_info': a value of type object"):
        grade("show", "a", extra_info={"x": object()})
    assert grade("ignores", "a", extra_info={"x": object()}).scores.tolist() == [1.0]


def test_the_function_sees_what_the_row_has(grade):
    extra_info = {"a": (1, 2), "b": [1.5, None], 3: b"x"}
    assert grade("show", "a", extra_info=extra_info).extras[0]["show/seen"] == repr(extra_info)


def framed(message):
    return LENGTH.pack(len(message)) + message


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        # A pickle that would run a command.
        (framed(b"cposix\nsystem\n(S'true'\ntR."), "is not msgpack"),
        (LENGTH.pack(2**40), "1099511627776 bytes; at most"),
        (framed(b"\xdd\xff\xff\xff\xff" * 500), "is not msgpack"),  # lists of 2**32 in lists
        (framed(b"\x91" * 100_000 + b"\xc0"), "is not msgpack"),
        (
            framed(pack_answer([999, [[[[9.0, None, {}, None]], [], None]]])),
            "belongs to no request",
        ),
        (framed(pack_answer([2, []])), "another length"),
        (framed(pack_answer([2, [[[[1.0, None, {}, None]] * 2, [], None]]])), "another length"),
        (framed(pack_answer([2, [[[[math.nan, None, {}, None]], [], None]]])), "not finite"),
        (framed(pack_answer([2, [[[["9", None, {}, None]], [], None]]])), "number belongs"),
        (framed(pack_answer([2, [[[[9.0, None, [], None]], [], None]]])), "no map"),
        (framed(pack_answer([2, [[[[9.0, None, {}, None]], [[1, 1]], None]]])), "text belongs"),
        (framed(pack_answer([2, [[[[9.0, None, {}, {"step_scores": [9]}]], [], None]]])), "steps"),
        (framed(pack_answer([2, [[[], [], ["evil", "", False]]]])), "no kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_forged_answer_is_a_failed_call(grade, message, reason):
    result = grade("forge", "forge", "a", hexed=message.hex())
    assert result.scores.tolist() == [-1.0, 1.0]
    assert result.failures[0].kind == "crash" and reason in result.failures[0].message


def test_an_incomplete_answer_runs_into_the_limit(grade):
    result = grade("forge", "forge", timeout=0.5, hexed=LENGTH.pack(10).hex() + "93")
    assert [failure.kind for failure in result.failures] == ["timeout"]


def test_changed_answers_are_replies_or_malformed():
    steps = Steps(scores=(0.5,), ends=(3,), unit="tokens")
    graded = Graded(value=0.5, extras={"a": [1, "b", {"c": None}]}, steps=steps)
    error = CallError(kind="exception", message="no")
    replies = [Reply(graded=(graded,), metrics=(("m", 1.0),)), Reply(error=error)]
    sound = pack_replies(7, replies, 10**6)
    assert replies_of(unpack_answer(sound), 7, [1, 1]) == replies
    draw, refused = random.Random(0), 0
    for _ in range(3000):
        message = bytearray(sound)
        for _ in range(draw.randint(1, 3)):
            message[draw.randrange(len(message))] = draw.randrange(256)
        try:
            replies_of(unpack_answer(bytes(message)), 7, [1, 1])
        except Malformed:
            refused += 1
    assert refused > 1000


def test_odd_extras_become_text(grade):
    result = grade("odd", "a")
    assert result.scores.tolist() == [1.0]
    assert "a int whose repr raises ValueError" == result.extras[0]["odd/huge"]
    assert result.extras[0]["odd/text"] == "\ud800"


def test_an_answer_that_is_too_long_costs_its_own_sample_only(grade):
    result = grade("long", "long", "a")
    assert result.scores.tolist() == [-1.0, 1.0]
    assert "at most 67108864 are taken" in result.failures[0].message
