"""Where things lie in a run's `checkpoints` folder, and which model a path means; without jax.

`global_step_N/` has one item for each role's parameters, one for each optimizer, and `loop` (step,
data position, controllers); `frozen/` the roles that never change, written once; `huggingface/`
what an export needs beside the weights.
"""

from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.config import ConfigError
from jaxrl_llm.signatures import nearest_file
from jaxrl_llm.validation import is_hub_name

STEP_PREFIX = "global_step"
CHECKPOINTS = "checkpoints"
FROZEN = "frozen"
HUGGINGFACE = "huggingface"
LOOP = "loop"


@dataclass(frozen=True, kw_only=True)
class ModelPath:
    """What a user's path means: a Hugging Face model (`checkpoint` is None) or a checkpoint."""

    path: str  # of the directory or the checkpoint, or owner/name of a model on a hub
    checkpoint: Path | None = None


def is_complete(path: Path) -> bool:
    """Whether a checkpoint folder was written to its end."""
    return (path / "_CHECKPOINT_METADATA").exists() and (path / LOOP).exists()


def step_of(path: Path) -> int | None:
    """N of a folder `global_step_N`; None for any other name."""
    number = path.name.removeprefix(f"{STEP_PREFIX}_")
    return int(number) if number.isdecimal() and number != path.name else None


def run_directory_of(checkpoint: Path) -> Path:
    """The run that a checkpoint folder belongs to."""
    return checkpoint.absolute().parent.parent


def find_checkpoint(path: str) -> Path:
    """The finished checkpoint at `path`: a `global_step_N`, or the newest one of a run's folder.

    ConfigError, naming what is there instead, when there is none.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"there is no checkpoint {path}{nearest_file(folder)}")
    for parent in (folder, folder / CHECKPOINTS):
        found = [p for p in parent.glob(f"{STEP_PREFIX}_*") if step_of(p) is not None]
        finished = [p for p in found if is_complete(p)]
        if finished:
            return max(finished, key=lambda p: step_of(p) or 0)
    if is_complete(folder):
        return folder
    what = "was not written to its end" if step_of(folder) is not None else "holds no checkpoint"
    raise ConfigError(
        f"{path} {what}; give a folder such as RUN_DIR/{CHECKPOINTS}/{STEP_PREFIX}_100"
    )


def find_model_path(path: str) -> ModelPath:
    """A Hugging Face directory, a checkpoint, a run's folder, or owner/name of a hub.

    ConfigError with the nearest folder for anything else.
    """
    folder = Path(path)
    if (folder / "config.json").is_file() and not (folder / CHECKPOINTS).is_dir():
        return ModelPath(path=path)
    if folder.is_dir():
        try:
            checkpoint = find_checkpoint(path)
        except ConfigError:
            raise ConfigError(
                f"{path} is no model: it holds neither config.json with weights, nor a finished "
                f"checkpoint such as {CHECKPOINTS}/{STEP_PREFIX}_100"
            ) from None
        return ModelPath(path=str(checkpoint), checkpoint=checkpoint)
    if is_hub_name(path):
        return ModelPath(path=path)
    raise ConfigError(f"there is no model {path}{nearest_file(folder)}")
