"""Whole samples against an engine that is a table: the records are written out by hand."""

import pytest
import turn_templates as templates
from agents.conversing import (
    ASKED,
    CHAR,
    CHATML,
    SPECIAL_END,
    call,
    close_drivers,
    one,
    open_chat,
    opened,
    results,
    run,
    shown,
)
from agents.fake_engine import FakeEngine, sample_of
from turn_templates import TOOLS
from turn_tokenizers import open_tokenizer

from jaxrl_llm.agents.sessions import Host, Setup


@pytest.fixture(scope="module", autouse=True)
def closing():
    yield
    close_drivers()


# ------------------------------------------------------------------------- tools

FUNCTIONS = '''
import asyncio, math, os, time

def add(a: int, b: int = 0):
    """Add.

    Args:
        a: One number.
        b: Another number.
    """
    return a + b

async def slow_add(a: int, b: int):
    """Add, later.

    Args:
        a: One number.
        b: Another number.
    """
    await asyncio.sleep(0.05 * a)
    return {"sum": a + b}

def bad(kind: str):
    """Misbehave.

    Args:
        kind: How.
    """
    if kind == "raise":
        raise KeyError("gone")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "hang":
        time.sleep(60)
    if kind == "die":
        os._exit(7)
    if kind == "long":
        return "ab " * 3_000_000
    if kind == "nan":
        return math.nan
    if kind == "print":
        print("x" * 10_000_000)
        return "printed"
    if kind == "surrogate":
        return "a\\ud800b"
    return object

async def stuck(kind: str):
    """Never end.

    Args:
        kind: How.
    """
    await asyncio.sleep(60) if kind == "await" else time.sleep(60)
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("tools") / "my_tools.py"
    file.write_text(FUNCTIONS)
    return file


def all_of(functions):
    return [f"{functions}:{name}" for name in ("add", "slow_add", "bad", "stuck")]


def test_functions_as_tools(functions):
    chat = open_chat()
    first = call("add", a=17, b=25) + "\n" + call("add", a=1)
    trajectory = one(chat, ASKED, [first, "42 and 1"], tools=all_of(functions))
    assert '"name": "add"' in chat.decode(trajectory.prompt_ids, skip_special=False)
    assert shown(chat, trajectory) == (
        f"⟦{first}<|im_end|>⟧\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n"
        "<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "⟦42 and 1<|im_end|>⟧"
    )
    assert trajectory.stop_reason == "completed" and trajectory.reward is None
    assert results(trajectory) == ["42", "1"]
    assert trajectory.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 17, "b": 25}'


WRONG = [
    (("bad", {"kind": "raise"}), '{"error": "\'gone\'"}'),
    (("bad", {"kind": "exit"}), '{"error": "3"}'),
    (("bad", {"kind": "nan"}), "NaN"),
    (("bad", {"kind": "print"}), "printed"),
    (("bad", {"kind": "surrogate"}), "a?b"),
    (("bad", {"kind": "object"}), "\"<class 'object'>\""),
    (("gone", {}), "there is no tool 'gone'"),
    (("bad", {"kind": 3}), "kind: expected string, and it is 3"),
    (("bad", {}), "arguments: 'kind' is missing"),
    (("bad", {"kind": "x", "more": 1}), "there is no argument 'more'"),
    ('<tool_call>{"name": "bad", "arguments": {</tool_call>', "the call is not valid JSON"),
    ('<tool_call>{"name": "bad"}', "the call does not end with </tool_call>"),
]


def test_a_call_that_goes_wrong_is_an_observation(functions):
    texts = [x if isinstance(x, str) else call(x[0], **x[1]) for x, _ in WRONG]
    samples = [sample_of(open_chat(), i, ASKED, [x, "So."]) for i, x in enumerate(texts)]
    done = run(open_chat(), samples, tools=all_of(functions))
    for trajectory, (_, expected) in zip(done, WRONG, strict=True):
        assert trajectory.stop_reason == "completed" and not trajectory.failure
        (got,) = results(trajectory)
        assert expected in got
        assert trajectory.turns[0].num_failed == int(got.startswith("{"))


@pytest.mark.parametrize("kind", ["hang", "die"])
def test_a_tool_that_is_lost_is_a_failure_of_its_sample_alone(functions, kind):
    chat = open_chat()
    samples = [
        sample_of(chat, i, ASKED, [call("bad", kind=kind) if i == 1 else call("add", a=i), "So."])
        for i in range(4)
    ]
    tools = all_of(functions)
    good = run(chat, samples, tools=tools, tool_timeout_s=0.5, num_tool_workers=1)
    assert [t.failed for t in good] == [False, True, False, False]
    reason = {"hang": "timeout", "die": "failed"}[kind]
    assert (good[1].stop_reason, good[1].num_retries) == (reason, 1)
    assert "exit code 7" in good[1].failure or "longer than 0.5 s" in good[1].failure
    assert [results(t) for t in good if not t.failed] == [["0"], ["2"], ["3"]]


@pytest.mark.parametrize("kind", ["await", "block"])
def test_an_async_tool_that_never_ends(functions, kind):
    chat = open_chat()
    samples = [
        sample_of(
            *(chat, i, ASKED),
            [call("stuck", kind=kind) if i == 1 else call("slow_add", a=i, b=1), "So."],
        )
        for i in range(4)
    ]
    tools = all_of(functions)
    done = run(chat, samples, tools=tools, tool_timeout_s=0.5, num_tool_workers=1)
    assert [t.stop_reason for t in done] == ["completed", "timeout", "completed", "completed"]
    assert [results(t) for t in done if not t.failed] == [
        [f'{{"sum": {i + 1}}}'] for i in (0, 2, 3)
    ]


def test_a_long_result_loses_its_middle(functions):
    chat = open_chat()
    texts = [call("bad", kind="long") + call("bad", kind="nan"), "So."]
    trajectory = one(chat, ASKED, texts, tools=[f"{functions}:bad"], max_tool_result_tokens=40)
    long, short = results(trajectory)
    assert long.startswith("ab ab") and "[...]" in long and long.endswith("ab ")
    assert short == "NaN" and trajectory.turns[0].num_cut == 1
    assert 25 <= len(chat.encode(long)) + len(chat.encode(short)) <= 40


def test_the_order_of_arrival_changes_nothing(functions):
    chat = open_chat()
    samples = []
    for i in range(12):
        turns = [call("slow_add", a=(7 * i) % 5, b=1), call("add", a=i), call("bad", kind="raise")]
        samples.append(sample_of(chat, i, ASKED, [*turns[: i % 4], f"It is {i}."]))
    tools = all_of(functions)
    runs = [run(chat, samples, order=order, tools=tools) for order in range(3)]
    assert runs[0] == runs[1] == runs[2]
    assert [len(t.turns) for t in runs[0]] == [i % 4 + 1 for i in range(12)]


def test_a_row_may_have_some_of_the_tools(functions):
    chat = open_chat()
    tools = all_of(functions)
    trajectory = one(chat, ASKED, [call("bad", kind="nan"), "So."], {"tools": ["add"]}, tools=tools)
    assert "the tools are: add" in results(trajectory)[0]
    with pytest.raises(ValueError, match="tool 'slow'; did you mean 'slow_add'"):
        one(chat, ASKED, ["So."], {"tools": ["slow"]}, tools=tools)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f(a: int):\n    return a", "has no schema .*docstring"),
        ('def f(a):\n    """F.\n\n    Args:\n        a: A.\n    """', "has no schema"),
        ('def f(*a: int):\n    """F.\n\n    Args:\n        a: A.\n    """', r"parameter \*a"),
        ('def f(**a: int):\n    """F.\n\n    Args:\n        a: A.\n    """', r"parameter \*\*a"),
        ("f = 3", "is a int, not a function"),
        ("def g():\n    pass", "has no 'f'"),
        ("raise KeyError('x')", "importing .*KeyError"),
    ],
)
def test_a_function_that_is_no_tool_is_refused_at_the_start(tmp_path, source, why):
    file = tmp_path / "odd.py"
    file.write_text(source)
    with pytest.raises(ValueError, match=why):
        Host(Setup(tools=((f"{file}:f", {}, b""),))).describe()
    if source == "f = 3":  # in a worker process too
        with pytest.raises(ValueError, match=why):
            opened(CHAR, tools=f"{file}:f")


# ------------------------------------------------------------------------- environments

CLASSES = '''
import asyncio, os, random, time

class Counter:
    """Counts what it is told, and lists its seeds."""

    made = 0

    def __init__(self, *, most=3):
        self.most, self.total = most, 0

    def reset(self, start=0, seed=None, group_seed=None, **row):
        self.total, self.row, self.seeds = start, row, (seed, group_seed)
        return f" From {start}."

    def step(self, action):
        if action == "die" and self.total:
            os._exit(1)
        if action == "raise":
            raise RuntimeError("broken")
        if action == "nan":
            return {"observation": "x", "reward": float("nan")}
        if action == "odd":
            return 7
        self.total += int(action)
        reward = self.total / 10
        return f"={self.total}\\n", reward, self.total >= self.most, False, {"total": self.total}

class Flaky(Counter):
    """Dies once for each file that is not there yet."""

    def step(self, action):
        if action == "3" and not os.path.exists(self.row["file"]):
            open(self.row["file"], "w").close()
            os._exit(1)
        return super().step(action)

class Dice:
    """Answers differently each time, and dies once."""

    def reset(self, file):
        self.file = file

    def step(self, action):
        if action == "b" and not os.path.exists(self.file):
            open(self.file, "w").close()
            os._exit(1)
        return {"observation": f"{os.getpid()}{time.time_ns()}\\n", "done": action == "c"}

class Shop:
    """TRL: methods are tools."""

    def reset(self, goods, **row):
        self.goods, self.bought = goods, []
        return f" There is {goods}."

    def buy(self, name: str) -> str:
        """Buy one.

        Args:
            name: What.
        """
        if name != self.goods:
            raise ValueError(f"no {name}")
        self.bought.append(name)
        return f"bought {len(self.bought)}"

    def get_reward(self):
        return float(len(self.bought))

class Later:
    """All of it is async."""

    async def reset(self):
        await asyncio.sleep(0.01)
        return ": "

    async def step(self, action):
        await asyncio.sleep(0.01)
        return {"observation": "x", "reward": 1, "done": action == "b"}

    async def get_reward(self):
        return 5

class Nothing:
    """Has neither."""

def factory():
    return Counter(most=2)
'''


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    file = tmp_path_factory.mktemp("environments") / "my_environments.py"
    file.write_text(CLASSES)
    return file


def test_an_environment_of_yours(classes):
    settings = {"kind": "custom", "path": f"{classes}:Counter", "settings": {"most": 4}}
    trajectory = one(CHAR, "Add.", ["1", "2", "3"], {"start": 1}, environment=settings)
    assert CHAR.decode(trajectory.prompt_ids) == "Add. From 1."
    assert shown(CHAR, trajectory) == "⟦1<|eos|>⟧=2\n⟦2<|eos|>⟧"
    assert [t.reward for t in trajectory.turns] == [0.2, 0.4]
    assert trajectory.reward == pytest.approx(0.6)
    made = one(CHAR, "Add.", ["1", "2", "3"], environment=f"{classes}:factory")
    assert len(made.turns) == 2


def test_an_async_environment(classes):
    samples = [sample_of(CHAR, i, "Go", ["a", "b"]) for i in range(8)]
    done = run(CHAR, samples, environment=f"{classes}:Later")
    assert {shown(CHAR, t) for t in done} == {"⟦a<|eos|>⟧x⟦b<|eos|>⟧"}
    assert {(t.reward, t.final_reward) for t in done} == {(7.0, 5.0)}


def test_methods_as_tools_and_a_reward_at_the_end(classes):
    turns = [call("buy", name="tea") + call("buy", name="milk"), call("buy", name="tea"), "Done."]
    trajectory = one(open_chat(), ASKED, turns, {"goods": "tea"}, environment=f"{classes}:Shop")
    assert results(trajectory) == ["bought 1", '{"error": "no milk"}', "bought 2"]
    assert (trajectory.stop_reason, trajectory.reward) == ("completed", 2.0)
    assert trajectory.messages[0]["content"] == "17+25 and 1+2? There is tea."


def test_the_last_calls_count_though_their_results_are_left_out(classes):
    turns = [call("buy", name="tea"), call("buy", name="tea") * 2]
    for changes, bought in (({"max_turns": 2}, 3.0), ({"max_tool_calls": 2}, 2.0)):
        trajectory = one(
            *(open_chat(), ASKED, turns, {"goods": "tea"}),
            **changes,
            environment=f"{classes}:Shop",
        )
        assert (trajectory.stop_reason, trajectory.reward) == (next(iter(changes)), bought)
        assert trajectory.mask[-1] == 1


@pytest.mark.parametrize(
    ("action", "why"),
    [
        *(("raise", "RuntimeError: broken"), ("nan", "not a finite number")),
        *(("odd", "step returned a int"), ("die", "exit code 1"), ("x", "ValueError")),
    ],
)
def test_an_environment_that_fails_is_a_failure(classes, action, why):
    trajectory = one(CHAR, "Add.", ["1", action, "2"], environment=f"{classes}:Counter")
    assert (trajectory.stop_reason, trajectory.num_retries) == ("failed", 1)
    assert why in trajectory.failure and trajectory.failed


def test_a_new_environment_repeats_what_was_done(classes, tmp_path):
    turns, columns = ["1", "1", "3"], {"file": str(tmp_path / "once")}
    settings = {"kind": "custom", "path": f"{classes}:Flaky", "settings": {"most": 5}}
    trajectory = one(CHAR, "Add.", turns, columns, environment=settings)
    assert (trajectory.stop_reason, trajectory.num_retries, trajectory.differs) == (
        *("env_done", 1),
        False,
    )
    assert shown(CHAR, trajectory) == "⟦1<|eos|>⟧=1\n⟦1<|eos|>⟧=2\n⟦3<|eos|>⟧"
    odd = one(
        *(CHAR, "Add.", ["a", "b", "c"], {"file": str(tmp_path / "dice")}),
        environment=f"{classes}:Dice",
    )
    assert (odd.stop_reason, odd.num_retries, odd.differs) == ("env_done", 1, True)


def test_neighbours_of_a_lost_worker_go_on(classes, tmp_path):
    """One worker has all environments: those that it loses are made again."""
    samples = [sample_of(CHAR, i, "Add.", ["1", "die" if i == 2 else "1", "2"]) for i in range(6)]
    done = run(CHAR, samples, environment=f"{classes}:Counter", num_tool_workers=1)
    assert [t.stop_reason for t in done] == ["env_done"] * 2 + ["failed"] + ["env_done"] * 3
    assert [t.num_retries for t in done] == [0, 0, 1, 0, 0, 0]
    assert len({t.response_ids for t in done if not t.failed}) == 1


def test_rows_name_their_environment(classes):
    both = ["guess", f"{classes}:Counter"]
    samples = [
        sample_of(CHAR, 0, "a", ["20\n"], ground_truth=20, environment="guess"),
        sample_of(CHAR, 1, "b", ["3"], environment="Counter"),
    ]
    assert [t.stop_reason for t in run(CHAR, samples, environment=both)] == ["env_done"] * 2
    for columns, why in (
        ({"environment": "ges"}, "environment 'ges'; did you mean 'guess'"),
        ({}, "each row needs a column 'environment'"),
    ):
        with pytest.raises(ValueError, match=why):
            run(CHAR, [sample_of(CHAR, 0, "a", ["1"], **columns)], environment=both)
    with pytest.raises(ValueError, match="Nothing has neither step"):
        opened(CHAR, environment=f"{classes}:Nothing")


# ------------------------------------------------------------------------- limits


def test_limits_of_tokens():
    """Three budgets: of a turn, of the response, of the context."""
    long = ["[" + "1+" * 10 + "1]", "11"]
    reasons = {
        "max_turn_tokens": one(CHAR, "1?", long, environment="calculator", max_turn_tokens=10),
        "max_tokens": one(CHAR, "1?", long, environment="calculator", response=12),
        "context_overflow": one(CHAR, "1?", long, environment="calculator", max_context=14),
    }
    assert {name: t.stop_reason for name, t in reasons.items()} == {name: name for name in reasons}
    assert [len(t.response_ids) for t in reasons.values()] == [10, 12, 12]
    assert all(t.truncated and not t.failed for t in reasons.values())
    short = one(CHAR, "1?", long, environment="calculator", response=27)
    assert (short.stop_reason, len(short.response_ids)) == ("context_overflow", 23)
    fits = one(CHAR, "1?", long, environment="calculator", response=28)
    assert (fits.stop_reason, len(fits.response_ids)) == ("max_tokens", 28)


def test_limits_of_turns_and_parse_errors():
    chat, right = open_chat(), call("calculator", expression="1+1")
    turns = [call("gone"), right, call("gone"), call("gone"), "So."]
    trajectory = one(chat, ASKED, turns, tools="calculator")
    assert trajectory.stop_reason == "completed" and results(trajectory)[1] == "2"
    for most, number in ((1, 4), (0, 1)):
        trajectory = one(chat, ASKED, turns, tools="calculator", max_parse_errors=most)
        assert (trajectory.stop_reason, len(trajectory.turns)) == ("parse_error", number)
    for changes, number in (({"max_turns": 2}, 2), ({"max_tool_calls": 1}, 2)):
        trajectory = one(chat, ASKED, turns, tools="calculator", **changes)
        assert (trajectory.stop_reason, len(trajectory.turns)) == (next(iter(changes)), number)
        assert trajectory.mask[-1] == 1


def test_a_prompt_that_grows_too_long_is_a_failure():
    trajectory = one(open_chat(), ASKED, ["So."], tools="calculator", most_prompt=20)
    assert trajectory.stop_reason == "failed" and "more than 20" in trajectory.failure
    assert trajectory.response_ids == ()


def test_an_abort_keeps_what_was_sampled():
    driver = opened(CHAR, environment="guess")
    engine = FakeEngine(CHAR, driver.stop_ids(plain=True))
    for i in range(4):
        driver.add(engine, sample_of(CHAR, i, "guess:\n", ["16\n"] * 6, ground_truth=20))
    ended = driver.advance(engine)  # local environments open at once
    ended += driver.abort(engine)
    assert {t.stop_reason for t in ended} == {"aborted"} and len(ended) == 4
    assert not driver.has_work and not engine.has_work
    for trajectory in ended:
        assert len(trajectory.mask) == len(trajectory.response_ids)


def test_an_abort_drops_what_tools_still_answer(functions):
    chat = open_chat()
    driver = opened(chat, tools=f"{functions}:slow_add")
    engine = FakeEngine(chat, driver.stop_ids(plain=False))
    samples = [sample_of(chat, i, ASKED, [call("slow_add", a=9, b=1), "So."]) for i in range(2)]
    driver.add(engine, samples[0])
    driver.advance(engine)  # the turn has ended, and the tool is called
    (ended,) = driver.abort(engine)
    assert (ended.stop_reason, len(ended.turns)) == ("aborted", 1)
    (done,) = driver.run(engine, samples[1:])
    assert done.stop_reason == "completed" and not driver.has_work
    driver.close()


# ------------------------------------------------------------------------- resume


def test_a_resumed_step_reads_its_observations(classes, functions, tmp_path):
    """Answers that differ the second time get no say. Tools without a state are not called."""
    (tmp_path / "clock.py").write_text(
        "import time\n\ndef clock():\n    "
        f'"""Tell the time."""\n    open({str(tmp_path / "calls")!r}, "a").write("x")\n'
        "    return time.time_ns()\n"
    )
    dice = {"kind": "custom", "path": f"{classes}:Dice"}
    cases = {
        "tools": ({"tools": f"{tmp_path / 'clock.py'}:clock"}, open_chat(), ASKED),
        "dice": ({"environment": dice}, CHAR, "Roll."),
    }
    turns = {"tools": [call("clock"), call("clock"), "So."], "dice": ["a", "a", "c"]}
    for name, (changes, tokenizer, prompt) in cases.items():
        columns = {"file": str(tmp_path / "there")} if name == "dice" else {}
        sample = sample_of(tokenizer, 0, prompt, turns[name], **columns)
        done = []
        for _ in range(2):
            driver = opened(tokenizer, folder=tmp_path / name, **changes)
            engine = FakeEngine(tokenizer, driver.stop_ids(plain=name == "dice"))
            done += driver.run(engine, [sample])
            driver.close()
            with (tmp_path / name / "step_3.jsonl").open("a") as file:
                file.write('{"key": "0/9", "act')  # a line that a kill has cut
        assert done[0].response_ids == done[1].response_ids
        assert [t.differs for t in done] == [False, name == "dice"]
    assert (tmp_path / "calls").read_text() == "xx"
    driver = opened(CHAR, folder=tmp_path / "dice", environment="guess")
    driver.drop_before(3)
    assert [*(tmp_path / "dice").iterdir()]
    driver.drop_before(4)
    assert not [*(tmp_path / "dice").iterdir()]
    driver.close()


# ------------------------------------------------------------------------- templates


def test_a_template_of_one_call_gets_its_results_in_one_message(tmp_path):
    """Llama refuses two calls in a turn; the model may sample them all the same."""
    one_only = TOOLS.replace(
        "{% for m in messages %}{% if m.role == 'tool' %}",
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
        "{{ raise_exception('one call only') }}{% endif %}{% if m.role == 'tool' %}",
    )
    assert one_only != TOOLS
    chat = open_tokenizer(tmp_path, one_only, CHATML, eos=SPECIAL_END)
    turns = [call("calculator", expression="1+1") + call("calculator", expression="2+2"), "So."]
    trajectory = one(chat, ASKED, turns, tools="calculator")
    assert trajectory.stop_reason == "completed" and results(trajectory) == ["2\n4"]


def test_a_template_without_tools_and_results_gets_them_in_messages(tmp_path):
    gemma = templates.GEMMA.replace(
        "{{ 'model' if", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ 'model' if"
    )  # fmt: skip
    special = ["<start_of_turn>", "<end_of_turn>"]
    chat = open_tokenizer(tmp_path, gemma, special, eos="<end_of_turn>")
    turns = [call("calculator", expression="1+1"), "So."]
    trajectory = one(chat, ASKED, turns, tools="calculator")
    prompt = chat.decode(trajectory.prompt_ids, skip_special=False)
    assert prompt.startswith("<bos><start_of_turn>user\nYou may call these tools.")
    assert '"name": "calculator"' in prompt and prompt.endswith("<start_of_turn>model\n")
    assert shown(chat, trajectory) == (
        f"⟦{turns[0]}<end_of_turn>⟧\n<start_of_turn>user\n2<end_of_turn>\n"
        "<start_of_turn>model\n⟦So.<end_of_turn>⟧"
    )


def test_the_end_token_of_the_template_follows_a_stop_id_of_the_run():
    """`rollout.stop_token_ids` end a turn without it, so it is observed before the result."""
    chat = open_chat()
    driver, asks = opened(chat, tools="calculator"), call("calculator", expression="1+1")
    engine = FakeEngine(chat, (*driver.stop_ids(plain=False), *chat.encode("!")))
    try:
        (own,) = driver.run(engine, [sample_of(chat, 0, ASKED, [f"{asks}!", "2"])])
    finally:
        driver.close()
    usual = shown(chat, one(chat, ASKED, [asks, "2"], tools="calculator"))
    assert shown(chat, own) == usual.replace("<|im_end|>⟧", "!⟧<|im_end|>", 1)


def test_an_observation_that_the_template_refuses_is_a_failure(tmp_path):
    (tmp_path / "odd.py").write_text(
        "class Odd:\n    def step(self, action):\n"
        "        return {'observation': [{'role': 'system', 'content': 'x'}]}\n"
    )
    chat = open_tokenizer(
        tmp_path, templates.GEMMA, ["<start_of_turn>", "<end_of_turn>"], eos="<end_of_turn>"
    )
    trajectory = one(chat, ASKED, ["a", "b"], environment=f"{tmp_path / 'odd.py'}:Odd")
    assert trajectory.stop_reason == "failed" and trajectory.failure.startswith("template: ")


@pytest.mark.nightly
def test_rows_are_checked_before_the_first_step(classes, tmp_path):
    driver = opened(open_chat(), tools="calculator", environment=f"{classes}:Counter")
    driver.check(sample_of(open_chat(), 0, ASKED, []).prompt for _ in range(3))
    driver.check([sample_of(CHAR, 0, "text", []).prompt])
    for columns, why in (({"tools": ["x"]}, "tool 'x'"), ({"environment": "y"}, "environment 'y'")):
        with pytest.raises(ValueError, match=why):
            driver.check([sample_of(open_chat(), 0, ASKED, [], **columns).prompt])
    driver.close()
    dropping = "{% for m in messages %}{{ m.role }}{{ '\n' }}{% endfor %}"
    driver = opened(chat := open_tokenizer(tmp_path, dropping, []), tools="calculator")
    with pytest.raises(ValueError, match="chat template"):
        driver.check([sample_of(chat, 0, ASKED, []).prompt])
