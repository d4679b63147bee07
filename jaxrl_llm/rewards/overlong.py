"""DAPO's soft penalty for responses near the maximum length."""

from collections.abc import Sequence


def overlong_penalty(
    completion_ids: Sequence[Sequence[int]],
    *,
    max_length: int,
    buffer: int,
    penalty: float = 1.0,
) -> list[float]:
    """0 up to max_length - buffer tokens, then linearly down to -penalty at max_length.

    Lengths include the stop token. `max_length` is the maximum response length of the run. DAPO: Yu
    et al. 2025, eq. 13, in the linear form of verl's `DAPORewardManager`: beyond `max_length` the
    value falls further.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer}, max_length={max_length}: need 0 < buffer <= max_length")
    start = max_length - buffer
    return [min(0.0, (start - len(tokens)) / buffer * penalty) for tokens in completion_ids]
