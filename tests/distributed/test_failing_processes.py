"""A reward that fails on one of two processes: both mask its samples, and go on."""

import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_run import SAMPLES, TinyRun, assert_close

pytestmark = pytest.mark.ci

PROCESSES = [sys.executable, "-m", "jaxrl_llm.launch.local", "--processes=2", "--"]
TRAIN = [sys.executable, "scripts/train.py"]

# Process 1 of two has the second half of a batch, and so fails for all that it grades. One process
# grades the whole batch in one call, as nothing is tried again.
SECOND_HALF_FAILS = f"""
import os

WHOLE = {SAMPLES}
works = 0 if os.environ.get("JAXRL_PROCESS_ID") == "1" else WHOLE // 2


def digits(completions):
    return [sum(c.isdigit() for c in text) / 4 if i < works else None
            for i, text in enumerate(completions)]
"""
FLAGS = (
    "--config.algorithm=grpo",
    "--config.warmup=null",
    "--config.data.val_tasks=[]",
    "--config.total_steps=4",
    "--config.reward.max_retries=0",
)


def run_in(folder: Path) -> TinyRun:
    run = TinyRun(folder, *FLAGS)
    (folder / "reward.py").write_text(SECOND_HALF_FAILS)
    return run


def test_both_processes_mask_what_failed_on_one(tmp_path: Path) -> None:
    one, two = run_in(tmp_path / "one"), run_in(tmp_path / "two")
    one.finish_here()
    two.finish(launcher=[*PROCESSES, *TRAIN[1:]])
    expected, metrics = one.metrics(), two.metrics()
    assert list(metrics) == list(expected) == [0, 1, 2, 3, 4]
    for step, row in list(expected.items())[1:]:
        assert row["reward/masked_frac"] == 0.5 and row["rewards/failures"] == SAMPLES // 2
        assert_close(metrics[step], row, rtol=1e-5, atol=2e-6)
    samples = one.samples("train")
    for key, sample in two.samples("train").items():
        failed = key[1] >= SAMPLES // 2
        assert (sample["score"] is None) == bool(sample["failures"]) == failed
        assert (samples[key]["tokens"], samples[key]["score"]) == (
            sample["tokens"],
            sample["score"],
        )
    weights = one.weights(4)
    for name, array in two.weights(4).items():
        np.testing.assert_allclose(array, weights[name], rtol=1e-3, atol=1e-5, err_msg=name)
