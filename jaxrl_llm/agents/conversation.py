"""One sample as a state machine: what follows a sampled turn, and when the sample ends.

It is pure: it calls no tool and samples nothing. Limits of tokens are three: of a turn, of the
response (sampled and observed), and of the context. An observation that would be the last of the
sample is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxrl_llm.agents.drift import drift_of
from jaxrl_llm.agents.environments import Observation, Step
from jaxrl_llm.agents.styles import Message, Style
from jaxrl_llm.agents.tools import Result, Schema, checked, cut_middle, error_text, shares
from jaxrl_llm.agents.trajectory import Drift, Row, StopReason, Turn
from jaxrl_llm.tokenizer import Tokenizer

EngineStop = Literal["stop", "length", "context", "aborted"]


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Limits of a sample; 0 is no limit, where nothing else is said."""

    max_response_length: int  # sampled and observed tokens
    max_context: int  # tokens of prompt and response
    max_turns: int = 0  # turns of the model
    max_turn_tokens: int = 0  # sampled tokens of a turn
    max_tool_calls: int = 0
    max_parse_errors: int = 3  # turns in a row without a call that can be run; 0: none may be
    max_tool_result_tokens: int = 0  # tokens of the results of a turn


@dataclass(frozen=True)
class Act:
    """What the turn asks for: calls that can be run, or the text for an environment's step."""

    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    text: str | None = None


@dataclass(frozen=True)
class Append:
    """Ids of the observation, and the limit of the next turn."""

    ids: list[int]
    limit: int
    ended: Row | None = None  # row that ends here; the ids are the prompt of the next one


@dataclass(frozen=True)
class End:
    """The end of the sample."""

    reason: StopReason


class Conversation:
    """One sample. `start`, then `turn` and `observe` or `observe_step` by turns, until an End."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        style: Style,
        budgets: Budgets,
        tools: Mapping[str, Schema] | None = None,
        *,
        steps: bool = False,
        stateful: bool = False,
        forks: bool = False,
    ) -> None:
        """`steps`: an environment answers turns without calls. `stateful`: calls change one.

        `forks`: a row begins where the template drops thinking. `prompt`, `response` and `mask` are
        the last row's.
        """
        self._tokenizer, self._style, self._budgets = tokenizer, style, budgets
        self._tools, self._steps, self._stateful = dict(tools or {}), steps, steps or stateful
        self._forks = forks
        self._first = 0  # place in `turns` of the last row's first turn
        self.prompt: list[int] = []
        self.response: list[int] = []
        self.mask: list[int] = []
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        self.text = ""
        self._thinking = False  # the turn begins with thinking that is open
        self._num_calls = self._bad_turns = 0
        self._state = ""  # state before the next turn
        self._ending: StopReason | None = None  # why no turn follows the one that was sampled

    @property
    def has_tools(self) -> bool:
        """Whether the model may call tools."""
        return bool(self._tools)

    @property
    def own_turns(self) -> list[Turn]:
        """The turns of the last row."""
        return self.turns[self._first :]

    @property
    def limit(self) -> int:
        """The most tokens of the next turn."""
        left = self._budgets.max_response_length - len(self.response)
        left = min(left, self._context_left)
        return min(left, self._budgets.max_turn_tokens) if self._budgets.max_turn_tokens else left

    @property
    def _context_left(self) -> int:
        return self._budgets.max_context - len(self.prompt) - len(self.response)

    def start(
        self, messages: Sequence[Message], ids: Sequence[int], opening: Observation = None
    ) -> Append | End:
        """The ids of the prompt: the row's, with tools and what an environment opens with."""
        self.prompt, self.messages = self._style.prompt(messages, ids, opening)
        self._thinking = self._style.parser.opens_thinking(self.prompt)
        return Append(self.prompt, self.limit) if self.limit > 0 else End("context_overflow")

    def turn(self, ids: Sequence[int], stop: EngineStop) -> Act | End:
        """Take a sampled turn, and why the engine ended it."""
        start = len(self.response)
        self.response += ids
        self.mask += [1] * len(ids)
        parsed = self._style.parser.parse(ids, thinking=self._thinking)
        calls = tuple(checked(call, self._tools) for call in parsed.calls) if self._tools else ()
        self.text = parsed.content if calls else parsed.text
        turn = Turn(
            start=start,
            end=len(self.response),
            message=len(self.messages),
            calls=calls,
            state=self._state,
        )
        self.turns.append(turn)
        self.messages.append(_answer(self.text, parsed.thinking, self.turns[-1]))
        if stop != "stop":
            return End(self._cut(stop))
        if not calls:
            return self._without_calls()
        self._bad_turns = 0 if any(call.status == "ok" for call in calls) else self._bad_turns + 1
        if self._bad_turns > self._budgets.max_parse_errors:
            return End("parse_error")
        return self._with_calls(len(calls))

    def _cut(self, stop: EngineStop) -> StopReason:
        """Why a turn has no end."""
        if stop == "aborted":
            return "aborted"
        if len(self.response) >= self._budgets.max_response_length:
            return "max_tokens"
        if stop == "context" or self._context_left <= 0:
            return "context_overflow"
        return "max_turn_tokens"

    def _without_calls(self) -> Act | End:
        self._bad_turns = 0
        if not self._steps:
            return End("completed")
        self._end_at_max_turns()
        return Act(text=self.text)

    def _with_calls(self, number: int) -> Act | End:
        left = self._budgets.max_tool_calls - self._num_calls
        if self._budgets.max_tool_calls and left < number:
            self._ending, number = "max_tool_calls", max(left, 0)
        self._num_calls += number
        self._end_at_max_turns()
        if self._ending and not (self._stateful and number):
            return End(self._ending)
        run = [call for call in self.turns[-1].calls[:number] if call.status == "ok"]
        return Act(calls=tuple((call.name, call.values) for call in run))

    def _end_at_max_turns(self) -> None:
        if self._budgets.max_turns and len(self.turns) >= self._budgets.max_turns:
            self._ending = self._ending or "max_turns"

    def observe(self, results: Sequence[Result]) -> Append | End:
        """Take the results of the calls that could be run, in their order."""
        turn, given = self.turns[-1], iter(results)
        if self._ending:
            self._change(num_failed=sum(result.failed for result in results))
            return End(self._ending)
        every = [
            next(given) if call.status == "ok" else Result(error_text(call.problem), failed=True)
            for call in turn.calls
        ]
        texts = self._cut_results([result.text for result in every])
        self._change(
            num_failed=sum(result.failed for result in every),
            num_cut=sum(text != result.text for text, result in zip(texts, every, strict=True)),
        )
        every = [replace(result, text=text) for result, text in zip(every, texts, strict=True)]
        return self._append(*self._style.results(turn.calls, every, self.response[-1]))

    def observe_step(self, step: Step) -> Append | End:
        """Take the answer of the environment to the last turn."""
        self._change(reward=step.reward)
        self._state = str(step.info.get("state", ""))
        if step.done:
            return End("env_done")
        if self._ending:
            return End(self._ending)
        observation = step.observation
        if isinstance(observation, str):
            (text,) = self._cut_results([observation])
            self._change(num_cut=int(text != observation))
            observation = text
        return self._append(*self._style.observation(observation, self.response[-1]))

    def drift(self) -> Drift | None:
        """What rendering and encoding the conversation again would change."""
        return drift_of(self._style, self.messages, self.prompt, self.response, self.own_turns)

    def waited(self, seconds: float) -> None:
        """Note how long the answer to the last turn took."""
        self._change(tool_s=self.turns[-1].tool_s + seconds)

    def _change(self, **changes: Any) -> None:
        self.turns[-1] = replace(self.turns[-1], **changes)

    def _cut_results(self, texts: Sequence[str]) -> list[str]:
        """The texts, each cut to its share of the room."""
        room = self._budgets.max_tool_result_tokens
        # A token has at least one byte, so a short text needs no look.
        if not room or sum(len(text.encode()) for text in texts) <= room:
            return list(texts)
        encode = self._style.encode
        lengths = [len(encode(text)) for text in texts]
        return [
            cut_middle(text, encode, self._tokenizer.decode, most)
            for text, most in zip(texts, shares(lengths, room), strict=True)
        ]

    def _append(self, ids: list[int], messages: Sequence[Message]) -> Append | End:
        """The next turn begins behind an observation, if it fits with one token to sample."""
        if self._forks and self.own_turns:
            said, first = [*self.messages, *messages], self.own_turns[0].message
            prompt = self._style.without_thinking(said, first)
            if prompt is not None:
                return self._begin_row(prompt, messages)
        self.response += ids
        self.mask += [0] * len(ids)
        if self.limit < 1:
            del self.response[len(self.response) - len(ids) :]
            del self.mask[len(self.mask) - len(ids) :]
            return End("context_overflow")
        self.messages += messages
        self._thinking = self._style.parser.opens_thinking(ids)
        return Append(ids, self.limit)

    def _begin_row(self, prompt: list[int], messages: Sequence[Message]) -> Append | End:
        """The next turn begins a row, if it fits with one token to sample."""
        if len(prompt) >= self._budgets.max_context:
            return End("context_overflow")
        ended = Row(
            prompt=self.prompt, response=self.response, mask=self.mask, turns=self.own_turns
        )
        self.prompt, self.response, self.mask = prompt, [], []
        self._first = len(self.turns)
        self.messages += messages
        self._thinking = self._style.parser.opens_thinking(prompt)
        return Append(prompt, self.limit, ended)


def _answer(text: str, thinking: str, turn: Turn) -> Message:
    """The message of a turn, for reward functions and the trace."""
    message: Message = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if turn.calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
    return message
