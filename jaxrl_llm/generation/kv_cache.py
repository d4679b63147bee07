"""The cache of generation: prompts in one part, responses in the other.

Each prompt has one row, which all slots of its group read, so a group of n samples computes and
stores its prompt once. The responses lie in pages, which a slot takes one by one as its sample
grows (arXiv:2309.06180). So short samples do not reserve memory for the longest. Keys and values
share an array, because one kernel writes both. Each layer has its own leaves: XLA would copy a
stacked cache in every decode step. For latent attention the cache holds the latent vectors, as one
head (models/latent_attention.py).

A layer of a gated delta rule has states instead of keys and values. Each prompt has one, before its
last token, and so has each slot. The first step of a slot continues from its prompt's state.

Shape letters: C prompt rows, B slots, A rows of a prefill and L their tokens, P prompt entries,
O pages, R entries of a page, T pages a slot at most, K KV heads, N query heads, H head dim.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxrl_llm.kernels.decode_attention import (
    ROWS_HEAD_DIMS,
    DecodeImplementation,
    DecodeInputs,
    DecodeSchedule,
    block_entries,
    cache_length,
    decode_schedule,
    default_tuning,
    max_group_size,
    prefix_decode_attention,
)
from jaxrl_llm.kernels.decode_attention.heads import StepHeads, queries_and_entries
from jaxrl_llm.kernels.flash_attention import (
    Implementation,
    Visibility,
    attention,
    packed_visibility,
)
from jaxrl_llm.kernels.float8 import FLOAT8, FLOAT8_MAX
from jaxrl_llm.kernels.gated_delta import (
    Begin,
    Chunking,
    DeltaState,
    Inputs,
    begun,
    gated_delta_states,
    gated_delta_step,
)
from jaxrl_llm.kernels.hopper import on_hopper
from jaxrl_llm.kernels.mesh_split import MeshSplit, axes_size
from jaxrl_llm.kernels.strict import strict_in_scope
from jaxrl_llm.models.attention import Attend, AttendHeads, Kept, Recur
from jaxrl_llm.models.base import ModelConfig
from jaxrl_llm.models.config import GatedDelta

# The dtype of the residual stream. A bf16 stream would add about half of the difference between
# the sampler's log-probs and the trainer's. In generation float32 costs nothing.
RESIDUAL_DTYPE = "float32"

# A jitted function of its own, so that all layers share one lowering (0.2 s of one core each).
_prefix_decode_attention = jax.jit(
    prefix_decode_attention,
    static_argnames=("window", "implementation", "strict", "softcap", "shared_pages"),
)
_queries_and_entries = jax.jit(queries_and_entries, static_argnames="num_kv_heads")


class HeadAxes(NamedTuple):
    """The mesh axes that split attention heads, outermost first.

    `kv` are all axes, or the first ones: then each device has one KV head, which the devices of the
    other axes have too. Or none: every device has all KV heads.
    """

    query: tuple[str, ...]
    kv: tuple[str, ...]

    def num_query(self) -> int:
        """Into how many parts query heads are split."""
        return axes_size(self.query)

    def num_kv(self) -> int:
        """Into how many parts KV heads are split."""
        return axes_size(self.kv)


class LayerCache(NamedTuple):
    """Keys and values of one layer."""

    prompts: jax.Array  # [C, K, 2, P, H]
    own: jax.Array  # [O, K, 2, R, H]


class StateCache(NamedTuple):
    """States of one layer of a gated delta rule."""

    prompts: DeltaState  # [C, ...]; before the last token of the prompt
    own: DeltaState  # [B, ...]


Cache = tuple[LayerCache | StateCache, ...]  # one a layer


def keys_and_values(cache: Cache) -> LayerCache:
    """The cache of the first layer that has keys and values. All these layers have equal shapes."""
    return next(layer for layer in cache if isinstance(layer, LayerCache))


def of_slots(
    cache: Cache, from_S: jax.Array, first_S: jax.Array, prompt_rows_S: jax.Array
) -> Cache:
    """The cache with the states of the slots `from_S` alone; keys and values stay in their pages.

    Slots of `first_S` have the state of their prompt, and none begins later. A step that wrote some
    rows of all states would read and write every row on a GPU.
    """

    def one(layer: LayerCache | StateCache) -> LayerCache | StateCache:
        if isinstance(layer, LayerCache):
            return layer
        own = jax.tree.map(lambda x_B: x_B[from_S], layer.own)
        begin = Begin(layer.prompts, first_S, prompt_rows_S)
        return layer._replace(own=begun(begin, own, layer.prompts))

    return tuple(map(one, cache))


def in_place_of(cache: Cache, few_slots: Cache) -> Cache:
    """The cache of `few_slots` in the shapes of `cache`, so that its memory can be donated.

    States of the few come first. No scatter: the partitioner would not keep it to one replica.
    """
    update = partial(lax.dynamic_update_slice_in_dim, start_index=0, axis=0)

    def one(
        layer: LayerCache | StateCache, few: LayerCache | StateCache
    ) -> LayerCache | StateCache:
        if isinstance(layer, LayerCache):
            return few
        return layer._replace(own=jax.tree.map(update, layer.own, few.own))

    return tuple(map(one, cache, few_slots))


def cache_specs(cache: Cache, heads: HeadAxes) -> Any:
    """How the devices that share heads split a cache, a PartitionSpec for each array."""

    def one(layer: LayerCache | StateCache) -> Any:
        by_heads = isinstance(layer, LayerCache)
        spec = PartitionSpec(None, heads.kv) if by_heads else PartitionSpec()
        return jax.tree.map(lambda _: spec, layer)

    return tuple(map(one, cache))


def _own_kv_heads(heads: HeadAxes, num_kv_heads: int) -> bool:
    """True if each device has exactly the KV heads of its own query heads."""
    return heads.kv == heads.query or heads.num_kv() == num_kv_heads


def stored(keys: jax.Array, values: jax.Array, cache: jax.Array) -> jax.Array:
    """Keys and values [..., H] in the layout and dtype of the cache, [..., 2, H].

    Values are clipped for float8, which has no infinity: larger ones would become NaN.
    """
    x = jnp.stack([keys, values], axis=-2)
    if cache.dtype == FLOAT8:
        x = jnp.clip(x, -FLOAT8_MAX, FLOAT8_MAX)
    return x.astype(cache.dtype)


class Context(NamedTuple):
    """The part of the cache that each slot sees in one decode step.

    Indices of prompt rows and pages that a slot does not read may have any value.
    """

    prompt_rows_B: jax.Array
    prompt_lengths_B: jax.Array  # entries of the prompt row; 0 in a free slot
    pages_BT: jax.Array  # the slot's pages, in order
    own_lengths_B: jax.Array  # response entries, including the new one; 0 in a free slot
    # The kernel's schedule; None when it does not support so many heads. XLA ignores it.
    schedule: DecodeSchedule | None


def decode_context(
    config: ModelConfig,
    cache: LayerCache,
    prompt_rows_B: jax.Array,
    prompt_lengths_B: jax.Array,
    pages_BT: jax.Array,
    own_lengths_B: jax.Array,
    *,
    slots_per_prompt: int,
    heads: HeadAxes | None,
) -> Context:
    """The part of a decode step that all layers share. `cache` is the cache of any layer."""
    num_heads, (num_kv_heads, head_dim) = config.num_heads, config.cache_heads
    if heads is not None and _own_kv_heads(heads, num_kv_heads):
        num_heads, num_kv_heads = num_heads // heads.num_query(), num_kv_heads // heads.num_kv()
    group_size, schedule = num_heads // num_kv_heads, None
    strictly = strict_in_scope() is not None  # always one job a prompt and one a slot
    if head_dim not in ROWS_HEAD_DIMS:
        slots_per_prompt = 1
    if group_size <= max_group_size(head_dim):
        schedule = decode_schedule(
            prompt_rows_B,
            prompt_lengths_B,
            own_lengths_B,
            group_size=group_size,
            num_kv_heads=num_kv_heads,
            prefix_capacity=cache.prompts.shape[3],
            own_capacity=pages_BT.shape[1] * cache.own.shape[3],
            slots_per_prompt=max(2, slots_per_prompt) if strictly else slots_per_prompt,
            num_splits=1 if strictly else None,
            prompt_splits=1 if strictly else None,
            tuning=default_tuning(head_dim, cache.own.dtype),
        )
    return Context(prompt_rows_B, prompt_lengths_B, pages_BT, own_lengths_B, schedule)


def page_entries(config: ModelConfig, dtype: jnp.dtype, own_length: int) -> int:
    """Entries of a page: one block of the decode kernel.

    The kernel does not read float32. With float32 a page holds a whole response, so XLA copies
    less.
    """
    return max(own_length, 1) if dtype == jnp.float32 else block_entries(config.cache_heads[1])


def init_cache(
    config: ModelConfig,
    *,
    num_prompts: int,
    prompt_length: int,
    num_pages: int,
    page_entries: int,
    num_slots: int,
    dtype: jnp.dtype,
    state_dtype: jnp.dtype,
) -> Cache:
    """Zeroed caches, one a layer. The prompt length is rounded up to the kernel's blocks.

    `dtype` is of keys and values, `state_dtype` of the inputs of convolutions; states are float32.
    """
    K, H = config.cache_heads
    if dtype != jnp.float32:
        prompt_length = cache_length(prompt_length, H)
    prompts, own = (num_prompts, K, 2, prompt_length, H), (num_pages, K, 2, page_entries, H)

    def one(layer: int) -> LayerCache | StateCache:
        if config.delta is not None and config.is_linear(layer):
            sizes = (num_prompts, num_slots)
            return StateCache(*(_empty_states(config.delta, size, state_dtype) for size in sizes))
        return LayerCache(jnp.zeros(prompts, dtype), jnp.zeros(own, dtype))

    return tuple(map(one, range(config.num_layers)))


def _empty_states(delta: GatedDelta, number: int, dtype: jnp.dtype) -> DeltaState:
    memory = jnp.zeros((number, delta.value_heads, delta.value_dim, delta.key_dim), jnp.float32)
    channels = 2 * delta.key_heads * delta.key_dim + delta.value_heads * delta.value_dim
    return DeltaState(memory, jnp.zeros((number, delta.conv_size - 1, channels), dtype))


def prefill_attend(
    rows_AL: jax.Array,
    positions_AL: jax.Array,
    prompts_AL: jax.Array | None,
    implementation: Implementation,
    heads: HeadAxes | None,
) -> Attend:
    """Attention over rows of prompts that also writes keys and values into the cache.

    For each token, `rows_AL` is the row of the cache and `positions_AL` the entry in it.
    `prompts_AL` numbers the prompts of a row from 1 on, with 0 for padding; None means that a row
    holds one prompt, padded on the right. For `heads` see `_attention_by_heads`.

    Requires: padding has distinct rows out of range. It is not written.
    """

    def attend(
        q_ALNH: jax.Array,
        k_ALKH: jax.Array,
        v_ALKH: jax.Array,
        layer_cache: LayerCache | Kept,
        /,
        *,
        window: int | None,
        sinks: jax.Array | None = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        out_ALNH = _attention_by_heads(
            q_ALNH, k_ALKH, v_ALKH, prompts_AL, window, implementation, heads, sinks, softcap
        )
        if isinstance(layer_cache, Kept):
            cache, k_ALKH, v_ALKH = layer_cache
        else:
            cache = layer_cache
        new_ALK2H = stored(k_ALKH, v_ALKH, cache.prompts)
        entries = cache.prompts.at[rows_AL, :, :, positions_AL]
        written = entries.set(new_ALK2H, mode="drop", unique_indices=True)
        return out_ALNH, cache._replace(prompts=written)

    return attend


def extend_attend(
    prompt_rows_A: jax.Array,
    beginnings_A: jax.Array,
    pages_AT: jax.Array,
    entries_AL: jax.Array,
    real_AL: jax.Array,
    *,
    into_row: bool,
    sees_cache: bool,
    implementation: Implementation,
    heads: HeadAxes | None,
) -> Attend:
    """Attention of given tokens after what the cache has; it writes their keys and values.

    Token `entries_AL` of a sequence goes to its pages, or with `into_row` to its prompt row. It
    sees the `beginnings_A` first entries of the prompt row, and all own entries up to itself.
    Without `sees_cache` it sees the tokens of its own row alone.

    Requires: a model whose cache has the keys and values of each head, if `sees_cache`.
    """

    def attend(
        q_ALNH: jax.Array,
        k_ALKH: jax.Array,
        v_ALKH: jax.Array,
        layer_cache: LayerCache | Kept,
        /,
        *,
        window: int | None,
        sinks: jax.Array | None = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        cache, keys, values = layer_cache, k_ALKH, v_ALKH
        if isinstance(cache, Kept):
            cache, keys, values = cache
        A, L = real_AL.shape
        written = cache.prompts if into_row else cache.own
        number, entry_AL = written.shape[0], entries_AL
        at_AL = jnp.broadcast_to(prompt_rows_A[:, None], (A, L))
        if not into_row:
            page_AL = jnp.minimum(entries_AL // written.shape[3], pages_AT.shape[1] - 1)
            at_AL = jnp.take_along_axis(pages_AT, page_AL, axis=1)
            entry_AL = entries_AL % written.shape[3]
        # Padding gets distinct places out of range, which the scatter drops.
        at_AL = jnp.where(real_AL, at_AL, number + jnp.arange(A * L).reshape(A, L))
        new_ALK2H = stored(keys, values, written)
        written = written.at[at_AL, :, :, entry_AL].set(new_ALK2H, mode="drop", unique_indices=True)
        cache = cache._replace(**{"prompts" if into_row else "own": written})
        places = entries_AL - entries_AL[:, :1]
        before = 0
        if sees_cache:
            k_ALKH, v_ALKH, before = _entries_of(cache, prompt_rows_A, pages_AT, q_ALNH.dtype)
            places = entries_AL + before
        first = before if window is None else jnp.maximum(places - window + 1, before)
        visibility = Visibility(
            start_BT=jnp.where(real_AL, first, places + 1),
            last_BT=places,
        )
        if before:
            position_AL = beginnings_A[:, None] + entries_AL
            begin = 0 if window is None else jnp.maximum(position_AL - window + 1, 0)
            end = jnp.where(real_AL, beginnings_A[:, None], 0)
            visibility = replace(
                visibility,
                prefix_start_BT=jnp.minimum(jnp.broadcast_to(begin, end.shape), end),
                prefix_end_BT=end,
            )
        out = attention(
            q_ALNH,
            k_ALKH,
            v_ALKH,
            visibility=visibility,
            sinks=sinks,
            softcap=softcap,
            # The partitioner splits heads of XLA's attention, and not of a kernel.
            implementation=implementation if heads is None else "xla",
        )
        return out, cache

    return attend


def _entries_of(
    cache: LayerCache, prompt_rows_A: jax.Array, pages_AT: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array, int]:
    """Keys and values [A, S, K, H] of prompt rows, then of pages; the entries of a prompt row.

    A cache with a single prompt row has no beginnings: none of it is read.
    """
    own = cache.own.at[pages_AT].get(mode="clip")
    A, T, K, _, R, H = own.shape
    entries = jnp.moveaxis(own, 4, 2).reshape(A, T * R, K, 2, H)
    before = 0
    if cache.prompts.shape[0] > 1:
        rows = cache.prompts.at[prompt_rows_A].get(mode="clip")
        entries = jnp.concatenate([jnp.moveaxis(rows, 3, 1), entries], axis=1)
        before = cache.prompts.shape[3]
    entries = entries.astype(dtype)
    return entries[..., 0, :], entries[..., 1, :], before


def prefill_recur(
    chunking: Chunking, rows_AS: jax.Array, last_AS: jax.Array, heads: HeadAxes | None
) -> Recur:
    """The gated delta rule over rows of prompts that also writes their states into the cache.

    `chunking` is the chunking of the rows, whose runs are prompts. The state after the token
    `last_AS` of a row goes to row `rows_AS` of the cache.

    Requires: what is not written has distinct rows out of range.
    """

    def recur(inputs: Inputs, cache: StateCache, /) -> tuple[jax.Array, StateCache]:
        out_ALNV, states = gated_delta_states(inputs, chunking, last_AS, _delta_split(heads))
        prompts = jax.tree.map(
            lambda x, new: x.at[rows_AS].set(new.astype(x.dtype), mode="drop", unique_indices=True),
            cache.prompts,
            states,
        )
        return out_ALNV, cache._replace(prompts=prompts)

    return recur


def _delta_split(heads: HeadAxes | None) -> MeshSplit | None:
    return None if heads is None else MeshSplit(heads=heads.query)


def decode_recur(
    first_B: jax.Array | None,
    live_B: jax.Array,
    prompt_rows_B: jax.Array,
    heads: HeadAxes | None,
) -> Recur:
    """The gated delta rule of one new token a slot, which goes on from the slot's state.

    Slots of `first_B` go on from the state of their prompt; None: none does, and no state of a
    prompt is read. Only slots of `live_B` get a new state.
    """

    def recur(inputs: Inputs, cache: StateCache, /) -> tuple[jax.Array, StateCache]:
        begin = None if first_B is None else Begin(cache.prompts, first_B, prompt_rows_B)
        out_B1NV, own = gated_delta_step(inputs, cache.own, live_B, begin, _delta_split(heads))
        return out_B1NV, cache._replace(own=own)

    return recur


def _attention_by_heads(
    q_ALNH: jax.Array,
    k_ALKH: jax.Array,
    v_ALKH: jax.Array,
    prompts_AL: jax.Array | None,
    window: int | None,
    implementation: Implementation,
    heads: HeadAxes | None,
    sinks_N: jax.Array | None,
    softcap: float | None,
) -> jax.Array:
    """Causal attention; each device of the axes `heads` (if given) has its own heads.

    Inside a shard_map that leaves axes automatic, the partitioner cannot split cuDNN's attention.
    So these axes become manual here too.
    """

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        prompts: jax.Array | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        how: dict[str, Any] = {"window": window}
        if prompts is not None:
            how = {"visibility": packed_visibility(prompts, window=window)}
        how |= {"sinks": sinks, "softcap": softcap, "implementation": implementation}
        return attention(q, k, v, strict=strict_in_scope(), **how)

    if heads is None:
        return local(q_ALNH, k_ALKH, v_ALKH, prompts_AL, sinks_N)
    num_heads, num_kv_heads = q_ALNH.shape[2], k_ALKH.shape[2]
    by_heads, by_kv_heads = (PartitionSpec(None, None, axes) for axes in heads)
    sinks_spec = PartitionSpec(heads.query)
    if num_heads % heads.num_query():
        by_heads = by_kv_heads = sinks_spec = PartitionSpec()  # every device computes all heads
    elif not _own_kv_heads(heads, num_kv_heads):
        # The devices do not divide the KV heads, so each device holds all of them. Every query head
        # gets its own copy.
        repeats, by_kv_heads = num_heads // num_kv_heads, by_heads
        k_ALKH, v_ALKH = (jnp.repeat(x, repeats, axis=2) for x in (k_ALKH, v_ALKH))
    return jax.shard_map(
        local,
        in_specs=(by_heads, by_kv_heads, by_kv_heads, PartitionSpec(), sinks_spec),
        out_specs=by_heads,
        axis_names=set(heads.query),
        check_vma=False,
    )(q_ALNH, k_ALKH, v_ALKH, prompts_AL, sinks_N)


def decode_attend(
    context: Context,
    implementation: Implementation,
    heads: HeadAxes | None,
    *,
    shared_pages: bool = False,
) -> Attend:
    """Attention of one new token a slot. It also writes the token's key and value to its page.

    With `shared_pages` several rows are tokens of one sequence; see `prefix_decode_attention`.
    """

    def attend(
        q_B1NH: jax.Array,
        k_B1KH: jax.Array,
        v_B1KH: jax.Array,
        layer_cache: LayerCache,
        /,
        *,
        window: int | None,
        sinks: jax.Array | None = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        new_BK2H = stored(k_B1KH[:, 0], v_B1KH[:, 0], layer_cache.own)
        how = (window, implementation, heads, sinks, softcap, shared_pages)
        out_BNH, own = _decode_by_heads(q_B1NH[:, 0], new_BK2H, layer_cache, context, *how)
        return out_BNH[:, None], layer_cache._replace(own=own)

    return attend


def decode_attend_heads(
    context: Context,
    cache_dtype: jax.typing.DTypeLike,
    implementation: Implementation,
    heads: HeadAxes | None,
    *,
    shared_pages: bool = False,
) -> AttendHeads | None:
    """`decode_attend` of heads before norms and rope, which a kernel computes.

    None where decode attention is not the Hopper kernel, in strict mode, with a float8 cache, and
    where devices share the heads.
    """
    kernels = implementation == "pallas" or (implementation != "xla" and on_hopper())
    if not kernels or context.schedule is None or strict_in_scope() is not None:
        return None
    if cache_dtype != jnp.bfloat16 or heads is not None:
        return None

    def attend(
        step: StepHeads,
        layer_cache: LayerCache,
        /,
        *,
        window: int | None,
        sinks: jax.Array | None = None,
        softcap: float | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        B, A, H = step.heads_BAH.shape
        K = layer_cache.own.shape[1]
        queries_BXH, new_BK2H = _queries_and_entries(step, num_kv_heads=K)
        q_BNH = queries_BXH.reshape(B, K, -1, H)[:, :, : A // K - 2].reshape(B, -1, H)
        how = (window, implementation, None, sinks, softcap, shared_pages, queries_BXH)
        out_BNH, own = _decode_by_heads(q_BNH, new_BK2H, layer_cache, context, *how)
        return out_BNH[:, None], layer_cache._replace(own=own)

    return attend


def _decode_by_heads(
    q_BNH: jax.Array,
    new_BK2H: jax.Array,
    cache: LayerCache,
    context: Context,
    window: int | None,
    implementation: Implementation,
    heads: HeadAxes | None,
    sinks_N: jax.Array | None,
    softcap: float | None,
    shared_pages: bool,
    queries_BXH: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Decode attention and the new pages; each device of `heads` has its own KV heads.

    `queries_BXH` is the field of `DecodeInputs`; it requires `heads` None.
    """
    chosen: DecodeImplementation = "auto"
    if implementation == "pallas" or implementation == "xla":
        chosen = implementation

    def local(
        q_BNH: jax.Array,
        new_BK2H: jax.Array,
        cache: LayerCache,
        context: Context,
        sinks_N: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        inputs = DecodeInputs(
            q_BNH,
            new_BK2H,
            cache.prompts,
            context.prompt_rows_B,
            context.prompt_lengths_B,
            cache.own,
            context.pages_BT,
            context.own_lengths_B,
            queries_BXH,
        )
        return _prefix_decode_attention(
            inputs,
            window=window,
            implementation=chosen,
            schedule=context.schedule,
            strict=strict_in_scope(),
            sinks=sinks_N,
            softcap=softcap,
            shared_pages=shared_pages,
        )

    if heads is None:
        return local(q_BNH, new_BK2H, cache, context, sinks_N)
    assert queries_BXH is None
    if not _own_kv_heads(heads, new_BK2H.shape[1]):
        # The KV heads are whole on every device, while q may be split. The partitioner can do that
        # with XLA's matmuls, but not with a kernel.
        chosen = "xla"
        return local(q_BNH, new_BK2H, cache, context, sinks_N)
    by_heads, by_kv_heads = (PartitionSpec(None, axes) for axes in heads)
    return jax.shard_map(
        local,
        in_specs=(by_heads, by_kv_heads, by_kv_heads, PartitionSpec(), PartitionSpec(heads.query)),
        out_specs=(by_heads, by_kv_heads),
        axis_names=set(heads.query),
        check_vma=False,
    )(q_BNH, new_BK2H, cache, context, sinks_N)
