"""A sequence of the engine: the ids so far, who wrote them, and where it stands."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from jaxrl_llm.generation.calls import bits

# "queued": it waits for memory. "running": it is sampled. "waiting": its turn has ended, and it
# goes on with `Engine.append`. "ended": it gave its pages back.
Status = Literal["queued", "running", "waiting", "ended"]
# "stop": a stop token or stop string. "length": the limit of the turn. "context": no more room.
StopReason = Literal["stop", "length", "context", "aborted"]


@dataclass(frozen=True)
class Sampling:
    """How one sequence is sampled, as in `SamplingParams`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def has_filter(self) -> bool:
        """True if some tokens may be left out."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(eq=False, kw_only=True)
class Beginning:
    """A prompt in a row of the cache, which several sequences read."""

    tokens: tuple[int, ...]  # all but the last token of the prompt
    row: int = -1  # row of the cache; -1: not computed yet
    readers: int = 0  # sequences that have not ended
    routes: Any = None  # experts of the tokens, where they are recorded


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One conversation with the model."""

    tokens: list[int]  # prompt, sampled and appended ids
    sampled: list[bool]  # True for each id that the policy sampled
    logprobs: list[float]  # log-probs of sampled ids, 0 for the others
    num_prompt: int  # ids of the first prompt
    seed_key: np.ndarray  # uint32 [2], data of fold_in(key(seed), step)
    sample_id: int
    sampling: Sampling = field(default_factory=Sampling)
    beginning: Beginning | None = None  # shared ids before its own entries
    number: int = 0  # order of arrival: the oldest one never waits for memory
    status: Status = "queued"
    stop_reason: StopReason | None = None
    limit: int = 0  # ids at which the turn ends
    slot: int = -1  # slot that holds its state, where a model has one
    computed: int = 0  # own entries in the cache
    pages: list[int] = field(default_factory=list)
    routes: list[Any] = field(default_factory=list)  # experts of computed own entries, in parts
    kept: dict[int, Any] = field(default_factory=dict)  # kept ids by place, where filters are on
    base: int = field(init=False)  # ids in the shared beginning

    def __post_init__(self) -> None:
        self.base = 0 if self.beginning is None else len(self.beginning.tokens)

    @cached_property
    def words(self) -> tuple[int, ...]:
        """The key and the settings as `calls.Turns` has them."""
        how = self.sampling
        floats = (bits(how.temperature), how.top_k, bits(how.top_p), bits(how.min_p))
        return (*map(int, self.seed_key), *floats)

    @property
    def all_routes(self) -> list[Any]:
        """The experts of all computed ids, in parts, from the shared beginning on."""
        shared = [] if self.beginning is None else [self.beginning.routes]
        return [*shared, *self.routes]

    @property
    def response(self) -> list[int]:
        """The ids after the first prompt."""
        return self.tokens[self.num_prompt :]

    @property
    def own(self) -> list[int]:
        """The ids after the shared beginning."""
        return self.tokens[self.base :]

    @property
    def left_to_compute(self) -> int:
        """Own ids before the last one that are not in the cache."""
        return len(self.tokens) - self.base - 1 - self.computed
