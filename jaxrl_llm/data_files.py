"""The data files that a path, a glob or a dataset folder names.

This file imports neither jax nor a data library, so a config can be checked with it at once.
"""

import glob
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from jaxrl_llm.references import exists, nearest_file

KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".json": "json",
    ".csv": "csv",
}
HUB = "hf://"
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")
_BETWEEN_WORDS = re.compile(r"[-._ 0-9]+")
SHARD = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}")  # name of one of the files of a data set


@dataclass(frozen=True)
class DataFile:
    """One existing file of rows."""

    path: str
    kind: str  # parquet | jsonl | json | arrow | csv


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A split of a data set on the Hugging Face hub: hf://OWNER/NAME#SPLIT."""

    path: str  # owner/name
    config: str  # configuration of the data set; "" takes its only one
    split: str

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        return f"{HUB}{self.path}{config}#{self.split}"


def hub_name(text: str) -> HubName | None:
    """The data set that `text` names; None for a path of files. ValueError for half a name."""
    if not text.startswith(HUB):
        return None
    path, _, split = text.removeprefix(HUB).partition("#")
    parts = path.split("/")
    if len(parts) not in (2, 3) or not all(parts) or not split:
        raise ValueError(
            f"{text!r} is no data set of the hub: give hf://OWNER/NAME#SPLIT, or "
            "hf://OWNER/NAME/CONFIG#SPLIT"
        )
    if "[" in split:
        raise ValueError(
            f"{text!r} asks for a part of a split, and only whole splits are read: write the part "
            f"with load_dataset(..., split={split!r}).save_to_disk(FOLDER), and give that folder"
        )
    return HubName(path="/".join(parts[:2]), config="".join(parts[2:]), split=split)


def check_hub(name: HubName) -> None:
    """Raises ValueError where data sets of the hub cannot be loaded."""
    if find_spec("datasets") is None:
        raise ValueError(f"{name} needs the package datasets: pip install datasets")


def check_files(pattern: str) -> None:
    """Raises ValueError unless data files are there. It neither reads nor downloads any."""
    name = hub_name(pattern)
    if name is None:
        resolve_files(pattern)
    else:
        check_hub(name)


def resolve_files(pattern: str) -> list[DataFile]:
    """The data files that `pattern` names, in order: a file, a glob, a folder or FOLDER#SPLIT.

    A folder holds parquet, arrow or JSON files, or is what `Dataset.save_to_disk` writes. `#SPLIT`
    picks one of several splits. No row is read.

    Raises:
        ValueError: nothing is there (with the nearest name), the kind of file is unknown, or a
            folder has several splits and none was picked.
    """
    base, _, split = pattern.partition("#")
    if exists(pattern):  # a name may contain "#"
        base, split = pattern, ""
    matches = [base] if exists(base) else sorted(glob.glob(base, recursive=True))
    if not matches:
        raise ValueError(f"no file or folder {pattern!r}{nearest_file(Path(base))}")
    return [file for match in matches for file in _files_at(Path(match), split)]


def _files_at(path: Path, split: str) -> list[DataFile]:
    if path.is_dir():
        return _folder_files(path, split)
    if split:
        raise ValueError(f"{path.as_posix()!r} is a file and has no splits: leave out '#{split}'")
    return [_file(path)]


def _file(path: Path) -> DataFile:
    if path.suffix not in KINDS:
        raise ValueError(
            f"{str(path)!r} is not a data file that can be read: its name must end in "
            f"{', '.join(KINDS)}"
        )
    return DataFile(path.as_posix(), KINDS[path.suffix])


def _folder_files(folder: Path, split: str) -> list[DataFile]:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return _saved_files(folder / _pick(folder, splits, split))
    if (folder / "state.json").is_file():
        if split:
            raise ValueError(f"{str(folder)!r} is one split: leave out '#{split}'")
        return _saved_files(folder)
    visible = [path for path in sorted(folder.rglob("*")) if _is_visible(path, folder)]
    # Only the first kind that is there: next to parquet files, a .json file describes the data.
    kinds = [[path for path in visible if path.suffix == suffix] for suffix in KINDS]
    files = next((paths for paths in kinds if paths), None)
    if files is None:
        raise ValueError(f"the folder {str(folder)!r} holds no {', '.join(KINDS)} file")
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    if len(by_split) < 2 and not split:
        return [_file(path) for path in files]
    splits = [name for name in by_split if name]
    return [_file(path) for path in by_split[_pick(folder, splits, split)]]


def _is_visible(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and path.is_file()


def _saved_files(folder: Path) -> list[DataFile]:
    """The arrow files of a `save_to_disk` folder, in the order of its state.json."""
    state = json.loads((folder / "state.json").read_text())
    if state.get("_indices_data_files"):  # its arrow files hold rows that were not selected
        raise ValueError(f"{str(folder)!r} holds selected rows: save flatten_indices() of it")
    return [
        DataFile((folder / file["filename"]).as_posix(), "arrow") for file in state["_data_files"]
    ]


def _pick(folder: Path, splits: Sequence[str], split: str) -> str:
    if split in splits:
        return split
    if not splits:
        raise ValueError(f"{str(folder)!r} has no splits: leave out '#{split}'")
    what = f"has no split {split!r}" if split else "has several splits"
    raise ValueError(f"{str(folder)!r} {what}: give one as {folder}#{' or #'.join(splits)}")


def _split_of(path: Path) -> str:
    """The split that the words of a name give, else "".

    `train` for train.parquet, train-00000-of-00002.parquet, gsm8k_train.jsonl and train/x.parquet;
    `train_sft` for train_sft-00000-of-00001.parquet.
    """
    for part in (path.stem, *path.parts[:-1]):
        words = _BETWEEN_WORDS.split(part.lower())
        if name := next((word for word in words if word in SPLIT_NAMES), ""):
            shard = SHARD.fullmatch(part)
            return shard[1] if shard else name
    return ""
