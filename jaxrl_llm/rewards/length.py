"""Reward for a completion whose length is in a range."""

from collections.abc import Sequence


def length_range(
    completion_ids: Sequence[Sequence[int]],
    *,
    maximum: int,
    minimum: int = 0,
    width: int = 0,
    reward: float = 1.0,
) -> list[float]:
    """`reward` from `minimum` to `maximum` tokens; it falls linearly to 0 over `width` outside.

    Lengths include the stop token. width=0 is a hard edge. Use it with a task reward: alone, any
    text of that length is best.
    """
    if not 0 <= minimum <= maximum or width < 0:
        raise ValueError(
            f"minimum={minimum}, maximum={maximum}, width={width}: "
            "need 0 <= minimum <= maximum and width >= 0"
        )
    rewards = []
    for tokens in completion_ids:
        outside = max(minimum - len(tokens), len(tokens) - maximum, 0)
        # One token beyond a hard edge has reward 0: width 0 acts as width 1.
        rewards.append(reward * max(0.0, 1.0 - outside / max(width, 1)))
    return rewards
