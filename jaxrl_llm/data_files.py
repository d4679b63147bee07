"""The data files that a path, a glob or a dataset folder names.

This file imports neither jax nor a data library, so a config can be checked with it at once.
"""

import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxrl_llm.references import exists, nearest_file

KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".json": "json",
    ".csv": "csv",
}
HUB = "hf://"
MOST_FILES = 100_000  # in a folder of data
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")
_BETWEEN_WORDS = re.compile(r"[-._ 0-9]+")
SHARD = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}")  # of the files that a data set is split into


@dataclass(frozen=True)
class DataFile:
    """One existing file of rows."""

    path: str
    kind: str  # parquet | jsonl | json | arrow | csv


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A split of a data set on the Hugging Face hub: hf://OWNER/NAME#SPLIT."""

    path: str  # owner/name
    config: str  # of a data set that has several; "" takes its only one
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
            f"{text!r} asks for a part of a split, and only whole splits are read: give "
            f"#{split.partition('[')[0]}, or write the part with the package datasets, "
            f"load_dataset(..., split={split!r}).save_to_disk(FOLDER), and give that folder"
        )
    return HubName(path="/".join(parts[:2]), config="".join(parts[2:]), split=split)


def check_hub(name: HubName) -> None:
    """Raises ValueError where data sets of the hub cannot be loaded."""
    if find_spec("datasets") is None:
        raise ValueError(f"{name} needs the package datasets: pip install 'jaxrl_llm[hub]'")


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
        ValueError: nothing is there (with the nearest name), the kind of file is unknown, a folder
            has several splits and none was picked, or it is a name of the hub.
    """
    if pattern.startswith(HUB):
        raise ValueError(
            f"{pattern!r} is a data set of the hub, and files are asked for here: write it with "
            "the package datasets, load_dataset(...).save_to_disk(FOLDER), and give that folder"
        )
    base, _, split = pattern.partition("#")
    if not base:
        raise ValueError(f"{pattern!r} names no file: give one, a glob or a folder")
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
    if not path.is_file():
        what = "is a link to a file that is not there" if path.is_symlink() else "is no plain file"
        raise ValueError(f"{str(path)!r} {what}: give the file of the rows")
    return DataFile(path.as_posix(), KINDS[path.suffix])


def _folder_files(folder: Path, split: str) -> list[DataFile]:
    if (folder / "dataset_dict.json").is_file():
        with _described_by(folder / "dataset_dict.json") as found:
            splits = [str(split) for split in found["splits"]]
        return _saved_files(folder / _pick(folder, splits, split))
    if (folder / "state.json").is_file():
        if split:
            raise ValueError(f"{str(folder)!r} is one split: leave out '#{split}'")
        return _saved_files(folder)
    visible = _visible_files(folder)
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
    if not split and "" in by_split:
        raise ValueError(
            f"{str(folder)!r} has files of no split, such as {by_split[''][0].name}, and the split "
            f"{splits[0]}: give {folder}#{splits[0]}, or the files themselves, {folder}/*"
            f"{files[0].suffix}"
        )
    return [_file(path) for path in by_split[_pick(folder, splits, split)]]


def _visible_files(folder: Path) -> list[Path]:
    """The files below a folder, in order; without hidden ones. ValueError for too many."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        found += [Path(place, name) for name in names if name[0] != "."]
        if len(found) > MOST_FILES:
            raise ValueError(
                f"the folder {str(folder)!r} holds more than {MOST_FILES:,} files: give the folder "
                "of the data set in it"
            )
    return sorted(path for path in found if path.is_file())


def _saved_files(folder: Path) -> list[DataFile]:
    """The arrow files of a `save_to_disk` folder, in the order of its state.json."""
    with _described_by(folder / "state.json") as state:
        files = [folder / entry["filename"] for entry in state["_data_files"]]
        indices = state.get("_indices_data_files")
    if indices:
        raise ValueError(
            f"{str(folder)!r} stores an index mapping with its rows: call flatten_indices() "
            "before save_to_disk()"
        )
    for file in files:
        if not file.is_file():
            raise ValueError(f"{str(folder)!r} lacks {file.name!r}, which its state.json names")
    return [DataFile(file.as_posix(), "arrow") for file in files]


@contextmanager
def _described_by(file: Path) -> Iterator[Any]:
    """What `save_to_disk` wrote into a file of JSON; ValueError where it is not that."""
    try:
        yield json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(file)!r} is not as save_to_disk() writes it ({type(error).__name__}: {error}): "
            "write the folder again"
        ) from None


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
