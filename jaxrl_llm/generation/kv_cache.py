"""The key-value cache: for each layer one array a side, [slots, K, S, H].

Layers are separate leaves, never stacked: a stacked cache is copied whole in every decode step.
Shape letters: B slots, M rows of a refill, T tokens, K KV heads, N query heads, S cache length,
H head dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.kernels.decode_attention import decode_attention
from jaxrl_llm.kernels.flash_attention import Implementation, attention
from jaxrl_llm.models.attention import Attend
from jaxrl_llm.models.base import ModelConfig

LayerCache = tuple[jax.Array, jax.Array]  # keys, values


def init_cache(
    config: ModelConfig, num_slots: int, length: int, dtype: jnp.dtype
) -> tuple[LayerCache, ...]:
    """Zeroed caches, one (keys, values) pair a layer."""
    shape = (num_slots, config.num_kv_heads, length, config.head_dim)
    return tuple(
        (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)
    )


def prefill_attend(
    slots_M: jax.Array, implementation: Implementation, heads_axis: str | None
) -> Attend:
    """Attention over whole prompts that also writes keys and values into the rows `slots_M`.

    A slot out of range writes nothing. Prompts are padded on the right, so causal masking keeps
    padding out of every real token; what padding leaves in the cache lies past the row's length
    and is overwritten by the response. For `heads_axis` see `_attention_by_heads`.
    """

    def attend(
        q_MTNH: jax.Array,
        k_MTKH: jax.Array,
        v_MTKH: jax.Array,
        layer_cache: LayerCache,
        /,
        *,
        window: int | None,
    ) -> tuple[jax.Array, LayerCache]:
        out_MTNH = _attention_by_heads(q_MTNH, k_MTKH, v_MTKH, window, implementation, heads_axis)

        def write(cache_BKSH: jax.Array, new_MTKH: jax.Array) -> jax.Array:
            new_MKTH = new_MTKH.swapaxes(1, 2).astype(cache_BKSH.dtype)
            rows = cache_BKSH.at[slots_M, :, : new_MKTH.shape[2]]
            return rows.set(new_MKTH, mode="drop", unique_indices=True)

        keys, values = layer_cache
        return out_MTNH, (write(keys, k_MTKH), write(values, v_MTKH))

    return attend


def _attention_by_heads(
    q_MTNH: jax.Array,
    k_MTKH: jax.Array,
    v_MTKH: jax.Array,
    window: int | None,
    implementation: Implementation,
    heads_axis: str | None,
) -> jax.Array:
    """Causal attention, each device of the mesh axis `heads_axis` (if given) on its own heads.

    cuDNN's attention cannot be split by the partitioner inside a shard_map that leaves an axis
    automatic, so here that axis becomes manual too.
    """
    local = partial(attention, causal=True, window=window, implementation=implementation)
    if heads_axis is None:
        return local(q_MTNH, k_MTKH, v_MTKH)
    num_parts = jax.sharding.get_abstract_mesh().shape[heads_axis]
    num_heads, num_kv_heads = q_MTNH.shape[2], k_MTKH.shape[2]
    by_heads = PartitionSpec(None, None, heads_axis)
    if num_heads % num_parts:
        by_heads = PartitionSpec()  # every device computes all heads
    elif num_kv_heads % num_parts:
        # Fewer KV heads than devices, so they are whole everywhere: give every query head its own.
        repeats = num_heads // num_kv_heads
        k_MTKH, v_MTKH = (jnp.repeat(x, repeats, axis=2) for x in (k_MTKH, v_MTKH))
    return jax.shard_map(
        local,
        in_specs=(by_heads, by_heads, by_heads),
        out_specs=by_heads,
        axis_names={heads_axis},
        check_vma=False,
    )(q_MTNH, k_MTKH, v_MTKH)


def decode_attend(positions_B: jax.Array) -> Attend:
    """Attention of one new token a slot, which is written at `positions_B` of its row first."""
    slots_B = jnp.arange(positions_B.shape[0])

    def attend(
        q_B1NH: jax.Array,
        k_B1KH: jax.Array,
        v_B1KH: jax.Array,
        layer_cache: LayerCache,
        /,
        *,
        window: int | None,
    ) -> tuple[jax.Array, LayerCache]:
        def write(cache_BKSH: jax.Array, new_B1KH: jax.Array) -> jax.Array:
            entries = cache_BKSH.at[slots_B, :, positions_B]
            return entries.set(
                new_B1KH[:, 0].astype(cache_BKSH.dtype),
                mode="promise_in_bounds",
                unique_indices=True,
            )

        keys, values = layer_cache
        keys, values = write(keys, k_B1KH), write(values, v_B1KH)
        out_BNH = decode_attention(q_B1NH[:, 0], keys, values, positions_B + 1, window=window)
        return out_BNH[:, None], (keys, values)

    return attend
