"""Sampling of the next token: greedy, at a temperature, and with filters, without a sort.

Sampling takes the argmax of logits plus Gumbel noise. A large vocabulary is sampled in two steps:
first a column, by the sum of its F probabilities, then a token in that column. The distribution is
the same, and noise is needed for M + F numbers instead of F * M. The noise is a hash of (seed,
step, sample, token index, place). So a sample's tokens do not depend on its slot, its batch or the
number of devices. With filters, the few tokens that these keep are drawn from (`filters.py`).
Filters that are off add nothing to the program.

Shape letters: B rows, V = F * M vocabulary in F rows of M columns.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.generation.filters import Kept, kept_of_rows, kept_tokens, num_kept
from jaxrl_llm.generation.stop_strings import Stops, StopStrings
from jaxrl_llm.kernels.vocabulary_sums import num_rows, sums_of_columns
from jaxrl_llm.numerics import mix32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of sampling. Filters apply in the order top-k, top-p, min-p.

    Each filter works on the softmax at `temperature`. As in transformers, top-p uses the
    probabilities of the tokens that top-k kept. At most MOST_KEPT tokens are kept, the likeliest
    ones. Log-probs are of the distribution that is sampled, over the tokens that filters keep.
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

    def num_kept(self, vocab_size: int) -> int:
        """The most tokens that filters keep of a vocabulary; 0 where no filter is on."""
        if self.greedy:
            return 0
        return num_kept(vocab_size, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

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


class RowSampling(NamedTuple):
    """Settings of each row, as in `SamplingParams`."""

    temperature_B: jax.Array  # float32
    top_k_B: jax.Array  # int32
    top_p_B: jax.Array  # float32
    min_p_B: jax.Array  # float32


class Sampled(NamedTuple):
    """A token of each row."""

    tokens_B: jax.Array  # int32
    logprobs_B: jax.Array  # float32
    kept_BK: jax.Array | None  # ids of the tokens that filters keep, -1 for none; None: no filter


def sample(
    logits_BV: jax.Array,
    keys_B2: jax.Array,
    params: SamplingParams,
    sums_BM: jax.Array | None = None,
) -> Sampled:
    """Sample one token a row.

    Log-probs are at the sampling temperature (1 when greedy), over the tokens that filters keep.
    `keys_B2` comes from `token_keys`; greedy sampling does not read it. `sums_BM` are
    `sums_of_columns` of the logits over the temperature, where the caller has them.
    """
    z_BV = logits_BV.astype(jnp.float32)
    if params.greedy:
        tokens_B = jnp.argmax(z_BV, axis=-1).astype(jnp.int32)
        total_B = jax.nn.logsumexp(z_BV, axis=-1)
    else:
        if params.temperature != 1:
            z_BV = z_BV / params.temperature
        if params.num_kept(z_BV.shape[-1]):
            return _draw_kept(z_BV, keys_B2, params)
        tokens_B, total_B = _draw(z_BV, keys_B2, sums_BM)
    chosen_B = jnp.take_along_axis(z_BV, tokens_B[:, None], axis=-1)[:, 0]
    return Sampled(tokens_B, chosen_B - total_B, None)


def sample_rows(
    logits_BV: jax.Array, keys_B2: jax.Array, rows: RowSampling, *, filters: bool
) -> Sampled:
    """Sample one token a row, each with its own settings; the kept tokens are not returned.

    `filters` says that some row may have a filter.

    Guarantees: `sample` with a row's settings gives the same token and log-prob, whatever the other
        rows have.
    """
    is_greedy_B = rows.temperature_B == 0
    z_BV = logits_BV.astype(jnp.float32)
    z_BV = z_BV / jnp.where(is_greedy_B, 1.0, rows.temperature_B)[:, None]
    drawn_B, total_B = _draw(z_BV, keys_B2, None)
    tokens_B = jnp.where(is_greedy_B, jnp.argmax(z_BV, axis=-1).astype(jnp.int32), drawn_B)
    chosen_B = jnp.take_along_axis(z_BV, tokens_B[:, None], axis=-1)[:, 0]
    plain = Sampled(tokens_B, chosen_B - total_B, None)
    if not filters:
        return plain
    has_filter_B = (rows.top_k_B > 0) & (rows.top_k_B < z_BV.shape[-1])
    has_filter_B |= (rows.top_p_B < 1) | (rows.min_p_B > 0)
    has_filter_B &= ~is_greedy_B
    kept = kept_of_rows(z_BV, top_k=rows.top_k_B, top_p=rows.top_p_B, min_p=rows.min_p_B)
    drawn = _draw_from(kept, keys_B2)
    return Sampled(
        jnp.where(has_filter_B, drawn.tokens_B, plain.tokens_B),
        jnp.where(has_filter_B, drawn.logprobs_B, plain.logprobs_B),
        None,
    )


def _draw_kept(z_BV: jax.Array, keys_B2: jax.Array, params: SamplingParams) -> Sampled:
    """Tokens from the softmax over the tokens that filters keep."""
    kept = kept_tokens(z_BV, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    return _draw_from(kept, keys_B2)


def _draw_from(kept: Kept, keys_B2: jax.Array) -> Sampled:
    noise_BK = _gumbel_at(keys_B2, kept.ids_BK.astype(jnp.uint32))
    at_B1 = jnp.argmax(kept.z_BK + noise_BK, axis=-1)[:, None]
    tokens_B, chosen_B = (
        jnp.take_along_axis(x_BK, at_B1, axis=-1)[:, 0] for x_BK in (kept.ids_BK, kept.z_BK)
    )
    return Sampled(tokens_B, chosen_B - jax.nn.logsumexp(kept.z_BK, axis=-1), kept.ids_BK)


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


def _gumbel(keys_B2: jax.Array, size: int, first: int = 0) -> jax.Array:
    """Standard Gumbel noise [B, size] at the places from `first` on."""
    return _gumbel_at(keys_B2, (lax.iota(jnp.uint32, size) + jnp.uint32(first))[None, :])


def _gumbel_at(keys_B2: jax.Array, places_BV: jax.Array) -> jax.Array:
    """Standard Gumbel noise from a hash of (key, place); `places_BV` are uint32, [B or 1, V].

    The hash is two rounds of a 32-bit finaliser with one key word each, about a fifth of threefry's
    arithmetic. It is elementwise, so it fuses into the argmax and needs no communication when V is
    split.
    """
    first_B1, second_B1 = keys_B2[:, :1], keys_B2[:, 1:]
    bits_BV = mix32(mix32(places_BV + first_B1) ^ second_B1)
    # -log(-log1p(-v)) has full relative precision for small v, which gives the largest noise: the
    # tail reaches 22, instead of 16 with a 24-bit uniform.
    v_BV = (bits_BV.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    v_BV = jnp.minimum(v_BV, jnp.float32(1 - 2**-24))
    return -jnp.log(-jnp.log1p(-v_BV))
