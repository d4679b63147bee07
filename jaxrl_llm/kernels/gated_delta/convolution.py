"""The convolution over the last tokens that a token follows, and its gradient without a scatter.

Shape letters: see inputs.py.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.gated_delta.inputs import einsum
from jaxrl_llm.kernels.gated_delta.runs import (
    Chunking,
    PromptTaps,
    and_after,
    by_chunk,
    next_chunk,
    tap_chunk,
    tokens_after,
)
from jaxrl_llm.kernels.hopper import on_gpu


def convolved(x_BTE: jax.Array, kernel_EW: jax.Array, chunking: Chunking) -> jax.Array:
    """The causal convolution over the tokens that each token follows, float32."""
    x_BTE = x_BTE.astype(jnp.float32)
    token_T, width = jnp.arange(x_BTE.shape[1]), kernel_EW.shape[-1]
    y_BTE = x_BTE * kernel_EW[:, -1]
    for back in range(1, min(width, len(token_T))):
        in_run_BT = token_T - back >= chunking.runs.start_BT
        moved_BTE = jnp.pad(x_BTE, ((0, 0), (back, 0), (0, 0)))[:, : len(token_T)]
        y_BTE += jnp.where(in_run_BT[..., None], moved_BTE, 0) * kernel_EW[:, -1 - back]
    taps = chunking.taps
    return y_BTE if taps is None else y_BTE + _over_prompts(x_BTE, kernel_EW, taps)


@jax.custom_vjp
def _over_prompts(x_BTE: jax.Array, kernel_EW: jax.Array, taps: PromptTaps) -> jax.Array:
    """What the convolution takes from prompts, for the first tokens of the runs that answer them.

    Its gradient has no scatter, which is slow where it is exact.
    """
    y_BTE = jnp.zeros_like(x_BTE)
    for i in range(kernel_EW.shape[-1] - 1):
        found_BTE = jnp.take_along_axis(x_BTE, taps.from_BTW[..., i, None], axis=1)
        found_BTE = jnp.where(taps.inside_BTW[..., i, None], found_BTE, 0)
        y_BTE += found_BTE * kernel_EW[:, -2 - i]
    return y_BTE


def _over_prompts_backward(
    residuals: tuple[jax.Array, jax.Array, PromptTaps], gradient_BTE: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    """What tokens of prompts get from runs, for each distance to the token that takes them."""
    x_BTE, kernel_EW, taps = residuals
    (B, length, E), width = x_BTE.shape, kernel_EW.shape[-1]
    size, lead = tap_chunk(length, width), width - 2
    gradient_XBFE = and_after(by_chunk(gradient_BTE, size), tokens_after(size, width))
    given_XBRE = _sums(taps.takes_XBRF, gradient_XBFE)
    near = lead + size  # rows of a distance
    far_YBRE = einsum("XBY,XBRE->YBRE", taps.chunk_XBY, given_XBRE[:, :, (width - 1) * near :])
    row, given = 0, []
    for distance in range(1, width):
        of_chunk = given_XBRE[:, :, (distance - 1) * near : distance * near]
        before = next_chunk(of_chunk[:, :, :lead])
        own = of_chunk[:, :, lead:] + jnp.pad(before, ((0, 0), (0, 0), (size - lead, 0), (0, 0)))
        for b in range(distance):
            far_YB1E = far_YBRE[:, :, row + b, None]
            own += jnp.where((taps.behind_YBC == b)[..., None], far_YB1E, 0)
            own += jnp.where((taps.behind_next_YBC == b)[..., None], next_chunk(far_YB1E), 0)
        row += distance
        given.append(jnp.moveaxis(own, 0, 1).reshape(B, -1, E)[:, :length])
    # Without the barrier XLA fuses all this into the sums of taps, where few threads repeat it.
    given = jax.lax.optimization_barrier(given)
    of_kernel = [jnp.zeros(E, jnp.float32)]  # no prompt's token has distance 0
    of_x_BTE = jnp.zeros_like(x_BTE)
    for distance, given_BTE in enumerate(given, start=1):
        of_x_BTE += given_BTE * kernel_EW[:, -1 - distance]
        of_kernel.append((given_BTE * x_BTE).sum(axis=(0, 1)))
    return of_x_BTE, jnp.stack(of_kernel[::-1], axis=-1), None


_over_prompts.defvjp(
    lambda x, kernel, taps: (_over_prompts(x, kernel, taps), (x, kernel, taps)),
    _over_prompts_backward,
)


def _sums(takes_XBRF: jax.Array, x_XBFE: jax.Array) -> jax.Array:
    """Float32 sums of the tokens that each row takes, in one matmul for tensor cores.

    A float32 number is a sum of three bfloat16 numbers, and their products with 0 and 1 are exact.
    """
    if not on_gpu():
        return einsum("XBRF,XBFE->XBRE", takes_XBRF.astype(jnp.float32), x_XBFE)
    parts = []
    for _ in range(3):
        part = jax.lax.reduce_precision(x_XBFE, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x_XBFE -= part
    takes_XBRF = jnp.concatenate([takes_XBRF.astype(jnp.bfloat16)] * 3, axis=3)
    each_XBFE = jnp.concatenate(parts, axis=2)
    return jnp.einsum("XBRF,XBFE->XBRE", takes_XBRF, each_XBFE, preferred_element_type=jnp.float32)
