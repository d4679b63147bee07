"""Sizes of the exchange of rows between devices with split experts. Imports no jax."""

import math

SLACK = 1.25  # rows of a round over the rows of even loads


def round_rows(rows: int, devices: int) -> int:
    """Rows that a device sends to another one in a round, of its (token, expert) rows."""
    return math.ceil(SLACK * rows / devices)


def exchanges_rows(tokens: int, experts_of_token: int, devices: int, itemsize: int) -> bool:
    """True if one round moves fewer bytes than a gather of all tokens does.

    `tokens` counts the tokens of a device, and `itemsize` is their dtype's. A round brings each
    device `round_rows` rows of inputs from every other one, and as many outputs. A gather brings
    the tokens of the others, and in float32 the sums of its own tokens from them.
    """
    rows = round_rows(tokens * experts_of_token, devices)
    return 2 * itemsize * rows < (itemsize + 4) * tokens
