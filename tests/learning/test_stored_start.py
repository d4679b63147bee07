"""A start whose programs an earlier one kept: the same bits, and a refusal where they changed.

A sweep over rates, coefficients, clips and seeds reads all of its programs.
"""

import json
import shutil

import numpy as np
import pytest
from tiny_run import TinyRun, assert_same_bits

pytestmark = pytest.mark.nightly

# The decay of the first moment is a constant of the program.
FEW = ("--config.total_steps=2", "--config.warmup=none", "--config.save_every=0")
FEW += ("--config.algorithm=grpo", "--config.data.val_tasks=[]", "--config.checkpoint.best_metric=")
OTHER = (*FEW, "--config.actor.optimizer.b1=0.8")
SWEPT = {
    "actor.optimizer.learning_rate": 1e-3,
    "actor.optimizer.weight_decay": 0.1,
    "actor.optimizer.max_grad_norm": 0.5,
    "algorithm.kl_loss_coef": 0.05,
    "algorithm.clip_low": 0.1,
    "algorithm.clip_high": 0.3,
    "seed": 7,
}


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


def test_a_sweep_compiles_once(run, tmp_path):
    """Other rates, coefficients, clips and seed: not one program more, of jax's cache or ours."""
    first, weights, _ = finished(run, *FEW)
    compiled = {name for name in files(tmp_path, "**/*") if not name.endswith("-atime")}
    assert len(compiled) > 10
    swept = [f"--config.{key}={value}" for key, value in SWEPT.items()]
    other = TinyRun(tmp_path / "other", *run.flags)
    other.arguments[0] = run.arguments[0]  # the same file of a config
    second, others, _ = finished(other, *FEW, *swept)
    now = {name for name in files(tmp_path, "**/*") if not name.endswith("-atime")}
    assert not now - compiled, sorted(now - compiled)
    # Four updates of a warm-up of three steps: 1/3, 2/3 and 1 of the peak, and the peak.
    assert first[1]["actor/lr"] == pytest.approx(0.75 * 3e-3)
    assert second[1]["actor/lr"] == pytest.approx(0.75 * 1e-3)
    learned = [name for name in weights if name.startswith("actor[")]
    assert learned and not any(np.array_equal(weights[x], others[x]) for x in learned)


def test_a_resumed_run_has_the_numbers_of_its_own_config(run, tmp_path):
    own = ("--config.warmup=none", "--config.data.val_tasks=[]", "--config.validation.every=0")
    own += ("--config.checkpoint.best_metric=", "--config.algorithm.kl_controller=fixed")
    first, _, _ = finished(run, *own, "--config.total_steps=2")
    assert first[2]["actor/reward_kl_penalty_coeff"] == pytest.approx(0.05)
    lower = TinyRun(tmp_path / "lower", *run.flags)
    lower.finish(
        *own,
        "--config.total_steps=3",
        f"--config.resume={run.step_path(2)}",
        "--config.algorithm.kl_coef=0.2",
        "--config.actor.optimizer.learning_rate=1e-4",
        "--config.actor.optimizer.schedule=constant",
    )
    assert lower.metrics()[3]["actor/reward_kl_penalty_coeff"] == pytest.approx(0.2)
    assert lower.metrics()[3]["actor/lr"] == pytest.approx(1e-4)
