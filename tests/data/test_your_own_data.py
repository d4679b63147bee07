"""Each file and command of docs/your-own-data.md, as written: the data are loaded."""

import re
import shlex
from pathlib import Path

import pytest
from chat_tokenizer import write_chat_tokenizer

from jaxrl_llm.config import is_offline
from jaxrl_llm.data.run_data import has_held_out, load_records, load_run_prompts, train_sources
from jaxrl_llm.launch.command_line import read_config
from jaxrl_llm.launch.flags import TRAIN
from jaxrl_llm.tokenizer import load_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "your-own-data.md"
FENCE = re.compile(r"`([\w.]+)`:\n\n```\w+\n(.*?)```\n\n```\njaxrl train (.*?)```", re.DOTALL)
EXAMPLES = {name: (rows, command) for name, rows, command in FENCE.findall(PAGE.read_text())}
RECORDS = {"chats.jsonl": "examples", "pairs.jsonl": "preferences"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_files_of_the_page_are_read(name, tmp_path, monkeypatch):
    rows, command = EXAMPLES[name]
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(rows)
    model = write_chat_tokenizer(tmp_path / "MODEL")
    (model / "config.json").write_text("{}")
    flags = shlex.split(command.replace("\\\n", " "))  # as a shell does
    config, _ = read_config(flags, TRAIN)
    tokenizer = load_tokenizer(model)
    assert has_held_out(config) == (name == "problems.jsonl")
    if name in RECORDS:
        assert is_offline(config)
        found = load_records(config, train_sources(config), RECORDS[name], tokenizer, None)
    else:
        found = load_run_prompts(config, train_sources(config), tokenizer, None)
        assert [prompt.ground_truth for prompt in found][0] == "5"
    assert len(found) == 2
    if name == "questions.csv":
        (system, user) = found[0].messages
        assert system == {"role": "system", "content": "Answer with a number."}
        assert user == {"role": "user", "content": "What is 2+3?"}


def test_the_page_has_its_four_files():
    assert list(EXAMPLES) == ["questions.csv", "problems.jsonl", "chats.jsonl", "pairs.jsonl"]
