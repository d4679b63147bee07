"""The convolution over the last tokens that a token follows, and its gradient without a scatter.

Shape letters: those of inputs.py.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxrl_llm.kernels.gated_delta.inputs import einsum
from jaxrl_llm.kernels.gated_delta.runs import Runs, by_chunk, chunk_size, prompts_of
from jaxrl_llm.kernels.hopper import on_gpu


def convolved(x_BTGH: jax.Array, kernel_GHW: jax.Array, runs: Runs) -> jax.Array:
    """The causal convolution over the tokens that each token follows, float32."""
    x_BTGH, kernel_GHW = x_BTGH.astype(jnp.float32), kernel_GHW.astype(jnp.float32)
    token_T, width = jnp.arange(x_BTGH.shape[1]), kernel_GHW.shape[-1]
    y_BTGH = x_BTGH * kernel_GHW[..., -1]
    for back in range(1, min(width, len(token_T))):
        in_run_BT = token_T - back >= runs.start_BT
        found = jnp.where(in_run_BT[..., None, None], _moved(x_BTGH, back), 0)
        y_BTGH += found * kernel_GHW[..., width - 1 - back]
    return (
        y_BTGH if runs.prefix_start_BT is None else y_BTGH + _over_prompts(x_BTGH, kernel_GHW, runs)
    )


def _moved(x_BT: jax.Array, places: int) -> jax.Array:
    """x so many tokens later, or earlier where that is negative; zeros move in."""
    before, after = max(places, 0), max(-places, 0)
    padded = jnp.pad(x_BT, ((0, 0), (before, after), *[(0, 0)] * (x_BT.ndim - 2)))
    return padded[:, after : after + x_BT.shape[1]]


@jax.custom_vjp
def _over_prompts(x_BTGH: jax.Array, kernel_GHW: jax.Array, runs: Runs) -> jax.Array:
    """What the convolution takes from prompts, for the first tokens of the runs that answer them.

    Its gradient has no scatter, which is slow where it is exact.
    """
    y_BTGH = jnp.zeros_like(x_BTGH)
    for back, earlier_BTGH in _of_prompts(x_BTGH, kernel_GHW.shape[-1], runs):
        y_BTGH += earlier_BTGH * kernel_GHW[..., -1 - back]
    return y_BTGH


def _of_prompts(x_BTGH: jax.Array, width: int, runs: Runs) -> Iterator[tuple[int, jax.Array]]:
    """For so many tokens back: what each token finds there, where it is in the run's prompt."""
    assert runs.prefix_start_BT is not None and runs.prefix_end_BT is not None
    token_T = jnp.arange(x_BTGH.shape[1])
    for back in range(1, width):
        at_BT = runs.prefix_end_BT - (runs.start_BT - (token_T - back))
        inside_BT = (token_T - back < runs.start_BT) & (at_BT >= runs.prefix_start_BT)
        inside_BT &= runs.start_BT <= token_T
        at_BT = jnp.where(inside_BT, at_BT, 0)
        earlier_BTGH = jnp.take_along_axis(x_BTGH, at_BT[..., None, None], axis=1)
        yield back, jnp.where(inside_BT[..., None, None], earlier_BTGH, 0)


def _over_prompts_backward(
    residuals: tuple[jax.Array, jax.Array, Runs], gradient_BTGH: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    """What tokens of prompts get from runs, for each distance to the token that takes them.

    By matmuls with 0 and 1. Y are chunks, too. E are the tokens of a chunk with the last ones of
    the chunk before, F those with the first ones of the chunk after. R are E for each distance, and
    then what goes to prompts that ended in chunks before: a row for each distance and each number
    of tokens behind in the prompt.
    """
    x_BTGH, kernel_GHW, runs = residuals
    length, width = x_BTGH.shape[1], kernel_GHW.shape[-1]
    size = max(chunk_size(length), width)
    lead, distances = width - 2, range(1, width)
    prompts = prompts_of(runs, size)
    first_X11 = size * jnp.arange(len(prompts.end_XBC))[:, None, None]

    def and_after(x_XBC: jax.Array) -> jax.Array:
        after = jnp.pad(x_XBC[1:, :, :lead], ((0, 1), *[(0, 0)] * (x_XBC.ndim - 1)))
        return jnp.concatenate([x_XBC, after], axis=2)

    start_XBF = and_after(by_chunk(runs.start_BT, size, fill=-1)) - first_X11
    in_run_XBF = jnp.arange(size + lead) - start_XBF
    starts_XBF = (start_XBF >= 0) & (start_XBF < size)  # the run, in this chunk
    last_XBF = and_after(prompts.end_XBC) - 1 - first_X11  # of the prompt
    length_XBF = and_after(prompts.length_XBC)
    place_E1 = jnp.arange(-lead, size)[:, None]
    near, far = [], []
    for distance in distances:
        behind_XBF = distance - 1 - in_run_XBF  # tokens after it in the prompt
        takes_XBF = starts_XBF & (in_run_XBF >= 0) & (behind_XBF >= 0) & (behind_XBF < length_XBF)
        near_XB1F = (takes_XBF & (last_XBF >= 0))[:, :, None]
        near.append(((last_XBF - behind_XBF)[:, :, None] == place_E1) & near_XB1F)
        far_XBF = takes_XBF & (last_XBF < 0)
        far += [(far_XBF & (behind_XBF == b))[:, :, None] for b in range(distance)]
    takes_XBRF = jnp.concatenate([*near, *far], axis=2)
    given_XBRGH = _sums(takes_XBRF, and_after(by_chunk(gradient_BTGH, size)))
    split = len(distances) * (lead + size)
    near_XBDEGH = given_XBRGH[:, :, :split].reshape(
        *given_XBRGH.shape[:2], len(distances), lead + size, *given_XBRGH.shape[3:]
    )
    chunk_XBY = prompts.chunk_XBY.astype(jnp.float32)
    far_YBRGH = einsum("XBY,XBRGH->YBRGH", chunk_XBY, given_XBRGH[:, :, split:])

    def next_chunk(x_YB: jax.Array, fill: int = 0) -> jax.Array:
        padding = ((0, 1), *[(0, 0)] * (x_YB.ndim - 1))
        return jnp.pad(x_YB[1:], padding, constant_values=fill)

    def behind(last_YB: jax.Array, first: int) -> jax.Array:  # tokens before its prompt's last one
        last_YB1, place_C = last_YB[..., None], jnp.arange(first, first + size)
        return jnp.where(last_YB1 >= 0, last_YB1 - place_C, -1)[..., None, None]

    behind_YBC11 = behind(prompts.last_YB, 0)
    behind_next_YBC11 = behind(next_chunk(prompts.last_YB, fill=-1), -size)
    given, row = [], 0
    for distance in distances:
        of_chunk = near_XBDEGH[:, :, distance - 1]
        own, before = of_chunk[:, :, lead:], of_chunk[1:, :, :lead]
        own += jnp.pad(before, ((0, 1), (0, 0), (size - lead, 0), (0, 0), (0, 0)))
        for b in range(distance):
            far_YB1GH = far_YBRGH[:, :, row + b, None]
            own += jnp.where(behind_YBC11 == b, far_YB1GH, 0)
            own += jnp.where(behind_next_YBC11 == b, next_chunk(far_YB1GH), 0)
        row += distance
        given_BTGH = jnp.moveaxis(own, 0, 1).reshape(len(x_BTGH), -1, *x_BTGH.shape[2:])
        given.append(given_BTGH[:, :length])
    # Without the barrier XLA fuses all this into the sums of taps, where few threads repeat it.
    given = jax.lax.optimization_barrier(given)
    taps = [jnp.zeros_like(kernel_GHW[..., 0])]  # of the token itself: none is of a prompt
    of_x_BTGH = jnp.zeros_like(x_BTGH)
    for distance, given_BTGH in zip(distances, given, strict=True):
        of_x_BTGH += given_BTGH * kernel_GHW[..., -1 - distance]
        taps.append((given_BTGH * x_BTGH).sum(axis=(0, 1)))
    return of_x_BTGH, jnp.stack(taps[::-1], axis=-1), None


def _sums(takes_XBRF: jax.Array, x_XBFGH: jax.Array) -> jax.Array:
    """Float32 sums of the tokens that each row takes, in one matmul for tensor cores.

    A float32 number is a sum of three bfloat16 numbers, and their products with 0 and 1 are exact.
    """
    if not on_gpu():
        return einsum("XBRF,XBFGH->XBRGH", takes_XBRF.astype(jnp.float32), x_XBFGH)
    parts = []
    for _ in range(3):
        part = jax.lax.reduce_precision(x_XBFGH, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x_XBFGH -= part
    takes_XBRF = jnp.concatenate([takes_XBRF.astype(jnp.bfloat16)] * 3, axis=3)
    each_XBFGH = jnp.concatenate(parts, axis=2)
    return jnp.einsum(
        "XBRF,XBFGH->XBRGH", takes_XBRF, each_XBFGH, preferred_element_type=jnp.float32
    )


_over_prompts.defvjp(
    lambda x, kernel, runs: (_over_prompts(x, kernel, runs), (x, kernel, runs)),
    _over_prompts_backward,
)
