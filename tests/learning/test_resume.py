"""A run that was killed, interrupted or moved ends as one that was left alone."""

import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import (
    EPOCH_STEPS,
    KEPT,
    SAMPLES,
    SAVE_EVERY,
    TOTAL_STEPS,
    TinyRun,
    assert_close,
    assert_same_bits,
)

from jaxrl_llm.evaluation.trained_model import export_checkpoint


@pytest.fixture(scope="module")
def reference(ppo_run: TinyRun) -> TinyRun:
    """A run from start to end, without a break."""
    return ppo_run


def assert_same_run(run: TinyRun, reference: TinyRun) -> None:
    metrics, expected = run.metrics(), reference.metrics()
    assert list(metrics) == list(range(TOTAL_STEPS + 1))
    for step, row in expected.items():
        assert metrics[step] == row, f"step {step}"
    assert run.events() == reference.events() != []
    assert_same_bits(run.weights(TOTAL_STEPS), reference.weights(TOTAL_STEPS))
    for kind in ("train", "validation"):
        assert run.samples(kind) == reference.samples(kind)


@pytest.mark.nightly
def test_reference_learns_and_keeps_what_it_should(reference: TinyRun) -> None:
    metrics = reference.metrics()
    assert metrics[TOTAL_STEPS]["critic/score/mean"] > metrics[1]["critic/score/mean"]
    assert len(reference.samples("train")) == TOTAL_STEPS * SAMPLES
    assert metrics[EPOCH_STEPS]["training/epoch"] == 1.0
    assert reference.saved_steps() == kept_steps(reference)


def kept_steps(run: TinyRun) -> list[int]:
    """The newest of the saved steps, and the one of the highest entropy."""
    metrics = run.metrics()
    saved = range(SAVE_EVERY, TOTAL_STEPS + 1, SAVE_EVERY)
    best = max(saved, key=lambda step: metrics[step]["actor/entropy"])
    newest = list(saved)[-KEPT:]
    assert best not in newest  # or the test would not see whether the best is kept
    return [best, *newest]


def copy_compiled(folder: Path) -> None:
    """Fill `folder` with links to the programs that the tests have compiled so far."""
    folder.mkdir()
    for file in Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).iterdir():
        (folder / file.name).symlink_to(file.resolve())


def cut_off_in_first_save(folder: Path) -> TinyRun:
    """A run that was killed before the folder of its first save got its final name."""
    for i in range(5):
        run = TinyRun(folder / f"try{i}")

        def saving(run: TinyRun = run) -> list[Path]:
            return list(run.checkpoints.glob("global_step_[1-9]*tmp*"))

        run.kill_when(saving)
        if saving():
            return run
    raise AssertionError("every save was over before the kill")


def test_kill_9_leaves_no_mark(
    tmp_path: Path, reference: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed during the first save after the warm-up, and within a step at an epoch's boundary."""
    # New programs go where a killed process leaves no half of one for other tests.
    copy_compiled(tmp_path / "compiled")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    run = cut_off_in_first_save(tmp_path)
    assert run.step_path(0).exists() and not run.step_path(SAVE_EVERY).exists()
    warm_up = (run.run_dir / "warmup" / "metrics.jsonl").read_bytes()

    boundary = 2 * EPOCH_STEPS
    run.pause_at(boundary + 1)
    run.kill_when(lambda: run.paused() and run.step_path(boundary).exists())
    run.unpause()

    assert f"resumed from {run.step_path(boundary)}" in run.finish_here()
    assert (run.run_dir / "warmup" / "metrics.jsonl").read_bytes() == warm_up
    assert_same_run(run, reference)
    assert run.saved_steps() == kept_steps(reference)


SIZES = """{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
    num_attention_heads: 2, max_position_embeddings: 16, tie_word_embeddings: true}"""
LOSS = "loss: docs/examples/cost_model.py:length_error, optimizer: {learning_rate: 0.003}"
LEARNED_COST = (
    "--config.algorithm=grpo", "--config.warmup=null", "--config.total_steps=4",
    f"--config.models=[{{name: cost, hf_config: {SIZES}, update: {{{LOSS}}}}}]",
    "--config.stages=[docs/examples/cost_model.py:cost_penalty]",
)  # fmt: skip


@pytest.mark.nightly
def test_a_model_of_the_users_that_learns_is_resumed_with_its_bits(tmp_path: Path) -> None:
    """Its weights and its optimizer are equal to a run that was left alone."""
    whole = TinyRun(tmp_path / "whole", *LEARNED_COST)
    whole.finish_here()
    killed = TinyRun(tmp_path / "killed", *LEARNED_COST)
    killed.pause_at(SAVE_EVERY + 1)
    killed.kill_when(lambda: killed.paused() and killed.step_path(SAVE_EVERY).exists())
    killed.unpause()
    assert f"resumed from {killed.step_path(SAVE_EVERY)}" in killed.finish_here()
    assert killed.metrics() == whole.metrics()
    weights = whole.weights(4)
    assert any(name.startswith("cost_optimizer") for name in weights)
    assert_same_bits(killed.weights(4), weights)
    assert whole.metrics()[4]["cost/loss"] < whole.metrics()[1]["cost/loss"]
    folder = export_checkpoint(whole.step_path(4), tmp_path / "export", role="cost")
    head = load_file(folder / "model.safetensors")["score.weight"]
    np.testing.assert_array_equal(head.T, weights["cost['score']['kernel']"])
    assert np.abs(head).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(
    tmp_path: Path, reference: TinyRun, number: signal.Signals
) -> None:
    run = TinyRun(tmp_path)
    step = 5  # between two saves
    run.pause_at(step)
    with run.process() as process:
        run.wait_for(run.paused, process)
        os.killpg(process.pid, number)
        run.unpause()
        assert process.wait(60) == 130
    output = (run.folder / "log.txt").read_text()
    assert f"interrupted at step {step} of {TOTAL_STEPS}" in output
    assert "run the same command again" in output
    assert "Traceback" not in output
    assert run.saved_steps()[-1] == step
    assert list(run.metrics()) == list(range(step + 1))
    run.finish()
    assert_same_run(run, reference)


def test_resume_never_refuses_a_used_folder(reference: TinyRun) -> None:
    before = (reference.run_dir / "metrics.jsonl").read_bytes()
    output = reference.finish_here("--config.resume=never", code=2)
    assert "--config.resume=auto" in output and "--config.run_dir" in output
    assert "Traceback" not in output
    assert (reference.run_dir / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_is_left_as_it_is(reference: TinyRun) -> None:
    before = reference.metrics(), reference.saved_steps()
    output = reference.finish_here()
    assert f"already at step {TOTAL_STEPS} of {TOTAL_STEPS}; nothing to do" in output
    assert f"finished at step {TOTAL_STEPS}" in output
    assert (reference.metrics(), reference.saved_steps()) == before


@pytest.mark.slow
def test_another_runs_checkpoint_goes_on_in_a_new_folder(
    tmp_path: Path, reference: TinyRun
) -> None:
    start = TOTAL_STEPS - SAVE_EVERY
    run = TinyRun(tmp_path)
    run.finish(f"--config.resume={reference.step_path(start)}")
    expected = reference.metrics()
    assert run.metrics() == {step: expected[step] for step in range(start + 1, TOTAL_STEPS + 1)}
    assert_same_bits(run.weights(TOTAL_STEPS), reference.weights(TOTAL_STEPS))
    assert run.saved_steps() == [TOTAL_STEPS]


def on_mesh(**sizes: int) -> list[str]:
    keys = [f"--config.mesh.{axis}={size}" for axis, size in sizes.items()]
    return [f"--devices={math.prod(sizes.values())}", *keys]


TWO_LAYERS = ("--config.actor.hf_config.num_hidden_layers=2",)  # one for each stage of a pipeline
MIX = on_mesh(pipeline=2, fsdp=2, tensor=2)
OTHER_MIX = on_mesh(data=2, fsdp=2, sequence=2)
APART = ["--devices=2", "--config.placement.critic=1", "--config.placement.reference=critic"]
AHEAD = ["--devices=2", "--config.placement.rollout=1", "--config.max_staleness=2"]


def resume_copy(folder: Path, run: TinyRun, flags: list[str]) -> TinyRun:
    """A copy of `run` without its last checkpoint, resumed with these flags."""
    *_, start, last = run.saved_steps()
    copy = TinyRun(folder, *run.flags)
    shutil.copytree(run.run_dir, copy.run_dir)
    shutil.rmtree(copy.step_path(last))
    (copy.run_dir / "config.json").unlink()  # it names the other folder's reward
    # This process has eight devices, and cannot have fewer.
    finish = copy.finish_here if "--devices=8" in flags else copy.finish
    output = finish(*flags)
    assert f"resumed from {copy.step_path(start)}" in output
    assert list(copy.metrics()) == list(run.metrics())
    return copy


def assert_close_run(run: TinyRun, reference: TinyRun) -> None:
    """The steps after a move: the same samples, and metrics to rounding."""
    metrics, expected = run.metrics(), reference.metrics()
    for step in list(expected)[-SAVE_EVERY:]:
        assert_close(metrics[step], expected[step], rtol=1e-4, atol=1e-5)
    samples = run.samples("train")
    for key, sample in reference.samples("train").items():
        assert samples[key]["tokens"] == sample["tokens"], key


@pytest.mark.nightly
def test_a_run_moves_to_a_mix_of_axes(tmp_path: Path) -> None:
    """The moments of its optimizer, which lie in the host's memory, move too."""
    grpo = "--config.algorithm=grpo", "--config.warmup=null", "--config.total_steps=4"
    offload = "--config.actor.optimizer.offload=true"
    run = TinyRun(tmp_path / "one", *TWO_LAYERS, *grpo, offload)
    run.finish_here()
    assert_close_run(resume_copy(tmp_path / "mix", run, MIX), run)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [on_mesh(fsdp=8), APART], ids=["fsdp", "apart"])
def test_a_run_moves_to_other_devices(tmp_path: Path, reference: TinyRun, flags: list[str]) -> None:
    assert_close_run(resume_copy(tmp_path, reference, flags), reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "others"),
    [(MIX, OTHER_MIX), (APART, on_mesh(data=2)), (AHEAD, [*AHEAD, "--config.placement.critic=1"])],
    ids=["mix", "apart", "ahead"],
)
def test_a_run_on_devices_resumes_there_and_on_others(
    tmp_path: Path, flags: list[str], others: list[str]
) -> None:
    placed = TinyRun(tmp_path / "placed", *TWO_LAYERS, "--config.total_steps=4")
    placed.finish(*flags)
    again = resume_copy(tmp_path / "again", placed, flags)
    assert again.metrics() == placed.metrics()
    assert again.samples("train") == placed.samples("train")
    assert_same_bits(again.weights(4), placed.weights(4))
    assert_close_run(resume_copy(tmp_path / "others", placed, others), placed)
