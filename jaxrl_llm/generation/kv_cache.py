"""The key-value cache of generation: prompts in one part, what each slot adds in the other.

A prompt's keys and values lie in a row of their own, and every slot that answers the prompt reads
them there: a group of n samples stores and computes its prompt once. What a slot's sample added
lies in pages, taken one by one as the sample grows, so that many short samples need no room for
the longest (arXiv:2309.06180). Keys and values share an array, so that one kernel writes a step's
both. Each layer has its own leaves, never stacked: a stacked cache is copied whole in every decode
step.

Shape letters: C prompt rows, B slots, A rows of a prefill and L their tokens, P prompt entries,
O pages, R entries of a page, T pages a slot at most, K KV heads, N query heads, H head dim.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.kernels.decode_attention import (
    MOST_GROUP_ROWS,
    DecodeImplementation,
    DecodePlan,
    block_entries,
    cache_length,
    decode_plan,
    default_tuning,
    prefix_decode_attention,
)
from jaxrl_llm.kernels.flash_attention import Implementation, attention, packed_visibility
from jaxrl_llm.kernels.float8 import FLOAT8, FLOAT8_MAX
from jaxrl_llm.models.attention import Attend
from jaxrl_llm.models.base import ModelConfig

# Lowered once for all layers: to lower one kernel takes 0.2 s of one core, to compile it as long.
_prefix_decode_attention = jax.jit(
    prefix_decode_attention, static_argnames=("window", "implementation")
)


class LayerCache(NamedTuple):
    """Keys and values of one layer."""

    prompts: jax.Array  # [C, K, 2, P, H]
    own: jax.Array  # [O, K, 2, R, H]


def stored(keys: jax.Array, values: jax.Array, cache: jax.Array) -> jax.Array:
    """[..., H] and [..., H] as the cache keeps them, [..., 2, H].

    A float8 has no infinity: what is too large would become NaN.
    """
    x = jnp.stack([keys, values], axis=-2)
    if cache.dtype == FLOAT8:
        x = jnp.clip(x, -FLOAT8_MAX, FLOAT8_MAX)
    return x.astype(cache.dtype)


class Context(NamedTuple):
    """What each slot sees of the cache in one decode step."""

    prompt_rows_B: jax.Array
    prompt_lengths_B: jax.Array  # entries of the prompt row; 0 in a free slot
    pages_BT: jax.Array  # the slot's pages, in order; those it does not reach may be any number
    own_lengths_B: jax.Array  # own entries, the new one included; 0 in a free slot
    # Of the kernel, where it takes so many heads; XLA takes no notice of it.
    plan: DecodePlan | None


def decode_context(
    config: ModelConfig,
    cache: LayerCache,
    prompt_rows_B: jax.Array,
    prompt_lengths_B: jax.Array,
    pages_BT: jax.Array,
    own_lengths_B: jax.Array,
    *,
    slots_per_prompt: int,
    heads_axis: str | None,
) -> Context:
    """What all layers of a step share, computed once; `cache` is any layer's."""
    heads_split = jax.sharding.get_abstract_mesh().shape[heads_axis] if heads_axis else 1
    group_rows, plan = config.num_heads // config.num_kv_heads, None
    if group_rows <= MOST_GROUP_ROWS:
        plan = decode_plan(
            prompt_rows_B,
            prompt_lengths_B,
            own_lengths_B,
            group_rows=group_rows,
            num_kv_heads=max(1, config.num_kv_heads // heads_split),
            prefix_entries=cache.prompts.shape[3],
            own_entries=pages_BT.shape[1] * cache.own.shape[3],
            slots_per_prompt=slots_per_prompt,
            tuning=default_tuning(config.head_dim, cache.own.dtype),
        )
    return Context(prompt_rows_B, prompt_lengths_B, pages_BT, own_lengths_B, plan)


def page_entries(config: ModelConfig, dtype: jnp.dtype, own_length: int) -> int:
    """Entries of a page: a block of the kernel.

    It reads no float32, so such a cache has pages that hold a whole response and XLA less to copy.
    """
    return max(own_length, 1) if dtype == jnp.float32 else block_entries(config.head_dim)


def init_cache(
    config: ModelConfig,
    *,
    num_prompts: int,
    prompt_length: int,
    num_pages: int,
    page_entries: int,
    dtype: jnp.dtype,
) -> tuple[LayerCache, ...]:
    """Zeroed caches, one a layer. The prompts' length is rounded up to the blocks of the kernel."""
    K, H = config.num_kv_heads, config.head_dim
    if dtype != jnp.float32:
        prompt_length = cache_length(prompt_length, H)
    prompts, own = (num_prompts, K, 2, prompt_length, H), (num_pages, K, 2, page_entries, H)
    return tuple(
        LayerCache(jnp.zeros(prompts, dtype), jnp.zeros(own, dtype))
        for _ in range(config.num_layers)
    )


def prefill_attend(
    rows_AL: jax.Array,
    positions_AL: jax.Array,
    prompts_AL: jax.Array | None,
    implementation: Implementation,
    heads_axis: str | None,
) -> Attend:
    """Attention over rows of prompts that also writes keys and values into the cache.

    Token by token: the prompt row of the cache, one out of range (another for each) where nothing
    is to be written, the place in it, and the prompt, from 1 on, 0 for padding. Without
    `prompts_AL` a row holds one prompt, padded on the right. For `heads_axis` see
    `_attention_by_heads`.
    """

    def attend(
        q_ALNH: jax.Array,
        k_ALKH: jax.Array,
        v_ALKH: jax.Array,
        layer_cache: LayerCache,
        /,
        *,
        window: int | None,
    ) -> tuple[jax.Array, LayerCache]:
        out_ALNH = _attention_by_heads(
            q_ALNH, k_ALKH, v_ALKH, prompts_AL, window, implementation, heads_axis
        )
        new_ALK2H = stored(k_ALKH, v_ALKH, layer_cache.prompts)
        entries = layer_cache.prompts.at[rows_AL, :, :, positions_AL]
        written = entries.set(new_ALK2H, mode="drop", unique_indices=True)
        return out_ALNH, layer_cache._replace(prompts=written)

    return attend


def _attention_by_heads(
    q_ALNH: jax.Array,
    k_ALKH: jax.Array,
    v_ALKH: jax.Array,
    prompts_AL: jax.Array | None,
    window: int | None,
    implementation: Implementation,
    heads_axis: str | None,
) -> jax.Array:
    """Causal attention, each device of the mesh axis `heads_axis` (if given) on its own heads.

    cuDNN's attention cannot be split by the partitioner inside a shard_map that leaves an axis
    automatic, so here that axis becomes manual too.
    """

    def local(q: jax.Array, k: jax.Array, v: jax.Array, prompts: jax.Array | None) -> jax.Array:
        masks: dict[str, Any] = {"window": window}
        if prompts is not None:
            masks = {"visibility": packed_visibility(prompts, window=window)}
        return attention(q, k, v, implementation=implementation, **masks)

    if heads_axis is None:
        return local(q_ALNH, k_ALKH, v_ALKH, prompts_AL)
    num_parts = jax.sharding.get_abstract_mesh().shape[heads_axis]
    num_heads, num_kv_heads = q_ALNH.shape[2], k_ALKH.shape[2]
    by_heads = PartitionSpec(None, None, heads_axis)
    if num_heads % num_parts:
        by_heads = PartitionSpec()  # every device computes all heads
    elif num_kv_heads % num_parts:
        # Fewer KV heads than devices, so they are whole everywhere: give every query head its own.
        repeats = num_heads // num_kv_heads
        k_ALKH, v_ALKH = (jnp.repeat(x, repeats, axis=2) for x in (k_ALKH, v_ALKH))
    return jax.shard_map(
        local,
        in_specs=(by_heads, by_heads, by_heads, PartitionSpec()),
        out_specs=by_heads,
        axis_names={heads_axis},
        check_vma=False,
    )(q_ALNH, k_ALKH, v_ALKH, prompts_AL)


def decode_attend(
    context: Context, implementation: Implementation, heads_axis: str | None
) -> Attend:
    """Attention of one new token a slot, whose key and value go into the slot's page on the way."""

    def attend(
        q_B1NH: jax.Array,
        k_B1KH: jax.Array,
        v_B1KH: jax.Array,
        layer_cache: LayerCache,
        /,
        *,
        window: int | None,
    ) -> tuple[jax.Array, LayerCache]:
        new_BK2H = stored(k_B1KH[:, 0], v_B1KH[:, 0], layer_cache.own)
        out_BNH, own = _decode_by_heads(
            q_B1NH[:, 0], new_BK2H, layer_cache, context, window, implementation, heads_axis
        )
        return out_BNH[:, None], layer_cache._replace(own=own)

    return attend


def _decode_by_heads(
    q_BNH: jax.Array,
    new_BK2H: jax.Array,
    cache: LayerCache,
    context: Context,
    window: int | None,
    implementation: Implementation,
    heads_axis: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Decode attention and the new pages, each device of `heads_axis` (if any) on its KV heads."""
    chosen: DecodeImplementation = "auto"
    if implementation == "pallas" or implementation == "xla":
        chosen = implementation

    def local(
        q_BNH: jax.Array, new_BK2H: jax.Array, cache: LayerCache, context: Context
    ) -> tuple[jax.Array, jax.Array]:
        return _prefix_decode_attention(
            q_BNH,
            new_BK2H,
            cache.prompts,
            context.prompt_rows_B,
            context.prompt_lengths_B,
            cache.own,
            context.pages_BT,
            context.own_lengths_B,
            window=window,
            implementation=chosen,
            plan=context.plan,
        )

    if heads_axis is None:
        return local(q_BNH, new_BK2H, cache, context)
    if cache.own.shape[1] % jax.sharding.get_abstract_mesh().shape[heads_axis]:
        # The KV heads are whole on every device while q may be split: the partitioner can do that
        # with XLA's products, not with a kernel.
        chosen = "xla"
        return local(q_BNH, new_BK2H, cache, context)
    by_heads = PartitionSpec(None, heads_axis)
    return jax.shard_map(
        local,
        in_specs=(by_heads, by_heads, by_heads, PartitionSpec()),
        out_specs=by_heads,
        axis_names={heads_axis},
        check_vma=False,
    )(q_BNH, new_BK2H, cache, context)
