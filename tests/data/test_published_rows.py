"""Rows as published data sets have them, in the files in which they come, become the right tokens.

What is learned is written between ⟦ and ⟧.
"""

import json
import pickle
from dataclasses import replace

import pyarrow as pa
import pytest
import turn_templates as templates
from pyarrow import parquet
from turn_tokenizers import BOS, EOS, open_tokenizer, write_tokenizer

from jaxrl_llm.config import Config, DataConfig
from jaxrl_llm.data.dataset import (
    RowRules,
    Sources,
    load_examples,
    load_preferences,
    load_prompts,
    load_unpaired,
)
from jaxrl_llm.data.run_data import load_records
from jaxrl_llm.data.shaping import Shape
from jaxrl_llm.tokenizer import CharTokenizer, load_tokenizer

RULES = RowRules(max_length=2000)
CHATML = ["<|im_start|>", "<|im_end|>"]
ASKED = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
USER, SURE = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Sure."}
NO = {"role": "assistant", "content": "No."}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """ChatML with tools; variables of the template show in a text."""
    template = "{% if brief is defined %}brief={{ brief }} {% endif %}" + templates.TOOLS
    folder = tmp_path_factory.mktemp("chat")
    return open_tokenizer(folder, template, CHATML, eos="<|im_end|>")


def jsonl(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Sources(files=(str(folder / "rows.jsonl"),))


def marked(tokenizer, example):
    text, before = "", 0
    for token, mask in zip(example.token_ids, example.loss_mask, strict=True):
        text += {(0, 1): "⟦", (1, 0): "⟧"}.get((before, mask), "")
        text += tokenizer.decode([token], skip_special=False)
        before = mask
    return text + "⟧" * before


def learned(load, sources, tokenizer, rules=RULES):
    return [marked(tokenizer, example) for example in load(sources, tokenizer, rules).items]


# ------------------------------------------------------------------------- formats by purpose


def test_ultrachat(chat, tmp_path):
    """The prompt is the first question again; the messages are the conversation."""
    row = {"prompt": "Hello", "prompt_id": "0a1b", "messages": [USER, SURE]}
    sources = jsonl(tmp_path, [row])
    assert learned(load_examples, sources, chat) == [f"{ASKED}⟦Sure.<|im_end|>⟧\n"]
    assert load_prompts(sources, chat, RULES).items[0].text == "Hello"


@pytest.mark.parametrize("chat_style", [False, True])
def test_ultrafeedback(chat, chat_style, tmp_path):
    """Chosen and rejected are whole conversations, and the prompt is a text."""
    row = {"prompt": "Hello", "chosen": [USER, SURE], "rejected": [USER, NO], "score_chosen": 8.0}
    sources = replace(jsonl(tmp_path, [row]), shape=Shape(chat=chat_style))
    (pair,) = load_preferences(sources, chat, RULES).items
    assert marked(chat, pair.chosen) == f"{ASKED}⟦Sure.<|im_end|>⟧"
    assert marked(chat, pair.rejected) == f"{ASKED}⟦No.<|im_end|>⟧"
    more = {"prompt": "Hello", "chosen": [USER, NO, USER, SURE], "rejected": [USER, NO, USER, NO]}
    (tmp_path / "more").mkdir()
    (longer,) = load_preferences(jsonl(tmp_path / "more", [more]), chat, RULES).items
    assert marked(chat, longer.rejected) == f"{ASKED}No.<|im_end|>\n{ASKED}⟦No.<|im_end|>⟧"
    good, bad = load_unpaired(sources, chat, RULES).items
    assert (good.completion, good.label) == (pair.chosen, 1.0)
    assert (bad.completion, bad.label) == (pair.rejected, 0.0)


def test_a_prompt_of_messages_with_which_both_answers_begin(chat, tmp_path):
    system = {"role": "system", "content": "s"}
    row = {"prompt": [USER], "chosen": [USER, SURE], "rejected": [USER, NO]}
    plain = load_preferences(jsonl(tmp_path, [row]), chat, RULES).items
    short = {"prompt": [USER], "chosen": [SURE], "rejected": [NO]}
    assert plain == load_preferences(jsonl(tmp_path, [short]), chat, RULES).items
    whole = {
        "prompt": [system, USER],
        "chosen": [system, USER, SURE],
        "rejected": [system, USER, NO],
    }
    for asked in ([system, USER], [USER], "Hello"):  # the system of the answers is kept
        (pair,) = load_preferences(jsonl(tmp_path, [whole | {"prompt": asked}]), chat, RULES).items
        given = "<|im_start|>system\ns<|im_end|>\n" + ASKED
        assert marked(chat, pair.chosen) == f"{given}⟦Sure.<|im_end|>⟧"
        assert marked(chat, pair.rejected) == f"{given}⟦No.<|im_end|>⟧"
    sources = replace(jsonl(tmp_path, [row]), shape=Shape(system_prompt="s"))
    with_system = {"prompt": [system, USER], "chosen": [SURE], "rejected": [NO]}
    assert (
        load_preferences(sources, chat, RULES).items
        == load_preferences(jsonl(tmp_path, [with_system]), chat, RULES).items
    )


BYE = {"role": "user", "content": "Bye"}


@pytest.mark.parametrize(
    ("prompt", "before", "text"),
    [("Hello ", [], ASKED), ("Bye", [USER, SURE], f"{ASKED}Sure.<|im_end|>\n")],
)
def test_whole_conversations_hold_their_prompt(prompt, before, text, chat, tmp_path):
    """The prompt may be the last question, or lack a blank: it is not asked a second time."""
    asked = [*before, BYE if before else USER]
    row = {"prompt": prompt, "chosen": [*asked, SURE], "rejected": [*asked, NO]}
    (pair,) = load_preferences(jsonl(tmp_path, [row]), chat, RULES).items
    text += ASKED.replace("Hello", "Bye") if before else ""
    assert marked(chat, pair.rejected) == f"{text}⟦No.<|im_end|>⟧"


@pytest.mark.parametrize(
    ("load", "row"),
    [
        (load_preferences, {"prompt": [BYE], "chosen": [USER, SURE], "rejected": [USER, NO]}),
        (load_preferences, {"prompt": "Bye", "chosen": [USER, SURE], "rejected": [USER, NO]}),
        (load_examples, {"prompt": [USER], "completion": [USER, SURE]}),
    ],
)
def test_an_answer_that_asks_another_question_is_refused(load, row, chat, tmp_path):
    with pytest.raises(ValueError, match="a whole conversation that does not begin with the promp"):
        load(jsonl(tmp_path, [row]), chat, RULES)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, SURE]},
        {"messages": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Sure."}]},
        {"prompt": "Hello", "chosen": [USER, SURE], "rejected": [USER, NO]},
    ],
)
def test_the_system_of_a_row(row, chat, tmp_path):
    """ShareGPT's files have a column for it. A row's own counts before the run's."""
    load = load_preferences if "chosen" in row else load_examples
    for shape, own in (
        (Shape(), "s"),
        (Shape(system_prompt="x"), "s"),
        (Shape(system_prompt="s"), ""),
    ):
        (item,) = load(
            replace(jsonl(tmp_path, [row | {"system": own}]), shape=shape), chat, RULES
        ).items
        text = marked(chat, getattr(item, "chosen", item))
        assert text.rstrip() == f"<|im_start|>system\ns<|im_end|>\n{ASKED}⟦Sure.<|im_end|>⟧"
    if "chosen" in row:  # answers alone, to a text
        asked = row | {"prompt": "Hello", "chosen": [SURE], "rejected": [NO], "system": "s"}
        (item,) = load(jsonl(tmp_path, [asked]), chat, RULES).items
        assert (
            marked(chat, item.chosen)
            == f"<|im_start|>system\ns<|im_end|>\n{ASKED}⟦Sure.<|im_end|>⟧"
        )
    (tmp_path / "own").mkdir()
    said = {"from": "system", "value": "s"}
    shaped = replace(
        jsonl(tmp_path / "own", [{"messages": [said, USER, SURE]}]), shape=Shape(system_prompt="x")
    )
    assert learned(load_examples, shaped, chat)[0].count("system") == 1


def test_gsm8k_as_verl_writes_it(chat, tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "Hello"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0, "answer": "72", "question": None},
    }
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    (prompt,) = load_prompts(Sources(files=(f"{tmp_path}/train.parquet",)), chat, RULES).items
    assert (prompt.text, prompt.ground_truth) == (ASKED, "72")
    assert prompt.columns["extra_info"] == row["extra_info"]  # a null there stays


def test_kto_labels_are_numbers_too(tmp_path):
    rows = [
        {"prompt": "2+2=", "completion": "4", "label": 1},
        {"prompt": "2+2=", "completion": "", "label": 0},
    ]
    char = CharTokenizer()
    items = load_unpaired(jsonl(tmp_path, rows), char, RULES).items
    assert [(marked(char, x.completion), x.label) for x in items] == [
        ("2+2=⟦4<|eos|>⟧", 1.0),
        ("2+2=⟦<|eos|>⟧", 0.0),
    ]
    # For SFT a number is no judgement.
    assert len(load_examples(jsonl(tmp_path, rows[:1]), char, RULES).items) == 1


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        (
            {"messages": "conversations"},
            {
                "conversations": [
                    {"from": "human", "value": "Hello"},
                    {"from": "gpt", "value": "Sure."},
                ]
            },
            f"{ASKED}⟦Sure.<|im_end|>⟧\n",
        ),
        (
            {"prompt": "instruction+input", "completion": "output"},
            {"instruction": "Add.", "input": "2+2", "output": "4"},
            "Add.\n\n2+2⟦4<|im_end|>⟧",
        ),
        (
            {"prompt": "instruction+input", "completion": "output"},
            {"instruction": "Add 2+2.", "input": "", "output": "4"},
            "Add 2+2.⟦4<|im_end|>⟧",
        ),
    ],
)
def test_sharegpt_and_alpaca_by_a_key_that_the_message_names(
    columns, row, expected, chat, tmp_path
):
    sources = jsonl(tmp_path, [row])
    shaped = replace(sources, shape=Shape(columns=columns))
    assert learned(load_examples, shaped, chat) == [expected]
    names = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
    with pytest.raises(ValueError, match="config.data.columns=") as error:
        load_examples(sources, chat, RULES)
    assert "{" + names + "}" in str(error.value)


def test_an_unknown_role_of_sharegpt_is_named(chat, tmp_path):
    row = {"messages": [{"from": "narrator", "value": "x"}]}
    with pytest.raises(ValueError, match=r"messages\[0\].from holds 'narrator', .* human, user, g"):
        load_examples(jsonl(tmp_path, [row]), chat, RULES)


# ------------------------------------------------------------------------- nulls of Arrow


def tool(name, *parameters):
    schema = {"type": "object", "properties": {p: {"type": "string"} for p in parameters}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def calling(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


WEATHER = {"messages": [USER, calling("weather", city="Lima")], "tools": [tool("weather", "city")]}
ADD = {"messages": [USER, calling("add", a="1", b="2")], "tools": [tool("add", "a", "b")]}


def in_every_file(folder, rows):
    """Sources with the same rows: parquet, a saved data set, JSON lines."""
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, folder / "rows.parquet")
    (folder / "saved").mkdir(exist_ok=True)
    with (
        pa.OSFile(f"{folder}/saved/data.arrow", "wb") as out,
        pa.ipc.new_stream(out, table.schema) as w,
    ):
        w.write_table(table)
    (folder / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    files = [Sources(files=(f"{folder}/{name}",)) for name in ("rows.parquet", "saved")]
    return [*files, jsonl(folder, rows)]


def as_pair(row):
    answers = {"chosen": row["messages"][1:], "rejected": [NO]}
    return {"prompt": row["messages"][:1], "tools": row["tools"], **answers}


@pytest.mark.parametrize(
    ("load", "rows"),
    [
        (load_examples, [WEATHER, ADD]),
        (
            load_examples,
            [
                {
                    "prompt": row["messages"][:1],
                    "completion": row["messages"][1:],
                    "tools": row["tools"],
                }
                for row in (WEATHER, ADD)
            ],
        ),
        (load_preferences, [as_pair(WEATHER), as_pair(ADD)]),
        (load_unpaired, [as_pair(WEATHER), as_pair(ADD)]),
        (
            load_prompts,
            [
                {
                    "prompt": [*row["messages"], {"role": "tool", "content": "7"}],
                    "tools": row["tools"],
                }
                for row in (WEATHER, ADD)
            ],
        ),
    ],
)
def test_nulls_that_arrow_adds_reach_no_token(load, rows, chat, tmp_path):
    """A struct of Arrow has the keys of all rows: `a` and `b` of one tool, `city` of the other."""
    *arrow, lines = (load(s, chat, RULES).items for s in in_every_file(tmp_path, rows))
    for items in arrow:
        for item, expected in zip(items, lines, strict=True):
            if load is load_prompts:
                assert (item.token_ids, item.text) == (expected.token_ids, expected.text)
            else:
                assert without_source(item) == without_source(expected)


def without_source(item):
    """The tokens and masks of an item; the name of its file is another."""
    if hasattr(item, "token_ids"):
        return item.token_ids, item.loss_mask
    if hasattr(item, "label"):
        return without_source(item.completion), item.label
    return without_source(item.chosen), without_source(item.rejected)


def test_nulls_in_lists_and_in_json_text_stay(chat, tmp_path):
    schema = {"name": "f", "parameters": {"type": "object", "default": None, "enum": ["a", None]}}
    row = {"messages": [USER, SURE], "tools": json.dumps([schema])}
    for sources in in_every_file(tmp_path, [row]):
        assert '"default": null, "enum": ["a", null]' in learned(load_examples, sources, chat)[0]
    row = {"messages": [USER, SURE], "tools": [schema]}
    parquet_, saved, lines = (
        learned(load_examples, s, chat)[0] for s in in_every_file(tmp_path, [row])
    )
    assert '"default": null' in lines  # JSON says it
    assert parquet_ == saved and '"enum": ["a", null]' in saved and "default" not in saved


def test_rows_of_the_package_datasets(chat, tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([WEATHER, ADD])
    lines = load_examples(jsonl(tmp_path, [WEATHER, ADD]), chat, RULES).items
    rows = load_examples(Sources(rows=made), chat, RULES).items
    assert [r.token_ids for r in rows] == [line.token_ids for line in lines]
    made.save_to_disk(str(tmp_path / "saved"))
    rows = load_examples(Sources(files=(f"{tmp_path}/saved",)), chat, RULES).items
    assert [r.token_ids for r in rows] == [line.token_ids for line in lines]


# ------------------------------------------------------------------------- keys of rows


@pytest.mark.parametrize("key", ["weight", "train", "loss_mask"])
def test_turns_of_weight_0_are_not_learned(key, chat, tmp_path):
    """OpenAI's fine-tuning files have `weight`."""
    row = {"messages": [USER, SURE | {key: 0}, USER, NO | {key: 1}]}
    (text,) = learned(load_examples, jsonl(tmp_path, [row]), chat)
    assert text == f"{ASKED}Sure.<|im_end|>\n{ASKED}⟦No.<|im_end|>⟧\n"
    row = {"prompt": [USER], "completion": [SURE | {key: False}, USER, NO | {key: True}]}
    (text,) = learned(load_examples, jsonl(tmp_path, [row]), chat)
    assert text == f"{ASKED}Sure.<|im_end|>\n{ASKED}⟦No.<|im_end|>⟧"
    for value, message in ((0.5, "learned \\(1\\) or not"), (0, "no assistant turn to learn")):
        row = {"messages": [USER, SURE | {key: value}]}
        with pytest.raises(ValueError, match=message):
            load_examples(jsonl(tmp_path, [row]), chat, RULES)


@pytest.mark.parametrize("value", [{"brief": True}, '{"brief": true}'])
def test_variables_of_the_template_in_a_row(value, chat, tmp_path):
    """TRL's column, as an object or as JSON text."""
    rows = [{"messages": [USER, SURE]}, {"messages": [USER, SURE], "chat_template_kwargs": value}]
    plain, brief = learned(load_examples, jsonl(tmp_path, rows), chat)
    assert plain == f"{ASKED}⟦Sure.<|im_end|>⟧\n" and brief == "brief=True " + plain
    prompts = [{"prompt": [USER], "chat_template_kwargs": value}]
    assert (
        load_prompts(jsonl(tmp_path, prompts), chat, RULES).items[0].text == "brief=True " + ASKED
    )
    rows = [{"messages": [USER, SURE], "chat_template_kwargs": [1]}]
    with pytest.raises(ValueError, match="'chat_template_kwargs' holds list, not an object"):
        load_examples(jsonl(tmp_path, rows), chat, RULES)


def test_variables_of_other_rows_are_no_variables_of_this_one(tmp_path):
    """A struct of Arrow has a null for each. verl's files have a column for thinking."""
    names = ("brief", "enable_thinking")
    template = "".join(f"{{% if {n} is defined %}}{n}={{{{ {n} }}}} {{% endif %}}" for n in names)
    tokenizer = open_tokenizer(tmp_path / "t", template + templates.CHATML, CHATML)
    row = {"messages": [USER, SURE], "prompt": [USER], "enable_thinking": None}
    rows = [row | {"chat_template_kwargs": {name: True}} for name in names]
    rows += [row | {"enable_thinking": False}, row]
    starts = ["brief=True <", "enable_thinking=True <", "enable_thinking=False <", "<|"]
    for sources in in_every_file(tmp_path, rows):
        texts = learned(load_examples, sources, tokenizer)
        prompts = [x.text for x in load_prompts(sources, tokenizer, RULES).items]
        for text, prompt, start in zip(texts, prompts, starts, strict=True):
            assert text.startswith(start) and prompt.startswith(start)


def test_thinking_is_true_or_false(tmp_path):
    """A CSV holds texts, and numbers are not what a template compares with."""
    template = "{% if enable_thinking is false %}off {% endif %}" + templates.CHATML
    tokenizer = open_tokenizer(tmp_path / "t", template, CHATML)
    row = {"prompt": [USER], "enable_thinking": 0}
    assert load_prompts(jsonl(tmp_path, [row]), tokenizer, RULES).items[0].text.startswith("off <")
    with pytest.raises(ValueError, match="'enable_thinking' holds 'false', not true or false"):
        load_prompts(jsonl(tmp_path, [row | {"enable_thinking": "false"}]), tokenizer, RULES)


def test_the_older_form_of_a_call_is_refused(chat, tmp_path):
    """OpenAI's first files have it, and no template writes it."""
    said = {"role": "assistant", "content": "Let me see.", "function_call": {"name": "f"}}
    with pytest.raises(ValueError, match=r"messages\[1\] has a function_call: write it as tool_ca"):
        load_examples(jsonl(tmp_path, [{"messages": [USER, said]}]), chat, RULES)


def test_text_parts_are_joined_and_others_are_named(chat, tmp_path):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    said = {"role": "assistant", "content": [{"type": "text", "text": "Sure."}]}
    row = {"messages": [{"role": "user", "content": parts}, said]}
    for sources in in_every_file(tmp_path, [row]):
        assert learned(load_examples, sources, chat) == [f"{ASKED}⟦Sure.<|im_end|>⟧\n"]
    row = {"prompt": [{"role": "user", "content": [*parts, {"type": "image", "url": "x"}]}]}
    with pytest.raises(ValueError, match=r"prompt\[0\].content\[2\] is of type image"):
        load_prompts(jsonl(tmp_path, [row]), chat, RULES)


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_images_are_refused(streaming, chat, tmp_path):
    row = {"messages": [USER, SURE], "images": ["x.png"]}
    for sources in in_every_file(tmp_path, [row]):
        with pytest.raises(ValueError, match="column 'images' is filled"):
            load_examples(sources, chat, replace(RULES, streaming=streaming))
    assert load_examples(jsonl(tmp_path, [row | {"images": []}]), chat, RULES).items


def test_tools_that_a_template_does_not_read_are_told(tmp_path, caplog):
    tokenizer = open_tokenizer(tmp_path / "t", templates.CHATML, CHATML)
    load_examples(
        jsonl(tmp_path, [{"messages": [USER, SURE], "tools": [tool("f")]}] * 3), tokenizer, RULES
    )
    told = [
        r.getMessage() for r in caplog.records if "column 'tools' has no effect" in r.getMessage()
    ]
    assert len(told) == 1


@pytest.mark.parametrize("load", [load_prompts, load_examples])
def test_tools_of_a_text_are_refused(load, chat, tmp_path):
    row = {"prompt": "Hello", "completion": "Sure.", "tools": [tool("f")]}
    sources = jsonl(tmp_path, [row])
    with pytest.raises(ValueError, match="column 'tools' needs a prompt of messages"):
        load(sources, chat, RULES)
    assert load(replace(sources, shape=Shape(chat=True)), chat, RULES).items


def test_one_bos_where_the_text_has_it_already(tmp_path):
    """A prompt, a pair and a text that a user's template wrote."""
    folder = write_tokenizer(tmp_path / "t", templates.CHATML, CHATML)
    config = json.loads((folder / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    config["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [token_id(config, BOS)], "tokens": [BOS]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_id == token_id(config, BOS)
    for start in ("", BOS):
        prompts = load_prompts(jsonl(tmp_path, [{"prompt": f"{start}hi"}]), tokenizer, RULES).items
        assert tokenizer.decode(prompts[0].token_ids, skip_special=False) == f"{BOS}hi"
        row = {"prompt": f"{start}hi", "completion": "yes"}
        assert learned(load_examples, jsonl(tmp_path, [row]), tokenizer) == [f"{BOS}hi⟦yes{EOS}⟧"]
        row = {"text": f"{start}hi"}
        assert learned(load_examples, jsonl(tmp_path, [row]), tokenizer) == [f"{BOS}⟦hi{EOS}⟧"]
        row = {"prompt": f"{start}hi", "chosen": "yes", "rejected": "no"}
        (pair,) = load_preferences(jsonl(tmp_path, [row]), tokenizer, RULES).items
        assert marked(tokenizer, pair.rejected) == f"{BOS}hi⟦no{EOS}⟧"


def token_id(config, token):
    return next(x["id"] for x in config["added_tokens"] if x["content"] == token)


# ------------------------------------------------------------------------- rows that become several


def test_a_turn_is_a_row_where_the_template_drops_thinking(tmp_path):
    tokenizer = open_tokenizer(tmp_path / "t", templates.QWEN3, CHATML)
    why = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nSure."}
    sources = jsonl(tmp_path, [{"messages": [USER, why, USER, why]}])
    assert len(learned(load_examples, sources, tokenizer)) == 2
    kept = learned(load_examples, sources, tokenizer, replace(RULES, keep_thinking=True))
    assert len(kept) == 1 and kept[0].count("⟦<think>\nwhy") == 2
    with pytest.raises(ValueError, match="keep_thinking=true"):
        load_examples(sources, tokenizer, replace(RULES, streaming=True))
    streamed = replace(RULES, streaming=True, keep_thinking=True)
    assert learned(load_examples, sources, tokenizer, streamed) == kept


def test_labelled_rows_keep_their_order_without_a_shuffle(tmp_path):
    rows = [{"prompt": f"{i}+1=", "completion": str(i), "label": True} for i in range(20)]
    files = jsonl(tmp_path, rows).files

    def order(shuffle):
        config = Config(data=DataConfig(shuffle=shuffle, max_prompt_length=9))
        records = load_records(config, Sources(files=files), "unpaired", CharTokenizer(), None)
        return [record.rows["completion"].row for record in records]

    assert order(False) == list(range(20)) != order(True)
    rows = [{"prompt": f"{i}+1=", "chosen": "1", "rejected": "2"} for i in range(3)]
    files = jsonl(tmp_path, rows).files
    assert order(False) == [0, 1, 2, 0, 1, 2]  # no neighbours have one prompt


def test_an_answer_that_continues_a_message_is_refused(chat, tmp_path):
    """The template would write a second message of the assistant."""
    row = {"prompt": [USER, {"role": "assistant", "content": "It"}], "completion": " is."}
    with pytest.raises(ValueError, match="the prompt ends in a message of the assistant"):
        load_examples(jsonl(tmp_path, [row]), chat, RULES)


def test_a_tokenizer_that_has_tried_its_template_can_be_sent_to_a_worker(chat):
    chat.turns([tool("f")]).end(calls=True)
    copy = pickle.loads(pickle.dumps(chat))
    assert copy.turns().prompt([USER]) == chat.turns().prompt([USER]) and copy.stop_ids
