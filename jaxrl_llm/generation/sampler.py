"""Sampling of the next token: greedy, temperature, top-k, top-p and min-p, without a sort.

Sampling takes the argmax of logits plus Gumbel noise. A large vocabulary is sampled in two steps:
first a column, by the sum of its F probabilities, then a token in that column. The distribution is
the same, and noise is needed for M + F numbers instead of F * M. The noise is a hash of (seed,
step, sample, token index, place). So a sample's tokens do not depend on its slot, its batch or the
number of devices. Bisection on the bits of the floats finds the thresholds of top-k and top-p. A
filter that is off adds nothing to the program.

Shape letters: B rows, V = F * M vocabulary in F rows of M columns.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.generation.stop_strings import Stops, StopStrings
from jaxrl_llm.kernels.vocabulary_sums import num_rows, sums_of_columns
from jaxrl_llm.numerics import mix32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of sampling. Filters apply in the order top-k, top-p, min-p.

    Each filter works on the softmax at `temperature` and keeps all tokens that tie with the last
    one kept. As in transformers, top-p uses the probabilities of the tokens that top-k kept.
    Log-probs are of the full softmax, because the trainer recomputes these. So with a filter, the
    sampled policy is narrower than the reported log-probs say.
    """

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k most likely; 0 is off
    top_p: float = 1.0  # keep the smallest set of most likely tokens with this mass; 1 is off
    min_p: float = 0.0  # keep tokens at least this likely relative to the likeliest; 0 is off
    stop_token_ids: tuple[int, ...] = ()  # each of them ends a response, as its last token
    stop_strings: StopStrings | None = None  # the token that completes one ends a response

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken. The filters then have no effect."""
        return self.temperature == 0

    @property
    def stops(self) -> Stops:
        """The ends of a response."""
        return Stops(self.stop_token_ids, self.stop_strings)

    def have_ended(self, tokens_NR: jax.Array, lengths_N: jax.Array) -> jax.Array:
        """True for each response that is complete, bool [N]. Responses are padded on the right."""
        last_N1 = jnp.maximum(lengths_N - 1, 0)[:, None]
        last_N = jnp.take_along_axis(tokens_NR, last_N1, axis=1)[:, 0]
        ended_N = (lengths_N > 0) & self.is_stop(last_N)
        if self.stop_strings is None:
            return ended_N
        written_NR = jnp.arange(tokens_NR.shape[1]) < lengths_N[:, None]
        return ended_N | (
            self.stop_strings.read(tokens_NR, written_NR) == self.stop_strings.complete
        )

    def is_stop(self, tokens: jax.Array) -> jax.Array:
        """True for each token that ends its response; bool, the shape of `tokens`."""
        if not self.stop_token_ids:
            # Not an empty array: in a shard_map it becomes an unused argument, on which Shardy of
            # jax 0.11.2 crashes.
            return jnp.zeros(tokens.shape, bool)
        stops = jnp.asarray(self.stop_token_ids, tokens.dtype)
        return jnp.any(tokens[..., None] == stops, axis=-1)


def token_keys(seed_key: jax.Array, sample_ids_B: jax.Array, token_index_B: jax.Array) -> jax.Array:
    """The key of each row's draw, fold_in(fold_in(seed_key, sample), token), uint32 [B, 2].

    `seed_key` is fold_in(key(seed), step), one for all rows or [B]. `token_index_B` counts the
    response's tokens from 0.

    Requires: threefry keys. Other generators do not promise the same bits under vmap.
    """

    def one(key: jax.Array, sample_id: jax.Array, token_index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, sample_id), token_index)
        return jax.random.key_data(key)

    key_axis = 0 if seed_key.ndim else None
    return jax.vmap(one, in_axes=(key_axis, 0, 0))(seed_key, sample_ids_B, token_index_B)


def sample(
    logits_BV: jax.Array,
    keys_B2: jax.Array,
    params: SamplingParams,
    sums_BM: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sample one token a row; returns (tokens int32 [B], log-probs float32 [B]).

    Log-probs are of the full softmax at the sampling temperature (1 when greedy). `keys_B2`
    comes from `token_keys`; greedy sampling does not read it. `sums_BM` are `sums_of_columns` of
    the logits over the temperature, where the caller has them.
    """
    z_BV = logits_BV.astype(jnp.float32)
    if params.greedy:
        tokens_B = jnp.argmax(z_BV, axis=-1).astype(jnp.int32)
        total_B = jax.nn.logsumexp(z_BV, axis=-1)
    else:
        if params.temperature != 1:
            z_BV = z_BV / params.temperature
        kept_BV = filter_logits(z_BV, params)
        sums_BM = sums_BM if kept_BV is z_BV else None
        tokens_B, total_B = _draw(kept_BV, keys_B2, sums_BM)
        if kept_BV is not z_BV:
            total_B = jax.nn.logsumexp(z_BV, axis=-1)
    chosen_B = jnp.take_along_axis(z_BV, tokens_B[:, None], axis=-1)[:, 0]
    return tokens_B, chosen_B - total_B


def _draw(
    z_BV: jax.Array, keys_B2: jax.Array, sums_BM: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """(tokens sampled from the softmax of z, its log-normalisers), each [B].

    Token f * M + m is in row f and column m. So a device that holds a slice of the vocabulary holds
    whole rows, and adds its part to every column.
    """
    B, V = z_BV.shape
    rows = num_rows(V)
    z_BFM = z_BV.reshape(B, rows, V // rows)
    sums_BM = sums_of_columns(z_BV) if sums_BM is None else sums_BM
    columns = V // rows
    column_B = jnp.argmax(sums_BM + _gumbel(keys_B2, columns), axis=-1).astype(jnp.int32)
    total_B = jax.nn.logsumexp(sums_BM, axis=-1)
    if rows == 1:
        return column_B, total_B
    z_BF = jnp.take_along_axis(z_BFM, column_B[:, None, None], axis=2)[:, :, 0]
    row_B = jnp.argmax(z_BF + _gumbel(keys_B2, rows, first=columns), axis=-1).astype(jnp.int32)
    return row_B * columns + column_B, total_B


def filter_logits(z_BV: jax.Array, params: SamplingParams) -> jax.Array:
    """`z_BV` (logits divided by the temperature), with -inf for tokens that a filter removes."""
    if 0 < params.top_k < z_BV.shape[-1]:
        z_BV = _keep_above(z_BV, _top_k_threshold(z_BV, params.top_k))
    if params.top_p < 1:
        z_BV = _keep_above(z_BV, _top_p_threshold(z_BV, params.top_p))
    if params.min_p > 0:
        peak_B = jnp.max(z_BV, axis=-1)
        z_BV = jnp.where(z_BV >= (peak_B + jnp.log(params.min_p))[:, None], z_BV, -jnp.inf)
    return z_BV


def _gumbel(keys_B2: jax.Array, size: int, first: int = 0) -> jax.Array:
    """Standard Gumbel noise [B, size] from a hash of (key, place); places count from `first`.

    The hash is two rounds of a 32-bit finaliser with one key word each, about a fifth of threefry's
    arithmetic. It is elementwise, so it fuses into the argmax and needs no communication when V is
    split.
    """
    index_V = lax.iota(jnp.uint32, size) + jnp.uint32(first)
    first_B1, second_B1 = keys_B2[:, :1], keys_B2[:, 1:]
    bits_BV = mix32(mix32(index_V[None, :] + first_B1) ^ second_B1)
    # -log(-log1p(-v)) has full relative precision for small v, which gives the largest noise: the
    # tail reaches 22, instead of 16 with a 24-bit uniform.
    v_BV = (bits_BV.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    v_BV = jnp.minimum(v_BV, jnp.float32(1 - 2**-24))
    return -jnp.log(-jnp.log1p(-v_BV))


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 numbers in the order of the float32 values; -0 equals 0."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.float32(0), x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _keep_above(z_BV: jax.Array, threshold_B: jax.Array) -> jax.Array:
    return jnp.where(_ordered_bits(z_BV) >= threshold_B[:, None], z_BV, -jnp.inf)


def _largest_threshold(ordered_BV: jax.Array, weight_BV: jax.Array, need_B: jax.Array) -> jax.Array:
    """The largest uint32 t [B] such that tokens >= t weigh at least `need_B`; takes 32 passes."""

    def step(i: jax.Array, t_B: jax.Array) -> jax.Array:
        candidate_B = t_B | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        above_BV = ordered_BV >= candidate_B[:, None]
        weight_B = jnp.sum(jnp.where(above_BV, weight_BV, 0), axis=-1)
        return jnp.where(weight_B >= need_B, candidate_B, t_B)

    return lax.fori_loop(0, 32, step, jnp.zeros(ordered_BV.shape[:1], jnp.uint32))


def _top_k_threshold(z_BV: jax.Array, k: int) -> jax.Array:
    ordered_BV = _ordered_bits(z_BV)
    need_B = jnp.full(z_BV.shape[:1], k, jnp.int32)
    return _largest_threshold(ordered_BV, jnp.ones_like(ordered_BV, jnp.int32), need_B)


def _top_p_threshold(z_BV: jax.Array, p: float) -> jax.Array:
    mass_BV = jnp.exp(z_BV - jnp.max(z_BV, axis=-1, keepdims=True))
    return _largest_threshold(_ordered_bits(z_BV), mass_BV, p * jnp.sum(mass_BV, axis=-1))
