"""verl and TRL rows to records, against ids and masks that are written out; bad rows; limits."""

import json
from dataclasses import replace

import pytest
from chat_tokenizer import TEMPLATE, write_chat_tokenizer

from jaxrl_llm.config import ChainSum, Products
from jaxrl_llm.data.dataset import (
    RowRules,
    Sources,
    load_examples,
    load_preferences,
    load_prompts,
)
from jaxrl_llm.data.formats import Overlong, detect_format, examples_of, kept_positions, prompt_of
from jaxrl_llm.data.tasks import WRONG_ANSWERS
from jaxrl_llm.tokenizer import CharTokenizer, load_tokenizer

CHAR = CharTokenizer()
USER = [{"role": "user", "content": "2+2?"}]
ANSWER = [{"role": "assistant", "content": "4"}]
WRONG = [{"role": "assistant", "content": "5"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": USER,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return load_tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chat")))


def rows_file(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return Sources(files=(str(path),))


def load_one(load, tmp_path, row, tokenizer, **rules):
    loaded = load(rows_file(tmp_path, [row]), tokenizer, RowRules(**{"max_length": 99, **rules}))
    return loaded.items[0]


def learned(example, tokenizer):
    """(what is given, what is learned, as text)."""
    given = [t for t, m in zip(example.token_ids, example.loss_mask, strict=True) if not m]
    wanted = [t for t, m in zip(example.token_ids, example.loss_mask, strict=True) if m]
    return tuple(tokenizer.decode(ids, skip_special=False) for ids in (given, wanted))


@pytest.mark.parametrize(
    "row, expected",
    [
        (VERL, "verl"),
        ({**VERL, "reward_model": '{"ground_truth": "4"}'}, "verl"),
        ({"prompt": "a", "reward_model": "Skywork"}, "prompt"),
        ({"prompt": "a", "answer": "b"}, "prompt"),
        ({"prompt": USER}, "prompt"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"prompt": "a", "completion": None}, "prompt"),
        ({"prompt": "a", "completion": "b", "label": True}, "unpaired_preference"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"prompt": None, "chosen": "b", "rejected": "c"}, "implicit_preference"),
        ({"messages": USER + ANSWER}, "messages"),
        ({"text": "a"}, "text"),
        ({"question": "a"}, None),
        ({}, None),
    ],
)
def test_formats_are_told_apart(row, expected):
    assert detect_format(row, "prompts") == expected


def test_verl_row_becomes_a_prompt(tmp_path, chat):
    prompt = load_one(load_prompts, tmp_path, VERL, chat)
    assert prompt.text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert list(prompt.token_ids) == chat.encode(prompt.text)
    assert prompt.messages == tuple(USER)
    assert (prompt.data_source, prompt.ground_truth, prompt.row) == ("openai/gsm8k", "4", 0)
    assert prompt.columns == {name: value for name, value in VERL.items() if name != "prompt"}


def test_a_reward_model_as_json_text_is_parsed(tmp_path, chat):
    row = {**VERL, "reward_model": json.dumps(VERL["reward_model"])}
    assert load_one(load_prompts, tmp_path, row, chat) == load_one(
        load_prompts, tmp_path, VERL, chat
    )


@pytest.mark.parametrize("column", ["ground_truth", "answer", "solution"])
def test_trl_prompt_rows(tmp_path, chat, column):
    prompt = load_one(load_prompts, tmp_path, {"prompt": "2+2=", column: "4", "level": 3}, CHAR)
    assert list(prompt.token_ids) == CHAR.encode("2+2=")
    assert (prompt.text, prompt.messages, prompt.ground_truth) == ("2+2=", None, "4")
    assert prompt.data_source == "rows"
    assert prompt.columns == {column: "4", "level": 3}
    assert load_one(load_prompts, tmp_path, {"prompt": USER}, chat).ground_truth is None


def test_a_binary_right_answer_is_text():
    row = {"prompt": b"2+2=", "answer": b"4"}
    prompt = prompt_of(row, "prompt", CHAR, data_source="rows", index=0)
    assert (prompt.text, prompt.ground_truth) == ("2+2=", "4")


def test_plain_prompts_begin_with_bos_where_the_tokenizer_does(tmp_path):
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "bos", add_bos=True))
    prompt = load_one(load_prompts, tmp_path, {"prompt": "hi"}, tokenizer)
    assert list(prompt.token_ids) == [1, *tokenizer.encode("hi")]
    conversation = load_one(load_prompts, tmp_path, {"prompt": USER}, tokenizer)
    assert 1 not in conversation.token_ids  # the template writes what it wants
    text = load_one(load_examples, tmp_path, {"text": "hi"}, tokenizer)
    assert list(text.token_ids) == [1, *tokenizer.encode("hi"), 3]
    assert text.loss_mask == (0, 1, 1, 1)


def test_a_begun_answer_is_continued(tmp_path, chat):
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    prompt = load_one(load_prompts, tmp_path, {"prompt": begun}, chat)
    assert prompt.text.endswith("<|im_start|>assistant\nIt is")


def test_null_keys_of_arrow_are_dropped(chat):
    row = {"prompt": [{"role": "user", "content": "a", "tool_calls": None}]}
    prompt = prompt_of(row, "prompt", chat, data_source="x", index=4)
    assert prompt.messages == ({"role": "user", "content": "a"},)
    assert prompt.row == 4


def test_tools_reach_the_template(tmp_path):
    template = "{% if tools %}[{{ tools[0].name }}]{% endif %}" + TEMPLATE
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "tools", template=template))
    for tools in ([{"name": "add"}], '[{"name": "add"}]'):
        prompt = load_one(load_prompts, tmp_path, {"prompt": USER, "tools": tools}, tokenizer)
        assert prompt.text.startswith("[add]<|im_start|>")


def test_completion_examples_learn_the_completion_and_its_end(tmp_path, chat):
    example = load_one(load_examples, tmp_path, {"prompt": "2+2=", "completion": "4"}, CHAR)
    assert example.token_ids == (*CHAR.encode("2+2=4"), 1)
    assert example.loss_mask == (0, 0, 0, 0, 1, 1)
    for completion in (ANSWER, "4"):
        row = {"prompt": USER, "completion": completion}
        example = load_one(load_examples, tmp_path, row, chat)
        given = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        assert learned(example, chat) == (given, "4<|im_end|>")
        prompt = load_one(load_prompts, tmp_path, row, chat)
        assert example.token_ids[: len(prompt.token_ids)] == prompt.token_ids  # as in RL


def test_text_examples_learn_everything_after_the_first_token(tmp_path):
    example = load_one(load_examples, tmp_path, {"text": "abc"}, CHAR)
    assert example.token_ids == (*CHAR.encode("abc"), 1)
    assert example.loss_mask == (0, 1, 1, 1)


def test_message_examples_learn_the_assistant_turns(tmp_path, chat):
    messages = [{"role": "system", "content": ""}, *USER, *ANSWER, *USER, *WRONG, *USER]
    example = load_one(load_examples, tmp_path, {"messages": messages}, chat, max_length=300)
    given, wanted = learned(example, chat)
    assert wanted == "4<|im_end|>5<|im_end|>"
    turn = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert given == "<|im_start|>system\n<|im_end|>\n" + turn + "\n" + turn + "\n"
    whole = chat.apply_chat_template(messages[:-1], add_generation_prompt=False)
    assert chat.decode(example.token_ids, skip_special=False) == whole


def test_a_template_that_rewrites_the_past_is_refused(tmp_path):
    template = "{{ messages | length }}" + TEMPLATE
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "odd", template=template))
    with pytest.raises(ValueError, match="the chat template of .*odd' rewrites the prompt"):
        load_one(load_examples, tmp_path, {"messages": USER + ANSWER}, tokenizer)


def test_a_template_without_end_tokens_gets_one(tmp_path):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path / "bare", template=template))
    row = {"prompt": USER, "completion": ANSWER}
    example = load_one(load_examples, tmp_path, row, tokenizer)
    assert learned(example, tokenizer) == ("user:2+2?\nassistant:", "4\n<|im_end|>")


def test_preference_pairs(tmp_path, chat):
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "55", "margin": 2}
    pair = load_one(load_preferences, tmp_path, row, CHAR)
    assert pair.chosen.token_ids == (*CHAR.encode("2+2=4"), 1)
    assert pair.rejected.token_ids == (*CHAR.encode("2+2=55"), 1)
    assert pair.rejected.loss_mask == (0, 0, 0, 0, 1, 1, 1)
    assert pair.margin == 2.0
    implicit = {"chosen": "a b c", "rejected": "a b dd"}
    pair = load_one(load_preferences, tmp_path, implicit, CHAR)
    assert learned(pair.chosen, CHAR) == ("a b", " c<|eos|>")
    assert learned(pair.rejected, CHAR) == ("a b", " dd<|eos|>")
    assert pair.margin == 0.0
    explicit = {"prompt": USER, "chosen": ANSWER, "rejected": WRONG}
    implicit = {"chosen": USER + ANSWER, "rejected": USER + WRONG}
    pairs = [load_one(load_preferences, tmp_path, r, chat) for r in (explicit, implicit)]
    assert pairs[0] == pairs[1]
    assert learned(pairs[0].chosen, chat)[1] == "4<|im_end|>"


BAD_PROMPTS = [
    (b'{"prompt": "\xff"}', "not UTF-8: invalid start byte at byte 12"),
    (b'{"prompt": "a"', "not JSON: Expecting ',' delimiter at character 14"),
    (b"[1]", "expected a JSON object, got list"),
    ({"question": "a"}, "column 'prompt' is missing"),
    ({"prompt": None}, "column 'prompt' is null"),
    ({"prompt": ""}, "column 'prompt' is empty"),
    ({"prompt": " \n"}, "column 'prompt' is empty"),
    ({"prompt": 7}, "column 'prompt' holds int, not a string or a list of messages"),
    ({"prompt": {"role": "user"}}, "column 'prompt' holds dict, not a string or a list of"),
    ({"prompt": []}, "column 'prompt' is empty"),
    ({"prompt": ["hi"]}, "prompt[0] holds str, not a message"),
    ({"prompt": [{"content": "hi"}]}, "prompt[0] has no role"),
    ({"prompt": [{"role": "user"}]}, "column 'prompt[0].content' holds NoneType"),
    ({"prompt": [{"role": "user", "content": ""}]}, "column 'prompt[0].content' is empty"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0] is of type image"),
    ({"prompt": "a\ud83d"}, "column 'prompt' holds half of a surrogate pair"),
    ({"prompt": [{"role": "wizard", "content": "hi"}]}, "unknown role wizard"),
    ({"prompt": "a", "tools": "{"}, "column 'tools' is not JSON"),
    ({"prompt": "a", "tools": 3}, "column 'tools' holds int, not a list"),
    ({"prompt": "a", "data_source": 3}, "column 'data_source' holds int"),
]


@pytest.mark.parametrize("row, reason", BAD_PROMPTS)
def test_every_kind_of_bad_prompt_row_is_set_aside(tmp_path, chat, row, reason):
    sources = rows_file(tmp_path, [{"prompt": "é good"}, row, {"prompt": "good"}])
    aside = tmp_path / "out" / "bad_rows.jsonl"
    rules = RowRules(max_length=99, max_bad_fraction=0.5, bad_rows_file=aside)
    loaded = load_prompts(sources, chat, rules)
    assert [prompt.row for prompt in loaded.items] == [0, 2]
    assert loaded.num_rows == 3
    (line,) = aside.read_text().splitlines()
    record = json.loads(line)
    assert (record["source"], record["row"]) == (sources.files[0], 1)
    assert reason in record["reason"]
    load_prompts(sources, chat, rules)  # as a resumed run does
    assert aside.read_text().splitlines() == [line]


def test_parquet_bytes_are_text_when_they_are_utf8(chat):
    prompt = prompt_of({"prompt": "é".encode()}, "prompt", chat, data_source="x", index=0)
    assert prompt.text == "é"
    with pytest.raises(ValueError, match="column 'prompt' is not UTF-8"):
        prompt_of({"prompt": b"\xff"}, "prompt", chat, data_source="x", index=0)


@pytest.mark.parametrize(
    "load, good, bad, reason",
    [
        (load_prompts, VERL, {**VERL, "reward_model": {"style": "rule"}}, "has no ground_truth"),
        (load_prompts, VERL, {**VERL, "reward_model": None}, "'reward_model' is null"),
        (load_prompts, VERL, {**VERL, "reward_model": "{4"}, "'reward_model' is not JSON: Expect"),
        (load_prompts, VERL, {**VERL, "reward_model": '{"a": 4}'}, "has no ground_truth"),
        (
            load_prompts,
            VERL,
            {**VERL, "reward_model": '{"ground_truth": 4, "ground_truth": 5}'},
            "'reward_model': the key 'ground_truth' stands twice",
        ),
        (
            load_prompts,
            VERL,
            {**VERL, "reward_model": {"ground_truth": float("inf")}},
            "column 'reward_model.ground_truth' holds inf, which is not a right answer",
        ),
        (
            load_prompts,
            {"prompt": USER, "answer": 4.5},
            {"prompt": USER, "answer": float("nan")},
            "column 'answer' holds nan",
        ),
        (
            load_prompts,
            {"prompt": USER, "solution": [4, "x"]},
            b'{"prompt": "a", "solution": [4, {"x": 1e999}]}',
            "column 'solution' holds inf",
        ),
        (
            load_examples,
            {"prompt": USER, "completion": ANSWER},
            {"prompt": "plain", "completion": ANSWER},
            "the prompt is a string and its completion a list",
        ),
        (
            load_examples,
            {"prompt": "a", "completion": "b"},
            {"prompt": "a", "completion": ""},
            "'completion' is empty",
        ),
        (load_examples, {"messages": USER + ANSWER}, {"messages": USER}, "no assistant turn"),
        (load_examples, {"messages": USER + ANSWER}, {"messages": "hi"}, "holds str, not a list"),
        (
            load_preferences,
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            "chosen and rejected are the same",
        ),
        (
            load_preferences,
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"},
            "column 'margin' holds 'much'",
        ),
        (
            load_preferences,
            {"chosen": "ab", "rejected": "ac"},
            {"chosen": "b", "rejected": "c"},
            "common beginning is empty",
        ),
        (
            load_preferences,
            {"chosen": "ab", "rejected": "ac"},
            {"chosen": "ab", "rejected": "abc"},
            "no prompt can be split off: chosen is empty",
        ),
        (
            load_preferences,
            {"chosen": "ab", "rejected": "ac"},
            {"chosen": "ab", "rejected": USER + WRONG},
            "not both strings or both lists",
        ),
    ],
)
def test_other_bad_rows(tmp_path, chat, load, good, bad, reason):
    sources = rows_file(tmp_path, [good, good, bad])
    loaded = load(sources, chat, RowRules(max_length=99, max_bad_fraction=0.4))
    assert len(loaded.items) == 2
    assert [row.row for row in loaded.bad_rows] == [2]
    assert reason in loaded.bad_rows[0].reason


def test_too_many_bad_rows_refuse_the_run(tmp_path):
    rows = [{"prompt": "1"}] * 8 + [{"prompt": ""}, b"\xff"] + [{"prompt": "é"}] * 6
    aside = tmp_path / "bad.jsonl"
    rules = RowRules(max_length=9, max_bad_fraction=0.4, bad_rows_file=aside)
    with pytest.raises(ValueError) as error:
        load_prompts(rows_file(tmp_path, rows), CHAR, rules)
    message = str(error.value)
    assert (
        "8 of 16 rows (50.0%) are bad, more than config.data.max_bad_fraction=0.4 allows" in message
    )
    assert "row 8: column 'prompt' is empty" in message
    assert "the character tokenizer does not know 'é' (U+00E9, position 0)" in message
    assert "and 3 more" in message
    assert f"all are listed in {aside}" in message
    assert "raise config.data.max_bad_fraction" in message
    assert len(aside.read_text().splitlines()) == 8


def test_rows_that_are_all_bad_are_named_where_all_may_be(tmp_path):
    sources = rows_file(tmp_path, [{"prompt": ""}, b"\xff"])
    with pytest.raises(
        ValueError, match=r"left of 2 \(0 .* overlong, 2 bad; the first: .* row 1: not"
    ):
        load_prompts(sources, CHAR, RowRules(max_length=9, max_bad_fraction=1.0))


def test_exactly_the_allowed_share_passes(tmp_path):
    sources = rows_file(tmp_path, [{"prompt": "1"}, {"prompt": ""}])
    loaded = load_prompts(sources, CHAR, RowRules(max_length=9, max_bad_fraction=0.5))
    assert len(loaded.items) == 1
    with pytest.raises(ValueError, match="1 of 2 rows"):
        load_prompts(sources, CHAR, RowRules(max_length=9, max_bad_fraction=0.49))


def test_conversations_for_the_character_tokenizer_name_the_remedy(tmp_path):
    with pytest.raises(ValueError, match="no chat template: give prompts as plain strings"):
        load_one(load_prompts, tmp_path, VERL, CHAR)


def test_wrong_or_unknown_formats_are_refused(tmp_path):
    rules = RowRules(max_length=9)
    with pytest.raises(ValueError, match="holds text rows, which give no prompts"):
        load_prompts(rows_file(tmp_path, [{"text": "a"}]), CHAR, rules)
    with pytest.raises(ValueError, match="holds verl rows, which give no examples") as error:
        load_examples(rows_file(tmp_path, [VERL]), CHAR, rules)
    assert "Set config.data.train_files or config.data.train_tasks to data" in str(error.value)
    warmup = replace(rows_file(tmp_path, [VERL]), key="config.warmup")
    with pytest.raises(ValueError, match="Set config.warmup.files or config.warmup.tasks to data"):
        load_examples(warmup, CHAR, rules)
    with pytest.raises(ValueError, match="unpaired_preference rows, which give no examples"):
        row = {"prompt": "a", "completion": "b", "label": False}
        load_examples(rows_file(tmp_path, [row]), CHAR, rules)
    with pytest.raises(ValueError, match="'question', 'reply'.*with config.data.columns={ours"):
        load_prompts(rows_file(tmp_path, [{"question": "a", "reply": "b"}]), CHAR, rules)
    with pytest.raises(
        ValueError, match="no data: set config.data.train_files or config.data.train_tasks"
    ):
        load_prompts(Sources(), CHAR, rules)
    with pytest.raises(ValueError, match=r"no rows are left of 0: rows.jsonl is empty; set config"):
        load_prompts(rows_file(tmp_path, []), CHAR, rules)


def test_positions_kept_by_each_truncation():
    assert list(kept_positions(5, 5, "error")) == [0, 1, 2, 3, 4]
    assert list(kept_positions(6, 4, "left")) == [2, 3, 4, 5]
    assert list(kept_positions(6, 4, "right")) == [0, 1, 2, 3]
    assert list(kept_positions(6, 4, "middle")) == [0, 1, 4, 5]
    assert list(kept_positions(7, 5, "middle")) == [0, 1, 4, 5, 6]
    assert list(kept_positions(7, 1, "middle")) == [6]
    with pytest.raises(Overlong, match="7 tokens are more than the limit of 5"):
        kept_positions(7, 5, "error")


@pytest.mark.parametrize(
    "truncation, kept", [("left", "3456"), ("right", "1234"), ("middle", "1256")]
)
def test_prompts_are_truncated(tmp_path, truncation, kept):
    row = {"prompt": "123456"}
    prompt = load_one(load_prompts, tmp_path, row, CHAR, max_length=4, truncation=truncation)
    assert CHAR.decode(prompt.token_ids) == kept
    assert prompt.text == "123456"


def test_rows_that_are_left_out_are_counted_in_the_log(tmp_path, caplog):
    sources = rows_file(tmp_path, [{"prompt": "1"}, {"prompt": "123456"}, {"prompt": ""}])
    load_prompts(sources, CHAR, RowRules(max_length=4, filter_overlong=True, max_bad_fraction=0.5))
    overlong, bad = (record.getMessage() for record in caplog.records)
    assert overlong.startswith("1 of 3 rows have more than 4 tokens and are left out")
    assert bad.startswith("1 of 3 rows are bad and are left out")
    assert bad.endswith("rows.jsonl row 2: column 'prompt' is empty")


def test_the_files_of_a_split_are_one_source(tmp_path):
    for i in range(2):
        (tmp_path / f"test-0000{i}-of-00002.jsonl").write_text('{"prompt": "1"}\n')
    loaded = load_prompts(Sources(files=(str(tmp_path),)), CHAR, RowRules(max_length=4))
    assert [prompt.data_source for prompt in loaded.items] == ["test", "test"]


def test_overlong_prompts_are_refused_or_filtered(tmp_path):
    sources = rows_file(tmp_path, [{"prompt": "1"}, {"prompt": "123456"}])
    with pytest.raises(ValueError, match=r"rows.jsonl row 1: 6 tokens are more than the limit"):
        load_prompts(sources, CHAR, RowRules(max_length=4))
    for truncation in ("error", "left"):  # filtering comes first, as in verl
        rules = RowRules(max_length=4, truncation=truncation, filter_overlong=True)
        loaded = load_prompts(sources, CHAR, rules)
        assert [prompt.text for prompt in loaded.items] == ["1"]
        assert (loaded.num_overlong, loaded.bad_rows) == (1, [])
    with pytest.raises(ValueError, match="no rows are left of 2"):
        rules = RowRules(max_length=1, filter_overlong=True)
        load_prompts(rows_file(tmp_path, [{"prompt": "12"}] * 2), CHAR, rules)


def test_examples_are_truncated_with_their_mask(tmp_path):
    row = {"prompt": "12", "completion": "345"}
    right = load_one(load_examples, tmp_path, row, CHAR, max_length=4, truncation="right")
    assert (CHAR.decode(right.token_ids), right.loss_mask) == ("1234", (0, 0, 1, 1))
    left = load_one(load_examples, tmp_path, row, CHAR, max_length=3, truncation="left")
    assert (CHAR.decode(left.token_ids), left.loss_mask) == ("45", (0, 1, 1))
    message = (
        "config.data.truncation=right leaves no token to learn from: 2 of 6 tokens are kept. "
        "Raise config.data.max_prompt_length .*config.data.filter_overlong_prompts=true"
    )
    with pytest.raises(ValueError, match=message):
        load_one(load_examples, tmp_path, row, CHAR, max_length=2, truncation="right")


def test_files_tasks_and_custom_classes_together(tmp_path, chat):
    files = rows_file(tmp_path, [{"prompt": "1"}]).files
    tasks = (ChainSum(size=3), Products(size=2))
    loaded = load_prompts(Sources(files=files, tasks=tasks), CHAR, RowRules(max_length=9))
    sources = [prompt.data_source for prompt in loaded.items]
    assert sources == ["rows"] + ["chain_sum_3x1"] * 3 + ["products_1x1"] * 2
    chatty = Sources(tasks=tasks, split="held_out", prompt_style="chat")
    rules = RowRules(max_length=120)
    prompts = load_prompts(chatty, chat, rules).items
    examples = load_examples(chatty, chat, rules).items
    for prompt, example in zip(prompts, examples, strict=True):
        assert prompt.messages is not None and prompt.messages[0]["role"] == "user"
        assert learned(example, chat) == (prompt.text, f"{prompt.ground_truth}<|im_end|>")
    (tmp_path / "mine.py").write_text(
        "class Rows(list):\n    def __init__(self, files):\n"
        "        super().__init__({'prompt': name} for name in files)\n"
    )
    custom = Sources(files=("7+1=", ""), dataset_class=f"{tmp_path}/mine.py:Rows")
    loaded = load_prompts(custom, CHAR, RowRules(max_length=9, max_bad_fraction=0.5))
    assert [prompt.text for prompt in loaded.items] == ["7+1="]
    assert [(row.row, row.reason) for row in loaded.bad_rows] == [(1, "column 'prompt' is empty")]


SPLIT_CLASS = """
class Rows(list):
    def __init__(self, files, split):
        names = files if split == "train" else {held_out}
        super().__init__({{"prompt": name, "index": i}} for i, name in enumerate(names))
"""


def test_a_class_with_a_split_gives_both(tmp_path):
    rules = RowRules(max_length=9)
    (tmp_path / "apart.py").write_text(SPLIT_CLASS.format(held_out=["3"]))
    train = Sources(files=("1", "2"), dataset_class=f"{tmp_path}/apart.py:Rows")
    held_out = replace(train, files=(), split="held_out")
    assert [prompt.text for prompt in load_prompts(train, CHAR, rules).items] == ["1", "2"]
    assert [prompt.text for prompt in load_prompts(held_out, CHAR, rules).items] == ["3"]


def test_a_class_without_a_split_serves_training_alone(tmp_path):
    """Held-out rows come from files and tasks of their own."""
    rules = RowRules(max_length=9)
    (tmp_path / "mine.py").write_text(
        "class Rows(list):\n    def __init__(self, files):\n"
        "        super().__init__([{'prompt': '1'}])\n"
    )
    train = Sources(dataset_class=f"{tmp_path}/mine.py:Rows")
    held_out = replace(train, split="held_out")
    assert [prompt.text for prompt in load_prompts(train, CHAR, rules).items] == ["1"]
    message = (
        "mine.py:Rows takes no keyword `split`.*config.data.val_files or config.data.val_tasks"
    )
    with pytest.raises(ValueError, match=message):
        load_prompts(held_out, CHAR, rules)
    assert held_out.are_empty() and not train.are_empty()
    held_out = replace(held_out, files=rows_file(tmp_path, [{"prompt": "2"}]).files)
    assert [prompt.text for prompt in load_prompts(held_out, CHAR, rules).items] == ["2"]


def test_a_rejected_answer_may_be_empty():
    """A policy that ends at once gives that answer, and a reward model has to know it."""
    row = {"prompt": "2+2=", "chosen": "4", "rejected": ""}
    _, rejected = examples_of(row, "preference", CHAR, data_source="x", index=0)
    assert rejected.token_ids == (*CHAR.encode("2+2="), CHAR.eos_id)
    with pytest.raises(ValueError, match="'chosen' is empty"):
        examples_of(row | {"chosen": ""}, "preference", CHAR, data_source="x", index=0)


def test_tasks_give_pairs_where_preferences_are_asked_for():
    sources = Sources(tasks=(ChainSum(size=2),))
    rules = RowRules(max_length=9, truncation="right")
    pairs = load_preferences(sources, CHAR, rules).items
    assert len(pairs) == 2 * len(WRONG_ANSWERS)
    assert all(len(pair.rejected.token_ids) <= 9 for pair in pairs)
    assert {pair.chosen.data_source for pair in pairs} == {"chain_sum_3x1"}
