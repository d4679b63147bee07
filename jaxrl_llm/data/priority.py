"""Prioritised sampling: prompts are drawn by their earlier scores, not in shuffled epochs.

A weight function gives each visited prompt a weight. Its positional parameters are names of
`FIELDS`, its keyword-only parameters are settings. It takes and returns one number for each visited
prompt. Prompts that were never visited have no scores: they are drawn first, in random order.

V is the number of visited prompts, B of prompts in a batch, N of all prompts.
"""

import base64
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.data.loader import NEXT_BATCH, check_position, digests_of
from jaxrl_llm.distributed.multihost import HostRows, gather_objects, value_of_main
from jaxrl_llm.observability.moments import Moments
from jaxrl_llm.references import check_settings, load, nearest
from jaxrl_llm.types import Prompt

# Parameters of a weight function, for each visited prompt. The config is checked against it.
FIELDS: dict[str, str] = {
    "mean": "mean score of the samples at its last visit",
    "std": "their unbiased standard deviation, 0 for a single sample",
    "visits": "how often it was drawn, 1 or more",
    "since": "steps from its last visit to the current step",
}
PENDING = "pending"  # in a state: the batches that were drawn and have no scores
STATE = {"mean": "<f4", "std": "<f4", "visits": "<i4", "last_step": "<i4"}  # for each prompt

# The classes of prompts, in the order in which they are drawn; random order within a class.
UNVISITED, WEIGHTED, UNWANTED, THIS_STEP = range(4)

Values = Float[np.ndarray, " V"]


# ------------------------------------------------------------------------- weight functions


def failure_rate(mean: Values, *, low: float = 0.0, high: float = 1.0) -> Values:
    """1 - p, where p is the success rate: Kimi k1.5's prioritised sampling (arXiv:2501.12599).

    p = (mean - low) / (high - low), clipped to [0, 1]. `low` and `high` are the scores of a wrong
    and of a right answer. Prompts that the policy never solves get the largest weight: if many
    prompts cannot be solved, use `learnability`.
    """
    return 1.0 - _success(mean, low, high)


def learnability(mean: Values, *, low: float = 0.0, high: float = 1.0) -> Values:
    """p (1 - p), p as in `failure_rate`: the variance of a right-or-wrong score, largest at 1/2.

    Foster et al. 2025 (arXiv:2502.12272) draw from the prompts with the largest values; here the
    value is the weight. It is 0 for a prompt whose last group was all right or all wrong. Only the
    uniform draws return such a prompt.
    """
    success = _success(mean, low, high)
    return success * (1.0 - success)


def spread(std: Values) -> Values:
    """The variance of the last group's scores: `learnability` for scores of any kind.

    Needs several samples for each prompt. With few samples the estimate is rough.
    """
    return np.square(std)


WEIGHTS: dict[type[c.Priority], Callable[..., Any]] = {
    c.FailureRate: failure_rate,
    c.Learnability: learnability,
    c.Spread: spread,
}


def weight_function(settings: c.PrioritySettings) -> Callable[..., Any]:
    """The function that `settings` name, with its settings.

    Raises ValueError for a user's function that cannot be loaded, has no such setting, or reads
    what is not in FIELDS.
    """
    if not isinstance(settings, c.Custom):
        return partial(WEIGHTS[type(settings)], **asdict(settings))
    function = load(settings.path)
    check_settings(settings.path, function, settings.settings, takes_fields=True)
    for name in field_names(function):
        if name not in FIELDS:
            raise ValueError(
                f"config.data.priority={settings.path}: its parameter {name!r} is nothing that is "
                f"known of a prompt{nearest(name, FIELDS)}; there are {', '.join(FIELDS)}. A "
                "setting must be keyword-only (after *)"
            )
    return partial(function, **settings.settings)


def _success(mean: Values, low: float, high: float) -> Values:
    return np.clip((mean - low) / (high - low), 0.0, 1.0)


# ------------------------------------------------------------------------- draws


class PriorityLoader:
    """Batches of prompts, drawn with weights that depend on earlier scores.

    Each draw takes a visited prompt with probability q = uniform / V + (1 - uniform) weight / sum
    of weights, without replacement within a step. So once all prompts are visited, a batch holds a
    given prompt with a probability of at least 1 - (1 - uniform / N)^B. Unvisited prompts come
    first. Prompts in an earlier batch of the same step (dynamic sampling), or in a batch whose
    scores are not there yet (generating ahead), come last. If all weights are 0, they count as
    equal.

    A batch depends on the seed, its number, and the scores passed to `update` before it was drawn.
    `get_state` has the state: one array for each entry of `STATE`, and the batches without scores.
    All processes take process 0's draw.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        weigh: Callable[..., Any],
        *,
        batch_size: int,
        seed: int,
        uniform: float,
    ) -> None:
        """`weigh` reads FIELDS. It is called once here, so that an error is found early.

        Raises:
            ValueError: a batch would hold every prompt, or `weigh` gives wrong shapes.
        """
        if batch_size >= len(prompts):
            raise ValueError(
                f"config.data.train_batch_size={batch_size} takes all of the {len(prompts)} "
                "training prompts each time, so config.data.priority has nothing to choose: lower "
                "the batch size, or set --config.data.priority=null"
            )
        self._prompts = prompts
        self._weigh = weigh
        self._reads = field_names(weigh)
        self._batch_size = batch_size
        self._seed = seed % 2**32
        self._uniform = uniform
        self._next_batch = 0
        self._memory = {name: np.zeros(len(prompts), kind) for name, kind in STATE.items()}
        self._drawn: deque[np.ndarray] = deque()  # the batches whose scores `update` expects
        self._again: deque[np.ndarray] = deque()  # batches of a restored state, to be drawn again
        self._weights({name: np.ones(2) for name in FIELDS})

    @property
    def epoch(self) -> int:
        """Number of prompts drawn, divided by the number of prompts and rounded down."""
        drawn = self._next_batch - len(self._again)
        return drawn * self._batch_size // len(self._prompts)

    def draw(self, step: int, groups: np.ndarray | None = None) -> list[Prompt]:
        """The next batch, for `step` (1-based); with `groups` only those prompts of it."""
        drawn = self._again.popleft() if self._again else self._draw(step)
        self._drawn.append(drawn)
        return [self._prompts[i] for i in (drawn if groups is None else drawn[groups]).tolist()]

    def _draw(self, step: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, self._next_batch])
        # An exponential race: the first arrivals at rates q are successive draws with weights q.
        arrival = rng.exponential(size=len(self._prompts))
        rank = np.full(len(self._prompts), UNVISITED)
        visited = self._visited()
        if visited.size:
            rates = self._probabilities(step)
            rank[visited] = np.where(rates > 0, WEIGHTED, UNWANTED)
            arrival[visited] /= np.where(rates > 0, rates, 1.0)
            rank[visited[self._memory["last_step"][visited] == step]] = THIS_STEP
        for waiting in self._drawn:
            rank[waiting] = THIS_STEP
        chosen = np.lexsort((arrival, rank))[: self._batch_size].astype(np.int32)
        self._next_batch += 1
        return np.array(value_of_main(chosen.tolist(), "drawn"), np.int32)

    def update(self, step: int, scores: np.ndarray, rows: HostRows | None = None) -> None:
        """Record the scores of a batch [B * samples]; a prompt's samples are adjacent.

        The batch is the first that was drawn and has no scores.

        With `rows`, `scores` belong to the rows that this process owns. All processes must call
        it then: the mean and the deviation of each prompt are gathered. NaN stands for a sample
        without a score; a prompt that has none keeps what it had.
        """
        assert self._drawn, "no batch was drawn"
        scores = np.asarray(scores, np.float64)
        if rows is None:
            scored = [_moments(group) for group in scores.reshape(self._batch_size, -1)]
        else:
            scored = self._gathered(scores, rows)
        has_scores = np.array([moments.count > 0 for moments in scored])
        memory, drawn = self._memory, self._drawn.popleft()[has_scores]
        memory["mean"][drawn] = [moments.mean for moments in scored if moments.count]
        memory["std"][drawn] = [moments.std for moments in scored if moments.count]
        memory["visits"][drawn] += 1
        memory["last_step"][drawn] = step

    def _gathered(self, scores: np.ndarray, rows: HostRows) -> list[Moments]:
        """The moments of each prompt's scores; the samples of one may be on two hosts."""
        samples = rows.num_rows // self._batch_size
        prompts = rows.owned // samples
        own = [[int(p), *_moments(scores[prompts == p]).numbers] for p in np.unique(prompts)]
        scored = [Moments()] * self._batch_size
        for moments in gather_objects(own, "priorities"):
            for prompt, *numbers in moments:
                scored[prompt] += Moments(*numbers)
        return scored

    def metrics(self, step: int) -> dict[str, float]:
        """Metrics of the state from which the step after `step` draws."""
        memory, visited = self._memory, self._visited()
        probabilities = self._probabilities(step + 1)
        return {
            "data/unvisited": 1.0 - visited.size / len(self._prompts),
            "data/effective_prompts": float(1.0 / np.square(probabilities).sum()),
            "data/known_score": float(memory["mean"][visited].mean(dtype=np.float64)),
            "data/longest_wait": float(step - memory["last_step"][visited].min()),
        }

    def get_state(self, pending: int = 0) -> dict[str, Any]:
        """The exact state in JSON's types, and the facts that must be equal to restore it.

        From there the last `pending` batches come again; they are those without scores. Those that
        an earlier state kept, and that were not drawn again yet, follow them.
        """
        assert len(self._drawn) == pending, "the scores of a batch are missing"
        arrays = {name: _pack(array) for name, array in self._memory.items()}
        waiting = [drawn.tolist() for drawn in (*self._drawn, *self._again)]
        return self._position() | arrays | {PENDING: waiting}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue with the batch that came next when `get_state` was called.

        Raises:
            ValueError: the state belongs to other data, another seed or batch size, or to a run
                without priorities.
        """
        check_position(state, self._position(), also=STATE)
        self._next_batch = int(state[NEXT_BATCH])
        self._memory = {name: _unpack(state[name], kind) for name, kind in STATE.items()}
        self._drawn.clear()
        self._again = deque(np.array(drawn, np.int32) for drawn in state.get(PENDING, []))

    def _position(self) -> dict[str, Any]:
        return {
            NEXT_BATCH: self._next_batch,
            "batch_size": self._batch_size,
            "num_items": len(self._prompts),
            **self._digests,
            "seed": self._seed,
        }

    @cached_property
    def _digests(self) -> dict[str, int]:
        return digests_of(self._prompts)

    def _visited(self) -> np.ndarray:
        return np.flatnonzero(self._memory["visits"])

    def _probabilities(self, step: int) -> np.ndarray:
        """The probability q of each visited prompt, as if no other prompts existed: [V] float64."""
        visited = self._visited()
        known = {name: array[visited] for name, array in self._memory.items()}
        values = {
            "mean": known["mean"].astype(np.float64),
            "std": known["std"].astype(np.float64),
            "visits": known["visits"],
            "since": step - known["last_step"],
        }
        weights = self._weights(values)
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size:
            prompt = self._prompts[int(visited[bad[0]])]
            raise ValueError(
                f"config.data.priority gave {bad.size} of {visited.size} prompts a weight that is "
                f"negative or not finite, the first of them {weights[bad[0]]:g} to row {prompt.row}"
                f" of {prompt.data_source}. For scores outside of 0 to 1, set low and high, or clip"
            )
        largest = weights.max()
        # Divided by the largest first, because the sum of finite weights can be infinite.
        shares = weights / largest if largest > 0 else np.ones_like(weights)
        return self._uniform / visited.size + (1.0 - self._uniform) * shares / shares.sum()

    def _weights(self, values: dict[str, np.ndarray]) -> np.ndarray:
        """The function's weights of prompts with these values of FIELDS."""
        weights = np.asarray(self._weigh(*(values[name] for name in self._reads)), np.float64)
        shape = next(iter(values.values())).shape
        if weights.shape != shape:
            raise ValueError(
                f"config.data.priority gave weights of shape {weights.shape} for {shape[0]} "
                f"prompts: it must return one number each, shape {shape}"
            )
        return weights


def _pack(array: np.ndarray) -> str:
    """The bytes of an array as text, which is shorter than JSON's decimals."""
    return base64.b64encode(zlib.compress(array.tobytes())).decode("ascii")


def _unpack(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), kind).copy()


def _moments(scores: np.ndarray) -> Moments:
    """The moments of scores, of which NaN are none."""
    return Moments.of(scores[~np.isnan(scores)])
