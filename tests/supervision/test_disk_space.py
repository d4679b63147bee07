"""A full disk is refused at the start."""

import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import pytest
from tiny_run import TinyRun

from jaxrl_llm.config import ConfigError
from jaxrl_llm.supervision import disk_space


def test_bytes_of_arrays():
    tree = {"a": jnp.zeros((3, 4), jnp.float32), "b": [jnp.zeros(5, jnp.bfloat16)]}
    assert disk_space.bytes_of(tree) == 48 + 10


def test_a_run_that_cannot_save_does_not_begin(tmp_path):
    with pytest.raises(ConfigError, match=r"takes up to 1e\+09 GB, .* --config.run_dir on another"):
        disk_space.check_space(tmp_path, 10**18)
    disk_space.check_space(tmp_path, 1)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 64 MB, where the system lets us mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(file: Path, left: int) -> None:
    """Write a file that leaves `left` bytes of its disk free."""
    found = os.statvfs(file.parent)
    file.write_bytes(bytes(found.f_bavail * found.f_frsize - left))


@pytest.mark.nightly
def test_a_run_on_a_full_disk_is_refused(small_disk, tmp_path):
    small = "--config.algorithm=grpo", "--config.warmup=null", "--config.data.val_tasks=[]"
    run = TinyRun(tmp_path / "run", *small)
    fill(small_disk / "filler", 10**5)
    output = run.finish_here(f"--config.run_dir={small_disk}/run", code=2)
    assert "error: a checkpoint of this run takes up to" in output
    assert not (small_disk / "run" / "checkpoints" / "frozen").exists()
