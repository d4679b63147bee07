"""`jaxrl verify`: whether the checkpoints of a run are what was saved."""

from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm.checkpoint import manager
from jaxrl_llm.checkpoint.digests import DIGESTS, DamagedCheckpoint
from jaxrl_llm.checkpoint.layout import CHECKPOINTS, DAMAGED, FROZEN, STEP_PREFIX, step_of
from jaxrl_llm.config import ConfigError


def verify(path: Path) -> Iterator[tuple[str, bool]]:
    """A line for each checkpoint of a run, and whether it is sound.

    `path` is a run's folder, its `checkpoints` folder, or one `global_step_N`.

    Raises: ConfigError when there is no checkpoint.
    """
    if step_of(path.absolute()) is not None:
        yield _checked(path)
        return
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = [
        step for each in folder.glob(f"{STEP_PREFIX}_*") if (step := step_of(each)) is not None
    ]
    aside = sorted((folder / DAMAGED).glob("*"))
    if not steps and not aside:
        raise ConfigError(f"{path} holds no checkpoint; give the folder of a run")
    for step in sorted(steps):
        yield _checked(folder / f"{STEP_PREFIX}_{step}")
    if (folder / FROZEN).is_dir():
        yield _checked(folder / FROZEN)
    for each in aside:
        yield f"{each}: damaged, was set aside; delete it when you do not need it", False


def _checked(path: Path) -> tuple[str, bool]:
    try:
        if path.name == FROZEN:
            manager.check_frozen(path)
        else:
            manager.check(path)
    except DamagedCheckpoint as error:
        return str(error), False
    if not (path / DIGESTS).exists():
        return f"{path}: without digests of its files; its arrays are compared when loaded", True
    files = [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return f"{path}: sound, {len(files) - 1} files, {size / 1e9:.3g} GB", True
