"""The files in a run's `checkpoints` folder, and the model that a path names. Imports no jax.

`global_step_N/` has an item for each role's parameters, one for each optimizer, and `loop` (step,
data position, controllers). `frozen/` has the roles that never change. `huggingface/` has the files
other than weights that an export needs.
"""

from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.config import ConfigError
from jaxrl_llm.references import exists, is_folder, is_hub_name, nearest_file

STEP_PREFIX = "global_step"
CHECKPOINTS = "checkpoints"
FROZEN = "frozen"
DAMAGED = "damaged"  # checkpoints that were set aside
HUGGINGFACE = "huggingface"
LOOP = "loop"
OPTIMIZER = "_optimizer"  # suffix of the item of a learning role's optimizer


@dataclass(frozen=True, kw_only=True)
class ModelPath:
    """The model that a user's path names: a Hugging Face model or one of our checkpoints."""

    path: str  # path of the directory or the checkpoint, or owner/name of a model on a hub
    checkpoint: Path | None = None  # None for a Hugging Face model

    @property
    def files(self) -> str:
        """The directory, or owner/name, with config.json and the tokenizer."""
        return self.path if self.checkpoint is None else str(self.checkpoint.parent / HUGGINGFACE)


def is_complete(path: Path) -> bool:
    """True if a checkpoint folder is finished: an interrupted save lacks one of these two."""
    return (path / "_CHECKPOINT_METADATA").exists() and (path / LOOP).exists()


def step_of(path: Path) -> int | None:
    """N of a folder `global_step_N`, None for any other name."""
    number = path.name.removeprefix(f"{STEP_PREFIX}_")
    return int(number) if number.isdecimal() and number != path.name else None


def run_directory_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint folder belongs to."""
    return checkpoint.absolute().parent.parent


def find_checkpoint(path: str) -> Path:
    """The finished checkpoint at `path`.

    `path` is a `global_step_N`, or a run's or `checkpoints` folder, whose newest one is taken.
    ConfigError, naming what is there instead, if there is none.
    """
    folder = Path(path)
    if not is_folder(folder):
        raise ConfigError(f"there is no checkpoint {path}{nearest_file(folder)}")
    for parent in (folder, folder / CHECKPOINTS):
        steps = [p for p in parent.glob(f"{STEP_PREFIX}_*") if step_of(p) is not None]
        finished = [p for p in steps if is_complete(p)]
        if finished:
            return max(finished, key=lambda p: step_of(p) or 0)
    if is_complete(folder):
        return folder
    what = (
        "was not written to its end"
        if step_of(folder) is not None
        else "holds no checkpoint that was written to its end"
    )
    raise ConfigError(
        f"{path} {what}; give a folder such as RUN_DIR/{CHECKPOINTS}/{STEP_PREFIX}_100"
    )


def find_model_path(path: str) -> ModelPath:
    """The model at `path`: what every command and config accepts where a model is expected.

    That is a Hugging Face directory, a run's folder, its `checkpoints` folder, one `global_step_N`
    folder, or owner/name of a model on a hub. Reads no weights and asks no hub.

    Raises:
        ConfigError: what is there instead, or the nearest folder.
    """
    if not path:
        raise ConfigError("the path of the model is empty; give a folder, such as runs/ppo")
    folder = Path(path)
    if not exists(folder) and is_hub_name(path):
        return ModelPath(path=path)
    if not exists(folder):
        raise ConfigError(f"there is no model {path}{nearest_file(folder)}")
    if not folder.is_dir():
        raise ConfigError(f"{path} is a file, and a model is a folder; give {folder.parent}")
    if folder.name == HUGGINGFACE and folder.parent.name == CHECKPOINTS:
        raise ConfigError(f"{path} holds no weights; give {folder.parent} or one step in it")
    # A run's folder has a config.json too, which describes no model.
    is_run = (folder / CHECKPOINTS).is_dir() or (folder / "metrics.jsonl").is_file()
    if (folder / "config.json").is_file() and (any(folder.glob("*.safetensors")) or not is_run):
        return ModelPath(path=path)
    if is_run or _may_hold_checkpoints(folder):
        checkpoint = find_checkpoint(path)
        return ModelPath(path=str(checkpoint), checkpoint=checkpoint)
    raise ConfigError(
        f"{path} is no model: it holds neither config.json with weights, nor a finished "
        f"checkpoint such as {CHECKPOINTS}/{STEP_PREFIX}_100"
    )


def _may_hold_checkpoints(folder: Path) -> bool:
    """True if `folder` is a `checkpoints` folder or the folder of one step, by names alone."""
    return (
        step_of(folder) is not None
        or folder.name == CHECKPOINTS
        or any(step_of(path) is not None for path in folder.glob(f"{STEP_PREFIX}_*"))
        or is_complete(folder)
    )
