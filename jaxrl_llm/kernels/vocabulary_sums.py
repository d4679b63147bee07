"""Log-sum-exps over a vocabulary in two steps, which read its logits once.

Shape letters: B rows, V = F * M vocabulary in F rows of M columns.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

MOST_ROWS = 128  # F
FEWEST_COLUMNS = 256
ROWS_AT_ONCE = 16  # so that each of up to 8 devices holds whole parts of 128 rows


def num_rows(vocab_size: int) -> int:
    """The largest power of two, up to MOST_ROWS, that divides V and leaves FEWEST_COLUMNS."""
    rows = 1
    while rows < MOST_ROWS and vocab_size % (2 * rows) == 0:
        if vocab_size // (2 * rows) < FEWEST_COLUMNS:
            break
        rows *= 2
    return rows


def sums_of_columns(z_BV: Float[Array, "B V"]) -> Float[Array, "B M"]:
    """The log-sum-exp of each column; over a row's columns it gives the whole row's.

    The logits, the largest array here, are read once.

    `jax.nn.logsumexp` reads them twice, for the maximum and for the sum. Here one reduction over
    ROWS_AT_ONCE rows gives both. The rest is small; its maximum and sum are plain reductions, which
    the partitioner can split over devices that hold different rows.
    """
    (B, V), F = z_BV.shape, num_rows(z_BV.shape[-1])
    if F == 1:
        return z_BV
    M = V // F
    z_BCRM = z_BV.reshape(B, -1, min(F, ROWS_AT_ONCE), M)

    def join(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
        (peak, total), (other_peak, other_total) = one, other
        # Equal peaks have a difference of 0, also two of -inf, whose difference would be NaN.
        gap = jnp.where(peak == other_peak, 0.0, -jnp.abs(peak - other_peak))
        rest = jnp.exp(gap)
        higher = peak >= other_peak
        joined = jnp.where(higher, total + other_total * rest, total * rest + other_total)
        return jnp.where(higher, peak, other_peak), joined

    start = (jnp.float32(-jnp.inf), jnp.float32(0))
    peak_BCM, total_BCM = lax.reduce((z_BCRM, jnp.ones_like(z_BCRM)), start, join, (2,))
    peak_BM = jnp.max(peak_BCM, axis=1)
    finite_BM = jnp.where(jnp.isfinite(peak_BM), peak_BM, 0.0)
    total_BM = jnp.sum(total_BCM * jnp.exp(peak_BCM - finite_BM[:, None]), axis=1)
    return finite_BM + jnp.log(total_BM)
