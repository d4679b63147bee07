"""The gated delta rule on a mesh: each device computes its own rows and heads.

The partitioner cannot split a kernel. Devices that share the tokens of a row have some tokens of
all heads before and behind the rule. In it each has all tokens of some heads: two exchanges bring
them there and back. So states and convolution never cross a border between devices. To hand on
states instead, each device would need the product of its tokens' matrices, keys by keys.

Shape letters: see inputs.py, and S tokens of a device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.kernels.gated_delta.inputs import DeltaState, Inputs, Streams, of_channels
from jaxrl_llm.kernels.gated_delta.runs import Chunking, PromptTaps
from jaxrl_llm.kernels.mesh_split import MeshSplit, in_row_order, in_token_order


def on_each_device(
    split: MeshSplit,
    compute: Callable[..., Any],
    inputs: Inputs,
    others: tuple[Any, ...],
    specs: Callable[[Any, Any], tuple[tuple[Any, ...], Any]],
) -> Any:
    """`compute(inputs, *others)` on each device.

    `specs` gives the PartitionSpecs of `others` and of the result, from the axes that split rows
    and those that split heads.
    """
    rows = split.rows_of(inputs.streams.k.shape[0]) or None
    heads = split.heads_of(inputs.streams.k.shape[2]) or None
    of_others, of_result = specs(rows, heads)
    by_head = PartitionSpec(rows, split.tokens or None, heads)
    of_inputs: list[Any] = [by_head, PartitionSpec(heads), by_head, by_head]
    # In float32, as devices that share heads add up the gradients of these.
    kernels = jax.tree.map(lambda x: x.astype(jnp.float32), inputs.kernels)
    return jax.shard_map(
        compute,
        in_specs=(Inputs(*of_inputs), *of_others),
        out_specs=of_result,
        axis_names={*split.rows, *split.tokens, *split.heads},
        check_vma=False,
    )(inputs._replace(kernels=kernels), *others)


def over_tokens(
    compute: Callable[[Inputs, Chunking], jax.Array], split: MeshSplit
) -> Callable[[Inputs, Chunking], jax.Array]:
    """`compute` of all tokens, where a device has its part of a row; its result has that part, too.

    Requires: tokens are in `token_order`; the chunking belongs to whole rows.
    """
    parts = split.num_token_parts
    if parts == 1:
        return compute

    def run(inputs: Inputs, chunking: Chunking) -> jax.Array:
        heads = inputs.streams.v.shape[2]
        out_BTNV = in_token_order(compute(_of_own_heads(inputs, split), chunking), parts)
        out_BSNV = jax.lax.all_to_all(
            out_BTNV, split.tokens, split_axis=1, concat_axis=2, tiled=True
        )
        return out_BSNV[:, :, :heads]

    return run


def _of_own_heads(inputs: Inputs, split: MeshSplit) -> Inputs:
    """All tokens of this device's heads, of its tokens of all heads.

    Key heads that the devices do not divide are repeated for their value heads. Of these the last
    devices may have some that are zeros.
    """
    axes, parts = split.tokens, split.num_token_parts
    (q, k, v), kernels, log_decay_BSN, rate_BSN = inputs
    heads = v.shape[2]
    if (repeats := heads // k.shape[2]) > 1 and k.shape[2] % parts:
        q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
        of_q, of_k = (jnp.repeat(x, repeats, axis=0) for x in (kernels.q, kernels.k))
        kernels = Streams(of_q, of_k, kernels.v)

    def even(x: jax.Array, axis: int) -> jax.Array:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, -x.shape[axis] % parts)
        return jnp.pad(x, padding)

    def exchanged(*arrays: jax.Array) -> jax.Array:
        by_part = [x.reshape(*x.shape[:2], parts, -1) for x in arrays]
        x_BSPE = jnp.concatenate(by_part, axis=-1)
        x_BT1E = jax.lax.all_to_all(x_BSPE, axes, split_axis=2, concat_axis=1, tiled=True)
        return in_row_order(x_BT1E[:, :, 0], parts)

    def own(kernel: jax.Array) -> jax.Array:
        size = kernel.shape[0] // parts
        return jax.lax.dynamic_slice_in_dim(kernel, jax.lax.axis_index(axes) * size, size)

    streams = Streams(*(even(x, 2) for x in (q, k, v)))
    like = Streams(*(x[:, :, : x.shape[2] // parts] for x in streams))
    rates_BTN = exchanged(even(log_decay_BSN, 2), even(rate_BSN, 2))
    return Inputs(
        of_channels(exchanged(*streams), like),
        Streams(*(own(even(x, 0)) for x in kernels)),
        *jnp.split(rates_BTN, 2, axis=-1),
    )


def chunking_specs(chunking: Chunking, rows: Any) -> Chunking:
    """The PartitionSpecs of a chunking: rows are the first dim of tokens, the second of chunks."""
    of_tokens, of_chunks = PartitionSpec(rows), PartitionSpec(None, rows)
    taps: list[Any] = [of_tokens, of_tokens, of_chunks, of_chunks, of_chunks, of_chunks]
    of_taps = None if chunking.taps is None else PromptTaps(*taps)
    specs: list[Any] = [of_tokens, of_chunks, of_chunks, of_chunks, of_taps]
    return Chunking(*specs)


def state_specs(heads: Any, *lead: None) -> DeltaState:
    """The PartitionSpecs of states with such leading dims."""
    of_memory_and_window: list[Any] = [
        PartitionSpec(*lead, heads),
        PartitionSpec(*lead, None, heads),
    ]
    return DeltaState(*of_memory_and_window)
