"""Agent libraries as they are, as programs of a training run; scripts/test_adapters.sh runs it."""

import os

import pytest
from agents.conversing import open_chat
from server.test_programs import CALL, run

SMOLAGENTS = """
from smolagents import CodeAgent, OpenAIServerModel


def agent(row, base_url, api_key):
    model = OpenAIServerModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = CodeAgent(tools=[], model=model, verbosity_level=0, max_steps=3)
    return float(agent.run(row["prompt"][0]["content"]) == 42)
"""
# A command of another environment: the library's package has the name of a folder of these tests.
OPENAI_AGENTS = '''
import json, os, sys

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One number.
        b: Other number.
    """
    return str(a + b)


row = json.load(sys.stdin)
model = OpenAIResponsesModel(model="policy", openai_client=AsyncOpenAI())
agent = Agent(name="one", instructions="Be brief.", tools=[add], model=model)
assert Runner.run_sync(agent, row["prompt"][0]["content"]).final_output == "42"
'''


def sampled(own):
    tokenizer = open_chat()
    return [tokenizer.decode(own.response_ids[turn.start : turn.end]) for turn in own.turns]


def test_smolagents(tmp_path):
    """A CodeAgent writes its steps into the next prompt itself, so each step is a row."""
    pytest.importorskip("smolagents")
    steps = (
        "Thought: I add.\n<code>\nx = 17 + 25\nprint(x)\n</code> and more",
        "Thought: I know.\n<code>\nfinal_answer(42)\n</code>",
    )
    sizes = {"data.max_prompt_length": 40_000, "data.max_response_length": 40_000}
    (own,), _ = run(tmp_path, SMOLAGENTS, steps, **{"rollout.max_rows": 4}, **sizes)
    assert (own.failure, own.reward) == ("", 1.0)
    one, two = sampled(own)
    assert one.startswith(steps[0].removesuffix(" and more")) and "and more" not in one
    assert two.startswith(steps[1]) and own.num_rows == 2


def test_openai_agents(tmp_path):
    """It asks the Responses API. A conversation with a tool is one row."""
    python = os.environ.get("OPENAI_AGENTS_PYTHON")
    if python is None:
        pytest.skip("OPENAI_AGENTS_PYTHON names no environment with openai-agents")
    file = tmp_path / "command.py"
    file.write_text(OPENAI_AGENTS)
    keys = {"rollout.program": f"{python} {file}", "reward.functions": ["exact_answer"]}
    (own,), _ = run(tmp_path, "", ("Yes. " + CALL, "42"), **keys)
    assert (own.failure, own.num_rows, own.num_branches) == ("", 1, 1)
    assert sampled(own) == ["Yes. " + CALL, "42"]
