"""Room for checkpoints, asked for at the start."""

import shutil
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.multihost import value_of_main


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


def _free(folder: Path) -> int:
    return value_of_main(shutil.disk_usage(folder).free, "disk_space")


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
