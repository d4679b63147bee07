"""Limits that are learnt, who lags, and what a process does past a limit."""

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl_llm.config import WatchdogConfig
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.supervision import watchdog
from jaxrl_llm.supervision.watchdog import BETWEEN, END, STALLED, Limits, Place, Watch, lagging
from jaxrl_llm.trainer import loop


def test_a_limit_is_ten_times_the_longest_but_for_the_first():
    limits = Limits(floor_s=90.0, ceiling_s=600.0)
    assert limits.of("gen") == 600.0
    limits.add("gen", 200.0)  # compiles
    assert limits.of("gen") == 600.0
    limits.add("gen", 1.0)
    assert limits.of("gen") == 90.0  # the floor
    limits.add("gen", 12.0)
    limits.add("gen", 2.0)
    assert limits.of("gen") == 120.0
    limits.add("gen", 100.0)
    assert limits.of("gen") == 600.0  # the ceiling
    assert limits.of("save") == 600.0
    limits.forget()
    assert limits.of("gen") == 600.0


def place(
    changes: int, *, at: float = 100.0, stage: str = "gen", waits: str | None = None
) -> Place:
    return Place(at=at, step=3, stage=stage, changes=changes, waits=waits)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({0: place(9), 1: place(9), 2: place(9)}, {}),
        ({0: place(9), 1: place(8), 2: place(9)}, {1: "is in step 3, stage gen"}),
        ({0: place(9, waits="a"), 1: place(9), 2: place(9, waits="a")}, {1: "is in step 3"}),
        ({0: place(9), 1: place(9, at=50.0), 2: place(8)}, {1: "has not run for 50 s"}),
        ({0: place(9), 2: place(9)}, {1: "never wrote where it stands"}),
        ({0: place(9), 1: place(10, at=1.0, stage=END), 2: place(9)}, {1: "left the run after"}),
    ],
)
def test_the_process_that_the_others_wait_for(places, expected):
    found = lagging(places, 3, now=100.0)
    assert found.keys() == expected.keys()
    assert all(text in found[k] for k, text in expected.items())


class Notes(Watch):
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.forgotten = 0

    def forget(self) -> None:
        self.forgotten += 1

    def enter(self, stage: str, step: int | None = None, *, learn: bool = True) -> None:
        self.stages.append(stage)


def test_the_clocks_of_a_step_name_its_stages():
    notes = Notes()
    timer = Timer(watch=notes.clocks)
    with timer("gen"):
        timer.start("reward")
    timer.stop("reward")
    assert notes.stages == ["gen", "gen and reward", "reward", BETWEEN]


def open_watch(folder: Path, ended: threading.Event, codes: list[int], **settings):
    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    return watchdog.open_watch(WatchdogConfig(**settings), folder, end)


def test_a_stage_past_its_limit_ends_the_process_with_its_stacks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    ended, codes = threading.Event(), []
    with open_watch(tmp_path, ended, codes, floor_minutes=0.001) as watch:
        for _ in range(3):
            watch.enter("gen", 7)
            watch.enter(BETWEEN)
        watch.enter("gen")
        assert ended.wait(10)
        text = (tmp_path / "stacks-0.txt").read_text()
    assert codes[0] == STALLED
    assert "process 0 has been in step 7, stage gen for 0 s, and the limit is 0 s" in text
    assert "test_a_stage_past_its_limit" in text  # where the main thread stands
    assert "ends with exit code 75" in capsys.readouterr().err


def test_a_run_that_goes_on_leaves_no_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    ended, codes = threading.Event(), []
    with open_watch(tmp_path, ended, codes, floor_minutes=0.001) as watch:
        for stage in ("a", "b", "disk space"):
            watch.enter(stage, learn=False)
        assert not ended.wait(0.3)  # what is not learnt has the ceiling
    assert not codes and not (tmp_path / "stacks-0.txt").exists()


def test_a_ceiling_of_0_turns_it_off(tmp_path):
    with open_watch(tmp_path, threading.Event(), [], ceiling_minutes=0.0) as watch:
        assert type(watch) is Watch
    assert not list(tmp_path.iterdir())


def test_a_training_does_not_inherit_the_limits_of_the_one_before(monkeypatch):
    """The first validation after a warm-up compiles, and took more than ten validations of it."""
    watch, done = Notes(), SimpleNamespace(is_new=False, step=1, total_steps=1, stopped=False)
    folder = SimpleNamespace(path=Path(), is_finished=lambda *_: False)
    run = SimpleNamespace(trainings=lambda: [done, done], summary=lambda: "summary")
    monkeypatch.setattr(loop, "open_run_folder", lambda *_: nullcontext(folder))
    monkeypatch.setattr(loop, "open_watch", lambda *_: nullcontext(watch))
    monkeypatch.setattr(loop, "open_run", lambda *_: nullcontext(run))
    assert loop.train(SimpleNamespace(watchdog=None)) == "summary"
    assert watch.forgotten == 2
