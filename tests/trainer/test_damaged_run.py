"""A run whose checkpoints were damaged goes on from a sound one, or says how to begin again."""

import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from in_process import run_here
from tiny_run import TOTAL_STEPS, TinyRun, assert_same_bits

from jaxrl_llm.launch.main import run as run_command

pytestmark = pytest.mark.nightly


def damage(checkpoint: Path) -> Path:
    """Flip a bit in the largest file of the actor; the file."""
    file = max((checkpoint / "actor").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.relative_to(checkpoint)


def copied(run: TinyRun, folder: Path) -> TinyRun:
    """A copy of a run that its command goes on with."""
    copy = TinyRun(folder, *run.flags)
    shutil.copytree(run.run_dir, copy.run_dir)
    (copy.run_dir / "config.json").unlink()  # it names the other folder's reward
    return copy


@pytest.fixture(scope="module")
def run(ppo_run: TinyRun) -> TinyRun:
    """A whole run that kept its last three checkpoints."""
    assert ppo_run.saved_steps()[-3:] == [8, 10, TOTAL_STEPS]
    return ppo_run


def test_a_run_goes_on_from_the_newest_sound_checkpoint(run: TinyRun, tmp_path: Path) -> None:
    again = copied(run, tmp_path)
    shutil.rmtree(again.step_path(TOTAL_STEPS))
    file = damage(again.step_path(10))
    output = again.finish_here()
    moved = again.checkpoints / "damaged" / "global_step_10"
    assert f"{again.step_path(10)} is damaged: {file} has other bytes" in output
    assert f"it was moved to {moved}" in output
    assert f"resumed from {again.step_path(8)}" in output
    assert again.metrics() == run.metrics()
    assert_same_bits(again.weights(TOTAL_STEPS), run.weights(TOTAL_STEPS))
    found = verified(again.run_dir)
    assert found.returncode == 1
    assert f"{moved}: damaged, was set aside" in found.stdout


@pytest.mark.slow
def test_a_damaged_array_is_named_when_its_files_have_no_digests(
    run: TinyRun, tmp_path: Path
) -> None:
    """As a kill leaves a checkpoint that comes before its files have digests."""
    again = copied(run, tmp_path)
    shutil.rmtree(again.step_path(TOTAL_STEPS))
    (again.step_path(10) / "digests.json").unlink()
    for item in ("actor", "actor_optimizer"):
        shutil.rmtree(again.step_path(10) / item)
        shutil.copytree(again.step_path(8) / item, again.step_path(10) / item)
    output = again.finish(code=2)
    assert f"error: {again.step_path(10)} is damaged: array actor/" in output
    assert "The same command goes on from the checkpoint before it" in output
    again.finish()
    assert_same_bits(again.weights(TOTAL_STEPS), run.weights(TOTAL_STEPS))


def test_a_run_does_not_begin_again_over_damaged_checkpoints(run: TinyRun, tmp_path: Path) -> None:
    again = copied(run, tmp_path)
    for step in again.saved_steps():
        (again.step_path(step) / "loop").rename(again.step_path(step) / "gone")
    for _ in range(2):  # the second start finds them set aside
        output = again.finish_here(code=2)
        assert f"{again.run_dir} has no sound checkpoint" in output
        assert "begin again from step 0, give another --config.run_dir" in output
    assert again.saved_steps() == []
    assert len(list((again.checkpoints / "damaged").iterdir())) == len(run.saved_steps())


def test_a_damaged_checkpoint_is_not_exported(run: TinyRun, tmp_path: Path) -> None:
    again = copied(run, tmp_path)
    file = damage(again.step_path(TOTAL_STEPS))
    flags = [f"--model={again.run_dir}", f"--output={tmp_path / 'export'}"]
    found = run_here(partial(run_command, "export", flags), flags)
    assert found.returncode == 2, found.stderr
    assert f"global_step_{TOTAL_STEPS} is damaged: {file} has other bytes" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("name", ["digests.json", "manifest.ocdbt"])
def test_frozen_roles_without_a_file_are_refused(run: TinyRun, tmp_path: Path, name: str) -> None:
    again = copied(run, tmp_path)
    shutil.rmtree(again.step_path(TOTAL_STEPS))
    (again.checkpoints / "frozen" / name).unlink()
    output = again.finish_here(code=2)
    assert f"frozen is damaged: {name} is missing. Every checkpoint of the run needs it" in output
    assert "Traceback" not in output


def test_frozen_roles_of_another_run_are_refused(run: TinyRun, tmp_path: Path) -> None:
    """The run went on with the reference of another run, which is sound, and so with another KL."""
    other = TinyRun(tmp_path / "other", "--config.warmup=null", "--config.total_steps=1")
    other.finish_here()  # without the warm-up its reference is another one
    again = copied(run, tmp_path)
    shutil.rmtree(again.step_path(TOTAL_STEPS))
    shutil.rmtree(again.checkpoints / "frozen")
    shutil.copytree(other.checkpoints / "frozen", again.checkpoints / "frozen")
    output = again.finish_here(code=2)
    assert "another run: the checkpoint was saved with other weights of reference" in output
    assert "Traceback" not in output


def test_verify_has_a_line_for_each_checkpoint(run: TinyRun, tmp_path: Path) -> None:
    found = verified(run.run_dir)
    assert found.returncode == 0, found.stdout + found.stderr
    names = [line.partition(": sound, ")[0] for line in found.stdout.splitlines()]
    steps = [str(run.step_path(step)) for step in run.saved_steps()]
    assert names == [*steps, str(run.checkpoints / "frozen")]
    again = copied(run, tmp_path)
    file = damage(again.step_path(10))
    found = verified(again.run_dir)
    assert found.returncode == 1
    assert f"global_step_10 is damaged: {file} has other bytes" in found.stdout
    assert found.stdout.count("sound") == len(names) - 1
    assert verified(tmp_path / "run").returncode == 1
    assert verified(again.step_path(8)).returncode == 0


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_verify_says_where_no_checkpoint_is(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    found = verified(tmp_path / folder)
    assert found.returncode == 2
    assert found.stderr.startswith("error: ") and str(tmp_path / folder) in found.stderr


def verified(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_here(partial(run_command, "verify", [str(folder)]), [str(folder)])
