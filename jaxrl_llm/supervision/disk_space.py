"""Room for checkpoints: asked for at the start, and waited for at a save."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.checkpoint.save_failures import SaveFailed
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.multihost import value_of_main
from jaxrl_llm.supervision.signals import host_work

WAIT_S = 600.0  # for room on a full disk, before a run gives up
POLL_S = 2.0


def bytes_of(arrays: Any) -> int:
    """The bytes of all arrays of a tree, concrete or abstract."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def check_space(folder: Path, needed: int) -> None:
    """Raises: ConfigError when the disk of `folder` has not `needed` bytes free.

    Every process must call it; the disk that process 0 sees counts.
    """
    free = _free(folder)
    if free < needed:
        raise ConfigError(
            f"a checkpoint of this run takes up to {_gb(needed)}, and the disk of {folder} has "
            f"{_gb(free)} free: delete old runs, or give --config.run_dir on another disk"
        )


def wait_for_space(folder: Path, needed: int, say: Callable[[str], None]) -> None:
    """Wait until the disk of `folder` has `needed` bytes free. Every process must call it.

    A request to end the run does not wait for it.
    Raises: ValueError after WAIT_S seconds.
    """
    if (free := _free(folder)) >= needed:
        return
    what = f"the disk of {folder} has {_gb(free)} free, and a checkpoint takes up to {_gb(needed)}"
    say(f"{what}; the run waits {WAIT_S / 60:g} minutes for room")
    deadline = time.monotonic() + WAIT_S
    with host_work():
        while (free := _free(folder)) < needed:
            if value_of_main(time.monotonic() > deadline, "disk_full"):
                raise ValueError(
                    f"{what}, also after {WAIT_S / 60:g} minutes. Make room; the same command then "
                    "goes on from the last checkpoint"
                )
            time.sleep(POLL_S)
    say(f"{_gb(free)} are free; the run goes on")


def until_there_is_room(save: Callable[[], None], say: Callable[[str], None]) -> None:
    """Call `save` again while the disk or a quota is full. One of several processes does not wait.

    Raises: what `save` raises; ValueError after WAIT_S seconds.
    """
    deadline = 0.0
    while True:
        try:
            save()
            break
        except SaveFailed as failed:
            if not failed.is_full or jax.process_count() > 1:
                raise
            if not deadline:
                deadline = time.monotonic() + WAIT_S
                say(f"{failed}; the run waits {WAIT_S / 60:g} minutes for room")
            elif time.monotonic() > deadline:
                raise ValueError(f"{failed}; waited {WAIT_S / 60:g} minutes") from None
            with host_work():
                time.sleep(POLL_S)
    if deadline:
        say("there is room; the run goes on")


def check_writable(folder: Path) -> None:
    """Raises: ConfigError when no file can be made in `folder`, which is made if need be."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the run cannot write to {folder}: {error.strerror}; give --config.run_dir on "
            "another disk"
        ) from None


def _free(folder: Path) -> int:
    return value_of_main(shutil.disk_usage(folder).free, "disk_space")


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
