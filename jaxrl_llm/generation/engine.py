"""Generation in one program: a fixed number of slots, refilled from a queue inside the loop.

The outer while_loop prefills prompts, many at once and ahead of need; the inner one decodes one
token in every slot. A slot that becomes free takes the next sample whose prompt is prefilled, in
the same step; the inner loop ends when a slot is free and no such sample is left. No host takes
part, so every host of a mesh runs the same program.

What the slots add to the cache lies in pages that they take as they grow (pages.py), so the number
of slots is bound by the tokens that are alive, not by the longest that a response may be.

Once nothing is pending and few slots are live, they move together and the loop goes on with that
many: the longest responses of a batch are a long tail, and there a step of all slots computes for
the empty ones.

Shape letters: N samples, G groups (prompts), P prompt tokens, R response tokens, B slots, A rows of
a prefill, L tokens of such a row, C prompt rows of the cache, T pages a slot, V vocabulary, S slots
of a tail.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.distributed.mesh import REPLICA_AXES, num_replicas
from jaxrl_llm.distributed.reshard import to_layout
from jaxrl_llm.distributed.sharding import GENERATION_RULES, ShardingRules, shardings
from jaxrl_llm.generation.kv_cache import (
    LayerCache,
    decode_attend,
    decode_context,
    init_cache,
    page_entries,
    prefill_attend,
)
from jaxrl_llm.generation.packed_prompts import (
    PackedPrompts,
    RowSizes,
    pack_prompts,
    prefill_rows,
    row_sizes,
)
from jaxrl_llm.generation.pages import (
    PageSizes,
    PageTable,
    empty_table,
    num_admissible,
    page_sizes,
    take_pages,
)
from jaxrl_llm.generation.sampler import SamplingParams, sample, token_keys
from jaxrl_llm.kernels.flash_attention import Implementation, chosen_attention
from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.models.base import ModelSpec, bind, merge_projections, quantize_projections

# "float8" computes the layers' projections and keeps the cache in float8_e4m3fn: faster, and
# further from the trainer's log-probs, so that a run wants importance weights.
Quantization = Literal["none", "float8"]
# Of the sum that the layers add to. In bf16 its rounding would be half of the distance between the
# sampler's log-probs and the trainer's (with float32 in both), and here float32 costs nothing.
RESIDUAL_DTYPE = "float32"
# Slots of the tails. From about 160 on a step takes as long as its products, so there a tail is an
# eighth of the slots smaller than the one before, and a tile of a product at least; below, as long
# as it takes to read the model. Each is a decode step more to compile, so responses that are short
# at most have none.
TAIL_TILE = 128
FEWEST_TILED = 256
FEWEST_SLOTS_OF_TAILS = (160, 64)
SHORTEST_TAIL = 512  # response tokens
# On a GPU, unless told otherwise: for fewer rows XLA takes products of a matrix and vectors, and a
# step of one slot then lasts 9 % longer than one of eight (four layers of 1.5B on an H200).
FEWEST_SLOTS = 8
# With so many slots and more, products are cuBLAS' and not XLA's own Triton kernels: on an H200 a
# rollout of 1.5B takes 6 % less time so with 256 slots and 2 % less with 128, and compiles faster;
# with 64 it takes 2 % more, and for a single slot cuBLAS converts the whole head to float32.
FEWEST_WITHOUT_TRITON = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """Responses in the order of the prompts, and what the loop did.

    The counters are int32 scalars from `generate` and [replicas] from `generate_on_mesh`.
    """

    tokens: jax.Array  # int32 [N, R]; the pad id after the end
    mask: jax.Array  # float32 [N, R]; 1 for every token of the response, its stop token included
    logprobs: jax.Array  # float32 [N, R]; under the sampling temperature, 0 after the end
    finished: jax.Array  # bool [N]; False when cut at its limit, and for padding rows
    steps: jax.Array  # decode steps run
    prefills: jax.Array  # prefills run
    slot_steps: jax.Array  # slots computed, over all steps
    live_slot_steps: jax.Array  # over slot_steps: the share of the decode work that was used
    # Of slot_steps, those in which a sample waited for a page: in its slot, or to get a free one.
    stalled_slot_steps: jax.Array


class _Queue(NamedTuple):
    """What generation reads and never changes; `order_G` lists the groups that hold a prompt."""

    prompts_NP: jax.Array
    lengths_N: jax.Array
    sample_ids_N: jax.Array
    limits_N: jax.Array
    order_G: jax.Array
    num_groups: jax.Array
    packed: PackedPrompts  # in that order


class _State(NamedTuple):
    """The carry of both loops."""

    cache: tuple[LayerCache, ...]
    table: PageTable
    row_B: jax.Array  # row of the queue that the slot answers
    prompt_row_B: jax.Array  # row of the cache that holds its prompt
    token_B: jax.Array  # last token of the sequence, not yet in the cache
    count_B: jax.Array  # response tokens so far, and the slot's own entries in the cache
    live_B: jax.Array
    prompt_row_G: jax.Array  # where a group's prompt was put
    prefilled: jax.Array  # groups of the queue's order whose prompt is in the cache
    head: jax.Array  # samples of the queue's order that a slot has taken
    tokens_NR: jax.Array  # -1 where nothing was written
    logprobs_NR: jax.Array
    steps: jax.Array
    prefills: jax.Array
    slot_steps: jax.Array
    live_slot_steps: jax.Array
    stalled_slot_steps: jax.Array


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    num_slots: int
    group: int
    prefill: RowSizes
    prompt_rows: int  # C
    tails: tuple[int, ...]  # slots of each tail, falling


def compiler_options(samples: int, num_slots: int) -> dict[str, bool]:
    """XLA's options for a program that only generates: `samples` of a replica, in `num_slots`."""
    slots = min(num_slots or samples, samples)
    if jax.default_backend() != "gpu" or slots < FEWEST_WITHOUT_TRITON:
        return {}
    return {"xla_gpu_enable_triton_gemm": False}


def generate(
    spec: ModelSpec,
    params: Any,
    prompts_NP: jax.Array,
    prompt_lengths_N: jax.Array,
    sample_ids_N: jax.Array,
    seed_key: jax.Array,
    *,
    sampling: SamplingParams,
    limits_N: jax.Array | None = None,
    group: int = 1,
    num_slots: int = 0,
    prefill: RowSizes | None = None,
    tail_slots: tuple[int, ...] | None = None,
    cache_tokens: int = 0,
    tokens_a_page: int = 0,
    attention: Implementation = "auto",
    quantization: Quantization = "none",
    pad_id: int = 0,
    heads_axis: str | None = None,
) -> GenerationOutput:
    """Answer every prompt. Pure; to be called inside jit, on one device or one replica.

    Prompts are padded on the right; a row of length 0 is padding and answers nothing. A sample's
    tokens depend on its prompt, its `sample_ids` entry and `seed_key` (fold_in(key(seed), step))
    alone. Parameters come in the dtype to compute in; caches take that of the embedding.

    `group` says that each `group` consecutive rows hold one and the same prompt (all of them
    padding, or none), which is then computed and stored once. `limits_N` (int32 tokens) ends single
    responses before `sampling.max_new_tokens`; each is 1 or more.

    `num_slots` sequences are decoded at once (0: all, and 8 or more on a GPU); `prefill` are the
    rows of prompts that are computed at once (None: see `row_sizes`). `tail_slots` are the
    numbers of slots, falling, with which the loop goes on once no more samples are live or pending
    (None: fewer and fewer where responses may be long). `cache_tokens` is how many tokens of
    responses the cache has room for (0: for `num_slots` of the longest): with less, slots may wait
    for one another, which changes no result; `tokens_a_page` of them are handed out at once (0: as
    the kernel reads them). `attention` is the implementation ("cudnn" of prefills alone, and "auto"
    of decoding then); `quantization` is of weights and cache; `heads_axis` is the mesh axis that
    splits heads where a caller left one automatic (see `generate_on_mesh`).
    """
    prompts_NP, prompt_lengths_N, sample_ids_N = (
        jnp.asarray(x) for x in (prompts_NP, prompt_lengths_N, sample_ids_N)
    )
    num_samples, max_new_tokens = prompts_NP.shape[0], sampling.max_new_tokens
    dtype = bind(spec, params).unembedding().dtype
    sizes = _sizes(
        prompts_NP,
        prompt_lengths_N,
        num_slots,
        prefill,
        group,
        tail_slots,
        max_new_tokens,
        _prefill_attention(attention, dtype, spec.config.head_dim),
    )
    cache_dtype = dtype if quantization == "none" else FLOAT8
    pages = page_sizes(
        num_slots=sizes.num_slots,
        own_length=max_new_tokens,
        page_entries=tokens_a_page or page_entries(spec.config, cache_dtype, max_new_tokens),
        cache_tokens=cache_tokens,
    )
    if limits_N is None:
        limits_N = jnp.full((num_samples,), max_new_tokens, jnp.int32)
    if limits_N.shape != (num_samples,):
        raise ValueError(f"{num_samples} prompts but limits of shape {limits_N.shape}.")
    has_prompt_G = prompt_lengths_N[:: sizes.group] > 0
    order_G = jnp.nonzero(has_prompt_G, size=has_prompt_G.size, fill_value=0)[0]
    num_groups = jnp.sum(has_prompt_G, dtype=jnp.int32)
    lengths_G = prompt_lengths_N[:: sizes.group][order_G]
    lengths_G = jnp.where(jnp.arange(order_G.size) < num_groups, lengths_G, 0)
    queue = _Queue(
        prompts_NP,
        prompt_lengths_N,
        sample_ids_N,
        jnp.minimum(limits_N, max_new_tokens),
        order_G=order_G.astype(jnp.int32),
        num_groups=num_groups,
        packed=pack_prompts(lengths_G, num_groups, sizes.prefill),
    )
    if heads_axis is None:
        spec, params = merge_projections(spec, params)
    if quantization == "float8":
        if heads_axis is not None:
            raise ValueError(
                "a float8 rollout needs whole weights on each device: mesh.tensor=1 (with fsdp or "
                "data for more devices), or rollout.quantization=none"
            )
        spec, params = quantize_projections(spec, params)
    state = _empty_state(spec, queue, sizes, pages, cache_dtype, max_new_tokens)
    if num_samples > 0:
        settings = {"attention": attention, "heads_axis": heads_axis}
        state = _run(
            partial(_prefill, spec, params, queue, sizes, **settings),
            partial(
                _decode, spec, params, queue, sizes.group, pages, seed_key, sampling, **settings
            ),
            partial(_fill_slots, queue, sizes.group, pages),
            queue,
            sizes,
            state,
        )
    return _output(state, sampling, pad_id)


def generate_on_mesh(
    spec: ModelSpec,
    params: Any,
    prompts_NP: jax.Array,
    prompt_lengths_N: jax.Array,
    sample_ids_N: jax.Array,
    seed_key: jax.Array,
    *,
    mesh: Mesh,
    sampling: SamplingParams,
    limits_N: jax.Array | None = None,
    rules: ShardingRules = GENERATION_RULES,
    group: int = 1,
    num_slots: int = 0,
    cache_tokens: int = 0,
    attention: Implementation = "auto",
    quantization: Quantization = "none",
    pad_id: int = 0,
) -> GenerationOutput:
    """`generate` on every replica of the mesh at once, each with its share of the prompts.

    The layout switch is inside: `params` come in any layout and leave for that of `rules`, whole
    over the replica axes, split over `tensor`. Each replica has its own `num_slots` and
    `cache_tokens` and runs its own number of steps; only collectives over `tensor` are in the
    loops. N must be a multiple of the replicas; a group that would be cut between two of them is
    computed in each. Call inside jit.
    """
    replicas, num_samples = num_replicas(mesh), prompts_NP.shape[0]
    if num_samples % replicas:
        raise ValueError(
            f"{num_samples} prompts do not divide over {replicas} replicas (data * fsdp); pad to "
            f"{-(-num_samples // replicas) * replicas} rows, the added ones of prompt length 0."
        )
    # With `tensor` of 1 there is nothing to split, and it is manual like the others.
    split = mesh.shape["tensor"] > 1
    params = to_layout(params, shardings(spec.axes, spec.params, mesh, rules))
    if limits_N is None:
        limits_N = jnp.full((num_samples,), sampling.max_new_tokens, jnp.int32)

    def one_replica(
        params: Any, prompts: Any, lengths: Any, sample_ids: Any, key: Any, limits: Any
    ) -> GenerationOutput:
        output = generate(
            spec,
            params,
            prompts,
            lengths,
            sample_ids,
            key,
            sampling=sampling,
            limits_N=limits,
            group=math.gcd(group, num_samples // replicas),
            num_slots=num_slots,
            cache_tokens=cache_tokens,
            attention=attention,
            quantization=quantization,
            pad_id=pad_id,
            heads_axis="tensor" if split else None,
        )
        return jax.tree.map(lambda x: x[None] if x.ndim == 0 else x, output)

    rows, whole = PartitionSpec(REPLICA_AXES), PartitionSpec()
    # `tensor` stays automatic: the partitioner splits the matrix products as the parameters are.
    manual = REPLICA_AXES if split else mesh.axis_names
    return jax.shard_map(
        one_replica,
        mesh=mesh,
        in_specs=(whole, rows, rows, rows, whole, rows),
        out_specs=rows,
        axis_names=set(manual),
        check_vma=False,  # trip counts differ by replica, so the carries' types could not agree
    )(params, prompts_NP, prompt_lengths_N, sample_ids_N, seed_key, limits_N)


def _sizes(
    prompts_NP: jax.Array,
    lengths_N: jax.Array,
    num_slots: int,
    prefill: RowSizes | None,
    group: int,
    tail_slots: tuple[int, ...] | None,
    max_new_tokens: int,
    prefill_attention: Implementation,
) -> _Sizes:
    num_samples, width = prompts_NP.shape
    if lengths_N.shape != (num_samples,):
        raise ValueError(f"{num_samples} prompts but prompt lengths of shape {lengths_N.shape}.")
    if width == 0 and num_samples > 0:
        raise ValueError("prompts have a width of 0 tokens; pad them to 1 or more.")
    if num_slots < 0:
        raise ValueError(f"num_slots={num_slots} must be 0 (automatic) or more.")
    if prefill is not None and (prefill.tokens < width or min(prefill.rows, prefill.prompts) < 1):
        raise ValueError(f"{prefill} holds no prompt of {width} tokens.")
    if group < 1 or num_samples % group:
        raise ValueError(f"{num_samples} prompts are not groups of {group}: give a divisor.")
    num_groups = num_samples // group
    fewest = FEWEST_SLOTS if jax.default_backend() == "gpu" else 1
    slots = min(num_slots or max(num_samples, fewest), max(num_samples, fewest))
    # Unless told otherwise, no more prompts of the longest than all slots can take at once. Of
    # short ones more, which take no memory where each prompt has a row of the cache anyway.
    prefill = prefill or row_sizes(
        width,
        max(1, min(num_groups, -(-slots // group))),
        most=num_groups if num_groups <= slots else slots // 4,
        attention=prefill_attention,
    )
    if tail_slots is None:
        tail_slots = _tails(slots) if max_new_tokens >= SHORTEST_TAIL else ()
    if any(a <= b for a, b in zip((slots, *tail_slots), (*tail_slots, 0), strict=True)):
        raise ValueError(f"tail_slots={tail_slots} must fall, from less than {slots} slots.")
    # Live slots hold at most `slots` prompts, so there are rows free whenever a prefill is due.
    most = prefill.rows * prefill.prompts
    return _Sizes(
        num_slots=slots,
        group=group,
        prefill=prefill,
        prompt_rows=max(1, min(num_groups, slots + most)),
        tails=tail_slots,
    )


def _prefill_attention(word: Implementation, dtype: Any, head_dim: int) -> Implementation:
    """What computes a prefill's attention: packed rows, but for cuDNN where our kernels cannot."""
    packed = chosen_attention(word, dtype, head_dim, ranges=True)
    whole = chosen_attention(word, dtype, head_dim, ranges=False)
    return whole if whole == "cudnn" and packed == "xla" else packed


def _tails(slots: int) -> tuple[int, ...]:
    step = TAIL_TILE * max(1, math.ceil(slots / 8 / TAIL_TILE))
    tiled = [n for n in range(step, slots, step) if n >= FEWEST_TILED]
    sizes = (*reversed(tiled), *FEWEST_SLOTS_OF_TAILS)
    return tuple(n for n in sizes if n <= slots * 7 / 8)


def _empty_state(
    spec: ModelSpec,
    queue: _Queue,
    sizes: _Sizes,
    pages: PageSizes,
    cache_dtype: Any,
    max_new_tokens: int,
) -> _State:
    num_samples, width = queue.prompts_NP.shape
    zeros_B, zero = jnp.zeros((sizes.num_slots,), jnp.int32), jnp.int32(0)
    cache = init_cache(
        spec.config,
        num_prompts=sizes.prompt_rows,
        prompt_length=width,
        num_pages=pages.num_pages,
        page_entries=pages.entries,
        dtype=cache_dtype,
    )
    return _State(
        cache=cache,
        table=empty_table(pages, sizes.num_slots, num_samples),
        row_B=zeros_B,
        prompt_row_B=zeros_B,
        token_B=zeros_B,
        count_B=zeros_B,
        live_B=jnp.zeros((sizes.num_slots,), bool),
        prompt_row_G=jnp.zeros(queue.order_G.shape, jnp.int32),
        prefilled=zero,
        head=zero,
        tokens_NR=jnp.full((num_samples, max_new_tokens), -1, jnp.int32),
        logprobs_NR=jnp.zeros((num_samples, max_new_tokens), jnp.float32),
        steps=zero,
        prefills=zero,
        slot_steps=zero,
        live_slot_steps=zero,
        stalled_slot_steps=zero,
    )


def _run(
    prefill: Any, decode: Any, fill_slots: Any, queue: _Queue, sizes: _Sizes, state: _State
) -> _State:
    """The two loops, then one loop for each tail."""
    num_pending = queue.num_groups * sizes.group
    fewest = (*sizes.tails, 0)

    def prefill_due(state: _State) -> jax.Array:
        taken = state.head >= state.prefilled * sizes.group
        return (state.prefilled < queue.num_groups) & taken & ~jnp.all(state.live_B)

    def unfinished(state: _State) -> jax.Array:
        return (state.head < num_pending) | _more_live(fewest[0], state)

    def prefill_then_decode(state: _State) -> _State:
        return lax.while_loop(
            lambda state: unfinished(state) & ~prefill_due(state),
            lambda state: fill_slots(decode(state)),
            fill_slots(prefill(state)),
        )

    state = lax.while_loop(unfinished, prefill_then_decode, state)
    for num_slots, fewer in zip(sizes.tails, fewest[1:], strict=True):
        state = _moved_together(state, num_slots)
        state = lax.while_loop(partial(_more_live, fewer), decode, state)
    return state


def _more_live(number: int, state: _State) -> jax.Array:
    return jnp.sum(state.live_B, dtype=jnp.int32) > number


def _moved_together(state: _State, num_slots: int) -> _State:
    """The live slots, `num_slots` at most, and no others. Their pages stay where they are."""
    _, from_S = lax.top_k(state.live_B.astype(jnp.int32), num_slots)
    table = state.table._replace(pages_BT=state.table.pages_BT[from_S])
    by_slot = {name: getattr(state, name)[from_S] for name in _State._fields if name[-2:] == "_B"}
    return state._replace(table=table, **by_slot)


def _output(state: _State, sampling: SamplingParams, pad_id: int) -> GenerationOutput:
    written_NR = state.tokens_NR >= 0
    lengths_N = jnp.sum(written_NR, axis=1)
    last_N1 = jnp.maximum(lengths_N - 1, 0)[:, None]
    last_N = jnp.take_along_axis(state.tokens_NR, last_N1, axis=1)[:, 0]
    return GenerationOutput(
        tokens=jnp.where(written_NR, state.tokens_NR, pad_id),
        mask=written_NR.astype(jnp.float32),
        logprobs=state.logprobs_NR,
        finished=(lengths_N > 0) & sampling.is_stop(last_N),
        steps=state.steps,
        prefills=state.prefills,
        slot_steps=state.slot_steps,
        live_slot_steps=state.live_slot_steps,
        stalled_slot_steps=state.stalled_slot_steps,
    )


def _prefill(
    spec: ModelSpec,
    params: Any,
    queue: _Queue,
    sizes: _Sizes,
    state: _State,
    *,
    attention: Implementation,
    heads_axis: str | None,
) -> _State:
    """Put the next prompts into rows of the cache that no live slot reads.

    A prompt's last token is computed again by the first decode step, which has to give the logits
    after it: so a prefill needs no head and no sampling. It is computed here all the same, so that
    prompts of the full width lie at the kernel's blocks: without it attention takes 1.4 as many.
    """
    num_groups, prompt_rows = queue.order_G.shape[0], sizes.prompt_rows
    rows = prefill_rows(queue.packed, sizes.prefill, state.prefills)
    read_B = jnp.where(state.live_B, state.prompt_row_B, prompt_rows)
    used_C = jnp.zeros((prompt_rows,), bool).at[read_B].set(True, mode="drop")
    _, free_C = lax.top_k((~used_C).astype(jnp.int32), prompt_rows)

    # A pad id outside the vocabulary embeds as NaN, and NaN in the cache outlives any mask.
    real_AL, groups_AL = rows.real_AL, queue.order_G[rows.prompt_AL]
    tokens_AL = queue.prompts_NP[groups_AL * sizes.group, rows.position_AL]
    # Rows out of range, each another: the scatter drops them and stays free of duplicates.
    dropped_AL = prompt_rows + jnp.arange(real_AL.size).reshape(real_AL.shape)
    cache_rows_AL = jnp.where(real_AL, free_C[rows.place_AL], dropped_AL)
    _, cache = bind(spec, params)(
        jnp.where(real_AL, tokens_AL, 0),
        rows.position_AL,
        attend=prefill_attend(
            cache_rows_AL,
            rows.position_AL,
            jnp.where(real_AL, rows.prompt_AL + 1, 0) if sizes.prefill.prompts > 1 else None,
            attention,
            heads_axis,
        ),
        cache=state.cache,
        residual_dtype=RESIDUAL_DTYPE,
    )
    place_C = jnp.arange(prompt_rows)
    prompts_C = jnp.minimum(state.prefilled + place_C, num_groups - 1)
    targets_C = jnp.where(
        place_C < rows.num_prompts, queue.order_G[prompts_C], num_groups + place_C
    )
    return state._replace(
        cache=cache,
        prompt_row_G=state.prompt_row_G.at[targets_C].set(free_C, mode="drop", unique_indices=True),
        prefilled=state.prefilled + rows.num_prompts,
        prefills=state.prefills + 1,
    )


def _fill_slots(queue: _Queue, group: int, pages: PageSizes, state: _State) -> _State:
    """Free slots take the next samples whose prompt is in the cache, while there are pages."""
    num_samples = queue.prompts_NP.shape[0]
    free_B = ~state.live_B
    ready = state.prefilled * group
    admitted = state.head + num_admissible(state.table, pages, state.live_B)
    index_B = state.head + jnp.cumsum(free_B, dtype=jnp.int32) - 1
    take_B = free_B & (index_B < jnp.minimum(ready, admitted))
    index_B = jnp.clip(index_B, 0, num_samples - 1)
    group_B = queue.order_G[index_B // group]
    row_B = group_B * group + index_B % group
    token_B = queue.prompts_NP[row_B, jnp.maximum(queue.lengths_N[row_B] - 1, 0)]
    return state._replace(
        row_B=jnp.where(take_B, row_B, state.row_B),
        prompt_row_B=jnp.where(take_B, state.prompt_row_G[group_B], state.prompt_row_B),
        token_B=jnp.where(take_B, token_B, state.token_B),
        count_B=jnp.where(take_B, 0, state.count_B),
        live_B=state.live_B | take_B,
        head=state.head + jnp.sum(take_B, dtype=jnp.int32),
    )


def _decode(
    spec: ModelSpec,
    params: Any,
    queue: _Queue,
    group: int,
    pages: PageSizes,
    seed_key: jax.Array,
    sampling: SamplingParams,
    state: _State,
    *,
    attention: Implementation,
    heads_axis: str | None,
) -> _State:
    """One token in every slot of the state.

    A free slot, or one that waits for a page, computes along, reads nothing of the cache and leaves
    no trace.
    """
    model = bind(spec, params)
    row_B, count_B = state.row_B, state.count_B
    num_samples, slots_B = queue.prompts_NP.shape[0], jnp.arange(row_B.shape[0])
    table, live_B = take_pages(
        state.table,
        pages,
        sample_B=row_B,
        live_B=state.live_B,
        count_B=count_B,
        num_samples=num_samples,
    )
    prompt_B = jnp.where(live_B, queue.lengths_N[row_B] - 1, 0)
    own_B = jnp.where(live_B, count_B, 0)
    context = decode_context(
        spec.config,
        state.cache[0],
        state.prompt_row_B,
        prompt_B,
        table.pages_BT,
        jnp.where(live_B, count_B + 1, 0),
        slots_per_prompt=group,
        heads_axis=heads_axis,
    )
    hidden_B1D, cache = model(
        jnp.where(live_B, state.token_B, 0)[:, None],
        (prompt_B + own_B)[:, None],
        attend=decode_attend(context, attention, heads_axis),
        cache=state.cache,
        residual_dtype=RESIDUAL_DTYPE,
    )
    keys_B2 = token_keys(seed_key, queue.sample_ids_N[row_B], count_B)
    tokens_B, logprobs_B = sample(model.logits(hidden_B1D[:, 0]), keys_B2, sampling)

    # Free slots are refilled before a step: a sample that is still ready had no page to begin with.
    num_free = jnp.sum(~state.live_B, dtype=jnp.int32)
    stalled = jnp.minimum(num_free, state.prefilled * group - state.head)
    stalled += jnp.sum(state.live_B & ~live_B, dtype=jnp.int32)
    at = (jnp.where(live_B, row_B, num_samples + slots_B), own_B)
    ended_B = sampling.is_stop(tokens_B) | (count_B + 1 >= queue.limits_N[row_B])
    return state._replace(
        cache=cache,
        table=table,
        token_B=jnp.where(live_B, tokens_B, state.token_B),
        count_B=count_B + live_B,
        live_B=state.live_B & ~(live_B & ended_B),
        tokens_NR=state.tokens_NR.at[at].set(tokens_B, mode="drop", unique_indices=True),
        logprobs_NR=state.logprobs_NR.at[at].set(logprobs_B, mode="drop", unique_indices=True),
        steps=state.steps + 1,
        slot_steps=state.slot_steps + live_B.shape[0],
        live_slot_steps=state.live_slot_steps + jnp.sum(live_B, dtype=jnp.int32),
        stalled_slot_steps=state.stalled_slot_steps + stalled,
    )
