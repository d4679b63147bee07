"""What is seen before and during the first step."""

import io
import time
from contextlib import closing

import pytest

from jaxrl_llm.observability import console
from jaxrl_llm.observability.console import Console
from jaxrl_llm.observability.status import RANKS, Status


def test_a_status_is_silent_until_it_begins_and_after_its_end(monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    out, status = io.StringIO(), Status()
    status("of a library")
    status.begin(out)
    status("importing")
    status.end()
    status("over")
    assert out.getvalue() == "start: importing\n"


@pytest.mark.parametrize("name", RANKS)
def test_the_first_process_alone_says_what_goes_on(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    out, status = io.StringIO(), Status()
    status.begin(out)
    status("importing")
    assert out.getvalue() == ""


def test_a_long_stage_of_the_first_step_is_named_in_a_log(monkeypatch):
    monkeypatch.setattr(console, "PATIENCE_S", 0.02)
    out = io.StringIO()
    with closing(Console(file=out)) as shown:
        shown.begin("step", 2)
        shown.stage(1, ["reward"])
        shown.stage(1, ["gen"])  # at once, so the reward took no time
        deadline = time.monotonic() + 10
        while "gen" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        shown.log(1, {})
        shown.stage(2, ["values"])
        time.sleep(0.06)
    assert out.getvalue().splitlines() == [
        "step: 2 steps",
        "step 1 is in gen; the first step compiles its programs",
        "step 1/2",
    ]
