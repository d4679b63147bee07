"""The gated delta rule (arXiv:2412.06464) over rows of tokens, and of one token after others.

In whole rows, chunks of tokens are computed by matmuls and the states go from chunk to chunk. A
token follows the tokens of its run, and before these the prompt that its run answers. Other tokens
of the row do not touch its state.

Shape letters: see inputs.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.kernels.gated_delta.chunks import Chunks, chunks_of
from jaxrl_llm.kernels.gated_delta.convolution import convolved
from jaxrl_llm.kernels.gated_delta.inputs import (
    DeltaState,
    Inputs,
    Streams,
    activated,
    channels,
    einsum,
    kernel_of,
    of_channels,
)
from jaxrl_llm.kernels.gated_delta.runs import Chunking, Runs, by_chunk, chunk_size, chunking_of
from jaxrl_llm.kernels.gated_delta.scan import Moves, scan_chunks
from jaxrl_llm.kernels.gated_delta.split import (
    chunking_specs,
    on_each_device,
    over_tokens,
    state_specs,
)
from jaxrl_llm.kernels.gated_delta.step import Begin, begun, gated_delta_step
from jaxrl_llm.kernels.mesh_split import MeshSplit

__all__ = [
    "Begin",
    "Chunking",
    "DeltaState",
    "Inputs",
    "Runs",
    "Streams",
    "begun",
    "chunking_of",
    "gated_delta",
    "gated_delta_states",
    "gated_delta_step",
]


def gated_delta(inputs: Inputs, chunking: Chunking, split: MeshSplit | None = None) -> jax.Array:
    """The outputs of all tokens, float32 [B, T, N, V].

    Requires: inputs of padding are finite, as a chunk multiplies them by 0. Where tokens are split,
        they are in `token_order`; the chunking belongs to rows in their own order.
    """
    if split is not None and split.num_devices > 1:
        tokens = split.tokens or None

        def specs(rows: Any, heads: Any) -> tuple[tuple[Any, ...], Any]:
            return (chunking_specs(chunking, rows),), PartitionSpec(rows, tokens, heads)

        compute = over_tokens(gated_delta, split)
        return on_each_device(split, compute, inputs, (chunking,), specs)
    return _by_chunks(inputs, chunking)[0]


def gated_delta_states(
    inputs: Inputs, chunking: Chunking, last_BS: jax.Array, split: MeshSplit | None = None
) -> tuple[jax.Array, DeltaState]:
    """`gated_delta`, and the states after the tokens `last_BS`; -1 is the state before any token.

    Requires: no run has a prompt before it.
    """
    assert chunking.taps is None
    if split is not None and split.num_devices > 1:

        def specs(rows: Any, heads: Any) -> tuple[tuple[Any, ...], Any]:
            assert rows is None, "prompts have states only where rows are not split"
            states = state_specs(heads, None, None)
            return (PartitionSpec(), PartitionSpec()), (PartitionSpec(None, None, heads), states)

        return on_each_device(split, gated_delta_states, inputs, (chunking, last_BS), specs)
    out_BTNV, chunks, starts_XBNHV, values_XBNCV = _by_chunks(inputs, chunking)
    at_BS = jnp.maximum(last_BS, 0)
    size = chunks.decay_XBNCC.shape[-1]
    rows_B1 = jnp.arange(len(last_BS))[:, None]

    def of_chunk(x_XB: jax.Array) -> jax.Array:
        return x_XB[at_BS // size, rows_B1]

    place_BSC = jax.nn.one_hot(at_BS % size, size)
    decay_BSNC = einsum("BSC,BSNCD->BSND", place_BSC, of_chunk(chunks.decay_XBNCC))
    since_BSN = einsum("BSC,BSNC->BSN", place_BSC, of_chunk(chunks.since_XBNC))
    starts_BSNVH = of_chunk(starts_XBNHV).swapaxes(-1, -2)
    memory = since_BSN[..., None, None] * starts_BSNVH + einsum(
        "BSNC,BSNCH,BSNCV->BSNVH", decay_BSNC, of_chunk(chunks.k_XBNCH), of_chunk(values_XBNCV)
    )
    some_BS = last_BS >= 0
    memory = jnp.where(some_BS[..., None, None, None], memory, 0)
    width = inputs.kernels.q.shape[-1]
    tokens_BSW = at_BS[..., None] - jnp.arange(width - 2, -1, -1)
    start_BS = jnp.take_along_axis(chunking.runs.start_BT, at_BS, axis=1)
    seen_BSW = some_BS[..., None] & (tokens_BSW >= start_BS[..., None])
    window_BSWE = channels(inputs.streams)[rows_B1[..., None], jnp.maximum(tokens_BSW, 0)]
    found = DeltaState(memory, jnp.where(seen_BSW[..., None], window_BSWE, 0))
    # Else XLA computes them after all layers, and keeps each layer's chunks until then.
    return jax.lax.optimization_barrier((out_BTNV, found))


def _by_chunks(
    inputs: Inputs, chunking: Chunking
) -> tuple[jax.Array, Chunks, jax.Array, jax.Array]:
    """Outputs [B, T, N, V], the chunks, the states before each and the values that tokens write."""
    y_BTE = convolved(channels(inputs.streams), kernel_of(inputs), chunking)
    q, k, v = activated(*of_channels(y_BTE, inputs.streams))
    repeats = v.shape[-2] // k.shape[-2]
    if repeats > 1:
        q, k = (jnp.repeat(x, repeats, axis=-2) for x in (q, k))
    streams = (q, k, v, inputs.log_decay_BTN, inputs.rate_BTN)
    length = v.shape[1]
    size = chunk_size(length)
    q, k, v, log_decay, rate = (jnp.moveaxis(by_chunk(x, size), 3, 2) for x in streams)
    _, visible_XBCC, enters_XBPC, ends_XBPC, _ = chunking
    chunks = chunks_of(q, k, v, log_decay, rate, visible_XBCC)
    keeps_XBNPQ = einsum("XBPC,XBQC,XBNC->XBNPQ", ends_XBPC, enters_XBPC, chunks.since_XBNC)
    states = enters_XBPC.shape[2]
    if states > 1:  # a prompt that no other one follows
        keeps_XBNPQ += (ends_XBPC.sum(axis=-1) == 0)[:, :, None, :, None] * jnp.eye(states)
    leaves_XBNPC = einsum("XBPD,XBNDC->XBNPC", ends_XBPC, chunks.decay_XBNCC)
    moves = Moves(
        left_XBNCH=-chunks.reads_XBNCH,
        right_XBNCH=chunks.k_XBNCH,
        enters_XBNPC=jnp.broadcast_to(enters_XBPC[:, :, None], leaves_XBNPC.shape),
        leaves_XBNPC=leaves_XBNPC,
        keeps_XBNPQ=keeps_XBNPQ,
        own_XBNCV=chunks.values_XBNCV,
    )
    starts_XBNHPV, values_XBNCV = scan_chunks(moves)
    read_XBNCPV = einsum("XBNCH,XBNHPV->XBNCPV", chunks.q_XBNCH, starts_XBNHPV)
    out = (enters_XBPC.swapaxes(2, 3)[:, :, None, ..., None] * read_XBNCPV).sum(axis=-2)
    out += einsum("XBNCD,XBNDV->XBNCV", chunks.scores_XBNCC, values_XBNCV)
    out_BXCNV = out.transpose(1, 0, 3, 2, 4)
    out_BTNV = out_BXCNV.reshape(len(out_BXCNV), -1, *out_BXCNV.shape[3:])
    since = chunks.since_XBNC * enters_XBPC[:, :, :1]
    chunks = chunks._replace(since_XBNC=since)
    return out_BTNV[:, :length], chunks, starts_XBNHPV[..., 0, :], values_XBNCV
