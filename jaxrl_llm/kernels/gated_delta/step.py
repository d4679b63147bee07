"""The gated delta rule of one more token of every slot.

Shape letters: see inputs.py, and A prompts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.kernels.gated_delta.inputs import (
    DeltaState,
    Inputs,
    activated,
    channels,
    einsum,
    kernel_of,
    of_channels,
)
from jaxrl_llm.kernels.gated_delta.split import on_each_device, state_specs
from jaxrl_llm.kernels.gated_delta.step_kernel import kernel_fits, step_in_kernel
from jaxrl_llm.kernels.mesh_split import MeshSplit


class Begin(NamedTuple):
    """Slots that go on from the state of their prompt."""

    prompts: DeltaState  # [A, ...]
    first_B: jax.Array  # whether a slot begins
    rows_B: jax.Array  # its prompt


def begun(begin: Begin | None, own: Any, prompts: Any) -> Any:
    """Choose each slot's start: its own arrays [B, ...], or its prompt's [A, ...]."""
    if begin is None:
        return own
    of_prompts = jax.tree.map(lambda x: x[begin.rows_B], prompts)
    return _chosen(begin.first_B, of_prompts, own)


def _chosen(choice_B: jax.Array, one: Any, other: Any) -> Any:
    def of_one(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(choice_B.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(of_one, one, other)


def gated_delta_step(
    inputs: Inputs,
    own: DeltaState,
    live_B: jax.Array,
    begin: Begin | None = None,
    split: MeshSplit | None = None,
) -> tuple[jax.Array, DeltaState]:
    """The output of one more token of each slot, float32 [B, 1, N, V], and the states after it.

    Guarantees: a slot that is not live keeps its state; its output is 0, whatever its inputs are.
    """
    if split is not None and split.num_devices > 1:

        def specs(rows: Any, heads: Any) -> tuple[tuple[Any, ...], Any]:
            assert rows is None, "slots are not split"
            states, whole = state_specs(heads, None), PartitionSpec()
            of_begin: list[Any] = [states, whole, whole]
            of_others = (states, whole, None if begin is None else Begin(*of_begin))
            return of_others, (PartitionSpec(None, None, heads), states)

        return on_each_device(split, gated_delta_step, inputs, (own, live_B, begin), specs)
    prompts = None if begin is None else begin.prompts
    before = begun(begin, own.window, None if prompts is None else prompts.window)
    window_BWE = jnp.concatenate([before, channels(inputs.streams)], axis=1)
    y_BE = einsum("BWE,EW->BE", window_BWE.astype(jnp.float32), kernel_of(inputs))
    q_BGH, k_BGH, v_BNV = activated(*of_channels(y_BE, inputs.streams))
    decay_BN, rate_BN = jnp.exp(inputs.log_decay_BTN[:, 0]), inputs.rate_BTN[:, 0]
    token = (q_BGH, k_BGH, v_BNV, decay_BN, rate_BN)
    if kernel_fits(own.memory):
        source_B = jnp.where(live_B, 0, -1)
        if begin is not None:
            source_B = jnp.where(live_B & begin.first_B, begin.rows_B + 1, source_B)
        of_prompts = None if prompts is None else prompts.memory
        out_BNV, memory = step_in_kernel(*token, own.memory, source_B, of_prompts)
    else:
        memory = begun(begin, own.memory, None if prompts is None else prompts.memory)
        out_BNV, after = _step(*token, memory)
        out_BNV = jnp.where(live_B[:, None, None], out_BNV, 0)
        memory = _chosen(live_B, after, own.memory)
    return out_BNV[:, None], DeltaState(memory, _chosen(live_B, window_BWE[:, 1:], own.window))


def _step(
    q_BGH: jax.Array,
    k_BGH: jax.Array,
    v_BNV: jax.Array,
    decay_BN: jax.Array,
    rate_BN: jax.Array,
    memory_BNVH: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The outputs [B, N, V] of a token, and the memory after it."""
    repeats = v_BNV.shape[1] // k_BGH.shape[1]
    q_BNH, k_BNH = (jnp.repeat(x, repeats, axis=1) for x in (q_BGH, k_BGH))
    memory = memory_BNVH * decay_BN[..., None, None]
    known_BNV = einsum("BNVH,BNH->BNV", memory, k_BNH)
    new_BNV = rate_BN[..., None] * (v_BNV - known_BNV)
    memory += new_BNV[..., None] * k_BNH[:, :, None]
    return einsum("BNVH,BNH->BNV", memory, q_BNH), memory
