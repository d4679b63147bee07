"""An engine whose model is a table: a script has the turns, which end in any order."""

from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

from jaxrl_llm.agents.driver import Sample


@dataclass(eq=False)
class FakeBeginning:
    tokens: list


@dataclass(eq=False)
class FakeSequence:
    script: tuple
    tokens: list
    num_prompt: int
    limit: int
    logprobs: list
    status: str = "running"
    stop_reason: str | None = None
    turn: int = 0


class FakeEngine:
    """`order` shuffles which turns end in a step. `max_context` is the engine's own limit."""

    def __init__(self, tokenizer, stop_ids, order=0, max_context=10_000):
        self.tokenizer, self.random, self.max_context = tokenizer, Random(order), max_context
        self.stop_ids, self.sequences = stop_ids, []

    @property
    def has_work(self):
        return any(sequence.status == "running" for sequence in self.sequences)

    def beginning(self, tokens):
        return FakeBeginning(tokens)

    def add(self, prompt, *, limit, beginning, script):
        assert limit > 0 and beginning.tokens == prompt
        none = [0.0] * len(prompt)
        sequence = FakeSequence(script, list(prompt), len(prompt), limit, none)
        self.sequences.append(sequence)
        return sequence

    def append(self, sequence, tokens, *, limit):
        assert sequence.status == "waiting" and limit > 0
        sequence.tokens += tokens
        sequence.logprobs += [0.0] * len(tokens)
        sequence.status, sequence.limit, sequence.turn = "running", limit, sequence.turn + 1

    def step(self):
        running = [s for s in self.sequences if s.status == "running"]
        chosen = self.random.sample(running, self.random.randint(1, len(running)))
        for sequence in chosen:
            text = sequence.script[sequence.turn]
            ids = text if isinstance(text, list) else self.tokenizer.encode(text)
            if isinstance(text, str) and not (ids and ids[-1] in self.stop_ids):
                ids = [*ids, self.tokenizer.eos_id]
            room = min(sequence.limit, self.max_context - len(sequence.tokens))
            sequence.stop_reason = "stop" if len(ids) <= room else "length"
            ids = ids[:room]
            sequence.logprobs += [-0.5 - (len(sequence.tokens) + i) / 1000 for i in range(len(ids))]
            sequence.tokens += ids
            sequence.status = "waiting"
        return chosen

    def finish(self, sequence):
        assert sequence.status == "waiting"
        sequence.status = "ended"

    def abort(self, sequence):
        sequence.status, sequence.stop_reason = "ended", "aborted"


def prompt_of(tokenizer, prompt, **columns):
    """A row as the data room gives it, without jax."""
    is_text = isinstance(prompt, str)
    text = prompt if is_text else tokenizer.apply_chat_template(prompt)
    return SimpleNamespace(
        token_ids=tuple(tokenizer.encode(text)),
        text=text,
        messages=None if is_text else tuple(prompt),
        data_source="test",
        ground_truth=columns.get("ground_truth"),
        columns=columns,
    )


def sample_of(tokenizer, number, prompt, turns, **columns):
    """A sample whose turns the engine knows."""
    return Sample(
        prompt=prompt_of(tokenizer, prompt, **columns),
        step=3,
        sample=number,
        group=number // 2,
        options={"script": tuple(turns)},
    )
