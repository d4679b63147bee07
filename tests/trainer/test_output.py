"""What a run's output leaves behind where it cannot be opened, and of an earlier run."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_iteration import tiny_config

from jaxrl_llm.generation.stop_strings import Stops
from jaxrl_llm.supervision.callbacks import Callbacks
from jaxrl_llm.tokenizer import load_tokenizer
from jaxrl_llm.trainer.output import RunOutput

FAILING = """
class Mine:
    def __init__(self, run):
        raise RuntimeError("no server")
"""


def output(folder: Path, **log) -> RunOutput:
    config = tiny_config()
    return RunOutput(
        replace(config, log=replace(config.log, tensorboard=False, **log)),
        folder,
        tokenizer=load_tokenizer("char"),
        stops=Stops(()),
        resume_step=None,
        callbacks=Callbacks(functions=(), run_dir=folder, total_steps=8),
    )


def files_of(folder: Path) -> set[str]:
    """Files of the folder that this process has open."""
    found: set[str] = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(link.readlink()))
        except OSError:  # closed meanwhile
            continue
    return {path for path in found if path.startswith(str(folder))}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux lists open files there")
def test_a_tracker_that_cannot_be_opened_leaves_no_file_and_no_thread(tmp_path):
    (tmp_path / "mine.py").write_text(FAILING)
    threads = set(threading.enumerate())
    with pytest.raises(ValueError, match="no server"):
        output(tmp_path / "run", trackers=(f"{tmp_path / 'mine.py'}:Mine",))
    assert files_of(tmp_path / "run") == set()
    assert set(threading.enumerate()) <= threads


def test_curves_of_a_warm_up_that_saved_nothing_are_not_the_next_runs(tmp_path):
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "metrics.jsonl").write_text('{"training/global_step": 1, "loss": 2.0}\n')
    with output(tmp_path, report=False):
        pass
    assert not (tmp_path / "warmup" / "metrics.jsonl").exists()
