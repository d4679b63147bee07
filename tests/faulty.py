"""Runs a script in which one process fails in a chosen way, once.

    python tests/faulty.py FAULT PROCESS STEP FOLDER script.py ARGUMENTS

FOLDER/injected then exists, with the epoch seconds of the fault. A restart does not fail again.
"""

import ctypes
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fail() -> None:
    raise RuntimeError("a fault that a test made")


def kill_soon(name: int) -> None:
    os.kill(os.getpid(), name)


# What the process does at the begin of the step.
FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: kill_soon(signal.SIGKILL),
    "stopped": lambda: kill_soon(signal.SIGSTOP),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exception": fail,
    "hung": lambda: time.sleep(10_000),
    "lock held": lambda: ctypes.PyDLL(None).sleep(10_000),  # PyDLL keeps Python's lock
    "slow": lambda: time.sleep(5),
}
HOST_STAGE, IN_SAVE = "hung reward", "killed in a save"


def main(fault: str, process: str, step: str, folder: str, script: str) -> None:
    if os.environ["JAXRL_PROCESS_ID"] == process:
        inject(fault, int(step), Path(folder) / "injected")
    runpy.run_path(script, run_name="__main__")


def inject(fault: str, step: int, injected: Path) -> None:
    from jaxrl_llm.checkpoint.manager import CheckpointManager
    from jaxrl_llm.trainer.rewarding import RewardFunctions
    from jaxrl_llm.trainer.training import Training

    def once(now: int, what: Callable[[], object]) -> None:
        if now == step and not injected.exists():
            injected.write_text(str(time.time()))
            what()

    if fault == HOST_STAGE:
        before(RewardFunctions, "score", lambda _, c, now, *rest: once(now, FAULTS["hung"]))
    elif fault == IN_SAVE:
        after(CheckpointManager, "save", lambda _, now, *rest: once(now, FAULTS["killed"]))
    else:
        what = FAULTS[fault]
        after(Training, "begin_step", lambda t: once(t.step if t.listeners else -1, what))


def before(cls: Any, name: str, note: Callable[..., None]) -> None:
    function = getattr(cls, name)

    def noted(*arguments: Any) -> Any:
        note(*arguments)
        return function(*arguments)

    setattr(cls, name, noted)


def after(cls: Any, name: str, note: Callable[..., None]) -> None:
    function = getattr(cls, name)

    def noted(*arguments: Any) -> Any:
        result = function(*arguments)
        note(*arguments)
        return result

    setattr(cls, name, noted)


if __name__ == "__main__":
    given = sys.argv[1:6]
    sys.argv = sys.argv[5:]
    main(*given)
