"""Samples that talk with a table of turns: drivers, chats and calls for tests."""

import json
import tempfile
from pathlib import Path

from agents.fake_engine import FakeEngine, sample_of
from turn_templates import TOOLS
from turn_tokenizers import open_tokenizer

from jaxrl_llm.agents.setup import open_driver
from jaxrl_llm.config import load_config
from jaxrl_llm.tokenizer import CharTokenizer

CHAR = CharTokenizer()
CHATML = ["<|im_start|>", "<|im_end|>"]
SPECIAL_END = "<|im_end|>"
ASKED = [{"role": "user", "content": "17+25 and 1+2?"}]


def opened(tokenizer, max_context=10_000, folder=None, **changes):
    names = {"response": "data.max_response_length", "most_prompt": "data.max_prompt_length"}
    changes = {"response": 2000, "most_prompt": 4000} | changes
    keys = {names.get(key, f"rollout.{key}"): value for key, value in changes.items()}
    keys = {key.replace("rollout.max_retries", "reward.max_retries"): v for key, v in keys.items()}
    config = load_config("ppo", keys)
    return open_driver(config, tokenizer, max_context=max_context, folder=folder)


_DRIVERS = {}


def close_drivers():
    """End the worker processes of the drivers that tests share."""
    while _DRIVERS:
        _DRIVERS.popitem()[1].close()


def run(tokenizer, samples, order=0, max_context=10_000, **changes):
    key = f"{id(tokenizer)} {max_context} {changes}"
    if key not in _DRIVERS:
        _DRIVERS[key] = opened(tokenizer, max_context, **changes)
    driver = _DRIVERS[key]
    stop_ids = driver.stop_ids(plain=samples[0].prompt.messages is None)
    return driver.run(FakeEngine(tokenizer, stop_ids, order, max_context), samples)


def one(tokenizer, prompt, turns, columns=None, **changes):
    (trajectory,) = run(tokenizer, [sample_of(tokenizer, 0, prompt, turns, **(columns or {}))],
                        **changes)  # fmt: skip
    return trajectory


def shown(tokenizer, trajectory):
    """The response with sampled text between brackets ⟦ and ⟧."""
    parts, is_sampled = [], False
    for i, mask in zip(trajectory.response_ids, trajectory.mask, strict=True):
        if mask != is_sampled:
            parts.append("⟦" if mask else "⟧")
            is_sampled = mask
        parts.append(tokenizer.decode([i], skip_special=False))
    return "".join(parts) + "⟧" * bool(is_sampled)


_CHAT = []


def open_chat():
    if not _CHAT:
        folder = Path(tempfile.mkdtemp())
        _CHAT.append(open_tokenizer(folder, TOOLS, CHATML, eos=SPECIAL_END))
    return _CHAT[0]


def call(tool, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def results(trajectory):
    return [m["content"] for m in trajectory.messages if m["role"] == "tool"]
