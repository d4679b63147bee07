"""Dynamic sampling (DAPO): groups whose samples all got one reward are replaced by new ones.

Such a group teaches nothing to an estimator that compares the samples of a prompt. So the stages up
to the reward run again, on the loader's next prompts, until enough groups vary; then the rest of
the iteration runs once, on those. What a round has too many is dropped, as in verl: the only state
is the loader's position, which a checkpoint holds, and a resumed run generates the same rounds.

Yu et al. 2025, arXiv:2503.14476.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.config import FilterGroupsConfig
from jaxrl_llm.types import RolloutBatch

SCORE = "score"


@dataclass(kw_only=True)
class GroupFilter:
    """Takes the rounds of one iteration in and gives its batch; all in numpy.

    `column` is that of `reward_parts` which must vary, None for the score.
    """

    config: FilterGroupsConfig
    num_groups: int  # wanted
    group: int  # samples of each
    column: int | None = None
    _varied: list[RolloutBatch] = field(default_factory=list)
    _constant: list[RolloutBatch] = field(default_factory=list)
    _rounds: int = 0

    @property
    def rounds(self) -> int:
        """How many were taken in."""
        return self._rounds

    @property
    def complete(self) -> bool:
        """True when no other round is to be generated."""
        return self._count(self._varied) >= self.num_groups or (
            self._rounds >= self.config.max_num_gen_batches
        )

    def add(self, batch: RolloutBatch) -> None:
        """Take in a round: whole groups, their samples side by side."""
        if self.column is None:
            assert batch.scores is not None
            values: Any = batch.scores
        else:
            assert batch.reward_parts is not None
            values = np.nan_to_num(np.asarray(batch.reward_parts)[:, self.column])  # None adds 0
        groups = np.asarray(values).reshape(-1, self.group)
        varies = (groups.max(axis=1) != groups.min(axis=1)).repeat(self.group)
        self._varied.append(_rows(batch, varies))
        self._constant.append(_rows(batch, ~varies))
        self._rounds += 1

    def batch(self) -> RolloutBatch:
        """The groups to learn from, in the order in which they were generated.

        Raises ValueError when there are too few, unless the config fills up with groups that do
        not vary; those come last.
        """
        missing = self.num_groups - self._count(self._varied)
        rounds = list(self._varied)
        if missing > 0:
            if self.config.shortage == "error":
                raise ValueError(
                    f"after {self._rounds} rounds of generation only "
                    f"{self._count(self._varied)} of {self.num_groups} groups vary in "
                    f"{self.config.metric!r}: the prompts are too easy or too hard by now. Raise "
                    "config.rollout.filter_groups.max_num_gen_batches or config.rollout.n, lower "
                    "config.data.train_batch_size, or go on with the groups there are by "
                    "config.rollout.filter_groups.shortage=fill"
                )
            rounds += self._constant
        whole = _join(rounds)
        whole = _rows(whole, np.arange(len(whole.sample_ids)) < self.num_groups * self.group)
        ids: Any = np.arange(self.num_groups, dtype=np.int32).repeat(self.group)
        return whole.replace(group_ids=ids)

    def metrics(self) -> dict[str, float]:
        """How many groups were generated, varied and stand in for others."""
        varied, constant = self._count(self._varied), self._count(self._constant)
        return {
            "train/num_gen_batches": float(self._rounds),
            "rollout/groups_generated": float(varied + constant),
            "rollout/groups_varied": float(varied),
            "rollout/groups_filled": float(max(self.num_groups - varied, 0)),
            "frac_reward_zero_std": constant / (varied + constant),
        }

    def _count(self, rounds: list[RolloutBatch]) -> int:
        return sum(len(batch.sample_ids) for batch in rounds) // self.group


def _rows(batch: RolloutBatch, chosen: np.ndarray) -> RolloutBatch:
    return batch.replace(**{name: x[chosen] for name, x in _fields(batch).items()})


def _join(batches: list[RolloutBatch]) -> RolloutBatch:
    names = _fields(batches[0])
    return batches[0].replace(
        **{name: np.concatenate([getattr(batch, name) for batch in batches]) for name in names}
    )


def _fields(batch: RolloutBatch) -> dict[str, Any]:
    """The fields that were written."""
    every = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return {name: x for name, x in every.items() if x is not None}
