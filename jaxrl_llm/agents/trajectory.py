"""The record of one answer of several turns: what the policy sampled, and what it observed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from jaxrl_llm.agents.call_formats import Call

StopReason = Literal[
    "completed",  # an answer without a call
    "env_done",  # the environment is done
    "max_turns",
    "max_tool_calls",
    "max_tokens",  # the response is full
    "max_turn_tokens",  # a turn was cut
    "context_overflow",  # an observation does not fit
    "parse_error",  # too many turns in a row whose calls cannot be run
    "timeout",  # a tool or an environment ran too long, again after a retry
    "failed",  # an environment or its process failed, again after a retry
    "aborted",  # the run ended it
]
UNGRADED = ("timeout", "failed", "aborted")  # these say nothing about the policy


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of the model: sampled ids, and what followed."""

    start: int  # place in the response
    end: int
    message: int = -1  # place of its message in `messages`
    calls: tuple[Call, ...] = ()
    num_failed: int = 0  # calls whose result is an error
    num_cut: int = 0  # results that lost their middle
    reward: float | None = None  # the environment's, for this turn
    state: str = ""  # state before the turn, as the environment named it in `info`
    tool_s: float = field(default=0.0, compare=False)  # seconds of waiting for what followed


class Drift(NamedTuple):
    """What rendering and encoding a conversation again would change."""

    turns: int
    drifted: int  # turns whose ids would be others
    tokens: int  # ids from the first other one on


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt, and what was sampled and observed behind it; see `rows.py`."""

    prompt: Sequence[int]
    response: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float] = ()
    turns: Sequence[Turn]  # places count from the response; rows that fork share turns
    messages: Sequence[dict[str, Any]] = ()
    sequence: Any = None  # its ids in the engine


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One answer. The response is all after the prompt, sampled and observed."""

    id: str  # step and sample; rows of one trajectory share it
    sample: int  # number of the sample in its step
    group: int  # number of its prompt in the step
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()  # 1 for a sampled id, 0 for an observed one
    logprobs: tuple[float, ...] = ()  # 0 where the mask is 0
    turns: tuple[Turn, ...] = ()
    final_reward: float | None = None  # reward that the environment gave at the end
    stop_reason: StopReason = "completed"
    failure: str = ""  # kind and message of a failure
    num_retries: int = 0
    differs: bool = False  # the environment, made again, answered otherwise
    messages: tuple[dict[str, Any], ...] = ()  # the conversation, with prompt
    text: str = ""  # last turn, without thinking and special tokens
    num_branches: int = 0  # contexts in which turns were sampled; see `rows.py`
    row_starts: tuple[int, ...] = ()  # places in the response at which further rows begin
    shortened: bool = False  # its end did not fit into the response
    has_tools: bool = False  # the model may call tools
    drift: Drift | None = None  # None where it was not measured
    tool_s: float = field(default=0.0, compare=False)  # seconds of waiting for tools
    # Its rows, until the batch has what they and their sequences hold.
    rows: tuple[Row, ...] = field(default=(), compare=False, repr=False)

    @property
    def num_rows(self) -> int:
        """Rows that have turns of it."""
        return len(self.row_starts) + bool(self.turns)

    @property
    def failed(self) -> bool:
        """Whether it is no answer of the policy: it is left out of the loss and of its group."""
        return self.stop_reason in UNGRADED

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens ended it."""
        return self.stop_reason in ("max_tokens", "max_turn_tokens", "context_overflow")

    @property
    def reward(self) -> float | None:
        """The sum of the environment's rewards; None where it gave none."""
        rewards = [turn.reward for turn in self.turns] + [self.final_reward]
        given = [reward for reward in rewards if reward is not None]
        return sum(given) if given else None


IDS = ("response_ids", "mask", "logprobs", "rows")  # parts that a batch has as arrays


def without_ids(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory without its IDS, in JSON's types."""
    values = {name: value for name, value in asdict(trajectory).items() if name not in IDS}
    return values | {"length": len(trajectory.response_ids)}


def restored(
    kept: Mapping[str, Any],
    ids: Sequence[int],
    mask: Sequence[float],
    logprobs: Sequence[float],
) -> Trajectory:
    """The trajectory of what `without_ids` gave. Padding may follow its ids."""
    values = dict(kept)
    number = values.pop("length")
    turns = [
        Turn(**turn | {"calls": tuple(Call(**call) for call in turn["calls"])})
        for turn in values["turns"]
    ]
    whole = Trajectory(**values)
    return replace(
        whole,
        prompt_ids=tuple(whole.prompt_ids),
        turns=tuple(turns),
        response_ids=tuple(ids[:number]),
        mask=tuple(int(x) for x in mask[:number]),
        logprobs=tuple(logprobs[:number]),
        row_starts=tuple(whole.row_starts),
        messages=tuple(whole.messages),
        drift=None if whole.drift is None else Drift(*whole.drift),
    )
