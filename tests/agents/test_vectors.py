"""Whole conversations in token ids, recorded with SmolLM2's and Qwen3's own tokenizers."""

import pytest
import turn_templates as templates
from turn_tokenizers import open_tokenizer
from turn_vectors import CHATML, Recorded, recorded

from jaxrl_llm.agents.conversation import Act, Append, Budgets, Conversation, End
from jaxrl_llm.agents.environments import Step
from jaxrl_llm.agents.styles import ChatStyle
from jaxrl_llm.agents.tools import Result
from jaxrl_llm.turns import Turns

CASES = {
    "smollm2_retry": templates.SMOLLM2,
    "smollm2_split": templates.SMOLLM2,
    "smollm2_tool_role": templates.SMOLLM2,
    "smollm2_truncated": templates.SMOLLM2,
    "qwen3_instruct_2507_two_calls": templates.QWEN3_2507,
    "qwen3_training_two_calls": templates.QWEN3_KEPT,
    "qwen3_think_stripped": templates.QWEN3_KEPT,
}
STRIPPING = templates.QWEN3.replace(
    "m.content.split('</think>')[0] if '</think>' in m.content else ''", "m.reasoning_content or ''"
)
OTHER = 10**6  # first of the ids that stand for texts outside of the records
TAGS = {"<tool_call>": 151657, "</tool_call>": 151658, "<think>": 151667, "</think>": 151668}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


class Whole(Recorded):
    """Knows the recorded texts, also behind a list of tools; other texts have ids of their own."""

    def __init__(self, case, folder, template):
        super().__init__(case, folder, template)
        self.template_text = template
        self.stop_ids = self.model_stop_ids
        known = {i for ids in case["encodings"].values() for i in ids} | set(case["ids"])
        self.added_tokens |= {tag: (i, False) for tag, i in TAGS.items() if i in known}
        self.others = []

    def turns(self, tools=None, variables=None):
        return Turns(self, tools, variables)

    def encode(self, text):
        if text in self._case["encodings"]:
            return self._case["encodings"][text]
        self.others.append(text)
        return [OTHER + len(self.others) - 1]

    def encode_parts(self, text, places):
        full = next((t for t in self._case["encodings"] if text.endswith(t)), None)
        if full is None or text[places[0] :] not in full:
            return [self.encode(text[: places[0]]), self.encode(text[places[0] :])]
        ids = self._case["encodings"][full]
        cut = next(
            n
            for n in range(len(ids))
            if self.decode(ids[n:], skip_special=False) == text[places[0] :]
        )
        return [ids[:cut], ids[cut:]]

    def decode(self, ids, *, skip_special=True):
        return "".join(
            self.others[i - OTHER] if i >= OTHER else self._texts.get(i, "?")
            for i in ids
            if i not in self.stop_ids or not skip_special
        )


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_has_the_recorded_ids(name, tmp_path):
    case = recorded(name)
    tokenizer = Whole(case, tmp_path, CASES[name])
    is_tool = any(
        "role" in m and m["role"] == "tool" for m in case["turns"][0].get("new_messages", ())
    )
    tools = (case["tools"] or [ADD]) if is_tool else []
    style = ChatStyle(tokenizer, tools)
    conversation = Conversation(
        tokenizer,
        style,
        Budgets(max_response_length=200, max_context=1000),
        {"add": ADD} if is_tool else {},
        steps=not is_tool,
    )
    if name == "smollm2_tool_role":  # its system message names the tool in words of its own
        conversation.prompt = list(case["prompt_ids"])
    else:
        begun = conversation.start(case["first_messages"], case["prompt_ids"])
        assert isinstance(begun, Append) and begun.ids == case["prompt_ids"]
    for turn in case["turns"]:
        cut = "new_messages" not in turn and len(case["turns"]) == 1
        act = conversation.turn(turn["sampled_ids"], "length" if cut else "stop")
        if "new_messages" not in turn:
            continue
        assert isinstance(act, Act)
        if is_tool:
            assert len(act.calls) == len(turn["new_messages"])
            results = [Result(message["content"]) for message in turn["new_messages"]]
            appended = conversation.observe(results)
        else:
            appended = conversation.observe_step(Step(list(turn["new_messages"])))
        assert isinstance(appended, Append) and appended.ids == turn["suffix_ids"]
    assert conversation.prompt + conversation.response == case["ids"]
    assert [0] * len(conversation.prompt) + conversation.mask == case["mask"]
    offset = len(conversation.prompt)
    spans = [[turn.start + offset, turn.end + offset] for turn in conversation.turns]
    assert spans == case["sampled_spans"]
    if cut:
        assert act == End("max_turn_tokens")
        return
    if is_tool:
        assert act == End("completed")
    if name == "smollm2_tool_role":  # the template has no calls
        assert conversation.drift() is None
    else:
        if name == "qwen3_think_stripped":  # rendered again by the template that drops thinking
            folder = tmp_path / "stripping"
            folder.mkdir()
            renderer = open_tokenizer(folder, STRIPPING, CHATML)
            tokenizer.apply_chat_template = renderer.apply_chat_template
        check_drift(case, tokenizer, conversation)


def check_drift(case, tokenizer, conversation):
    """The text of the whole conversation is the recorded one, and so is its drift."""
    recorded_again = case["rerender"]
    text = tokenizer.decode(recorded_again["ids"], skip_special=False)
    case["encodings"][text] = recorded_again["ids"]
    before = len(tokenizer.others)
    drift = conversation.drift()
    assert drift is not None and len(tokenizer.others) == before
    assert drift.tokens == recorded_again["drift_tokens"]
    shared = recorded_again["common_prefix"]
    assert drift.drifted == sum(end > shared for _, end in case["sampled_spans"])
    assert drift.turns == len(case["turns"])
