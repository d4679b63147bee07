"""Runs of a chat model with tools: the ids of a conversation, its results and its rewards.

A model of random weights calls tools because its vocabulary has tokens that are whole calls.
"""

import json

import pytest
from chat_tokenizer import write_chat_tokenizer
from trainer.test_conversing import SIZES, metrics
from turn_templates import TOOLS

import jaxrl_llm as rl
from jaxrl_llm.report.conversations import conversation
from jaxrl_llm.tokenizer import load_tokenizer

CALLS = [
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {i}, "b": 1}}}}\n</tool_call>'
    for i in range(300)
]
CALLS += ['<tool_call>\n{"name": "add", "arguments": {"a": "x", "b": 1}}\n</tool_call>']
ROWS = [{"prompt": [{"role": "user", "content": f"What is {a}+1?"}]} for a in range(8)]
TOOL = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


def columns(completions, messages, num_turns, stop_reason, num_tool_calls):
    assert {m[0]["role"] for m in messages} <= {"system", "user"}
    ends = {"completed": 0.5, "max_tokens": 0.25}
    return [
        10 * turns + sum(m["role"] == "tool" for m in own) + ends.get(reason, 0.0)
        for own, turns, reason in zip(messages, num_turns, stop_reason)
    ]
'''


def write_tokenizer(folder):
    """A tokenizer with tokens that are whole calls; text is never encoded to them."""
    write_chat_tokenizer(folder, template=TOOLS)
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    vocabulary = stored["model"]["vocab"]
    for call in CALLS:
        vocabulary[call] = len(vocabulary)
    file.write_text(json.dumps(stored))
    return folder


def keys_of(folder, path):
    tokenizer = load_tokenizer(str(path))
    letters = [tokenizer.encode(chr(code))[0] for code in range(ord("A"), ord("z") + 1)]
    return SIZES | {
        "run_dir": str(folder),
        "data.tokenizer": str(path),
        "data.max_prompt_length": 700,
        "data.max_response_length": 240,
        "actor.hf_config.max_position_embeddings": 1024,
        "rollout.stop_token_ids": letters,
        "rollout.max_turns": 4,
        "total_steps": 1,
    }


@pytest.mark.nightly  # plain: calls of templates in agents/, runs of turns in test_conversing.py
@pytest.mark.parametrize("given", ["path", pytest.param("object", marks=pytest.mark.slow)])
def test_a_chat_model_calls_tools_and_reads_results(tmp_path, given):
    path, file = write_tokenizer(tmp_path / "tokenizer"), tmp_path / "tools.py"
    file.write_text(TOOL)
    rewards = [f"{file}:columns"]
    keys = keys_of(tmp_path / "run", path)
    if given == "path":
        keys |= {"rollout.tools": [f"{file}:add"], "reward.functions": rewards}
        rl.train(rl.load_config("grpo", keys), train_data=ROWS)
    else:
        keys |= {"reward.functions": rewards}
        rl.train(rl.load_config("grpo", keys), tools=[add], train_data=ROWS)

    tokenizer = load_tokenizer(str(path))
    from transformers.utils import get_json_schema

    turns = tokenizer.turns([get_json_schema(add)])
    lines = [x for f in (tmp_path / "run" / "trace").glob("train*") for x in f.open()]
    samples = [json.loads(line) for line in lines]
    answered = 0
    for sample in samples:
        extras = sample["extras"]
        messages, spans, ids = extras["messages"], extras["turns"], sample["tokens"]
        first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        assert sample["prompt_ids"] == tokenizer.encode(turns.prompt(messages[:first]))
        groups, own = [], []
        for message in messages[first:]:
            if message["role"] == "assistant":
                groups.append((message, own := []))
            else:
                own.append(message)
        assert len(groups) == len(spans)
        shown = conversation(extras, str)["messages"]
        assert [m["text"] for m in shown if m["kind"] == "sampled"] == [
            said["content"] for said, _ in groups
        ]
        observed = sum(m.get("tokens", 0) for m in shown if m["kind"] == "observed")
        assert observed + sum(m.get("tokens", 0) for m in shown if "turn" in m) == len(ids)
        for number, (said, results) in enumerate(groups):
            start, end = spans[number]["start"], spans[number]["end"]
            calls = said.get("tool_calls", [])
            text = tokenizer.decode(ids[start:end])
            assert len(calls) == text.count("<tool_call>")
            if number + 1 == len(spans):
                assert not results
                continue
            names = [call["function"]["name"] for call in calls]
            suffix = turns.suffix(results, calls=names, sampled_stop=ids[end - 1])
            assert ids[end : spans[number + 1]["start"]] == suffix
            for call, result in zip(calls, results, strict=True):
                arguments = json.loads(call["function"]["arguments"])
                right = str(arguments["a"]) != "x"
                wanted = str(arguments["a"] + arguments["b"]) if right else "error"
                assert wanted == result["content"] if right else wanted in result["content"]
                answered += right
        ends = {"completed": 0.5, "max_tokens": 0.25}.get(extras["stop_reason"], 0.0)
        results = sum(m["role"] == "tool" for m in messages)
        assert sample["score"] == 10 * len(spans) + results + ends
    assert answered > 8
    (step,) = [x for x in metrics(tmp_path / "run") if "num_turns/mean" in x]
    assert step["env/masked_frac"] == 0 < step["parse/ok"]
    assert step["rollout/drift_frac"] > 0  # the encoder makes no token that is a whole call


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b
