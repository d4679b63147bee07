"""DAPO's soft penalty for responses that come near the maximum length."""

from collections.abc import Sequence


def overlong_penalty(
    completion_ids: Sequence[Sequence[int]],
    *,
    max_length: int,
    buffer: int,
    penalty: float = 1.0,
) -> list[float]:
    """0 up to max_length - buffer tokens, then linearly down to -penalty at max_length.

    Lengths count the stop token. `max_length` is the run's maximum response length. Source: DAPO
    (Yu et al. 2025, eq. 13), with the linear form of verl's `DAPORewardManager`: a response longer
    than `max_length` goes on falling.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer}, max_length={max_length}: need 0 < buffer <= max_length")
    start = max_length - buffer
    return [min(0.0, (start - len(tokens)) / buffer * penalty) for tokens in completion_ids]
