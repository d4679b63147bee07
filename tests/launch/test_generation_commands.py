"""`jaxrl generate` on files and `jaxrl chat`, with a tiny model of random weights."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from chat_tokenizer import write_chat_tokenizer
from pyarrow import parquet
from tiny_models import tiny_config, write_directory

import jaxrl_llm as rl
from jaxrl_llm.evaluation.answer_settings import StreamSettings
from jaxrl_llm.launch import commands
from jaxrl_llm.launch.chat import chat

MESSAGES = [{"role": "user", "content": "a b c"}]
ROWS = [{"prompt": "hi", "id": 7}, {"prompt": MESSAGES, "id": 8}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = write_directory(tmp_path_factory.mktemp("m") / "chat", tiny_config(vocab_size=104))
    write_chat_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def model(folder) -> rl.OpenModel:
    return rl.open_model(folder)


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_file_of_prompts_is_answered(folder, model, tmp_path, capsys):
    as_text = {"prompt": json.dumps(MESSAGES), "id": 8}  # a CSV has no other messages
    rows = [ROWS[0], as_text]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out.jsonl"
    flags = [f"--model={folder}", "--max_new_tokens=5", "--n=2", "--batch_size=1", "--logprobs"]
    assert (
        commands.generate([*flags, f"--prompts={tmp_path / 'p.jsonl'}", f"--output={output}"]) == 0
    )
    expected = model.generate([row["prompt"] for row in ROWS], max_new_tokens=5, n=2, batch_size=1)
    found = lines_of(output)
    assert [row["id"] for row in found] == [7, 8]
    for row, answer in zip(found, expected, strict=True):
        assert row["responses"] == [completion.text for completion in answer.completions]
        assert row["finished"] == [completion.finished for completion in answer.completions]
        for numbers, completion in zip(row["logprobs"], answer.completions, strict=True):
            np.testing.assert_allclose(numbers, completion.logprobs, rtol=1e-6)
            assert len(numbers) == len(completion.tokens)
    assert "2/2 prompts answered" in capsys.readouterr().err


@pytest.mark.nightly
def test_stop_strings(folder, model, tmp_path, capsys):
    (answer,) = model.generate("hi", max_new_tokens=9, seed=3)
    text = answer.text
    stop = text[3:5]
    end = text.index(stop) + 2
    (cut,) = model.generate("hi", max_new_tokens=9, seed=3, stop=stop)
    assert (cut.text, cut.completions[0].finished) == (text[:end], True)
    assert "".join(model.stream("hi", max_new_tokens=9, seed=3, stop=[stop])) == text[:end]
    flags = [f"--model={folder}", "--prompt=hi", "--max_new_tokens=9", "--seed=3"]
    assert commands.generate([*flags, "--stop=never", f"--stop={stop}"]) == 0
    assert capsys.readouterr().out == text[:end] + "\n"


def test_parquet_and_no_logprobs(folder, tmp_path):
    parquet.write_table(pa.table({"question": ["hi", "ho"]}), tmp_path / "p.parquet")
    output = tmp_path / "out.jsonl"
    flags = [f"--model={folder}", "--max_new_tokens=3", f"--prompts={tmp_path / 'p.parquet'}"]
    assert commands.generate([*flags, f"--output={output}"]) == 0
    assert [set(row) for row in lines_of(output)] == [{"question", "responses", "finished"}] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt=a", "--prompts=b"], "--prompts: not allowed with argument --prompt"),
        (["--prompts={rows}"], "belong together"),
        (["--prompt=a", "--temperature=nan"], "--temperature=nan: must be a finite number"),
        (["--prompt=a", "--seed=4294967296"], "--seed=4294967296: must be at most 2147483647"),
        (["--prompts={rows}x", "--output={new}"], "no file or folder .*did you mean"),
        (["--prompts={rows}", "--output={rows}"], "exists; give a new file"),
        (["--prompts={rows}", "--output={new}"], "row 0 has no column prompt, messages"),
    ],
)
def test_mistakes_are_named(folder, tmp_path, flags, message):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    names = {"rows": tmp_path / "rows.jsonl", "new": tmp_path / "new.jsonl"}
    with pytest.raises(ValueError, match=message):
        commands.generate([f"--model={folder}", *(flag.format(**names) for flag in flags)])
    assert not names["new"].exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "hi"}, {"prompt": "x" * 5000}], r"rows\.jsonl row 1 has \d+ tokens and the"),
        ([{"prompt": "hi"}, {"prompt": [{"role": "user"}]}], "row 1: .*neither a text"),
        ([{"prompt": "hi"}, {"prompt": "\ud800"}], "row 1: .*surrogate"),
        ([{"prompt": "[{'role': 'user'}]"}], "row 0: column 'prompt' holds .*: write JSON"),
        ([], r"--prompts=.*rows\.jsonl has no row"),
    ],
)
def test_a_row_that_cannot_be_answered_is_named_before_a_file_is_made(
    folder, tmp_path, rows, message
):
    """So the same command works once the row is right."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--model={folder}", f"--prompts={tmp_path / 'rows.jsonl'}", "--logprobs"]
    with pytest.raises(rl.ConfigError, match=message):
        commands.generate([*flags, f"--output={tmp_path / 'new.jsonl'}"])
    assert not (tmp_path / "new.jsonl").exists()


def test_one_of_several_prompts_is_named(model):
    with pytest.raises(rl.ConfigError, match=r"^prompt 1 has \d+ tokens"):
        model.generate(["hi", "x" * 5000])
    with pytest.raises(rl.ConfigError, match=r"^prompt 1: the prompt 3 is neither a text"):
        model.generate(["hi", 3])
    with pytest.raises(rl.ConfigError, match=r"^the prompt has \d+ tokens"):
        model.generate("x" * 5000)


# ------------------------------------------------------------------------- chat


@pytest.mark.nightly
def test_a_conversation_keeps_its_turns_until_it_is_reset(model):
    out = io.StringIO()
    lines = ["hi\n", "\n", "ho\n", "/reset\n", "ho\n", "/what\n", "/exit\n", "never\n"]
    chat(model, lines, out, StreamSettings(max_new_tokens=6, temperature=0.0))

    def answer(*turns: str) -> str:
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
        return model.generate([messages], max_new_tokens=6, temperature=0.0)[0].text

    first = answer("hi")
    expected = [first, answer("hi", first, "ho"), "a new conversation", answer("ho")]
    found = out.getvalue()
    shown = found.split("there is no /what")[0]
    assert shown == "".join(f"{text}\n" for text in expected)
    assert "/exit ends" in found and "never" not in found


def test_a_conversation_that_is_too_long_goes_on(model):
    out = io.StringIO()
    how = StreamSettings(max_new_tokens=2, temperature=0.0)
    chat(model, ["x" * 5000, "/reset", "hi"], out, how)
    long, reset, answer = out.getvalue().split("\n", 2)
    assert "give a shorter prompt, or begin again with /reset" in long and answer


def test_chat_reads_a_pipe(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/reset\nhi\n"))
    assert commands.chat([f"--model={folder}", "--max_new_tokens=6", "--temperature=0"]) == 0
    first, _, rest = capsys.readouterr().out.partition("a new conversation\n")
    assert first == rest and first.strip() and "> " not in first


def test_an_answer_keeps_its_tabs_and_controls_no_terminal():
    class Spoken:
        def stream(self, *_, **__):
            yield from ("if x:\n\t", "y\x1b[31m")

    out = io.StringIO()
    chat(Spoken(), ["hi"], out, StreamSettings())  # pyright: ignore[reportArgumentType]
    assert out.getvalue() == "if x:\n\ty\\x1b[31m\n"


def test_an_empty_answer_ends_no_conversation():
    asked = []

    class Silent:
        def stream(self, messages, **_):
            asked.append([message["content"] for message in messages])
            yield from () if len(asked) == 2 else ("fine",)

    out = io.StringIO()
    chat(Silent(), ["a", "b", "c"], out, StreamSettings())  # pyright: ignore[reportArgumentType]
    assert asked == [["a"], ["a", "fine", "b"], ["a", "fine", "c"]]
    assert "no answer" in out.getvalue()


def test_chat_needs_a_template(tmp_path):
    plain = write_directory(tmp_path / "plain", tiny_config())
    with pytest.raises(rl.ConfigError, match="no chat template; `jaxrl generate`"):
        commands.chat([f"--model={plain}"])
