"""/v1/responses with OpenAI's real client, against chat completions of the same conversation."""

import openai
import pytest
from server.test_protocol import END, IDS, chat, hermes, serving, tokenizer

__all__ = ["hermes", "tokenizer"]  # fixtures
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
OF_CHATS = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def respond(client, **changes):
    return client.responses.create(**({"model": "m", "input": "hi"} | changes))


def streamed(client, **changes):
    """The events of a stream; their numbers count, and what is added ends."""
    events = list(respond(client, stream=True, **changes))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    added = [e.output_index for e in events if e.type == "response.output_item.added"]
    done = [e.output_index for e in events if e.type == "response.output_item.done"]
    assert added == done == list(range(len(added)))
    return events


def test_a_text(tokenizer):
    with serving(tokenizer) as here:
        reply = respond(
            here.client,
            instructions="Be brief.",
            include=["message.output_text.logprobs"],
            extra_body=IDS,
        )
        said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        other = chat(here.client, messages=said, extra_body=IDS)
    assert (reply.output_text, reply.status, reply.object) == ("hello", "completed", "response")
    assert (reply.prompt_token_ids, reply.token_ids) == (
        other.prompt_token_ids, other.choices[0].token_ids,
    )  # fmt: skip
    usage = reply.usage
    assert (usage.input_tokens, usage.output_tokens) == (other.usage.prompt_tokens, 6)
    (message,) = reply.output
    assert [x.token for x in message.content[0].logprobs] == [*"hello", "<|im_end|>"]
    assert (reply.temperature, reply.top_p, reply.tools) == (1.0, 1.0, [])


def test_an_answer_that_is_cut(tokenizer):
    with serving(tokenizer, "hello there") as here:
        reply = respond(here.client, max_output_tokens=5)
        events = streamed(here.client, max_output_tokens=5)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output_text == "hello" and reply.output[0].status == "incomplete"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "hello"


def test_items_are_the_messages_of_a_chat(hermes):
    """Two turns with calls: the second prompt has the ids of the same chat."""
    answers = iter(["<think>so</think>Yes. " + CALL + "\n" + CALL, "3"])

    def answer(prompt, key):
        return [*hermes.encode(next(answers)), END]

    with serving(hermes, answer) as here:
        items = [{"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]}]
        first = respond(here.client, input=items, tools=[TOOL], extra_body=IDS)
        assert [item.type for item in first.output][-2:] == ["function_call"] * 2
        calls = [item for item in first.output if item.type == "function_call"]
        assert [call.arguments for call in calls] == ['{"a": 1, "b": 2}'] * 2
        items += first.output
        for call in calls:
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
            items.append(result)
        second = respond(here.client, input=items, tools=[TOOL], extra_body=IDS)
        texts = [item for item in first.output if item.type == "message"]
        thoughts = [item for item in first.output if item.type == "reasoning"]
        message = {
            "role": "assistant",
            "content": texts[0].content[0].text if texts else "",
            "tool_calls": [
                {"id": c.call_id, "type": "function",
                 "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ],
        }  # fmt: skip
        if thoughts:
            message["reasoning_content"] = thoughts[0].content[0].text
        messages = [{"role": "user", "content": "1+2?"}, message]
        messages += [{"role": "tool", "tool_call_id": c.call_id, "content": "3"} for c in calls]
        answers = iter(["3"])
        other = chat(here.client, messages=messages, tools=[OF_CHATS], extra_body=IDS)
    assert second.output_text == "3"
    assert second.prompt_token_ids == other.prompt_token_ids
    assert first.tools[0].name == "add"


@pytest.mark.parametrize("text", ["hello you", "Yes. " + CALL, CALL + "\n" + CALL, "  " + CALL, ""])
def test_a_stream_ends_in_the_response_that_is_no_stream(hermes, text):
    with serving(hermes, lambda prompt, key: [*hermes.encode(text), END]) as here:
        whole = respond(here.client, tools=[TOOL])
        events = streamed(here.client, tools=[TOOL])
        with here.client.responses.stream(model="m", input="hi", tools=[TOOL]) as stream:
            helped = stream.until_done().get_final_response()
    last = events[-1]
    assert last.type == "response.completed"
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text
    calls = [x for x in whole.output if x.type == "function_call"]
    kinds = [item.type for item in whole.output]
    if text.startswith("  "):  # a stream sends blanks before it knows that a call follows
        kinds = ["message", *kinds]
    for found in (last.response, helped):
        assert [item.type for item in found.output] == kinds
        assert found.output_text.strip() == whole.output_text.strip()
        own = [x for x in found.output if x.type == "function_call"]
        assert [(x.name, x.arguments) for x in own] == [(x.name, x.arguments) for x in calls]
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [e.arguments for e in done] == [x.arguments for x in calls]
    if text == "hello you":
        assert len(deltas) > 1  # it comes as it is sampled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"previous_response_id": "resp_1"}, "body.previous_response_id .* send all items"),
        ({"reasoning": {"effort": "low"}}, "body.reasoning is not supported"),
        ({"text": {"format": {"type": "json_object"}}}, "body.text.format"),
        ({"tools": [{"type": "web_search"}]}, "the type 'web_search'"),
        ({"tool_choice": "required"}, "body.tool_choice='required'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "the type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ({"input": [{"role": "user"}]}, "not well formed: KeyError"),
        ({"include": ["file_search_call.results"]}, "'file_search_call.results'"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_what_is_refused(tokenizer, changes, message):
    with serving(tokenizer) as here, pytest.raises(openai.BadRequestError, match=message):
        respond(here.client, **changes)


def test_what_changes_no_answer(tokenizer):
    with serving(tokenizer) as here:
        reply = respond(
            here.client, store=False, truncation="auto", parallel_tool_calls=True, user="me",
            metadata={"a": "b"}, include=["reasoning.encrypted_content"], temperature=0.5,
            text={"format": {"type": "text"}}, reasoning=None, input=[
                {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"},
            ],
        )  # fmt: skip
        assert reply.output_text == "hello" and reply.temperature == 0.5
        assert here.engine.added[-1].sampling.temperature == 0.5
