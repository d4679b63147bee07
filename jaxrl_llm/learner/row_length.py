"""The length of packed rows. No jax."""

STEP = 128


def row_length(most: int, all_tokens: int) -> int:
    """Tokens of a row: `most`, or all tokens of a pass where these are fewer, in steps of STEP."""
    return min(most, -(-all_tokens // STEP) * STEP)
