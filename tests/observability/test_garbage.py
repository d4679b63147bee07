"""Garbage is collected rarely until the first step is done, then as before, and not at the exit."""

import gc
import subprocess
import sys

import pytest

from jaxrl_llm.observability.garbage import RARELY, Collector


@pytest.fixture
def thresholds():
    """The tests' own objects come back."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_garbage_is_collected_rarely_while_a_run_starts(thresholds):
    gc.set_threshold(700, 10, 10)
    collector = Collector()
    collector.begin_start()
    assert gc.get_threshold() == RARELY
    collector.end_start()
    assert gc.get_threshold() == (700, 10, 10)
    gc.set_threshold(900, 10, 10)
    collector.end_start()  # each step calls it
    assert gc.get_threshold() == (900, 10, 10)


@pytest.mark.parametrize("chosen", [(0, 10, 10), (RARELY[0] + 1, 10, 10)])
def test_what_a_program_chose_stays(thresholds, chosen):
    gc.set_threshold(*chosen)
    collector = Collector()
    collector.begin_start()
    assert gc.get_threshold() == chosen
    collector.end_start()
    assert gc.get_threshold() == chosen


@pytest.mark.parametrize("last_words, printed", [("", b"found"), ("end_without_search()", b"")])
def test_no_cycle_is_looked_for_at_the_exit(last_words, printed):
    program = f"""
from jaxrl_llm.observability.garbage import end_without_search
class Cycle:
    def __init__(self): self.itself = self
    def __del__(self, say=print): say("found", end="")
Cycle()
{last_words}
"""
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, check=True, capture_output=True).stdout == printed
