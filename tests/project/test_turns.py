"""Turns of chat templates of each kind: what is learned is written out between ⟦ and ⟧."""

import json
import re

import pytest
import turn_templates as templates
from turn_tokenizers import BOS, EOS, KINDS, open_tokenizer
from turn_vectors import check_cut_turn, check_suffix

from jaxrl_llm.turns import TurnEnd

SYSTEM = {"role": "system", "content": "You are brief."}
HELLO, BYE = {"role": "user", "content": "Hello"}, {"role": "user", "content": "Bye"}
SURE, FOUR = {"role": "assistant", "content": "Sure."}, {"role": "assistant", "content": "It is 4."}
WHY = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nSure."}
SO = {"role": "assistant", "content": "<think>\nso\n</think>\n\nIt is 4."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {}, "b": {}}}}


def call(arguments):
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


RESULT = {"role": "tool", "name": "add", "content": "42"}
CHATML, GPT = ["<|im_start|>", "<|im_end|>"], ["<|start|>", "<|message|>", "<|channel|>"]
ASKED = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
AGAIN = "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
# name: template, special tokens, messages, tools, rows with what is learned between ⟦ and ⟧.
CASES = {
    "one turn": (templates.CHATML, CHATML, [HELLO, SURE], (), [f"{ASKED}⟦Sure.<|im_end|>⟧\n"]),
    "two turns": (
        templates.CHATML,
        CHATML,
        [HELLO, SURE, BYE, FOUR],
        (),
        [f"{ASKED}⟦Sure.<|im_end|>⟧{AGAIN}⟦It is 4.<|im_end|>⟧\n"],
    ),
    "three turns with a system, and a question without an answer": (
        templates.CHATML,
        CHATML,
        [SYSTEM, HELLO, SURE, BYE, FOUR, BYE, FOUR, BYE],
        (),
        [
            f"<|im_start|>system\nYou are brief.<|im_end|>\n{ASKED}⟦Sure.<|im_end|>⟧{AGAIN}"
            f"⟦It is 4.<|im_end|>⟧{AGAIN}⟦It is 4.<|im_end|>⟧\n"
        ],
    ),
    "an answer first": (
        templates.CHATML,
        CHATML,
        [SURE, BYE, FOUR],
        (),
        [f"<|im_start|>assistant\n⟦Sure.<|im_end|>⟧{AGAIN}⟦It is 4.<|im_end|>⟧\n"],
    ),
    "tools and results": (
        templates.TOOLS,
        CHATML,
        [HELLO, call({"a": 17, "b": 25}), RESULT, RESULT, FOUR],
        (TOOL,),
        [
            f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n{ASKED}⟦<tool_call>\n"
            '{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call><|im_end|>⟧\n'
            "<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n42\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n⟦It is 4.<|im_end|>⟧\n"
        ],
    ),
    "a call as JSON text": (
        templates.TOOLS,
        CHATML,
        [HELLO, call('{"a":17}')],
        (),
        [
            f'{ASKED}⟦<tool_call>\n{{"name": "add", "arguments": {{"a": 17}}}}\n'
            "</tool_call><|im_end|>⟧\n"
        ],
    ),
    "thinking that later turns drop": (
        templates.QWEN3,
        CHATML,
        [HELLO, WHY, BYE, SO],
        (),
        [
            f"{ASKED}⟦<think>\nwhy\n</think>\n\nSure.<|im_end|>⟧\n",
            f"{ASKED}Sure.<|im_end|>{AGAIN}⟦<think>\nso\n</think>\n\nIt is 4.<|im_end|>⟧\n",
        ],
    ),
    "blanks": (
        templates.LLAMA2,
        [],
        [HELLO, SURE, BYE, FOUR],
        (),
        [f"{BOS}[INST] Hello [/INST]⟦ Sure. {EOS}⟧{BOS}[INST] Bye [/INST]⟦ It is 4. {EOS}⟧"],
    ),
    "an end of turn that no file names": (
        templates.GEMMA,
        ["<start_of_turn>", "<end_of_turn>"],
        [HELLO, SURE, BYE, FOUR],
        (),
        [
            f"{BOS}<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n"
            "⟦Sure.<end_of_turn>⟧\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
            "⟦It is 4.<end_of_turn>⟧\n"
        ],
    ),
    "an end token after the conversation": (
        templates.PHI3,
        ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        [SYSTEM, HELLO, SURE, BYE, FOUR],
        (),
        [
            "<|system|>\nYou are brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n"
            "⟦Sure.<|end|>⟧\n<|user|>\nBye<|end|>\n<|assistant|>\n⟦It is 4.<|end|>⟧\n" + EOS
        ],
    ),
    "the next message begins with the end token": (
        templates.GLM,
        ["[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        [HELLO, SURE, BYE, call({"a": 1}) | {"content": ""}, RESULT, FOUR],
        (),
        [
            "[gMASK]<|user|>\nHello<|assistant|>\n⟦Sure.<|user|>⟧\nBye<|assistant|>\n"
            "⟦<tool_call>add\na=1\n</tool_call><|observation|>⟧\n42<|assistant|>\n"
            "⟦It is 4.<|user|>⟧"
        ],
    ),
    "another end token before the last turn": (
        templates.GPT_OSS,
        [*GPT, "<|end|>", "<|return|>"],
        [HELLO, SURE | {"thinking": "why"}, BYE, FOUR],
        (),
        [
            "<|start|>user<|message|>Hello<|end|><|start|>assistant⟦<|channel|>analysis<|message|>"
            "why<|end|><|start|>assistant<|channel|>final<|message|>Sure.<|return|>⟧",
            "<|start|>user<|message|>Hello<|end|><|start|>assistant<|channel|>final<|message|>Sure."
            "<|end|><|start|>user<|message|>Bye<|end|><|start|>assistant⟦<|channel|>final<|message|>"
            "It is 4.<|return|>⟧",
        ],
    ),
    "thinking before a call, which the answer drops": (
        templates.GPT_OSS,
        [*GPT, "<|end|>", "<|return|>", "<|call|>"],
        [HELLO, call({"a": 1}) | {"thinking": "why"}, RESULT, FOUR | {"thinking": "so"}],
        (),
        [
            "<|start|>user<|message|>Hello<|end|><|start|>assistant⟦<|channel|>analysis<|message|>"
            'why<|end|><|start|>assistant to=add<|message|>{"a": 1}<|call|>⟧',
            "<|start|>user<|message|>Hello<|end|><|start|>assistant to=add<|message|>"
            '{"a": 1}<|call|><|start|>tool<|message|>42<|end|><|start|>assistant'
            "⟦<|channel|>analysis<|message|>so<|end|>"
            "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>⟧",
        ],
    ),
    "a generation prompt that no answer has": (
        templates.R1,
        ["<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<|call|>", "<|call_end|>"],
        [SYSTEM, HELLO, SURE, BYE, call({"a": 1}) | {"content": ""}],
        (),
        [
            f"{BOS}You are brief.<|User|>Hello<|Assistant|>⟦Sure.<|end_of_sentence|>⟧<|User|>Bye"
            '<|Assistant|>⟦<|call|>{"a": 1}<|call_end|><|end_of_sentence|>⟧'
        ],
    ),
    "content as parts": (
        templates.PARTS,
        ["<|im_start|>", "<end_of_utterance>"],
        [HELLO, SURE, BYE, FOUR],
        (),
        [
            "<|im_start|>User: Hello<end_of_utterance>\nAssistant:⟦ Sure.<end_of_utterance>⟧\n"
            "User: Bye<end_of_utterance>\nAssistant:⟦ It is 4.<end_of_utterance>⟧\n"
        ],
    ),
    "no special tokens": (
        templates.BARE,
        [],
        [HELLO, SURE, BYE, FOUR],
        (),
        [f"user: Hello\nassistant:⟦ Sure.\n⟧user: Bye\nassistant:⟦ It is 4.\n{EOS}⟧"],
    ),
}


def rows_of(tokenizer, messages, tools, **options):
    learned = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return tokenizer.turns(list(tools)).conversation(messages, learned, **options)


def marked(tokenizer, pieces):
    """The text of a row, with what is learned between ⟦ and ⟧."""
    parts = []
    for piece in pieces:
        text = tokenizer.decode(piece.ids, skip_special=False)
        parts.append(f"⟦{text}⟧" if piece.learned else text)
    return "".join(parts).replace("⟧⟦", "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_templates_own_text_with_the_turns_learned(name, kind, tmp_path):
    template, special, messages, tools, expected = CASES[name]
    tokenizer = open_tokenizer(tmp_path, template, special, kind=kind)
    rows = rows_of(tokenizer, messages, tools)
    assert len(rows) == len(expected)
    for pieces, text in zip(rows, expected, strict=True):
        ids = [i for piece in pieces for i in piece.ids]
        assert ids == tokenizer.encode(re.sub("[⟦⟧]", "", text))
        if kind == "byte":  # others leave a blank out when they decode
            assert marked(tokenizer, pieces) == text
        # The prompt of the first turn is what the model gets in RL.
        last = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        if last and len(rows) == 1 and template is not templates.R1:
            prompt = tokenizer.turns(list(tools)).prompt(messages[:last])
            assert list(pieces[0].ids) == tokenizer.encode(prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_learned_token_is_no_blank_of_the_tokenizer(kind, tmp_path):
    """An answer that is encoded alone gets one with two of the three kinds."""
    special = ["<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = open_tokenizer(tmp_path, templates.PHI3, special, kind=kind)
    (pieces,) = rows_of(tokenizer, [HELLO, SURE, BYE, FOUR], ())
    learned = [piece.ids for piece in pieces if piece.learned]
    begins = tokenizer.encode("x\nSure.<|end|>")[len(tokenizer.encode("x\n")) :]
    assert list(learned[0]) == begins
    given, answer = tokenizer.encode_parts("2+2=4", [4])
    assert given == tokenizer.encode("2+2=") and given + answer == tokenizer.encode("2+2=4")


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_holds_both_sides_of_a_place_is_split_there(kind, tmp_path):
    tokenizer = open_tokenizer(tmp_path, templates.BARE, [], kind=kind)
    whole = tokenizer.encode("The weather")
    assert len(whole) < len(tokenizer.encode("The wea")) + 4
    given, answer = tokenizer.encode_parts("The weather", [7])
    assert given == tokenizer.encode("The wea")
    assert tokenizer.decode([*given, *answer]).strip() == "The weather"
    assert tokenizer.decode(answer) == "ther" and len(answer) < 5
    parts = tokenizer.encode_parts("Hello Sure Bye", [5, 5, 6, 14])
    assert tokenizer.decode(sum(parts, [])).strip() == "Hello Sure Bye"
    assert [len(ids) > 0 for ids in parts] == [True, False, True, True, False]


def test_an_answer_that_continues_a_blank_of_the_prompt(tmp_path):
    """In RL the prompt ends with the blank, so the answer is learned without it."""
    tokenizer = open_tokenizer(tmp_path, templates.BARE, [])
    given, answer = tokenizer.encode_parts("User: Hello", [6])
    assert given == tokenizer.encode("User: ")
    assert tokenizer.decode(answer) == "Hello"


def test_thinking_is_kept_in_one_row_by_a_key(tmp_path):
    qwen = open_tokenizer(tmp_path / "q", templates.QWEN3, CHATML)
    (pieces,) = rows_of(qwen, [HELLO, WHY, BYE, SO], (), keep_thinking=True)
    text = (
        f"{ASKED}⟦<think>\nwhy\n</think>\n\nSure.<|im_end|>⟧{AGAIN}"
        "⟦<think>\nso\n</think>\n\nIt is 4.<|im_end|>⟧"
    )
    assert marked(qwen, pieces) == text
    assert [i for p in pieces for i in p.ids] == qwen.encode(re.sub("[⟦⟧]", "", text))

    special = ["<|User|>", "<|Assistant|>", "<|end_of_sentence|>"]
    r1 = open_tokenizer(tmp_path / "r", templates.R1, special)
    with pytest.raises(ValueError, match="template of .* drops the thinking.*keep_thinking=true"):
        rows_of(r1, [HELLO, WHY, BYE, SO], ())
    (pieces,) = rows_of(r1, [HELLO, WHY, BYE, SO], (), keep_thinking=True)
    assert marked(r1, pieces) == (
        f"{BOS}<|User|>Hello<|Assistant|><think>\n⟦why\n</think>\n\nSure.<|end_of_sentence|>⟧"
        "<|User|>Bye<|Assistant|><think>\n⟦so\n</think>\n\nIt is 4.<|end_of_sentence|>⟧"
    )

    glm = open_tokenizer(tmp_path / "g", *CASES[GLM_CASE][:2])
    (pieces,) = rows_of(glm, CASES[GLM_CASE][2], (), keep_thinking=True)
    assert marked(glm, pieces) == CASES[GLM_CASE][4][0]


GLM_CASE = "the next message begins with the end token"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (templates.COUNTING, [HELLO, SURE], "rewrites the prompt when the answer is added"),
        (templates.CHATML, [HELLO, call({"a": 1}) | {"content": "x"}], "does not write tool_calls"),
        (templates.GEMMA, [SYSTEM, HELLO, SURE], "refuses the conversation: System role not supp"),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.role + m.content }}{% endfor %}",
            [HELLO, SURE, RESULT, FOUR],
            "does not write results of tools",
        ),
        (
            templates.CHATML,
            [HELLO, SURE | {"reasoning_content": "why"}],
            "does not write 'reasoning_content'",
        ),
    ],
)
def test_what_a_template_cannot_write_is_refused_by_its_name(template, messages, message, tmp_path):
    tokenizer = open_tokenizer(tmp_path, template, CHATML)
    with pytest.raises(ValueError, match=message) as error:
        rows_of(tokenizer, messages, ())
    assert "the chat template" in str(error.value)


def test_completions_end_with_the_turn_and_are_one_row(tmp_path):
    tokenizer = open_tokenizer(tmp_path, templates.QWEN3, CHATML)
    turns = tokenizer.turns()
    pieces = turns.completion([HELLO, WHY, BYE, SO], [3])
    text = f"{ASKED}Sure.<|im_end|>{AGAIN}⟦<think>\nso\n</think>\n\nIt is 4.<|im_end|>⟧"
    assert marked(tokenizer, pieces) == text
    with pytest.raises(ValueError, match="rewrites earlier turns .*: give one turn"):
        turns.completion([HELLO, WHY, BYE, SO], [1, 3])


@pytest.mark.parametrize(
    ("template", "special", "end", "calls", "stops"),
    [
        (templates.TOOLS, CHATML, TurnEnd("<|im_end|>", "\n"), TurnEnd("<|im_end|>", "\n"), 2),
        (
            templates.GLM,
            ["<|user|>", "<|assistant|>", "<|observation|>"],
            TurnEnd("<|user|>", begins_next=True),
            TurnEnd("<|observation|>", begins_next=True),
            3,
        ),
        (templates.LLAMA2, [], TurnEnd(EOS), TurnEnd(), 1),
        (templates.BARE, [], TurnEnd(), TurnEnd(), 1),
    ],
)
def test_the_end_of_a_turn_stops_generation_and_is_told(
    template, special, end, calls, stops, tmp_path, caplog
):
    tokenizer = open_tokenizer(tmp_path, template, special)
    assert (tokenizer.turns().end(), tokenizer.turns().end(calls=True)) == (end, calls)
    assert len(tokenizer.stop_ids) == stops
    told = "\n".join(record.getMessage() for record in caplog.records)
    for text in {end.token, calls.token} - {"", EOS}:
        assert tokenizer.encode(text)[0] in tokenizer.stop_ids
        assert f"ends a turn with {text!r}" in told
    assert tokenizer.stop_origins[tokenizer.eos_id] == "files of the model"


# ------------------------------------------------------------------------- vectors


@pytest.mark.parametrize(
    ("case", "template"),
    [
        ("smollm2_retry", templates.SMOLLM2),
        ("smollm2_split", templates.SMOLLM2),
        ("smollm2_tool_role", templates.SMOLLM2),
        ("qwen3_instruct_2507_two_calls", templates.QWEN3_2507),
        ("qwen3_training_two_calls", templates.QWEN3_KEPT),
        ("qwen3_think_stripped", templates.QWEN3_KEPT),
    ],
)
def test_suffixes_are_the_recorded_ones(case, template, tmp_path):
    check_suffix(case, tmp_path, template)


def test_a_turn_that_was_cut_is_the_recorded_one(tmp_path):
    check_cut_turn("smollm2_truncated", tmp_path, templates.SMOLLM2)
