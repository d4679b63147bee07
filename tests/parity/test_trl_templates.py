"""Turns of every chat template that TRL ships: its files are read, and nothing is imported.

For each family the header and the end of a turn are written out, and the learned spans follow from
the template's own text. transformers renders and encodes the text independently of our code.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from turn_tokenizers import KINDS, PLAIN, open_tokenizer
from turn_vectors import check_suffix

pytestmark = pytest.mark.torch
FOUND = find_spec("trl")
if FOUND is None or not FOUND.submodule_search_locations:
    pytest.skip("pip install -e '.[parity]'", allow_module_level=True)
FILES = sorted(Path(FOUND.submodule_search_locations[0], "chat_templates").glob("*.jinja"))

IM, LLAMA = "<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"
# Name begins with: (text before a turn, its last token). The longest beginning counts.
FAMILIES = {
    "cohere": ("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "cohere2": ("<|CHATBOT_TOKEN|><|START_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": ("<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "diffusion_gemma": ("<|turn>model\n", "<turn|>"),
    "gemma": ("<start_of_turn>model\n", "<end_of_turn>"),
    "gemma4": ("<|turn>model\n", "<turn|>"),
    "glm4moe": ("<|assistant|>", "<|user|>"),
    "gptoss": ("<|end|><|start|>assistant", "<|return|>"),
    "idefics3": ("\nAssistant:", "<end_of_utterance>"),
    "lfm2": (IM, "<|im_end|>"),
    "llama3": (LLAMA, "<|eot_id|>"),
    "llava_next": ("[/INST]", "</s>"),
    "muse_glimmer": ("<|start|>assistant", "<|eot|>"),
    "nemotron": (IM + "<think>", "<|im_end|>"),
    "phi3": ("<|assistant|>\n", "<|end|>"),
    "qwen": (IM, "<|im_end|>"),
    "qwen3_5_nothink": (IM + "<think>\n\n</think>\n\n", "<|im_end|>"),
    "qwen3_5_think": (IM + "<think>\n", "<|im_end|>"),
    "qwen3_6": (IM + "<think>\n", "<|im_end|>"),
    "qwen3_8": (IM + "<think>\n", "<|im_end|>"),
    "smolvlm": ("\nAssistant:", "<end_of_utterance>"),
}
# Templates that rewrite earlier turns: of these each turn is a row.
ONE_ROW_A_TURN = (
    *("gptoss", "gptoss_training", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
)
NO_SYSTEM = ("gemma", "gemma_training")
NO_CALLS = (
    *("cohere", "deepseek_r1", "gemma", "gemma3", "idefics3", "llama3", "llava_next"),
    *("phi3", "phi3_5", "qwen2_5_vl", "smolvlm", "lfm2"),
)
TOKEN = re.compile(
    r"<\|[^<>|\s]+\|>|<\uff5c[^<>\s]+?\uff5c>|<\|[a-z_]+>|<[a-z_]+\|>|</s>|<[a-z]+_of_[a-z]+>"
    r"|<\|\"\|>|\[gMASK\]|<sop>"
)
SYSTEM = {"role": "system", "content": "You are brief."}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "The first."}},
            "required": ["a"],
        },
    },
}
FUNCTION = {"name": "add", "arguments": {"a": 17}}
CALL = {"type": "function", "id": "call00001", "function": FUNCTION}
CALLED = [
    {"role": "user", "content": "17+25?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]


def family(name):
    return FAMILIES[max((key for key in FAMILIES if name.startswith(key)), key=len)]


def without_calls(name):
    base = name.removesuffix("_training")
    return base in NO_CALLS or name.startswith(("cohere", "deepseek_r1"))


def conversation(turns, system=False):
    messages = [SYSTEM] if system else []
    for i in range(turns):
        messages.append({"role": "user", "content": f"Hello {i}"})
        messages.append({"role": "assistant", "content": f"Sure, {i}."})
    return messages


# Variants for training differ by marks that are not written: one kind of tokenizer tells enough.
OPENED = [(f, k) for f in FILES for k in KINDS if k == "byte" or "_training" not in f.stem]


@pytest.fixture(scope="module", params=OPENED, ids=[f"{f.stem}-{k}" for f, k in OPENED])
def opened(request, tmp_path_factory):
    """Name of a template, kind of tokenizer, and the tokenizer with all tokens of its text."""
    file, kind = request.param
    text = file.read_text(encoding="utf-8")
    special = [token for token in dict.fromkeys(TOKEN.findall(text)) if token not in PLAIN]
    tokenizer = open_tokenizer(tmp_path_factory.mktemp("t"), text, special, kind=kind)
    return file.stem, kind, tokenizer


def rows_of(tokenizer, messages, tools=(), **options):
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return tokenizer.turns(list(tools)).conversation(messages, turns, **options)


def rendered(tokenizer, messages, tools=(), form=lambda message: message):
    """transformers' own text."""
    return tokenizer.apply_chat_template(
        [form(message) for message in messages], add_generation_prompt=False, tools=list(tools)
    )


def as_parts(message):
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def spans(text, header, end, whole):
    """The learned texts: behind each header, to the end token, which a row gets if it lacks it."""
    if whole:
        found = re.findall(f"{re.escape(header)}(.*?{re.escape(end)})", text, re.DOTALL)
    else:
        found = []
    last = text[text.rindex(header) + len(header) :]
    if end not in last:
        return [*found, last + end]
    return found or [last[: last.index(end) + len(end)]]


def plain(text):
    """Without blanks, which DeepSeek's special tokens hold too."""
    return re.sub("[\\s\u2581]", "", text)


def check(name, tokenizer, messages, rows, kind):
    header, end = family(name)
    form = as_parts if name.startswith(("idefics3", "smolvlm", "llava")) else lambda x: x
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    several = name in ONE_ROW_A_TURN
    assert len(rows) == (len(turns) if several else 1)
    for row, last in zip(rows, turns if several else turns[-1:], strict=True):
        text = rendered(tokenizer, messages[: last + 1], form=form)
        expected = tokenizer.encode(text)
        ids = [i for piece in row for i in piece.ids]
        added = ids[len(expected) :]
        assert ids[: len(expected)] == expected
        assert added in ([], tokenizer.encode(end)[-1:])
        learned = [tokenizer.decode(p.ids, skip_special=False) for p in row if p.learned]
        wanted = spans(text, header, end, not several)
        if added:
            learned[-2:] = ["".join(learned[-2:])]
        if kind != "byte":  # a blank that the tokenizer puts before a text is decoded
            learned, wanted = [[plain(x) for x in found] for found in (learned, wanted)]
        assert learned == wanted


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("system", [False, True])
def test_rows_are_the_templates_text_and_turns_are_learned_to_their_end(opened, turns, system):
    name, kind, tokenizer = opened
    messages = conversation(turns, system)
    if system and name in NO_SYSTEM:
        with pytest.raises(ValueError, match="chat template refuses .*System role"):
            rows_of(tokenizer, messages)
    else:
        check(name, tokenizer, messages, rows_of(tokenizer, messages), kind)


def test_tools_and_results(opened):
    """A call is learned, its result is not; a template that drops calls is refused by name."""
    name, _, tokenizer = opened
    if without_calls(name):
        with pytest.raises(ValueError, match="the chat template of .* does not write tool_calls"):
            rows_of(tokenizer, CALLED, [TOOL])
        return
    rows = rows_of(tokenizer, CALLED, [TOOL])
    learned = "".join(
        tokenizer.decode(p.ids, skip_special=False) for row in rows for p in row if p.learned
    )
    given = "".join(
        tokenizer.decode(p.ids, skip_special=False)
        for row in rows[:1]
        for p in row
        if not p.learned
    )
    assert "17" in learned and "add" in learned and "It is 42." in learned
    assert "17+25?" in given and "17+25?" not in learned
    assert all(row[-1].learned or len(row[-1].ids) < 8 for row in rows)
    for row, last in zip(rows, (1, 3) if len(rows) == 2 else (3,), strict=True):
        check_text(tokenizer, row, CALLED[: last + 1], [TOOL])
    ends = {tokenizer.turns([TOOL]).end(calls=calls).token for calls in (False, True)}
    assert all(any(plain(learned).count(plain(end)) for end in ends) for _ in rows)
    assert {tokenizer.encode(end)[-1] for end in ends} <= set(tokenizer.stop_ids)


def check_text(tokenizer, row, messages, tools):
    """The ids of a row are transformers' own text; at most an end token follows."""
    text = rendered_calls(tokenizer, messages, tools)
    ids, expected = [i for piece in row for i in piece.ids], tokenizer.encode(text)
    assert ids[: len(expected)] == expected and len(ids) <= len(expected) + 1


def rendered_calls(tokenizer, messages, tools):
    """Some templates want the arguments of a call as JSON text."""

    def as_text(message):
        calls = message.get("tool_calls", ())
        if not calls:
            return message
        function = {**FUNCTION, "arguments": json.dumps(FUNCTION["arguments"])}
        return {**message, "tool_calls": [{**call, "function": function} for call in calls]}

    try:
        return rendered(tokenizer, messages, tools)
    except ValueError:
        return rendered(tokenizer, messages, tools, form=as_text)


THOUGHT = [
    CALLED[0],
    CALLED[1] | {"thinking": "whyc", "reasoning_content": "whyc"},
    CALLED[2],
    CALLED[3] | {"thinking": "whyd", "reasoning_content": "whyd"},
]


def test_thinking_around_a_call_is_learned_or_refused(opened):
    """A template that drops a thinking is refused by its name, or gives each turn its own row."""
    name, _, tokenizer = opened
    try:
        rows = rows_of(tokenizer, THOUGHT, [TOOL])
    except ValueError as error:
        assert re.search("the chat template of .* (does not write|rewrites the prompt)", str(error))
        assert not name.startswith(("gptoss", "qwen3_6", "qwen3_8", "nemotron", "glm", "muse"))
        return
    for row, last in zip(rows, (1, 3) if len(rows) == 2 else (3,), strict=True):
        check_text(tokenizer, row, THOUGHT[: last + 1], [TOOL])
    learned = "".join(
        tokenizer.decode(p.ids, skip_special=False) for row in rows for p in row if p.learned
    )
    words = ("whyc", "17", "whyd", "It is 42.")
    assert [learned.count(word) for word in words] == [1, 1, 1, 1]
    assert learned.index("whyc") < learned.index("17") < learned.index("whyd")


def test_thinking_is_learned_or_refused(opened):
    """Of each turn in a row of its own, or of all in one row by the key."""
    name, _, tokenizer = opened
    thought = "<think>\nwhy\n</think>\n\nSure."
    messages = [m for m in conversation(2)]
    messages[1] = messages[3] = {"role": "assistant", "content": thought}
    try:
        rows = rows_of(tokenizer, messages)
    except ValueError as error:
        assert "drops the thinking" in str(error) or "rewrites the prompt" in str(error)
        assert name.startswith(("deepseek", "qwen3_5_nothink"))
    else:
        learned = [[p for p in row if p.learned] for row in rows]
        texts = ["".join(tokenizer.decode(p.ids) for p in row) for row in learned]
        assert "".join(texts).count("why") == 2
    if not name.startswith(("qwen3_5_nothink", "gptoss")):
        (row,) = rows_of(tokenizer, messages, keep_thinking=True)
        text = "".join(tokenizer.decode(p.ids) for p in row if p.learned)
        assert text.count("why") == 2 and text.count("Sure.") == 2 and "Hello" not in text


@pytest.mark.parametrize(
    ("case", "template"),
    [
        ("qwen3_instruct_2507_two_calls", "qwen3_instruct_2507"),
        ("qwen3_training_two_calls", "qwen3_training"),
        ("qwen3_think_stripped", "qwen3_training"),
    ],
)
def test_suffixes_are_the_recorded_ones(case, template, tmp_path):
    (file,) = (file for file in FILES if file.stem == template)
    check_suffix(case, tmp_path, file.read_text(encoding="utf-8"))
