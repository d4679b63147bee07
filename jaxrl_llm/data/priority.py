"""Prompts drawn by what the policy got on them before, in place of shuffled epochs.

A weight function says how much each prompt is wanted. Its positional parameters name what it reads
(`FIELDS`), its keyword-only ones are settings; it takes and returns one number a visited prompt.
A prompt that was never visited has nothing to read, so such prompts come first, in random order.

V counts visited prompts, B the prompts of a batch, N all prompts.
"""

import base64
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.data.loader import NEXT_BATCH, check_position, fingerprint
from jaxrl_llm.distributed.multihost import gather_rows
from jaxrl_llm.types import Prompt

# What a weight function may ask for, of each visited prompt. The config is checked against it.
FIELDS: dict[str, str] = {
    "mean": "mean score over the samples of its last visit",
    "std": "their unbiased standard deviation, 0 for a single sample",
    "visits": "how often it was drawn, 1 or more",
    "since": "steps from its last visit to the step that is drawn for",
}
STATE = {"mean": "<f4", "std": "<f4", "visits": "<i4", "last_step": "<i4"}  # of each prompt

# Who is drawn before whom; within a class by chance.
UNVISITED, WEIGHTED, UNWANTED, THIS_STEP = range(4)

Values = Float[np.ndarray, " V"]


# ------------------------------------------------------------------------- weight functions


def failure_rate(mean: Values, *, low: float = 0.0, high: float = 1.0) -> Values:
    """1 - p, p the success rate: prioritised sampling of Kimi k1.5 (arXiv:2501.12599).

    p = (mean - low) / (high - low), held within 0 and 1: `low` and `high` are the scores of a wrong
    and of a right answer. It keeps prompts that the policy never solves: where the data hold
    many that cannot be solved, `learnability` wastes less.
    """
    return 1.0 - _success(mean, low, high)


def learnability(mean: Values, *, low: float = 0.0, high: float = 1.0) -> Values:
    """p (1 - p), p as in `failure_rate`: the variance of a right-or-wrong score, most at p = 1/2.

    Foster et al. 2025, arXiv:2502.12272, who draw from the prompts that have most of it; here it
    is the weight. A prompt whose last group was all right or all wrong has 0, and returns by the
    share of uniform draws alone.
    """
    success = _success(mean, low, high)
    return success * (1.0 - success)


def spread(std: Values) -> Values:
    """The variance of the last group's scores: learnability for scores of any kind.

    Needs several samples a prompt; with few of them it is rough.
    """
    return np.square(std)


def _success(mean: Values, low: float, high: float) -> Values:
    if not low < high:
        raise ValueError(
            f"low={low} and high={high}: the score of a wrong answer must be below that of a right "
            "one; low=0, high=1 works for scores from 0 to 1"
        )
    return np.clip((mean - low) / (high - low), 0.0, 1.0)


# ------------------------------------------------------------------------- draws


class PriorityLoader:
    """Batches of prompts drawn with probability by weight, and the memory that the weights read.

    Each draw takes a visited prompt with probability q = uniform / V + (1 - uniform) weight / sum
    of weights, without replacement within a step. So once all are visited, a batch holds each with
    a probability of at least 1 - (1 - uniform / N)^B, whatever its weight. Unvisited prompts come
    before all others; those that an earlier batch of the same step held (dynamic sampling) come
    last. Weights that are all 0 are equal weights.

    A batch depends on the seed, its number and the scores given to `update` before; the state,
    an array of each of `STATE`, is in `get_state`. Processes draw alike: the first one's draw is
    what all of them take.
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
        """`weigh` reads FIELDS; it is tried once, so that one that cannot work fails here.

        Raises:
            ValueError: a batch would hold every prompt anyway.
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
        self._drawn: np.ndarray | None = None  # the batch whose scores are awaited
        self._weights({name: np.ones(2) for name in FIELDS})

    @property
    def epoch(self) -> int:
        """Prompts drawn, in whole numbers of times all prompts."""
        return self._next_batch * self._batch_size // len(self._prompts)

    def draw(self, step: int) -> list[Prompt]:
        """The next batch, for `step` (1-based). `update` must follow before another."""
        assert self._drawn is None, "the scores of the batch before are missing"
        rng = np.random.default_rng([self._seed, self._next_batch])
        # An exponential race: who arrives first at rates q is who successive draws by q take.
        arrival = rng.exponential(size=len(self._prompts))
        rank = np.full(len(self._prompts), UNVISITED)
        visited = self._visited()
        if visited.size:
            rates = self._probabilities(step)
            rank[visited] = np.where(rates > 0, WEIGHTED, UNWANTED)
            arrival[visited] /= np.where(rates > 0, rates, 1.0)
            rank[visited[self._memory["last_step"][visited] == step]] = THIS_STEP
        chosen = np.lexsort((arrival, rank))[: self._batch_size].astype(np.int32)
        self._drawn = drawn = gather_rows(chosen[None])[0]
        self._next_batch += 1
        return [self._prompts[i] for i in drawn]

    def update(self, step: int, scores: np.ndarray) -> None:
        """Take in the scores [B * samples] of the batch that was drawn last, group after group."""
        assert self._drawn is not None, "no batch was drawn"
        groups = np.asarray(scores, np.float64).reshape(self._batch_size, -1)
        memory, drawn = self._memory, self._drawn
        memory["mean"][drawn] = groups.mean(axis=1)
        memory["std"][drawn] = groups.std(axis=1, ddof=1) if groups.shape[1] > 1 else 0.0
        memory["visits"][drawn] += 1
        memory["last_step"][drawn] = step
        self._drawn = None

    def metrics(self, step: int) -> dict[str, float]:
        """What the draws of the step after `step` will go by."""
        memory, visited = self._memory, self._visited()
        probabilities = self._probabilities(step + 1)
        return {
            "data/unvisited": 1.0 - visited.size / len(self._prompts),
            "data/effective_prompts": float(1.0 / np.square(probabilities).sum()),
            "data/known_score": float(memory["mean"][visited].mean(dtype=np.float64)),
            "data/longest_wait": float(step - memory["last_step"][visited].min()),
        }

    def get_state(self) -> dict[str, Any]:
        """The memory, bit for bit in JSON's types, and what must be unchanged to go on with it."""
        assert self._drawn is None, "the scores of the last batch are missing"
        return self._position() | {name: _pack(array) for name, array in self._memory.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues with the batch that `get_state` had ahead of it.

        Raises:
            ValueError: the state is of other data, another seed or another batch size, or of a run
                without priorities.
        """
        check_position(state, self._position(), also=STATE)
        self._next_batch = int(state[NEXT_BATCH])
        self._memory = {name: _unpack(state[name], kind) for name, kind in STATE.items()}
        self._drawn = None

    def _position(self) -> dict[str, Any]:
        return {
            NEXT_BATCH: self._next_batch,
            "batch_size": self._batch_size,
            "num_items": len(self._prompts),
            "items_crc32": self._items_crc32,
            "seed": self._seed,
        }

    @cached_property
    def _items_crc32(self) -> int:
        return fingerprint(self._prompts)

    def _visited(self) -> np.ndarray:
        return np.flatnonzero(self._memory["visits"])

    def _probabilities(self, step: int) -> np.ndarray:
        """Of each visited prompt to be the next one drawn, were there no others: [V], float64."""
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
            raise self._refused(weights, bad, visited, values)
        largest = weights.max()
        # Divided by the largest first: a sum of finite weights need not be finite.
        shares = weights / largest if largest > 0 else np.ones_like(weights)
        return self._uniform / visited.size + (1.0 - self._uniform) * shares / shares.sum()

    def _weights(self, values: dict[str, np.ndarray]) -> np.ndarray:
        """What the function gives prompts of which `values` are known"""
        weights = np.asarray(self._weigh(*(values[name] for name in self._reads)), np.float64)
        shape = next(iter(values.values())).shape
        if weights.shape != shape:
            raise ValueError(
                f"config.data.priority gave weights of shape {weights.shape} for {shape[0]} "
                f"prompts: it must return one number each, shape {shape}"
            )
        return weights

    def _refused(
        self,
        weights: np.ndarray,
        bad: np.ndarray,
        visited: np.ndarray,
        values: dict[str, np.ndarray],
    ) -> ValueError:
        first = int(bad[0])
        prompt = self._prompts[int(visited[first])]
        known = ", ".join(f"{name}={array[first]:g}" for name, array in values.items())
        return ValueError(
            f"config.data.priority gave {bad.size} of {visited.size} prompts a weight that is "
            f"negative or not finite, the first of them {weights[first]:g} to row {prompt.row} "
            f"of {prompt.data_source} ({known}). Weights must be 0 or more: for scores that "
            "leave 0 to 1, give the function's low and high, or clip"
        )


def _pack(array: np.ndarray) -> str:
    """The bytes of an array as text; decimals of JSON would be longer."""
    return base64.b64encode(zlib.compress(array.tobytes())).decode("ascii")


def _unpack(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), kind).copy()
