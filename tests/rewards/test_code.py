"""The code grader: forms of tests, what it reads from a completion, and how output is compared."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandboxed import needs_sandbox

from jaxrl_llm import config as c
from jaxrl_llm.rewards.code import (
    Assert,
    Call,
    Program,
    code,
    extract_code,
    read_truth,
    same_output,
)
from jaxrl_llm.rewards.manager import RewardManager
from jaxrl_llm.sandbox.box import Limits, Sandbox
from jaxrl_llm.sandbox.processes import descendants
from jaxrl_llm.sandbox.values import Foreign, decode, encode, no_object
from jaxrl_llm.types import Completion, Prompt


def block(source):
    return f"Here it is:\n```python\n{source}\n```\nDone."


@pytest.mark.parametrize(
    ("tests", "cases"),
    [
        # verl's prime_code, APPS and TACO
        ({"inputs": ["1\n"], "outputs": ["2\n"]}, [Program("1\n", "2\n")]),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [Program("1\n2", "3")]),
        ({"fn_name": "f", "inputs": [[1, [2]]], "outputs": [[3]]}, [Call("f", [1, [2]], [3])]),
        ({"fn_name": "f", "inputs": ['1\n"a"'], "outputs": ["[2]"]}, [Call("f", [1, "a"], [2])]),
        ({"assert_case": ["assert f(1)"], "inputs": [""]}, [Assert("assert f(1)")]),
        # MBPP
        (["assert f(1) == 2"], [Assert("assert f(1) == 2")]),
        # LiveCodeBench
        ([{"input": "1", "output": "2", "testtype": "stdin"}], [Program("1", "2")]),
        (
            [{"input": "1\n[2]", "output": "3", "testtype": "functional",
              "metadata": {"func_name": "f"}}],
            [Call("f", [1, [2]], 3)],
        ),
    ],
)  # fmt: skip
def test_forms_of_tests(tests, cases):
    assert read_truth(tests) == cases
    assert read_truth(json.dumps(tests)) == cases


@pytest.mark.parametrize(
    "tests", [None, 3, "no JSON", "[]", {}, {"inputs": ["1"], "outputs": []}, [3], "[" * 10**5]
)
def test_a_row_without_tests_is_refused(tests):
    with pytest.raises(ValueError, match="ground truth"):
        read_truth(tests)


@pytest.mark.parametrize(
    ("completion", "source"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\nno:\n```py\nb\n```", "b\n"),
        ("```Python \na\n```", "a\n"),
        ("```python\ncut", "cut"),
        ("```\na\n```", "a\n"),
        ("print(1)", None),
    ],
)
def test_the_last_block_is_the_code(completion, source):
    assert extract_code(completion) == source


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("  1 \n2  \n\n", "1\n2\n", True),
        ("1.0 2", "1 2.00", True),
        ("1 2", "1\n2", False),
        ("1", "2", False),
        ("yes", "YES", False),
        ("", "1", False),
        ("nan", "nan", True),
    ],
)
def test_same_output(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -(10**30), 0.1, "é", b"\x00", [1, [2]],
     (1, (2,)), {1, 2}, {1: {"a": (2,)}}, 2j],
)  # fmt: skip
def test_values_that_cross_between_programs(value):
    back = decode(json.loads(json.dumps(encode(value, no_object))), no_object)
    assert back == value and type(back) is type(value)
    with pytest.raises(Foreign):
        encode([object()], no_object)


@needs_sandbox
def test_programs():
    tests = {"inputs": ["1", "2", "3"], "outputs": ["2", "3", "9"]}
    right = block("print(int(input()) + 1)")
    assert code(right, tests) == {"score": 0.0, "reason": "test 3 of 3: another output"}
    assert code(right, tests, scoring="share")["score"] == pytest.approx(2 / 3)
    assert code("no code", tests)["reason"] == "no ```python block in the completion"
    broken = code(block("raise ValueError('what')"), tests)
    assert broken["reason"] == "test 1 of 3: exit code 1, ValueError: what"


@needs_sandbox
@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("def f(a, b): return a, b", {"fn_name": "f", "inputs": [[1, 2]], "outputs": [[1, 2]]}),
        ("def f(a): return a", {"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}),  # APPS wraps
        (
            "class Solution:\n  def f(self, a): return {a: True}",
            {"fn_name": "f", "inputs": [[1]], "outputs": [{"1": True}]},
        ),
        ("def f(a): a.sort()", ["a = [2, 1]; f(a); assert a == [1, 2]"]),
        ("import numpy as np\ndef f(n): return np.arange(n)", ["assert f(2) == [0, 1]"]),
        ("def f(n):\n  for i in range(n): yield i", ["assert list(f(2)) == [0, 1]"]),
        (
            "class A:\n  def __init__(self): self.v = []\n  def add(self, x): self.v.append(x)",
            ["a = A(); a.add(3); assert a.v == [3]", "a = A(); assert a.v == []"],
        ),
        (
            "def f(x):\n  if x < 0: raise ValueError('no')\nLIMIT = 3",
            ["try:\n  f(-1)\nexcept ValueError as e:\n  assert str(e) == 'no'\nelse:\n  assert 0",
             "assert LIMIT == 3", "def check(g):\n  assert g(1) is None\ncheck(f)"],
        ),
        ("def bisect(x): return x", ["assert bisect(1) == 1", "assert bisect.bisect([1], 0) == 0"]),
    ],
)  # fmt: skip
def test_functions_and_asserts(source, tests):
    assert code(block(source), json.dumps(tests)) == {"score": 1.0}


@needs_sandbox
def test_a_test_that_ends_the_code_costs_itself_only():
    source = "import os\ndef f(x):\n  if x == 2: os._exit(0)\n  return x"
    tests = [f"assert f({i}) == {i}" for i in range(1, 5)]
    result = code(block(source), tests, scoring="share")
    assert result["score"] == 0.75 and "test 2 of 4: the code ended" in result["reason"]


@needs_sandbox
def test_the_time_of_a_row_is_limited():
    tests = {"inputs": ["1"] * 50, "outputs": ["1"] * 50}
    start = time.monotonic()
    result = code(block("while True: pass"), tests, scoring="share", case_s=0.3, total_s=0.7)
    assert result["score"] == 0.0 and time.monotonic() - start < 3.0


@needs_sandbox
def test_the_grader_runs_in_the_pool():
    prompt = Prompt(token_ids=(1,), text="p", ground_truth='["assert f(1) == 2"]')
    texts = (block("def f(x): return x + 1"), block("def f(x): return x"), "nothing")
    answers = [Completion(tokens=(1,), text=t, logprobs=(0.0,), finished=True) for t in texts]
    with RewardManager([c.Code()]) as manager:
        result = manager.score([prompt] * 3, answers, step=1)
    assert result.scores.tolist() == [1.0, 0.0, 0.0] and not result.failures


FORBIDDEN = """
import sys
from jaxrl_llm.rewards.code import code, prepare
from jaxrl_llm.sandbox.seccomp import refuse_calls
refuse_calls()  # as a container does that forbids namespaces
try:
    prepare()
except ValueError as error:
    print(error)
"""


def test_without_namespaces_it_refuses():
    done = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True)
    assert "code of a model cannot be isolated here" in done.stdout
    assert "Operation not permitted" in done.stdout and "limits_only=True" in done.stdout


def test_limits_alone(tmp_path):
    """They end a program and its children, and hide no file."""
    (tmp_path / "seen").write_text("secret")
    with Sandbox(Limits(seconds=0.5), limits_only=True) as sandbox:
        outcome = sandbox.run_source(f"print(open({str(tmp_path / 'seen')!r}).read())")
        assert outcome.stdout == "secret\n"
        source = (
            "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(9)"
            "\n  os._exit(0)\nprint(os.getcwd(), flush=True); time.sleep(9)"
        )
        outcome = sandbox.run_source(source)
        assert outcome.why == "timeout"
        assert not Path(outcome.stdout.strip()).exists()
        refused = "import socket\ntry: socket.socket()\nexcept PermissionError: print('refused')"
        assert sandbox.run_source(refused).stdout == "refused\n"
    bomb = "import os, time\nfor _ in range(4):\n  if os.fork() == 0: os.setsid()\ntime.sleep(9)"
    before = set(descendants(os.getpid()))
    with Sandbox(Limits(seconds=5.0, processes=8), limits_only=True) as sandbox:
        outcome = sandbox.run_source(bomb)
        assert outcome.why == "processes" and set(descendants(os.getpid())) <= before
    tests = ["assert f(1) == 2"]
    assert code(block("def f(x): return 2"), tests, limits_only=True) == {"score": 1.0}
