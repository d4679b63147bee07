"""A start whose programs an earlier one kept: the same bits, and a refusal where they changed."""

import json
import shutil

import pytest
from tiny_run import TinyRun, assert_same_bits

pytestmark = pytest.mark.ci

# The learning rate is a number in the program.
FEW = ("--config.total_steps=2", "--config.warmup=none", "--config.save_every=0")
FEW += ("--config.algorithm=grpo", "--config.data.val_tasks=[]", "--config.checkpoint.best_metric=")
OTHER = (*FEW, "--config.actor.optimizer.learning_rate=1e-3")


@pytest.fixture
def run(tmp_path):
    return TinyRun(tmp_path / "r", f"--config.compile_cache={tmp_path / 'cache'}")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def finished(run, *flags, code=0):
    """Metrics, weights and output of a new run in the same folder."""
    shutil.rmtree(run.run_dir, ignore_errors=True)
    output = run.finish(*flags, code=code)
    return run.metrics(), (run.weights(2) if code == 0 else None), output


def files(tmp_path, pattern):
    return {file.name: file.stat().st_mtime_ns for file in (tmp_path / "cache").glob(pattern)}


def test_a_start_of_kept_programs_has_the_bits_of_one_that_compiles(run, tmp_path):
    first, weights, _ = finished(run, *FEW)
    kept = files(tmp_path, "programs/*")
    (start,) = (tmp_path / "cache" / "starts").iterdir()
    names = json.loads(start.read_text())
    assert len(names) == 3 and kept.keys() == set(names), "generation, log-probs, the update"
    programs = files(tmp_path, "jit_iteration-*")
    for name in programs:  # what jax would read
        (tmp_path / "cache" / name).unlink()

    second, again, _ = finished(run, *FEW)
    assert not files(tmp_path, "jit_iteration-*"), "a program was compiled"
    assert files(tmp_path, "programs/*") == kept
    assert_same_bits(weights, again)
    clocks = ("timing", "perf/", "throughput")
    for step in (1, 2):
        a, b = (
            {k: v for k, v in one[step].items() if not k.startswith(clocks)}
            for one in (first, second)
        )
        assert a == b


@pytest.mark.slow
def test_programs_that_are_not_those_of_this_run_end_it_before_it_writes(run, tmp_path):
    """As if something had changed that the key of a start does not know."""
    finished(run, *FEW)
    (start,) = (tmp_path / "cache" / "starts").iterdir()
    first, weights, _ = finished(run, *OTHER)
    (other,) = set((tmp_path / "cache" / "starts").iterdir()) - {start}
    other.write_bytes(start.read_bytes())
    metrics, _, output = finished(run, *OTHER, code=1)
    assert 1 not in metrics and "start the command again" in output
    assert not other.exists()
    shutil.rmtree(run.run_dir)
    second, again, _ = finished(run, *OTHER)
    assert_same_bits(weights, again)
