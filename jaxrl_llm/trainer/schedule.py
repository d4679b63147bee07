"""Which policy generates which batch. It follows from the step alone, never from a clock.

Policy v is the one after v updates. Step t begins with policy t - 1, and learns from batch t. With
`max_staleness` 1 the table begins so:

    step  policy  begins  learns from
       1       0    1, 2            1
       2       1       3            2
       3       2       4            3

With partial rollouts a policy also adds some tokens to each batch that is ahead, and the rest to
the batch of its own step.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Work(NamedTuple):
    """What the policy of a step adds to one batch."""

    batch: int  # step that learns from it
    begun: int  # policy that begins it
    tokens: int  # most new tokens of a response
    ends: bool  # no later policy adds anything


def work_of_step(
    step: int, begun: Mapping[int, int], *, staleness: int, part: int, longest: int
) -> list[Work]:
    """What is generated in `step`, by the batch.

    `begun` has the batches of earlier steps, or of a checkpoint: the policy that began each, by
    the batch. `part` is the number of tokens that a policy adds to a response; 0 for whole ones.
    `longest` is the most tokens of a response.
    """
    policy = step - 1
    new = {batch: policy for batch in range(step + len(begun), step + staleness + 1)}
    if not part:
        return [Work(batch, policy, longest, ends=True) for batch in new]
    line = []
    for batch, first in {**begun, **new}.items():
        left = longest - part * (policy - first)
        tokens = left if batch == step else min(part, left)
        if tokens > 0:
            line.append(Work(batch, first, tokens, ends=tokens == left))
    return line
