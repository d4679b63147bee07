"""The gated delta rule on a mesh: each device computes its own rows and heads.

The partitioner cannot split a kernel. No device needs anything of another one.

Shape letters: those of inputs.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.kernels.gated_delta.inputs import DeltaState, Inputs
from jaxrl_llm.kernels.gated_delta.runs import Chunking, PromptTaps
from jaxrl_llm.kernels.mesh_split import MeshSplit


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
    assert split.num_token_parts == 1, "tokens of a row that is split are refused"
    rows = split.rows_of(inputs.streams.k.shape[0]) or None
    heads = split.heads_of(inputs.streams.k.shape[2]) or None
    of_others, of_result = specs(rows, heads)
    by_head = PartitionSpec(rows, None, heads)
    of_inputs: list[Any] = [by_head, PartitionSpec(heads), by_head, by_head]
    # In float32, as devices that share heads add up the gradients of these.
    kernels = jax.tree.map(lambda x: x.astype(jnp.float32), inputs.kernels)
    return jax.shard_map(
        compute,
        in_specs=(Inputs(*of_inputs), *of_others),
        out_specs=of_result,
        axis_names={*split.rows, *split.heads},
        check_vma=False,
    )(inputs._replace(kernels=kernels), *others)


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
