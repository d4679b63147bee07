"""Programs with OpenAI's real client, whose requests become turns of training samples."""

import json
import sys
from dataclasses import dataclass, field
from itertools import count

import pytest
from agents.conversing import CHATML, SPECIAL_END, open_chat
from agents.conversing import one as driven
from agents.fake_engine import FakeEngine, FakeSequence, prompt_of
from chat_tokenizer import write_chat_tokenizer
from further import further
from tiny_models import tiny_config, write_directory
from turn_templates import QWEN3
from turn_tokenizers import open_tokenizer

import jaxrl_llm as rl
from jaxrl_llm.agents.driver import Sample
from jaxrl_llm.agents.rows import joined
from jaxrl_llm.agents.trajectory import Row, Trajectory, Turn
from jaxrl_llm.server.programs import open_programs

ASKED = [{"role": "user", "content": "17+25?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
TOOLS = '''
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One number.
        b: Other number.
    """
    return str(a + b)
'''
BEGIN = (
    TOOLS
    + """
import json, openai
from transformers.utils import get_json_schema


def ask(url, key, messages, **options):
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    reply = client.chat.completions.create(model="gpt", messages=messages, **options)
    return reply.choices[0].message
"""
)
AGENT = (
    BEGIN
    + """
def agent(row, base_url, api_key):
    messages, tools = list(row["prompt"]), [get_json_schema(add)]
    while True:
        answer = ask(base_url, api_key, messages, tools=tools)
        messages.append(answer.model_dump())
        if not answer.tool_calls:
            return float(answer.content == "42")
        for call in answer.tool_calls:
            text = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
"""
)


RESPONSES = (
    BEGIN
    + """
def agent(row, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    items = list(row["prompt"])
    tools = [{"type": "function", **get_json_schema(add)["function"]}]
    while True:
        reply = client.responses.create(model="gpt", input=items, tools=tools, store=False)
        items += reply.output
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return float(reply.output_text == "42")
        for call in calls:
            text = add(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
"""
)


@dataclass(eq=False)
class Sequence(FakeSequence):
    kept: dict = field(default_factory=dict)
    keys: tuple = ()


class Scripted(FakeEngine):
    """The turns of a sample follow its script, whatever sequence they are in."""

    def __init__(self, tokenizer, scripts):
        super().__init__(tokenizer, tokenizer.stop_ids)
        self.scripts = scripts
        self.numbers = [count() for _ in scripts]

    def add(self, prompt, *, limit, beginning, seed_key, sample_id):
        script = self.scripts[sample_id]
        sequence = Sequence(
            *(script, list(prompt), len(prompt), limit),
            [0.0] * len(prompt),
            turn=next(self.numbers[sample_id]),
            keys=(*map(int, seed_key), sample_id),
        )
        self.sequences.append(sequence)
        return sequence

    def append(self, sequence, tokens, *, limit):
        super().append(sequence, tokens, limit=limit)
        number = next(i for i, script in enumerate(self.scripts) if script is sequence.script)
        sequence.turn = next(self.numbers[number])


def run(tmp_path, text, *scripts, columns=(), **changes):
    """Trajectories of samples with these turns, and the engine."""
    file = tmp_path / "agent.py"
    file.write_text(text)
    keys = {"data.max_response_length": 2000, "data.max_prompt_length": 4000}
    keys |= {"rollout.program": f"{file}:agent", "reward.functions": []}
    config = rl.load_config("grpo", keys | changes)
    tokenizer = open_chat()
    programs, engine = open_programs(config, tokenizer), Scripted(tokenizer, scripts)
    samples = [
        Sample(
            prompt=prompt_of(tokenizer, ASKED, **(columns[i] if columns else {})),
            step=3,
            sample=i,
            group=i // 2,
            options={"seed_key": [1, 2], "sample_id": i},
        )
        for i in range(len(scripts))
    ]
    try:
        return programs.run(engine, samples), engine
    finally:
        programs.close()


@pytest.mark.parametrize("agent", [AGENT, RESPONSES], ids=["chat", "responses"])
def test_a_conversation_has_the_ids_of_the_driver(tmp_path, agent):
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)
    turns = ("Yes. " + CALL, "42")
    wanted = driven(open_chat(), ASKED, turns, tools=[f"{file}:add"])
    (own, other), engine = run(tmp_path, agent, turns, ("43",))
    for key in ("prompt_ids", "response_ids", "mask", "logprobs", "text"):
        assert getattr(own, key) == getattr(wanted, key), key
    assert [(t.start, t.end, len(t.calls)) for t in own.turns] == [
        (t.start, t.end, len(t.calls)) for t in wanted.turns
    ]
    assert (own.reward, own.stop_reason, own.num_branches) == (1.0, "completed", 1)
    assert (other.reward, len(other.turns)) == (0.0, 1)
    assert all(sequence.status == "ended" for sequence in engine.sequences)


RETRIES = (
    BEGIN
    + """
import time, urllib.request


def agent(row, base_url, api_key):
    body = json.dumps({"messages": row["prompt"]}).encode()

    def send(url=base_url, **headers):
        headers |= {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    first = send()
    assert send(**{"x-stainless-retry-count": "1"}) == first
    by_key = base_url.replace(f"/s/{api_key}", "")
    assert ask(by_key, api_key, [{"role": "user", "content": "more"}]).content == "b"
    return 1
"""
)


def test_retries_add_no_turn_and_the_key_names_a_session(tmp_path):
    (own,), engine = run(tmp_path, RETRIES, ("a", "b"))
    assert (own.failure, own.reward, own.num_branches, own.text) == ("", 1.0, 2, "b")
    assert len(engine.sequences) == 2


REFUSED = (
    BEGIN
    + """
def agent(row, base_url, api_key):
    assert ask(base_url, api_key, row["prompt"], temperature=1, top_p=1, seed=None).content == "a"
    for options in ({"temperature": 0.5}, {"n": 2}, {"seed": 1}, {"top_p": 0.9}):
        try:
            ask(base_url, api_key, row["prompt"], **options)
        except openai.BadRequestError as error:
            assert next(iter(options)) in str(error), error
        else:
            raise AssertionError(options)
    ask(base_url, api_key, row["prompt"], temperature=0.5)
"""
)


def test_other_sampling_is_refused_and_an_error_is_a_failure(tmp_path):
    (own,), _ = run(tmp_path, REFUSED, ("a", "a"))
    assert own.failed and own.num_retries == 1 and own.reward is None
    assert own.failure.startswith("exception: RuntimeError: BadRequestError: Error code: 400")
    assert "body.temperature=0.5: the run samples with 1.0; leave it out" in own.failure


STOPS = (
    BEGIN
    + """
def agent(row, base_url, api_key):
    messages = list(row["prompt"])
    answer = ask(base_url, api_key, messages, stop=["END", "x"])
    assert answer.content == "abc ", answer
    messages += [answer.model_dump(), {"role": "user", "content": "more"}]
    assert ask(base_url, api_key, messages).content == "b"
    return 1
"""
)


def test_a_stop_text_is_sampled_and_ends_a_turn(tmp_path):
    tokenizer = open_chat()
    (own,), engine = run(tmp_path, STOPS, ("abc END of it", "b"))
    assert (own.failure, own.num_branches, own.num_rows) == ("", 1, 1)
    texts = [tokenizer.decode(own.response_ids[turn.start : turn.end]) for turn in own.turns]
    assert texts[0].startswith("abc END") and len(texts[0]) < len("abc END of it")
    assert texts[1] == "b"
    between = own.response_ids[own.turns[0].end : own.turns[1].start]
    assert tokenizer.decode(between, skip_special=False).startswith("<|im_end|>\n<|im_start|>user")
    assert own.mask.count(0) == len(between) and len(own.logprobs) == len(own.response_ids)
    assert [sequence.status for sequence in engine.sequences] == ["ended"] * 2


LONG = (
    BEGIN
    + """
def agent(row, base_url, api_key):
    for text in ("one " * 40, "two " * 40):
        ask(base_url, api_key, [{"role": "user", "content": text}])
    return 1
"""
)


def test_a_prompt_of_several_rows_may_be_longer(tmp_path):
    """Its end stands in the response. With one row it is refused."""
    sizes = {"data.max_prompt_length": 20}
    (own,), engine = run(tmp_path, LONG, ("a", "b"), **{"rollout.max_rows": 2}, **sizes)
    first, second = (tuple(sequence.tokens) for sequence in engine.sequences)
    assert (own.failure, own.num_rows, len(own.prompt_ids)) == ("", 2, 20)
    assert own.prompt_ids + own.response_ids == first + second
    (refused,), _ = run(tmp_path, LONG, ("a", "b"), **sizes)
    assert refused.failed and "tokens, and the run takes 20" in refused.failure


BRANCHES = (
    BEGIN
    + """
def agent(row, base_url, api_key):
    def further(messages, text="more"):
        answer = ask(base_url, api_key, messages).content
        messages = [*messages, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": text}]

    one = further(row["prompt"])
    two = further(one)
    other = further(one[:-1] + [{"role": "user", "content": "else"}])
    assert [m["content"] for m in other if m["role"] == "assistant"] == ["a", "c"]
    ask(base_url, api_key, [{"role": "user", "content": "name of the chat?"}])
    further(other)
    return 0.5
"""
)


def test_of_several_branches_the_last_one_with_turns_is_kept(tmp_path):
    (own,), engine = run(tmp_path, BRANCHES, ("a", "b", "c", "d", "e"))
    tokenizer = open_chat()
    assert own.num_branches == 3 and not own.failure
    texts = [m["content"] for m in own.messages]
    assert texts == ["17+25?", "a", "else", "c", "more", "e"]
    sampled = [tokenizer.decode(own.response_ids[turn.start : turn.end]) for turn in own.turns]
    assert sampled == ["a", "c", "e"]
    wanted = driven_chat(["a", "c", "e"], ["else", "more"])
    assert own.response_ids == tuple(wanted)
    assert own.mask.count(1) == 6
    assert len({sequence.keys for sequence in engine.sequences}) == len(engine.sequences)


def driven_chat(answers, questions):
    """The ids of a chat, as the tokenizer has the whole text."""
    tokenizer, messages = open_chat(), list(ASKED)
    for answer, question in zip(answers, [*questions, None], strict=True):
        messages.append({"role": "assistant", "content": answer})
        if question:
            messages.append({"role": "user", "content": question})
    whole = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=False))
    ids = whole[len(tokenizer.encode(tokenizer.apply_chat_template(ASKED))) :]
    return ids[: len(ids) - ids[::-1].index(tokenizer.eos_id)]


LIMITS = (
    BEGIN
    + """
def agent(row, base_url, api_key):
    messages = row["prompt"]
    while True:
        answer = ask(base_url, api_key, messages).content
        messages = [*messages, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": "m"})
"""
)


@pytest.mark.parametrize(
    ("changes", "reason", "turns"),
    [
        ({"rollout.max_turns": 2}, "max_turns", 2),
        ({"data.max_response_length": 30}, "context_overflow", 2),
        ({"data.max_response_length": 4}, "max_tokens", 1),
        ({"rollout.max_turn_tokens": 3}, "max_turn_tokens", 1),
    ],
)
def test_limits_end_a_sample_without_a_failure(tmp_path, changes, reason, turns):
    (own,), _ = run(tmp_path, LIMITS, ["abcdefgh"] * 9, **changes)
    assert (own.stop_reason, own.failed, len(own.turns)) == (reason, False, turns)
    assert len(own.response_ids) == len(own.mask) <= changes.get("data.max_response_length", 99)


FAILS = (
    BEGIN
    + """
import asyncio, os, time

async def agent(row, base_url, api_key):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    if row["kind"] == "dies":
        os._exit(3)
    if row["kind"] == "hangs":
        await asyncio.sleep(60)
    if row["kind"] == "asks nothing":
        return 1.0
    reply = await client.chat.completions.create(model="m", messages=row["prompt"])
    if row["kind"] == "no number":
        return "good"
    return 2.0
"""
)


def test_failures_are_no_rewards(tmp_path):
    kinds = {
        "asks nothing": "no_answer: ",
        "no number": "exception: ValueError: the program returned 'good'",
        "hangs": "timeout: ",
        "dies": "crash: ",
        "fine": "",
    }
    trajectories, _ = run(
        tmp_path,
        FAILS,
        *[("a",) * 9] * len(kinds),
        columns=[{"kind": kind} for kind in kinds],
        **{"rollout.program_timeout_s": 5.0},
    )
    for own, (kind, failure) in zip(trajectories, kinds.items(), strict=True):
        assert own.failure.startswith(failure), (kind, own.failure)
        assert own.reward == (2.0 if kind == "fine" else None)
        assert own.failed == bool(failure)


COMMAND = (
    BEGIN
    + """
import os, sys

row = json.load(sys.stdin)
ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row["prompt"])
if row["seed"] < 0:
    sys.exit(2)
"""
)


def test_a_command(tmp_path):
    file = tmp_path / "command.py"
    file.write_text(COMMAND)
    line = f"{sys.executable} {file}"
    changes = {"rollout.program": line, "reward.functions": ["exact_answer"]}
    (own,), _ = run(tmp_path, "", ("a",), **changes)
    assert (own.failure, own.text, own.reward) == ("", "a", None)
    with pytest.raises(rl.ConfigError, match="reward: it has neither functions"):
        rl.load_config("grpo", {"rollout.program": line, "reward.functions": []})


def test_without_the_extra_a_run_ends_at_its_start(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(rl.ConfigError, match=r"program needs .*pip install starlette uvicorn"):
        rl.load_config("grpo", {"rollout.program": "python agent.py"})


def test_several_branches_are_rows_of_one_sample(tmp_path):
    """The rows by the tokenizer: a turn that two of them have is sampled in the first alone."""
    tokenizer = open_chat()
    (own,), _ = run(tmp_path, BRANCHES, ("a", "b", "c", "d", "e"), **{"rollout.max_rows": 3})
    one = driven_chat(["a", "b"], ["more"])
    name = [{"role": "user", "content": "name of the chat?"}]
    side = [*tokenizer.encode(tokenizer.apply_chat_template(name)), *tokenizer.encode("d")]
    side.append(tokenizer.eos_id)
    begin = tokenizer.encode(tokenizer.apply_chat_template(ASKED))
    assert own.prompt_ids == tuple(begin)
    rows = [begin + one, side, begin + driven_chat(["a", "c", "e"], ["else", "more"])]
    assert [*own.prompt_ids, *own.response_ids] == rows[0] + rows[1] + rows[2]
    first = len(rows[0]) - len(own.prompt_ids)
    assert own.row_starts == (first, first + len(rows[1])) and own.num_rows == 3
    sampled = [tokenizer.decode(own.response_ids[turn.start : turn.end]) for turn in own.turns]
    assert sampled == ["a", "b", "d", "c", "e"]  # each once
    places = {place for turn in own.turns for place in range(turn.start, turn.end)}
    assert {i for i, bit in enumerate(own.mask) if bit} == places
    assert all(own.messages[turn.message]["role"] == "assistant" for turn in own.turns)
    assert (own.reward, own.text, own.num_branches) == (0.5, "e", 3)
    # Of two, the branches of several turns are kept; a response that is too short keeps the last.
    (two,), _ = run(tmp_path, BRANCHES, ("a", "b", "c", "d", "e"), **{"rollout.max_rows": 2})
    assert [*two.prompt_ids, *two.response_ids] == rows[0] + rows[2] and two.num_rows == 2
    short = {"rollout.max_rows": 2, "data.max_response_length": len(rows[2]) - len(begin)}
    (last,), _ = run(tmp_path, BRANCHES, ("a", "b", "c", "d", "e"), **short)
    assert [*last.prompt_ids, *last.response_ids] == rows[2] and last.mask.count(1) == 6


THINKS = (
    BEGIN
    + """
def agent(row, base_url, api_key):
    messages = list(row["prompt"])
    for text in ("more", "and", ""):
        answer = ask(base_url, api_key, messages).content
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": text})
    return 1
"""
)


def test_a_row_begins_where_the_template_drops_thinking(tmp_path, monkeypatch):
    tokenizer = open_tokenizer(tmp_path / "model", QWEN3, CHATML, eos=SPECIAL_END)
    monkeypatch.setitem(globals(), "open_chat", lambda: tokenizer)
    keys = {"rollout.earlier_thinking": "fork", "rollout.max_rows": 3}
    turns = ("<think>\nhm\n</think>\n\na", "b", "c")
    (own,), _ = run(tmp_path, THINKS, turns, **keys)
    messages = [*ASKED, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
    second = tokenizer.encode(tokenizer.apply_chat_template(messages))
    start = own.row_starts[0]
    assert own.num_rows == 2 and [*own.response_ids[start : start + len(second)]] == second
    texts = [tokenizer.decode(own.response_ids[turn.start : turn.end]) for turn in own.turns]
    assert texts == [*turns] and own.turns[1].start == start + len(second)
    assert not own.failure


def test_the_prompt_of_a_group_is_what_its_samples_have_in_common():
    def of(prompt, response):
        turns = (Turn(start=0, end=2), Turn(start=3, end=len(response)))
        mask = (1, 1, 0, *[1] * (len(response) - 3))
        logprobs = tuple(-i / 10 for i in range(len(response)))
        ids = {"prompt": prompt, "response": response, "mask": mask, "logprobs": logprobs}
        rows = (Row(**ids, turns=turns),)
        return Trajectory(id="", sample=0, group=0, prompt_ids=(), rows=rows)

    samples = [of((1, 2, 3), (5, 6, 7, 8)), of((1, 2), (5, 6, 7, 8))]
    one, other = joined(samples, most_prompt=9, most=4)
    assert (one.prompt_ids, one.response_ids, one.mask) == ((1, 2), (3, 5, 6, 7), (0, 1, 1, 0))
    assert one.logprobs == (0, 0, -0.1, -0.2)
    assert [(t.start, t.end) for t in one.turns] == [(1, 3)] and one.shortened
    assert other.prompt_ids == (1, 2) and len(other.response_ids) == 4 and not other.shortened
    (short, _) = joined(samples, most_prompt=1, most=9)
    assert (short.prompt_ids, short.response_ids) == ((1,), (2, 3, 5, 6, 7, 8))


# Ahead on devices of their own, by a policy that stays as it is.
PACKED = {"actor.micro_batch_tokens": 256}
APART = {"placement.rollout": "1", "max_staleness": 1, "actor.optimizer.learning_rate": 0.0}


ROWS = {"rollout.max_rows": 3, "data.max_response_length": 100}
KEPT = {"rollout.top_k": 20, "algorithm.kl_loss_coef": 0.1}


@pytest.mark.parametrize(
    "changes",
    further([{}, ROWS | APART, APART, ROWS | PACKED, KEPT, ROWS | KEPT], first=2),
    ids=str,
)
def test_a_step_of_training_has_the_log_probs_of_the_trainer(tmp_path, changes):
    folder = write_directory(
        tmp_path / "model", tiny_config(vocab_size=104, max_position_embeddings=128)
    )
    write_chat_tokenizer(folder)
    several = "rollout.max_rows" in changes

    async def agent(row, base_url, api_key):
        import openai

        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages, answers = list(row["prompt"]), []
        if row["seed"] % 3 == 0:  # the prompts of a group differ
            messages[0] = {"role": "user", "content": messages[0]["content"] + "!"}
        for options in (
            {"max_tokens": 6, "stop": ["9", "k"]},
            {"max_tokens": 9} if several else {},
        ):
            reply = await client.chat.completions.create(model="m", messages=messages, **options)
            answers.append(reply.choices[0].message.content)
            messages.append({"role": "assistant", "content": answers[-1]})
            messages.append({"role": "user", "content": "more"})
        if row["seed"] % 2:  # another context
            name = [{"role": "user", "content": "a name, please"}]
            reply = await client.chat.completions.create(model="m", messages=name, max_tokens=5)
            answers.append(reply.choices[0].message.content)
        if row["seed"] % 5 == 0:
            raise ValueError("it fails")
        return float(len("".join(answers)))

    config = rl.load_config("grpo", {
        "actor": {"path": str(folder)}, "total_steps": 2,
        "run_dir": str(tmp_path / "run"), "data.max_response_length": 64,
        "data.max_prompt_length": 40, "data.train_batch_size": 4, "actor.ppo_mini_batch_size": 4,
        "rollout.n": 4, "warmup": None, "validation.every": 2,
        "validation.before_train": False, "validation.grader": None, "validation.graders": [],
    } | changes)  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"{a}+1"}]} for a in range(8)]
    rl.train(config, program=agent, rewards=[], train_data=rows, val_data=rows[:2])
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "num_turns/mean" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
        assert 1 < step["num_turns/mean"] <= 3 and 0 < step["rollout/fork_frac"] < 1
        assert 1 < step["rollout/rows/mean"] < 2 if several else step["rollout/rows/mean"] == 1
        assert 0 <= step["env/masked_frac"] < 1 and "rollout/drift_frac" in step
        assert "tools/call_frequency" not in step  # the program's requests have no tools
    assert sum(step["env/masked_frac"] for step in steps) > 0
