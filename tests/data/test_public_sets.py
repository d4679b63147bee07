"""Public sets from small files of their shape."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxrl_llm.data import public_sets
from jaxrl_llm.data.public_sets import last_boxed, prepare_public
from jaxrl_llm.data_files import DataFile
from jaxrl_llm.launch import commands
from jaxrl_llm.rewards.gsm8k import gsm8k

GSM8K = {"question": "How many?", "answer": "9*2=<<9*2=18>>18\nso\n#### 1,018"}
MATH = {
    "problem": "What is $1/2+1/2$?",
    "solution": "It is $\\boxed{0}$, no, $\\boxed{\\frac{2}{2}}$.",
    "level": "Level 3",
    "type": "Algebra",
}
MATH500 = {"problem": "1?", "answer": "1", "subject": "Algebra", "level": 2, "solution": "1"}
MBPP = {
    "text": "Write f.",
    "code": "def f(x): return x",
    "test_list": ["assert f(1) == 1", "assert f(2) == 2"],
    "test_setup_code": "",
}


def write_split(folder, split, rows):
    folder.mkdir(exist_ok=True, parents=True)
    parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def prepared(name, rows, tmp_path, **options):
    for split in set(public_sets.PUBLIC_SETS[name].splits.values()):
        write_split(tmp_path / "set", split, rows)
    prepare_public(name, tmp_path / "out", source=str(tmp_path / "set"), **options)
    return {file.stem: lines_of(file) for file in sorted((tmp_path / "out").iterdir())}


def test_gsm8k(tmp_path):
    found = prepared("gsm8k", [GSM8K], tmp_path)
    assert list(found) == ["test", "train"]
    (row,) = found["train"]
    assert row["ground_truth"] == "1018" and row["data_source"] == "gsm8k"
    assert row["prompt"].startswith("How many?\n") and "####" in row["prompt"]
    assert row["solution"] == "9*2=<<9*2=18>>18\nso"
    assert gsm8k("so\n#### 1018", row["ground_truth"])["score"] == 1.0


def test_math_has_a_level_for_a_curriculum(tmp_path):
    found = prepared("math", [MATH, MATH | {"level": "Level ?"}], tmp_path, instruction="Answer.")
    first, second = found["train"]
    assert first["ground_truth"] == "\\frac{2}{2}" and first["prompt"].endswith("?\nAnswer.")
    assert (first["level"], second["level"]) == (3, 0)


def test_a_set_of_one_split_may_be_one_file(tmp_path):
    (tmp_path / "test.jsonl").write_text(json.dumps(MATH500) + "\n")
    prepare_public("math500", tmp_path / "out", source=str(tmp_path / "test.jsonl"))
    (row,) = lines_of(tmp_path / "out" / "test.jsonl")
    assert (row["ground_truth"], row["level"]) == ("1", 2)


def test_mbpp_gives_the_asserts(tmp_path):
    rows = [MBPP, MBPP | {"test_setup_code": "import math"}]
    first, second = prepared("mbpp", rows, tmp_path)["validation"]
    assert json.loads(first["ground_truth"]) == MBPP["test_list"]
    assert "assert f(2) == 2" in first["prompt"]
    assert json.loads(second["ground_truth"])[0] == "import math\nassert f(1) == 1"


def test_the_hub_is_asked_by_name(tmp_path, monkeypatch):
    (tmp_path / "aime.jsonl").write_text(json.dumps({"problem": "p", "answer": 33}) + "\n")
    asked = []

    def files(name):
        asked.append(str(name))
        return [DataFile(str(tmp_path / "aime.jsonl"), "jsonl")]

    monkeypatch.setattr(public_sets, "hub_files", files)
    prepare_public("aime24", tmp_path / "out")
    assert asked == ["hf://HuggingFaceH4/aime_2024#train"]
    assert lines_of(tmp_path / "out" / "test.jsonl")[0]["ground_truth"] == "33"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("$\\boxed{4}$", "4"),
        ("$\\boxed {x_{1}}$ so", "x_{1}"),
        ("is $\\boxed 5$.", "5"),
        ("$\\fbox{7}$", "7"),
        ("\\boxed{1} or \\boxed{\\text{(A)}}", "\\text{(A)}"),
    ],
)
def test_the_last_box(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize("text", ["none", "\\boxed{1", "\\boxed"])
def test_no_box(text):
    with pytest.raises(ValueError, match="boxed"):
        last_boxed(text)


def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="lacks 'question'; it has .*; did you mean 'questions'"):
        prepared("gsm8k", [{"questions": "?", "answer": "#### 1"}], tmp_path)
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ValueError, match="1 of 2 rows cannot be used.* row 1: .*no ####"):
        prepared("gsm8k", [GSM8K, GSM8K | {"answer": "18"}], tmp_path)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_shows_the_keys(tmp_path, capsys):
    for split in ("train", "test"):
        write_split(tmp_path / "set", split, [GSM8K] * 200 + [GSM8K | {"answer": "18"}])
    output = tmp_path / "out"
    flags = [f"--output={output}", f"--source={tmp_path / 'set'}"]
    assert commands.prepare(["data", "gsm8k", *flags]) == 0
    shown = capsys.readouterr().out
    assert "train.jsonl: 200 rows, 1 left out" in shown
    assert f"--config.data.val_files='[{output / 'test.jsonl'}]'" in shown
    assert "--config.reward.functions='[gsm8k]'" in shown
