"""Names of columns, chat, system prompts; variables of the chat template; CSV; the hub."""

import json
import subprocess
import sys

import pytest
from chat_tokenizer import TEMPLATE, write_chat_tokenizer

from jaxrl_llm.config import ChainSum
from jaxrl_llm.data.dataset import RowRules, Sources, load_prompts
from jaxrl_llm.data.hub import hub_files
from jaxrl_llm.data.shaping import Shape
from jaxrl_llm.data.sources import BadRow, read_rows
from jaxrl_llm.data_files import HubName, check_files, hub_name, resolve_files
from jaxrl_llm.tokenizer import load_tokenizer, set_chat_variables

USER = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "s"}
OTHER = {"role": "system", "content": "own"}


@pytest.mark.parametrize(
    ("shape", "row", "expected"),
    [
        (Shape(), {"prompt": "q"}, {"prompt": "q"}),
        (Shape(columns={"prompt": "a"}), {"a": "q", "b": 1}, {"b": 1, "prompt": "q"}),
        (Shape(columns={"prompt": "a"}), {"a": "q", "prompt": "old"}, {"prompt": "q"}),
        (Shape(columns={"a": "b", "b": "a"}), {"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (Shape(chat=True), {"prompt": "q"}, {"prompt": [USER]}),
        (Shape(system_prompt="s"), {"prompt": [USER]}, {"prompt": [SYSTEM, USER]}),
        (Shape(system_prompt="s"), {"messages": [OTHER, USER]}, {"messages": [OTHER, USER]}),
        (Shape(chat=True, system_prompt="s"), {"prompt": "q"}, {"prompt": [SYSTEM, USER]}),
        (
            Shape(system_prompt="s"),
            {"chosen": [USER], "rejected": [USER]},
            {"chosen": [SYSTEM, USER], "rejected": [SYSTEM, USER]},
        ),
        (
            Shape(system_prompt="s"),
            {"prompt": [USER], "chosen": [USER]},
            {"prompt": [SYSTEM, USER], "chosen": [USER]},
        ),
    ],
)
def test_a_row_in_its_shape(shape, row, expected):
    assert shape.of(row) == expected


MESSAGES = json.dumps([OTHER, USER])


@pytest.mark.parametrize(
    ("shape", "row", "expected"),
    [
        (Shape(), {"prompt": MESSAGES}, {"prompt": [OTHER, USER]}),
        (Shape(chat=True), {"prompt": f"  {MESSAGES}"}, {"prompt": [OTHER, USER]}),
        (Shape(system_prompt="s"), {"messages": json.dumps([USER])}, {"messages": [SYSTEM, USER]}),
        (
            Shape(columns={"prompt": "a"}),
            {"a": MESSAGES, "completion": MESSAGES},
            {"prompt": [OTHER, USER], "completion": [OTHER, USER]},
        ),
        # Texts stay what they are, and so do other columns.
        *(
            (Shape(), {"prompt": text}, {"prompt": text})
            for text in ("[1, 2]", "[role]", '["role"]', '[{"role": 1}]', "[]", '{"role": "user"}')
        ),
        (Shape(), {"prompt": "q", "answer": MESSAGES}, {"prompt": "q", "answer": MESSAGES}),
    ],
)
def test_messages_as_json_text_are_messages(shape, row, expected):
    """A CSV cannot hold them otherwise. They would be learned as a text in brackets."""
    assert shape.of(row) == expected


def test_messages_as_python_prints_them_are_refused():
    with pytest.raises(ValueError, match="'prompt' holds messages as Python prints them: write J"):
        Shape().of({"prompt": str([USER])})


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no column 'qestion'; did you mean 'question'"):
        Shape(columns={"prompt": "qestion"}).of({"question": "q"})


@pytest.mark.parametrize(
    ("chat", "row", "message"),
    [
        (
            False,
            {"prompt": "q", "answer": "a"},
            "row has none: set --config.data.prompt_style=chat",
        ),
        (False, {"text": "q"}, "set --config.data.prompt_style=chat"),
        (True, {"chosen": "a", "rejected": "b"}, "or --config.data.system_prompt="),
    ],
)
def test_a_system_prompt_that_would_be_ignored_is_refused(chat, row, message):
    with pytest.raises(ValueError, match=message):
        Shape(chat=chat, system_prompt="s").of(row)


def test_tasks_refuse_a_system_prompt_that_they_would_ignore():
    sources = Sources(tasks=(ChainSum(size=4),), shape=Shape(system_prompt="s"))
    with pytest.raises(ValueError, match="4 of 4 rows.*\n.*prompt_style=chat"):
        load_prompts(sources, load_tokenizer("char"), RowRules(max_length=9))


def test_a_csv_file_is_read(tmp_path):
    file = tmp_path / "x.csv"
    file.write_bytes('\ufeffprompt,answer\r\n"a, ""b""\nc",1\r\n\r\nd,\r\ne,1,2\r\n'.encode())
    first, second, third = read_rows(*resolve_files(str(file)))
    assert (first.data, second.data) == (
        {"prompt": 'a, "b"\nc', "answer": "1"},
        {"prompt": "d", "answer": None},
    )
    assert third == BadRow(str(file), 2, "3 values for 2 columns")


def test_a_csv_file_has_long_fields(tmp_path):
    """Python's own limit is 131,072 characters."""
    (tmp_path / "x.csv").write_text(f"prompt\n{'long ' * 40_000}\n")
    (row,) = read_rows(*resolve_files(str(tmp_path / "x.csv")))
    assert row.data == {"prompt": "long " * 40_000}


@pytest.mark.parametrize("text", ["a,a\n1,2\n", "a,\n1,2\n", "", "\n"])
def test_a_csv_file_that_cannot_be_read_is_refused(tmp_path, text):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match="first line"):
        list(read_rows(*resolve_files(str(tmp_path / "x.csv"))))


def test_variables_reach_the_chat_template(tmp_path):
    template = TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}"
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "t", template=template))
    (tmp_path / "x.jsonl").write_text('{"prompt": [{"role": "user", "content": "q"}]}\n')
    sources, rules = Sources(files=(str(tmp_path / "x.jsonl"),)), RowRules(max_length=99)
    assert not load_prompts(sources, tokenizer, rules).items[0].text.endswith("</think>")
    set_chat_variables(tokenizer, {"enable_thinking": False})
    assert load_prompts(sources, tokenizer, rules).items[0].text.endswith("<think></think>")
    with pytest.raises(ValueError, match="enable_thinkin is nothing .* mean 'enable_thinking'"):
        set_chat_variables(tokenizer, {"enable_thinkin": False})
    with pytest.raises(ValueError, match="chat_template_kwargs.messages is set by the rows"):
        set_chat_variables(tokenizer, {"messages": []})
    with pytest.raises(ValueError, match="no chat template"):
        set_chat_variables(load_tokenizer("char"), {"enable_thinking": False})


# ------------------------------------------------------------------------- the hub


def test_names_of_the_hub():
    assert hub_name("data/x.jsonl") is None
    name = hub_name("hf://openai/gsm8k/main#train")
    assert name == HubName(path="openai/gsm8k", config="main", split="train")
    assert str(name) == "hf://openai/gsm8k/main#train"
    for wrong in ("hf://gsm8k#train", "hf://openai/gsm8k", "hf://a//b#c", "hf://a/b/c/d#e"):
        with pytest.raises(ValueError, match="hf://OWNER/NAME#SPLIT"):
            check_files(wrong)
    with pytest.raises(ValueError, match=r"only whole splits are read: write the part.*save_to"):
        check_files("hf://openai/gsm8k/main#train[:10%]")
    with pytest.raises(ValueError, match="no file or folder 'hf://openai/gsm8k/main#train'"):
        resolve_files("hf://openai/gsm8k/main#train")  # as `jaxrl generate --prompts` does


def test_the_missing_package_is_named():
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "from jaxrl_llm.data_files import check_files\n"
        "try: check_files('hf://a/b#train')\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install datasets" in done.stdout


def test_a_data_set_of_the_hub_is_read_from_the_cache(tmp_path, monkeypatch):
    """The package is real; the hub is a file, as there is no network in a test."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "x.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    real = datasets.load_dataset

    def load(path, name, *, split):
        assert (path, name, split) == ("owner/name-v1.5", None, "train")
        return real("json", data_files=str(tmp_path / "x.jsonl"), split=split, cache_dir=tmp_path)

    monkeypatch.setattr(datasets, "load_dataset", load)
    sources = Sources(files=("hf://owner/name-v1.5#train",))
    found = load_prompts(sources, load_tokenizer("char"), RowRules(max_length=9)).items
    assert [(p.text, p.ground_truth, p.data_source) for p in found] == [("1+1=", "2", "name-v1.5")]


def test_without_a_network_the_remedy_is_named(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load(*_, **__):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError, match="hf://a/b#c could not be loaded: no route. Without.*save"):
        hub_files(HubName(path="a/b", config="", split="c"))
