"""The gated delta rule (arXiv:2412.06464) over rows of tokens, and of one token after others.

A head has a state S of keys by values. Of a token with key k, value v, decay a = exp(g) and rate b:

    S <- a S,    S <- S + k (b (v - S^T k))^T,    its output is S^T q

In whole rows, chunks of tokens are computed by matmuls and the state goes from chunk to chunk. All
is float32. A token follows the tokens of its run, and before these the prompt that its run answers;
other tokens of the row do not touch its state. A convolution over the last tokens comes first.

Shape letters: B rows, T tokens, X chunks, C tokens of a chunk, G key heads, N value heads, H dims
of a key, V of a value, W tokens of the convolution, S tokens whose states are asked for.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens
_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Streams(NamedTuple):
    """Queries and keys [..., G, H] and values [..., N, V], or something for each of their dims."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Inputs(NamedTuple):
    """What a layer makes of its tokens."""

    streams: Streams  # before the convolution, [B, T, ...]
    kernels: Streams  # of the convolution, [..., W]
    log_decay_BTN: jax.Array  # float32, at most 0
    rate_BTN: jax.Array  # float32, from 0 to 1


class DeltaState(NamedTuple):
    """What a layer keeps of the tokens that it has read."""

    memory: jax.Array  # float32 [..., N, H, V]
    window: Streams  # the last W - 1 tokens before the convolution, [..., W - 1, heads, dims]


class Runs(NamedTuple):
    """Which tokens of its row a token follows, int32 [B, T]."""

    start_BT: jax.Array  # first token of its run; after the token itself for padding
    # The prompt before the run, which is empty where both are equal. None: no run has one.
    # Runs that answer a prompt lie between it and the next prompt.
    prefix_start_BT: jax.Array | None = None
    prefix_end_BT: jax.Array | None = None


def gated_delta(inputs: Inputs, runs: Runs) -> jax.Array:
    """The outputs of all tokens, float32 [B, T, N, V]."""
    return _by_chunks(inputs, runs)[0]


def gated_delta_states(
    inputs: Inputs, runs: Runs, last_BS: jax.Array
) -> tuple[jax.Array, DeltaState]:
    """`gated_delta`, and the states after the tokens `last_BS`; -1 is the state before any token.

    Requires: no run has a prompt before it.
    """
    assert runs.prefix_start_BT is None
    out_BTNV, chunks, starts_XBNHV, values_XBNCV = _by_chunks(inputs, runs)
    at_BS = jnp.maximum(last_BS, 0)
    size = chunks.decay_XBNCC.shape[-1]
    rows_B1 = jnp.arange(len(last_BS))[:, None]

    def of_chunk(x_XB: jax.Array) -> jax.Array:
        return x_XB[at_BS // size, rows_B1]

    place_BSC = jax.nn.one_hot(at_BS % size, size)
    decay_BSNC = _einsum("BSC,BSNCD->BSND", place_BSC, of_chunk(chunks.decay_XBNCC))
    since_BSN = _einsum("BSC,BSNC->BSN", place_BSC, of_chunk(chunks.since_XBNC))
    memory = since_BSN[..., None, None] * of_chunk(starts_XBNHV) + _einsum(
        "BSNC,BSNCH,BSNCV->BSNHV", decay_BSNC, of_chunk(chunks.k_XBNCH), of_chunk(values_XBNCV)
    )
    some_BS = last_BS >= 0
    memory = jnp.where(some_BS[..., None, None, None], memory, 0)
    width = inputs.kernels.q.shape[-1]
    tokens_BSW = at_BS[..., None] - jnp.arange(width - 2, -1, -1)
    start_BS = jnp.take_along_axis(runs.start_BT, at_BS, axis=1)
    seen_BSW = some_BS[..., None] & (tokens_BSW >= start_BS[..., None])
    rows_B11 = rows_B1[..., None]

    def window(x_BTGH: jax.Array) -> jax.Array:
        found = x_BTGH[rows_B11, jnp.maximum(tokens_BSW, 0)]
        return jnp.where(seen_BSW[..., None, None], found, 0)

    return out_BTNV, DeltaState(memory, Streams(*map(window, inputs.streams)))


def gated_delta_step(inputs: Inputs, state: DeltaState) -> tuple[jax.Array, DeltaState]:
    """The output of one more token a row, float32 [B, 1, N, V], and the states after it."""
    windows = Streams(
        *(
            jnp.concatenate([w, x], axis=1)
            for w, x in zip(state.window, inputs.streams, strict=True)
        )
    )
    q_BGH, k_BGH, v_BNV = (
        _einsum("BWGH,GHW->BGH", x.astype(jnp.float32), kernel.astype(jnp.float32))
        for x, kernel in zip(windows, inputs.kernels, strict=True)
    )
    q_BNH, k_BNH, v_BNV = _for_heads(q_BGH, k_BGH, v_BNV)
    decay_BN, rate_BN = jnp.exp(inputs.log_decay_BTN[:, 0]), inputs.rate_BTN[:, 0]
    memory = state.memory * decay_BN[..., None, None]
    known_BNV = _einsum("BNHV,BNH->BNV", memory, k_BNH)
    new_BNV = rate_BN[..., None] * (v_BNV - known_BNV)
    memory += k_BNH[..., None] * new_BNV[..., None, :]
    out_BNV = _einsum("BNHV,BNH->BNV", memory, q_BNH)
    return out_BNV[:, None], DeltaState(memory, Streams(*(x[:, 1:] for x in windows)))


def _for_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Activated values, and queries and keys of unit length, for each value head."""
    q, k, v = (jax.nn.silu(x) for x in (q, k, v))
    repeats = v.shape[-2] // k.shape[-2]

    def unit(x: jax.Array) -> jax.Array:
        x *= jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return jnp.repeat(x, repeats, axis=-2) if repeats > 1 else x

    return unit(q) * q.shape[-1] ** -0.5, unit(k), v


def _convolved(x_BTGH: jax.Array, kernel_GHW: jax.Array, runs: Runs) -> jax.Array:
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


def _over_prompts_backward(residuals: Any, gradient_BTGH: jax.Array) -> tuple[Any, Any, None]:
    """A token of a prompt adds up what the runs that answer it give, by matmuls with 0 and 1.

    Y are chunks, too. E are the tokens of a chunk, with the last ones of the chunk before.
    """
    x_BTGH, kernel_GHW, runs = residuals
    (length, width), token_T = (x_BTGH.shape[1], kernel_GHW.shape[-1]), jnp.arange(x_BTGH.shape[1])
    taps = [jnp.zeros_like(kernel_GHW[..., 0])]  # of the token itself: none is of a prompt
    for _, earlier_BTGH in _of_prompts(x_BTGH, width, runs):
        taps.append((earlier_BTGH * gradient_BTGH).sum(axis=(0, 1)))
    size = max(_chunk_size(length), width)
    lead = width - 2  # tokens of the chunk before
    place_E = jnp.arange(-lead, size)
    prompts = _prompts_of(runs, size)
    first_XBC = prompts.first_XBC
    at_XBC = prompts.end_XBC - 1 - size * jnp.arange(len(first_XBC))[:, None, None]
    total_XBEGH = jnp.zeros((*first_XBC.shape[:2], lead + size, *x_BTGH.shape[2:]), jnp.float32)
    for behind in range(width - 1):  # tokens after it in the prompt
        given_BTGH = jnp.zeros_like(gradient_BTGH)  # at the first token of a run, by all of it
        for token in range(width - 1 - behind):
            in_run_BT = (_moved(runs.start_BT, -token) == token_T) & (token_T < length - token)
            of_tap_BTGH = gradient_BTGH * kernel_GHW[..., -2 - token - behind]
            given_BTGH += jnp.where(in_run_BT[..., None, None], _moved(of_tap_BTGH, -token), 0)
        given_XBCGH = _by_chunk(given_BTGH, size)
        gives_XBC = first_XBC & (prompts.length_XBC > behind)
        near_XBCE = (at_XBC - behind)[..., None] == place_E
        near_XBCE &= (gives_XBC & (at_XBC >= 0))[..., None]
        total_XBEGH += _einsum("XBCE,XBCGH->XBEGH", near_XBCE.astype(jnp.float32), given_XBCGH)
        far_XBC = (gives_XBC & (at_XBC < 0)).astype(jnp.float32)
        far_XBGH = _einsum("XBC,XBCGH->XBGH", far_XBC, given_XBCGH)
        far_YBGH = _einsum("XBY,XBGH->YBGH", prompts.chunk_XBY.astype(jnp.float32), far_XBGH)
        place_YBE = (prompts.last_YB - behind)[..., None] == place_E
        place_YBE &= (prompts.last_YB >= 0)[..., None]
        total_XBEGH += jnp.where(place_YBE[..., None, None], far_YBGH[:, :, None], 0)
    own, before = total_XBEGH[:, :, lead:], total_XBEGH[1:, :, :lead]
    own += jnp.pad(before, ((0, 1), (0, 0), (size - lead, 0), (0, 0), (0, 0)))
    of_x_BTGH = jnp.moveaxis(own, 0, 1).reshape(len(x_BTGH), -1, *x_BTGH.shape[2:])[:, :length]
    return of_x_BTGH, jnp.stack(taps[::-1], axis=-1), None


_over_prompts.defvjp(
    lambda x, kernel, runs: (_over_prompts(x, kernel, runs), (x, kernel, runs)),
    _over_prompts_backward,
)


def _chunk_size(length: int) -> int:
    return min(CHUNK, max(8, 1 << (length - 1).bit_length()))


def _by_chunk(x_BT: jax.Array, size: int, fill: int = 0) -> jax.Array:
    """The tokens by chunk, [X, B, C, ...]; `fill` pads the last one."""
    padding = ((0, 0), (0, -x_BT.shape[1] % size), *[(0, 0)] * (x_BT.ndim - 2))
    x_BT = jnp.pad(x_BT, padding, constant_values=fill)
    return jnp.moveaxis(x_BT.reshape(x_BT.shape[0], -1, size, *x_BT.shape[2:]), 1, 0)


class _Prompts(NamedTuple):
    """The prompts before runs, by chunk. A chunk follows one of those that ended before it."""

    end_XBC: jax.Array
    length_XBC: jax.Array  # 0: none is before the token's run
    first_XBC: jax.Array  # whether a token is the first of a run with a prompt
    earlier_XBC: jax.Array  # whether the run begins in the chunk, and the prompt ended before it
    chunk_XBY: jax.Array  # whether it ended in chunk Y
    last_YB: jax.Array  # place in Y of its last token; -1: no later chunk follows a prompt there


def _prompts_of(runs: Runs, size: int) -> _Prompts:
    assert runs.prefix_start_BT is not None and runs.prefix_end_BT is not None
    start_XBC = _by_chunk(runs.start_BT, size, fill=-1)
    begin_XBC = _by_chunk(runs.prefix_start_BT, size)
    end_XBC = _by_chunk(runs.prefix_end_BT, size)
    first_X11 = size * jnp.arange(len(start_XBC))[:, None, None]
    token_X1C = first_X11 + jnp.arange(size)
    has_XBC = (begin_XBC < end_XBC) & (start_XBC <= token_X1C)
    earlier_XBC = has_XBC & (start_XBC >= first_X11) & (end_XBC <= first_X11)
    last_XB1 = jnp.where(earlier_XBC, end_XBC - 1, -1).max(axis=-1, keepdims=True)
    chunk_XBY = last_XB1 // size == jnp.arange(len(start_XBC))
    return _Prompts(
        end_XBC=end_XBC,
        length_XBC=jnp.where(has_XBC, end_XBC - begin_XBC, 0),
        first_XBC=has_XBC & (start_XBC == token_X1C),
        earlier_XBC=earlier_XBC,
        chunk_XBY=chunk_XBY,
        last_YB=jnp.where(chunk_XBY, last_XB1 % size, -1).max(axis=0).T,
    )


class _Chunks(NamedTuple):
    """What does not depend on the states before a chunk."""

    k_XBNCH: jax.Array
    q_XBNCH: jax.Array  # with the decay since the chunk began
    values_XBNCV: jax.Array  # what the tokens write, with empty states before the chunk
    reads_XBNCH: jax.Array  # keys that read the state before the chunk
    scores_XBNCC: jax.Array  # of queries and keys, decayed
    decay_XBNCC: jax.Array  # from one token to another that follows it; 0 where none does
    since_XBNC: jax.Array  # the decay since the chunk began


class _Entering(NamedTuple):
    """Which state from before the chunk its tokens follow: float32 [X, B, C] of 0 and 1."""

    last: jax.Array  # the state of the last token
    prompt: jax.Array  # that of the prompt that ended last
    ending: jax.Array  # 1 at the last token of a prompt that later chunks follow


def _by_chunks(inputs: Inputs, runs: Runs) -> tuple[jax.Array, _Chunks, jax.Array, jax.Array]:
    """Outputs [B, T, N, V], the chunks, the states before each and the values that tokens write."""
    q, k, v = (_convolved(x, w, runs) for x, w in zip(*inputs[:2], strict=True))
    streams = (*_for_heads(q, k, v), inputs.log_decay_BTN, inputs.rate_BTN)
    length = v.shape[1]
    size = _chunk_size(length)
    q, k, v, log_decay, rate = (jnp.moveaxis(_by_chunk(x, size), 3, 2) for x in streams)
    visible_XBCC, entering = _following(runs, size)
    chunks = _chunks(q, k, v, log_decay, rate, visible_XBCC)
    # P, Q: the state of the last token, and where runs have prompts that of the last prompt.
    final_C = (jnp.arange(size) == size - 1).astype(jnp.float32)
    enters, places = [entering.last], [jnp.broadcast_to(final_C, entering.last.shape)]
    if runs.prefix_start_BT is not None:
        enters, places = [*enters, entering.prompt], [*places, entering.ending]
    enters_XBPC, places_XBPC = jnp.stack(enters, axis=2), jnp.stack(places, axis=2)

    keeps_XBNPQ = _einsum("XBPC,XBQC,XBNC->XBNPQ", places_XBPC, enters_XBPC, chunks.since_XBNC)
    if len(enters) > 1:  # a prompt that no other one follows
        keeps_XBNPQ += (places_XBPC.sum(axis=-1) == 0)[:, :, None, :, None] * jnp.eye(2)
    moves = _Moves(
        values_XBNCV=chunks.values_XBNCV,
        reads_XBNCH=chunks.reads_XBNCH,
        k_XBNCH=chunks.k_XBNCH,
        decay_XBNCP=_einsum("XBPD,XBNDC->XBNCP", places_XBPC, chunks.decay_XBNCC),
        enters_XBPC=enters_XBPC,
        keeps_XBNPQ=keeps_XBNPQ,
    )

    def entered(enters_PC: jax.Array, found_NCPV: jax.Array) -> jax.Array:
        enters_CP = jnp.swapaxes(enters_PC, -1, -2)
        return (found_NCPV * enters_CP[..., None, :, :, None]).sum(axis=-2)

    def step(
        states_BNHPV: jax.Array, moves: _Moves
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        values, reads, k_BNCH, decay_BNCP, enters_BPC, keeps_BNPQ = moves
        values -= entered(enters_BPC, _einsum("BNCH,BNHPV->BNCPV", reads, states_BNHPV))
        writes_BNCPV = decay_BNCP[..., None] * values[..., None, :]
        new = _einsum("BNCH,BNCPV->BNHPV", k_BNCH, writes_BNCPV)
        for q in range(len(enters)):
            new += keeps_BNPQ[:, :, None, :, q, None] * states_BNHPV[..., q, None, :]
        return new, (states_BNHPV, values)

    shape = *k.shape[1:3], k.shape[-1], len(enters), v.shape[-1]
    _, (starts, values) = jax.lax.scan(step, jnp.zeros(shape, jnp.float32), moves)
    out = entered(enters_XBPC, _einsum("XBNCH,XBNHPV->XBNCPV", chunks.q_XBNCH, starts))
    out += _einsum("XBNCD,XBNDV->XBNCV", chunks.scores_XBNCC, values)
    out_BXCNV = out.transpose(1, 0, 3, 2, 4)
    out_BTNV = out_BXCNV.reshape(len(out_BXCNV), -1, *out_BXCNV.shape[3:])
    since = chunks.since_XBNC * entering.last[:, :, None]
    return out_BTNV[:, :length], chunks._replace(since_XBNC=since), starts[..., 0, :], values


class _Moves(NamedTuple):
    """What a step from chunk to chunk reads: all else is computed for all chunks at once."""

    values_XBNCV: jax.Array  # of the tokens, with empty states before the chunk
    reads_XBNCH: jax.Array  # of the states before it
    k_XBNCH: jax.Array
    decay_XBNCP: jax.Array  # from a token to each state after it
    enters_XBPC: jax.Array  # whether a token follows a state before it
    keeps_XBNPQ: jax.Array  # the share of a state before it in each state after it


def _following(runs: Runs, size: int) -> tuple[jax.Array, _Entering]:
    """Which tokens of its chunk each token follows, itself included, and which states before it."""
    start_XBC = _by_chunk(runs.start_BT, size, fill=runs.start_BT.shape[1] + size)
    first_X11 = size * jnp.arange(len(start_XBC))[:, None, None]
    token_X1C = first_X11 + jnp.arange(size)
    own_XBCC = token_X1C[..., None, :] >= start_XBC[..., None]
    causal_CC = jnp.tril(jnp.ones((size, size), bool))
    none = jnp.zeros(start_XBC.shape, jnp.float32)
    if runs.prefix_start_BT is None or runs.prefix_end_BT is None:
        last_XBC = start_XBC < first_X11
        return own_XBCC & causal_CC, _Entering(last_XBC.astype(jnp.float32), none, none)
    prompts = _prompts_of(runs, size)
    end_XBC, has_XBC = prompts.end_XBC, prompts.length_XBC > 0
    begin_XBC = end_XBC - prompts.length_XBC
    of_prefix_XBCC = token_X1C[..., None, :] >= begin_XBC[..., None]
    of_prefix_XBCC &= token_X1C[..., None, :] < end_XBC[..., None]
    begins_XBC = has_XBC & (start_XBC >= first_X11) & (begin_XBC < first_X11)
    last_XBC = (start_XBC < first_X11) | (begins_XBC & (end_XBC > first_X11))
    ending_XBC = jax.nn.one_hot(prompts.last_YB, size)
    prompt_XBC = prompts.earlier_XBC.astype(jnp.float32)
    entering = _Entering(last_XBC.astype(jnp.float32), prompt_XBC, ending_XBC)
    return (own_XBCC | (of_prefix_XBCC & has_XBC[..., None])) & causal_CC, entering


def _chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    rate: jax.Array,
    visible_XBCC: jax.Array,
) -> _Chunks:
    """The chunks of streams [X, B, N, C, ...]."""
    follows = (visible_XBCC & ~jnp.eye(visible_XBCC.shape[-1], dtype=bool))[:, :, None]
    visible = visible_XBCC.astype(jnp.float32)
    total = _einsum("XBCD,XBND->XBNC", visible, log_decay)
    # Summed for each pair: a difference of totals would lose digits where decays are strong.
    between = _einsum("XBCE,XBNED->XBNCD", visible, log_decay[..., None] * follows)
    decay = jnp.where(visible_XBCC[:, :, None], jnp.exp(between), 0)
    since = jnp.exp(total)
    written = jnp.tril(_einsum("XBNCH,XBNDH->XBNCD", k, k) * decay, -1) * rate[..., None]
    solved = unit_lower_inverse(written)
    return _Chunks(
        k_XBNCH=k,
        q_XBNCH=q * since[..., None],
        values_XBNCV=_einsum("XBNCD,XBNDV->XBNCV", solved, rate[..., None] * v),
        reads_XBNCH=_einsum("XBNCD,XBNDH->XBNCH", solved, (rate * since)[..., None] * k),
        scores_XBNCC=_einsum("XBNCH,XBNDH->XBNCD", q, k) * decay,
        decay_XBNCC=decay,
        since_XBNC=since,
    )


@jax.custom_vjp
def unit_lower_inverse(below: jax.Array) -> jax.Array:
    """The inverse of 1 + `below`, which is zero on and over the diagonal; [..., C, C].

    Inverses of blocks on the diagonal are joined to those of blocks of twice the size, by matmuls.
    Requires: C is a power of 2.
    """
    size = below.shape[-1]
    place = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=below.dtype), below.shape)
    block = 1
    while block < size:
        pair, half = place // (2 * block), place // block % 2
        corner = (pair[:, None] == pair) & (half[:, None] > half)
        joining = jnp.where(corner, below, 0)
        inverse -= _einsum("...CD,...DE,...EF->...CF", inverse, joining, inverse)
        block *= 2
    return inverse


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return (-_einsum("...DC,...DE,...FE->...CF", inverse, gradient, inverse),)


def _inverse_forward(below: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(below)
    return inverse, inverse


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
