"""Calls of each family, written out by hand as the models write them."""

import json

import pytest
from turn_tokenizers import EOS, open_tokenizer

from jaxrl_llm.agents.tool_calls import ToolCallParser, find_family
from jaxrl_llm.tokenizer import CharTokenizer

BAR, DS = "\uff5c", "\u2581"


def deepseek(words):
    return f"<{BAR}tool{DS}{words.replace(' ', DS)}{BAR}>"


SPECIAL = [
    *("<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|tool_call|>", "<|/tool_call|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|observation|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
    *("<|return|>", "<|python_tag|>", "<|eot_id|>", "<|im_end|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_response>"),
    *map(deepseek, ("calls begin", "calls end", "call begin", "sep", "call end")),
]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": ["integer", "string"]},
                "exact": {"type": "boolean"},
                "note": {"type": "string"},
                "items": {"type": "array"},
            }
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(tmp_path_factory.mktemp("t"), "{{ messages }}", SPECIAL)


def parse(tokenizer, family, text, **options):
    parser = ToolCallParser(tokenizer, [ADD], family)
    return parser.parse(tokenizer.encode(text), **options)


B, C, E = (deepseek(words) for words in ("calls begin", "call begin", "call end"))
SEP, END = deepseek("sep"), deepseek("calls end")
V3 = f'{C}function{SEP}add\n```json\n{{"a": 17}}\n```{E}'
V31 = f'{C}add{SEP}{{"a": 17}}{E}'
XML = "<tool_call>\n<function=add>\n{}</function>\n</tool_call>"
# family, answer, content, thinking, [(name, arguments)]
RIGHT = {
    "hermes": (
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 17,  "b": 25}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>',
        *("I add.", "", [("add", '{"a": 17,  "b": 25}'), ("add", "{}")]),
    ),
    "hermes with thinking": (
        '<think>\n<tool_call>{"name": "sub"}</tool_call>\n</think>\n\n'
        '<tool_call>{"arguments": {"a": "<b>"}, "name": "add"}</tool_call><|im_end|>',
        "",
        '<tool_call>{"name": "sub"}</tool_call>',
        [("add", '{"a": "<b>"}')],
    ),
    "hermes without calls": ("It is 42.<|im_end|>", "It is 42.", "", []),
    "hermes, arguments as text": (
        r'<tool_call>{"name": "add", "arguments": "{\"a\": 1}"}</tool_call>',
        *("", "", [("add", '{"a": 1}')]),
    ),
    "qwen3_coder": (
        "So:\n"
        + XML.format(
            "<parameter=a>\n17\n</parameter>\n<parameter=b>\nx\n\ny\n</parameter>\n"
            "<parameter=exact>\nTrue\n</parameter>\n<parameter=note>\n5\n</parameter>\n"
            '<parameter=items>\n[1, "2"]\n</parameter>\n'
        )
        + "<|im_end|>",
        *("So:", ""),
        [("add", '{"a": 17, "b": "x\\n\\ny", "exact": true, "note": "5", "items": [1, "2"]}')],
    ),
    "qwen3_coder, no parameters": (XML.format(""), "", "", [("add", "{}")]),
    "qwen3_coder, unreadable": (
        XML.format("<parameter=exact>\nmaybe\n</parameter>\n"),
        *("", "", [("add", '{"exact": "maybe"}')]),
    ),
    "glm": (
        "<think></think>\nI add.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>17</arg_value>\n"
        "<arg_key>note</arg_key>\n<arg_value>a b</arg_value>\n</tool_call><|observation|>",
        *("I add.", "", [("add", '{"a": 17, "note": "a b"}')]),
    ),
    "llama3": (
        '{"name": "add", "parameters": {"a": 17}}<|eot_id|>',
        *("", "", [("add", '{"a": 17}')]),
    ),
    "llama3, built in": (
        '<|python_tag|>search.call(query="a \\"b\\" c")<|eot_id|>',
        *("", "", [("search", '{"query": "a \\"b\\" c"}')]),
    ),
    "llama3, an answer in JSON": (
        '{"name": "Ann", "age": 3}<|eot_id|>',
        '{"name": "Ann", "age": 3}',
        "",
        [],
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 17}, "id": "abcdefgh1"}, '
        '{"name": "add", "arguments": {"a": 2}, "id": "abcdefgh2"}]<eos>',
        *("", "", [("add", '{"a": 17}', "abcdefgh1"), ("add", '{"a": 2}', "abcdefgh2")]),
    ),
    "mistral since v11": (
        'Now.[TOOL_CALLS]add[CALL_ID]abcdefgh1[ARGS]{"a": 17}[TOOL_CALLS]add[ARGS]{"a": 2}<eos>',
        *("Now.", "", [("add", '{"a": 17}', "abcdefgh1"), ("add", '{"a": 2}')]),
    ),
    "deepseek": (
        f"Well.{B}{V3}\n{V3}{END}<eos>",
        "Well.",
        "",
        [("add", '{"a": 17}'), ("add", '{"a": 17}')],
    ),
    "deepseek since v3.1": (f"{B}{V31}{V31}{END}<eos>", "", "", [("add", '{"a": 17}')] * 2),
    "gpt_oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 17}<|call|>',
        *("I add.", "Hm.", [("add", '{"a": 17}')]),
    ),
    "gpt_oss, recipient first": (
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 17}<|call|>',
        *("", "", [("add", '{"a": 17}')]),
    ),
    "gpt_oss, answer": (
        "<|channel|>analysis<|message|>Hm. to=functions.add<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is 42.<|return|>",
        *("It is 42.", "Hm. to=functions.add", []),
    ),
    "gemma4": (
        "<|channel>thought\nHm.\n<channel|>So.<|tool_call>call:add{a:17,items:[1,"
        '{k:<|"|>}, x<|"|>}],'
        'note:<|"|>a, {b}<|"|>,exact:true}<tool_call|>',
        *("So.", "Hm."),
        [("add", '{"a": 17, "items": [1, {"k": "}, x"}], "note": "a, {b}", "exact": true}')],
    ),
    "lfm2": (
        '<|tool_call_start|>[add(a=17, note="x, y)", exact=true), add(items=[1, {"k": null}])]'
        "<|tool_call_end|>So.<|im_end|>",
        *("So.", ""),
        [
            ("add", '{"a": 17, "note": "x, y)", "exact": true}'),
            ("add", '{"items": [1, {"k": null}]}'),
        ],
    ),
    "phi4": (
        '<|tool_call|>[{"name": "add", "arguments": {"a": 17}}]<|/tool_call|>',
        *("", "", [("add", '{"a": 17}')]),
    ),
    "plain": ('{"name": "add", "arguments": {"a": 17}}', "", "", [("add", '{"a": 17}')]),
    "plain fence": (
        'So:\n```json\n{"name": "add", "parameters": {"a": 17}}\n```\nand\n```json\n{"b": 1}\n```',
        *('So:\n\nand\n```json\n{"b": 1}\n```', "", [("add", '{"a": 17}')]),
    ),
    "plain list in a text that spells the tags": (
        '<tool_call>[{"name": "add", "arguments": {"a": 17}}]</tool_call>',
        *("", "", [("add", '{"a": 17}')]),
    ),
}


def family_of(case):
    return case.replace(",", " ").split()[0]


@pytest.mark.parametrize("case", RIGHT)
def test_calls_that_can_be_run(tokenizer, case):
    text, content, thinking, calls = RIGHT[case]
    parsed = parse(tokenizer, family_of(case), text)
    assert (parsed.content, parsed.thinking) == (content, thinking)
    assert [(c.status, c.problem) for c in parsed.calls] == [("ok", "")] * len(calls)
    got = [(c.name, c.arguments, *([c.id] if c.id else [])) for c in parsed.calls]
    assert got == calls
    assert [c.values for c in parsed.calls] == [json.loads(call[1]) for call in calls]


WRONG = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>', "invalid_json",
     "add"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "invalid_json",
     "add"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "invalid_json", ""),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', "missing_name", ""),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "malformed_structure",
     "add"),
    ("hermes", "<tool_call>17</tool_call>", "malformed_structure", ""),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}<|im_end|>', "unclosed_block", "add"),
    ("qwen3_coder", "<tool_call>\nadd(17)\n</tool_call>", "malformed_structure", ""),
    ("qwen3_coder", XML.format("<parameter=a>\n17\n"), "malformed_structure", "add"),
    ("qwen3_coder", "<tool_call>\n<function=add>\n</tool_call>", "unclosed_block", "add"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n17\n</tool_call>", "malformed_structure", "add"),
    ("glm", "<tool_call>add<|observation|>", "unclosed_block", "add"),
    ("llama3", '{"name": "add", "parameters": {"a": 1}', "unclosed_block", "add"),
    ("llama3", '{"name": "add", "parameters": {"a": b}}', "invalid_json", "add"),
    ("llama3", "<|python_tag|>import os", "invalid_json", ""),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}', "unclosed_block", "add"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1', "unclosed_block", "add"),
    ("deepseek", f"{B}{C}function{SEP}add\n```json\n{{1}}\n```{E}{END}", "invalid_json", "add"),
    ("deepseek", f"{B}{C}function{SEP}add\n```json\n{{}}\n```{END}", "unclosed_block", "add"),
    ("deepseek", f"{B}add(17){END}", "malformed_structure", ""),
    ("gpt_oss", "<|channel|>commentary to=functions.add json<|message|>{}", "unclosed_block",
     "add"),
    ("gpt_oss", "<|channel|>commentary to=functions.add json<|message|>a<|call|>", "invalid_json",
     "add"),
    ("gemma4", "<|tool_call>add(17)<tool_call|>", "malformed_structure", ""),
    ("gemma4", '<|tool_call>call:add{a:<|"|>x}<tool_call|>', "malformed_structure", "add"),
    ("gemma4", "<|tool_call>call:add{}<eos>", "unclosed_block", "add"),
    ("gemma4", "<|tool_call>call:{}<tool_call|>", "missing_name", ""),
    ("lfm2", "<|tool_call_start|>[add(17)]<|tool_call_end|>", "malformed_structure", "add"),
    ("lfm2", "<|tool_call_start|>[add(a=b)]<|tool_call_end|>", "malformed_structure", "add"),
    ("lfm2", "<|tool_call_start|>[add(a=1<|tool_call_end|>", "malformed_structure", "add"),
    ("lfm2", "<|tool_call_start|>[add(a=1)]<|im_end|>", "unclosed_block", "add"),
    ("plain", '```json\n{"name": "add", "arguments": {"a": }}\n```', "invalid_json", "add"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "status", "name"), WRONG)
def test_calls_that_cannot_be_run_say_why(tokenizer, family, text, status, name):
    (call,) = parse(tokenizer, family, text).calls
    assert (call.status, call.name) == (status, name)
    assert call.problem


def test_a_text_that_spells_a_delimiter_is_no_call(tokenizer):
    """The same answer as single characters: nothing in it is a delimiter."""
    text = RIGHT["hermes"][0].removesuffix("<|im_end|>")
    ids = [i for character in text for i in tokenizer.encode(character)]
    parsed = ToolCallParser(tokenizer, family="hermes").parse(ids)
    assert (parsed.content, parsed.calls) == (text, ())


def test_a_text_that_spells_a_delimiter_stays_in_an_argument(tokenizer):
    ids = tokenizer.encode('<tool_call>{"name": "add", "arguments": {"a": "')
    ids += [i for character in "</tool_call>" for i in tokenizer.encode(character)]
    ids += tokenizer.encode('"}}</tool_call>')
    (call,) = ToolCallParser(tokenizer, family="hermes").parse(ids).calls
    assert call.values == {"a": "</tool_call>"}


@pytest.mark.parametrize("opened", [False, True])
def test_thinking_that_the_prompt_opened(tokenizer, opened):
    """Its end alone shows it too; without an end all of the answer is thinking."""
    text = '<tool_call>{"name": "add"}</tool_call></think>Hello<|im_end|>'
    parsed = parse(tokenizer, "hermes", text, thinking=opened)
    assert (parsed.content, parsed.calls) == ("Hello", ())
    parsed = parse(tokenizer, "hermes", text.replace("</think>", ""), thinking=opened)
    assert len(parsed.calls) == 1 - opened and parsed.content == "Hello" * (1 - opened)


def test_a_prompt_opens_thinking(tokenizer):
    parser = ToolCallParser(tokenizer, family="hermes")
    ends = {"<think>\n": True, "<think>\n\n</think>\n\n": False, "assistant\n": False}
    assert {end: parser.opens_thinking(tokenizer.encode(end)) for end in ends} == ends


def test_characters_have_plain_calls():
    tokenizer = CharTokenizer()
    parser = ToolCallParser(tokenizer)
    ids = [*tokenizer.encode('{"name": "add", "arguments": {"a": 1}}'), tokenizer.eos_id]
    assert parser.family == "plain"
    assert [(c.name, c.values) for c in parser.parse(ids).calls] == [("add", {"a": 1})]
    assert parser.parse(tokenizer.encode("[37*48]")).content == "[37*48]"


def test_a_family_by_tokens_where_the_template_shows_none(tokenizer, tmp_path):
    assert find_family(tokenizer) == "gpt_oss"  # the first sign among its tokens
    assert find_family(open_tokenizer(tmp_path, "{{ messages }}", [EOS])) == "hermes"
    with pytest.raises(ValueError, match="no family 'herms' of tool calls; did you mean 'hermes'"):
        ToolCallParser(tokenizer, family="herms")
