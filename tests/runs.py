"""Whole runs that many tests read: each is made once, whatever the number of workers.

Tests copy a run before they change it.
"""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import TinyRun

Shared = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Shared:
    """`shared(name, make)`: a folder that `make` filled, in the first worker that asks for it."""
    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        root = root.parent  # each worker has a folder of its own below it

    def folder_of(name: str, make: Callable[[Path], None]) -> Path:
        folder, made = root / f"shared_{name}", root / f"shared_{name}.made"
        with open(root / f"shared_{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                folder.mkdir()
                make(folder)
                made.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def ppo_run(shared: Shared) -> TinyRun:
    """PPO with a warm-up, a critic, a reference and a Python reward, from start to end."""
    return TinyRun(shared("ppo", lambda folder: TinyRun(folder).finish()))
