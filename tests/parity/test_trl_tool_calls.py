"""The calls that the templates of TRL write are read again."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from turn_tokenizers import PLAIN, open_tokenizer

from jaxrl_llm.agents.call_formats import Call
from jaxrl_llm.agents.styles import ChatStyle
from jaxrl_llm.agents.tool_calls import ToolCallParser
from jaxrl_llm.agents.tools import Result

pytestmark = pytest.mark.torch
FOUND = find_spec("trl")
if FOUND is None or not FOUND.submodule_search_locations:
    pytest.skip("pip install -e '.[parity]'", allow_module_level=True)
FOLDER = Path(FOUND.submodule_search_locations[0], "chat_templates")
TOKEN = re.compile(
    r"<\|[^<>|\s]+\|>|<\uff5c[^<>\s]+?\uff5c>|<\|[a-z_]+>|<[a-z_]+\|>|</s>|<[a-z]+_of_[a-z]+>"
    r"|<\|\"\|>"
)
FAMILIES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_5_nothink": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder",
    "nemotron_3_super": "qwen3_coder",
    "nemotron_3_ultra": "qwen3_coder",
    "lfm2_v2": "lfm2",
    "glm4moe": "glm",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "deepseekv3": "deepseek",
    "gptoss": "gpt_oss",
    "gemma4": "gemma4",
    "gemma4_v5": "gemma4",
}
ONE_CALL = ("llama3", "gpt_oss")
TEXT = "a \u00e9 'b' {c}"
VALUES = {"a": 17, "b": TEXT, "items": [1, "x", {"k": True}], "exact": True}
TYPES = {"a": "integer", "b": "string", "items": "array", "exact": "boolean"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {
                key: {"type": kind, "description": "A value."} for key, kind in TYPES.items()
            },
        },
    },
}


def call(i):
    function = {"name": "add", "arguments": VALUES | {"a": i}}
    return {"type": "function", "id": f"call0000{i}", "function": function}


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_a_template_are_read_again(name, tmp_path):
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    special = [token for token in dict.fromkeys(TOKEN.findall(text)) if token not in PLAIN]
    tokenizer = open_tokenizer(tmp_path, text, special)
    parser = ToolCallParser(tokenizer, [TOOL])
    assert parser.family == FAMILIES[name]
    calls = [call(1)] if parser.family in ONE_CALL else [call(1), call(2)]
    messages = [
        {"role": "user", "content": "17+25?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    (row,) = tokenizer.turns([TOOL]).conversation(messages, [1])
    turn = next(piece for piece in row if piece.learned)
    before = [i for piece in row[: row.index(turn)] for i in piece.ids]
    parsed = parser.parse(turn.ids, thinking=parser.opens_thinking(before))
    assert [c.problem for c in parsed.calls] == [""] * len(calls)
    assert [(c.name, c.values) for c in parsed.calls] == [
        ("add", call["function"]["arguments"]) for call in calls
    ]
    assert parsed.content == ""


EVERY = sorted(file.stem for file in FOLDER.glob("*.jinja") if "_training" not in file.stem)
# Templates that write an earlier turn, or its thinking, otherwise than it was sampled.
REWRITES = ("gptoss", "qwen3", "glm4moe", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra")
RESULTS = [Result("42"), Result("43")]


@pytest.mark.parametrize("name", EVERY)
def test_turns_of_every_template(name, tmp_path):
    """A suffix holds the results, and where nothing is rewritten it is what the template writes."""
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    special = [token for token in dict.fromkeys(TOKEN.findall(text)) if token not in PLAIN]
    tokenizer = open_tokenizer(tmp_path, text, special)
    style = ChatStyle(tokenizer, [TOOL])
    asked = [{"role": "user", "content": "17+25?"}]
    prompt, _ = style.prompt(asked, [], None)
    assert "add" in tokenizer.decode(prompt)
    for number in (1, 2):
        made = [Call("add", "{}", {})] * number
        ids, messages = style.results(made, RESULTS[:number], -1)
        suffix = tokenizer.decode(ids)
        assert "42" in suffix and ("43" in suffix) == (number == 2)
    said, _ = style.observation("Go on.", -1)
    assert "Go on." in tokenizer.decode(said)
    if (
        name not in FAMILIES
        or name in REWRITES
        or FAMILIES[name] in ONE_CALL
        or name == "deepseekv3"
    ):
        return
    calls = [call(1), call(2)]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [
        {"role": "tool", "name": "add", "content": r.text, "tool_call_id": c["id"]}
        for r, c in zip(RESULTS, calls, strict=True)
    ]
    turns = tokenizer.turns([TOOL])
    (row,) = turns.conversation([*asked, answer], [1])
    turn = list(next(piece for piece in row if piece.learned).ids)
    suffix, _ = style.results([Call("add", "{}", {})] * 2, RESULTS, turn[-1])
    whole = tokenizer.encode(turns.prompt([*asked, answer, *results]))
    before = tokenizer.encode(turns.prompt(asked))
    assert whole == [*before, *turn, *suffix]
