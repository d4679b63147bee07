"""Rows that begin where the chat template drops thinking, against the text of the template."""

import numpy as np
import pytest
import turn_templates as templates
from agents.conversing import CHATML, SPECIAL_END, call, opened
from agents.fake_engine import FakeEngine, sample_of
from turn_tokenizers import open_tokenizer

import jaxrl_llm as rl
from jaxrl_llm.agents.styles import ChatStyle

# As Qwen3: thinking before the last question is dropped, and thinking between calls stays.
DROPS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
) + templates.TOOLS.replace(
    "{{ m.content or '' }}",
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}",
)
ADD = '''
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One number.
        b: Other number.
    """
    return str(a + b)
'''
ASKED = [{"role": "user", "content": "17+25?"}]


class Engine(FakeEngine):
    """A further row of a sample goes on in its script."""

    keys = ()

    def add(self, prompt, *, limit, beginning, script, seed_key, sample_id):
        self.keys = (*self.keys, tuple(map(int, seed_key)))
        place = self.sequences[-1].turn + 1 if self.sequences else 0
        sequence = super().add(prompt, limit=limit, beginning=self.beginning(prompt), script=script)
        sequence.turn = place
        return sequence


def run(tmp_path, turns, template=DROPS, **changes):
    tokenizer = open_tokenizer(tmp_path, template, CHATML, eos=SPECIAL_END)
    driver = opened(tokenizer, earlier_thinking="fork", **{"max_rows": 4} | changes)
    sample = sample_of(tokenizer, 0, ASKED, turns, ground_truth="42")
    sample.options.update(seed_key=np.array([1, 2], np.uint32), sample_id=0)
    engine = Engine(tokenizer, driver.stop_ids(plain=False))
    try:
        (own,) = driver.run(engine, [sample])
    finally:
        driver.close()
    assert all(sequence.status == "ended" for sequence in engine.sequences)
    assert len({*engine.keys}) == len(engine.sequences)
    return tokenizer, own


def rows_of(tokenizer, own):
    """The text of each row, and its sampled texts."""
    bounds = [0, *own.row_starts, len(own.response_ids)]
    texts = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        ids = [*(own.prompt_ids if start == 0 else ()), *own.response_ids[start:end]]
        sampled = [t for t in own.turns if start <= t.start < end]
        texts.append(
            (
                tokenizer.decode(ids, skip_special=False),
                [tokenizer.decode(own.response_ids[t.start : t.end]) for t in sampled],
            )
        )
    return texts


def test_tools_and_an_environment(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text(ADD)
    asks = call("add", a=17, b=25)
    turns = (f"<think>\nhm\n</think>\n\n{asks}", "<think>\nso\n</think>\n\n43",
             "44", "<think>\nno\n</think>\n\n42")  # fmt: skip
    retry = {"kind": "retry", "attempts": 4}
    tokenizer, own = run(tmp_path, turns, tools=[f"{file}:add"], environment=[retry])
    (first, one), (second, two) = rows_of(tokenizer, own)
    assert (one, two) == (list(turns[:2]), list(turns[2:]))
    head = tokenizer.decode(own.prompt_ids, skip_special=False).partition("17+25?")[0]
    again = "<|im_start|>user\nWrong. Try again.<|im_end|>\n<|im_start|>assistant\n"
    result = (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    begin = f"{head}17+25?<|im_end|>\n<|im_start|>assistant\n"
    assert first == f"{begin}{turns[0]}{result}{turns[1]}<|im_end|>"
    prompt = f"{begin}{asks}{result}43<|im_end|>\n{again}"
    # The template drops nothing of the third turn, which goes on in its row.
    assert second == f"{prompt}44<|im_end|>\n{again}{turns[3]}<|im_end|>"
    start = own.row_starts[0]
    length = len(tokenizer.encode(prompt))
    assert [*own.response_ids[start : start + length]] == tokenizer.encode(prompt)
    places = {i for turn in own.turns for i in range(turn.start, turn.end)}
    assert {i for i, bit in enumerate(own.mask) if bit} == places
    assert all((x < 0) == (i in places) for i, x in enumerate(own.logprobs))
    assert [own.messages[turn.message]["role"] for turn in own.turns] == ["assistant"] * 4
    assert (own.stop_reason, own.reward, own.num_rows, own.num_branches) == ("env_done", 1.0, 2, 2)
    assert own.drift is not None and own.drift.tokens == 0


def test_the_last_rows_are_kept(tmp_path):
    turns = [f"<think>\nhm\n</think>\n\n{i}" for i in range(40, 43)]
    environment = [{"kind": "retry", "attempts": 3}]
    tokenizer, own = run(tmp_path, turns, environment=environment, max_rows=2)
    assert own.num_rows == 2 and own.num_branches == 3
    assert [sampled for _, sampled in rows_of(tokenizer, own)] == [[turns[1]], [turns[2]]]
    _, short = run(tmp_path, turns, environment=environment, response=60)
    assert short.num_rows == 1 and len(short.response_ids) <= 60
    # What a template does not write as thinking, it does not drop.
    _, kept = run(tmp_path, turns, templates.CHATML, environment=environment)
    assert kept.num_rows == 1 and len(kept.turns) == 3


@pytest.mark.parametrize(
    ("template", "said"),
    [(DROPS, "42"), (templates.QWEN3, "42"), (templates.GPT_OSS, "42"), (templates.R1, "\n\n42"),
     (templates.CHATML, None), (templates.QWEN3_KEPT, None)],
    ids=["qwen3 with tools", "qwen3", "gpt-oss", "r1", "chatml", "qwen3 kept"],
)  # fmt: skip
def test_which_templates_drop_thinking(tmp_path, template, said):
    tokenizer = open_tokenizer(tmp_path, template, CHATML, eos=SPECIAL_END)
    style = ChatStyle(tokenizer)
    for thought in (
        {"content": "42", "reasoning_content": "so"},
        {"content": "<think>\nso\n</think>\n\n42"},
    ):
        messages = [*ASKED, {"role": "assistant"} | thought, {"role": "user", "content": "more"}]
        ids = style.without_thinking(messages, 1)
        assert (ids is not None) == (said is not None)
        if ids is not None:
            plain = [ASKED[0], {"role": "assistant", "content": said}, messages[2]]
            assert ids == tokenizer.encode(tokenizer.apply_chat_template(plain))
        assert style.without_thinking(messages, 2) is None  # not in the row


def test_a_run_that_forks_needs_rows():
    keys = {"rollout.environment": ["retry"], "rollout.earlier_thinking": "fork"}
    with pytest.raises(rl.ConfigError, match=r"fork does not work with .*max_rows=1"):
        rl.load_config("grpo", keys)
