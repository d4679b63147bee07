"""The code grader against completions and tests in the forms of public data sets.

`cases/code.jsonl` has a completion, the tests of its row and the right score. Expected results of
functions come from plain Python behind LiveCodeBench's list of imports.
"""

import json
from pathlib import Path

import pytest
from sandboxed import needs_sandbox

from jaxrl_llm.rewards.code import code

CASES = [json.loads(line) for line in open(Path(__file__).with_name("cases") / "code.jsonl")]


def test_there_are_enough_of_both_kinds():
    assert len(CASES) >= 100 and sum(case["score"] == 0 for case in CASES) >= 25


@needs_sandbox
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case(case):
    assert code(case["completion"], json.dumps(case["truth"]), case_s=3.0)["score"] == case["score"]
