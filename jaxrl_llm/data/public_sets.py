"""Public data sets as rows that a run reads: one JSON-lines file a split.

They come from the hub by the package `datasets`, or from a folder with the same columns. Prompts
are texts that end in an instruction, so that the answer can be found.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.data.hub import hub_files
from jaxrl_llm.data.sources import BadRow, read_rows
from jaxrl_llm.data_files import HUB, DataFile, hub_name, resolve_files
from jaxrl_llm.references import nearest

AFTER_MARKS = 'Reason step by step. End with a line "#### N", where N is the answer.'
IN_BOX = "Reason step by step. Put the answer into \\boxed{}."
AS_CODE = "Answer with one ```python block. It has to pass:"
MOST_LEFT_OUT = 0.01  # share of a split's rows that may be left out

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """Where a set is, and how a row of it becomes one of ours."""

    hub: str  # OWNER/NAME or OWNER/NAME/CONFIG
    splits: Mapping[str, str]  # our name -> the set's
    columns: tuple[str, ...]  # names of the columns that are read
    convert: Callable[[Row, str], dict[str, Any]]  # ValueError for a row that cannot be used
    instruction: str
    reward: str  # the reward function that fits


def _gsm8k(row: Row, instruction: str) -> dict[str, Any]:
    solution, marks, answer = row["answer"].rpartition("####")
    if not marks or not answer.strip():
        raise ValueError("its answer has no ####")
    return {
        "prompt": f"{row['question']}\n{instruction}",
        "ground_truth": answer.strip().replace(",", ""),
        "solution": solution.strip(),
    }


def _math(row: Row, instruction: str) -> dict[str, Any]:
    level = str(row["level"]).rpartition(" ")[2]
    converted = {
        "prompt": f"{row['problem']}\n{instruction}",
        "ground_truth": last_boxed(row["solution"]),
        "solution": row["solution"],
        "subject": row["type"],
    }
    # A number, so that a curriculum can follow it; a few rows say "Level ?".
    return converted | {"level": int(level) if level.isdecimal() else 0}


def _math500(row: Row, instruction: str) -> dict[str, Any]:
    return {
        "prompt": f"{row['problem']}\n{instruction}",
        "ground_truth": row["answer"],
        "subject": row["subject"],
        "level": int(row["level"]),
    }


def _aime(row: Row, instruction: str) -> dict[str, Any]:
    return {"prompt": f"{row['problem']}\n{instruction}", "ground_truth": str(row["answer"])}


def _mbpp(row: Row, instruction: str) -> dict[str, Any]:
    setup = row["test_setup_code"].strip()
    tests = [f"{setup}\n{test}" if setup else test for test in row["test_list"]]
    asked = "\n".join(row["test_list"])
    return {
        "prompt": f"{row['text']}\n{instruction}\n{asked}",
        "ground_truth": json.dumps(tests),
        "solution": row["code"],
    }


PUBLIC_SETS = {
    "gsm8k": PublicSet(
        hub="openai/gsm8k/main",
        splits={"train": "train", "test": "test"},
        columns=("question", "answer"),
        convert=_gsm8k,
        instruction=AFTER_MARKS,
        reward="gsm8k",
    ),
    "math": PublicSet(
        hub="DigitalLearningGmbH/MATH-lighteval",
        splits={"train": "train", "test": "test"},
        columns=("problem", "solution", "level", "type"),
        convert=_math,
        instruction=IN_BOX,
        reward="math_answer",
    ),
    "math500": PublicSet(
        hub="HuggingFaceH4/MATH-500",
        splits={"test": "test"},
        columns=("problem", "answer", "subject", "level"),
        convert=_math500,
        instruction=IN_BOX,
        reward="math_answer",
    ),
    "aime24": PublicSet(
        hub="HuggingFaceH4/aime_2024",
        splits={"test": "train"},
        columns=("problem", "answer"),
        convert=_aime,
        instruction=IN_BOX,
        reward="math_answer",
    ),
    "mbpp": PublicSet(
        hub="google-research-datasets/mbpp/full",
        splits={"train": "train", "test": "test", "validation": "validation"},
        columns=("text", "code", "test_list", "test_setup_code"),
        convert=_mbpp,
        instruction=AS_CODE,
        reward="code",
    ),
}


def prepare_public(
    name: str, output: Path, *, source: str = "", instruction: str | None = None
) -> dict[str, tuple[Path, int, int]]:
    """Write a set to `output`: for each split its file, its rows, and the rows left out.

    `source` is a folder with the splits, or a file of the only split, in place of the hub.

    Raises: ValueError without the package, the network or the columns, and where more than 1 % of
        the rows cannot be used.
    """
    public = PUBLIC_SETS[name]
    asked = public.instruction if instruction is None else instruction
    files = {ours: _files(public, theirs, source) for ours, theirs in public.splits.items()}
    output.mkdir(parents=True, exist_ok=True)
    return {
        split: _write(name, part, output / f"{split}.jsonl", asked) for split, part in files.items()
    }


def _files(public: PublicSet, split: str, source: str) -> list[DataFile]:
    if source:
        alone = len(public.splits) == 1 and Path(source).is_file()
        return resolve_files(source if alone else f"{source}#{split}")
    name = hub_name(f"{HUB}{public.hub}#{split}")
    assert name is not None
    return hub_files(name)


def _write(name: str, files: list[DataFile], file: Path, instruction: str) -> tuple[Path, int, int]:
    rows, left_out = 0, []
    temporary = file.with_suffix(".part")
    try:
        with open(temporary, "w", encoding="utf-8") as out:
            for row in _converted(name, files, instruction):
                if isinstance(row, BadRow):
                    left_out.append(row)
                else:
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
                    rows += 1
        _check_left_out(name, left_out, rows)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return file, rows, len(left_out)


def _check_left_out(name: str, left_out: list[BadRow], rows: int) -> None:
    every = rows + len(left_out)
    if rows and len(left_out) <= MOST_LEFT_OUT * every:
        return
    shown = "".join(
        f"; the first is {bad.source} row {bad.row}: {bad.reason}" for bad in left_out[:1]
    )
    raise ValueError(
        f"{name}: {len(left_out)} of {every} rows cannot be used{shown}. Give another --source"
    )


def _converted(
    name: str, files: list[DataFile], instruction: str
) -> Iterator[dict[str, Any] | BadRow]:
    public = PUBLIC_SETS[name]
    for file in files:
        for row in read_rows(file):
            if isinstance(row, BadRow):
                yield row
                continue
            for column in public.columns:
                if column not in row.data:
                    raise ValueError(
                        f"{name} has the columns {', '.join(public.columns)}, and {row.source} "
                        f"lacks {column!r}; it has {', '.join(row.data)}"
                        f"{nearest(column, row.data)}"
                    )
            try:
                yield public.convert(row.data, instruction) | {"data_source": name}
            except (ValueError, TypeError, AttributeError) as error:
                yield BadRow(row.source, row.row, str(error))


def last_boxed(text: str) -> str:
    r"""Content of the last \boxed{} or \fbox{} of a solution. ValueError without one."""
    begin = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    rest = text[begin:].partition("box" if text[begin:].startswith("\\fbox") else "boxed")[2]
    if begin < 0 or not rest.strip():
        raise ValueError("its solution has no \\boxed{}")
    if not rest.lstrip().startswith("{"):
        return rest.split("$")[0].strip()
    rest, depth = rest.lstrip(), 0
    for place, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:place].strip()
    raise ValueError("its \\boxed{ does not end")
