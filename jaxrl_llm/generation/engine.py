"""Generation in one program: a fixed number of slots, refilled from a queue inside the loop.

The outer while_loop refills: it prefills up to `refill_batch` pending prompts into free slots. The
inner one decodes one token in every slot until a refill is due or everything is done. No host
takes part, so every host of a mesh runs the same program.

Shape letters: N samples, P prompt tokens, R response tokens, B slots, M rows of a refill,
V vocabulary, S = P + R cache length.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.distributed.mesh import REPLICA_AXES, num_replicas
from jaxrl_llm.distributed.reshard import to_layout
from jaxrl_llm.distributed.sharding import GENERATION_RULES, ShardingRules, shardings
from jaxrl_llm.generation.kv_cache import LayerCache, decode_attend, init_cache, prefill_attend
from jaxrl_llm.generation.sampler import SamplingParams, sample, token_keys
from jaxrl_llm.kernels.flash_attention import Implementation
from jaxrl_llm.models.base import ModelSpec, bind

# While prompts are pending, a slot stays free for at most this many decode steps. A refill costs
# about as much as a few decode steps, so refilling at once for each slot would starve the others.
REFILL_INTERVAL = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """Responses in the order of the prompts, and what the loop did.

    The counters are int32 scalars from `generate` and [replicas] from `generate_on_mesh`.
    """

    tokens: jax.Array  # int32 [N, R]; the pad id after the end
    mask: jax.Array  # float32 [N, R]; 1 for every token of the response, its stop token included
    logprobs: jax.Array  # float32 [N, R]; under the sampling temperature, 0 after the end
    finished: jax.Array  # bool [N]; False when cut at max_new_tokens, and for padding rows
    steps: jax.Array  # decode steps run
    refills: jax.Array  # prefills run
    live_slot_steps: jax.Array  # over steps * slots: the share of the decode work that was used
    max_refill_wait: jax.Array  # most decode steps for which a slot stayed free before a refill


class _Queue(NamedTuple):
    """What generation reads and never changes; `order` lists the rows that hold a prompt."""

    prompts_NP: jax.Array
    lengths_N: jax.Array
    sample_ids_N: jax.Array
    order_N: jax.Array
    total: jax.Array


class _State(NamedTuple):
    """The carry of both loops."""

    cache: tuple[LayerCache, ...]
    row_B: jax.Array  # row of the queue that the slot answers
    token_B: jax.Array  # last token sampled, not yet in the cache
    length_B: jax.Array  # entries of the slot's cache row that hold its sequence
    count_B: jax.Array  # response tokens so far
    live_B: jax.Array
    idle_B: jax.Array  # decode steps since the slot became free
    head: jax.Array  # prompts taken from the queue
    output: GenerationOutput


def generate(
    spec: ModelSpec,
    params: Any,
    prompts_NP: jax.Array,
    prompt_lengths_N: jax.Array,
    sample_ids_N: jax.Array,
    seed_key: jax.Array,
    *,
    sampling: SamplingParams,
    num_slots: int = 0,
    refill_batch: int = 0,
    refill_interval: int = REFILL_INTERVAL,
    attention: Implementation = "auto",
    pad_id: int = 0,
    heads_axis: str | None = None,
) -> GenerationOutput:
    """Answer every prompt. Pure; to be called inside jit, on one device or one replica.

    Prompts are padded on the right; a row of length 0 is padding and answers nothing. A sample's
    tokens depend on its prompt, its `sample_ids` entry and `seed_key` (fold_in(key(seed), step))
    alone. Parameters come in the dtype to compute in; caches take that of the embedding.

    `num_slots` sequences are decoded at once (0: all); `refill_batch` prompts are prefilled at once
    (0: an eighth of the slots). `attention` is the implementation for the prefill; `heads_axis` is
    the mesh axis that splits heads where a caller left one automatic (see `generate_on_mesh`).
    """
    prompts_NP, prompt_lengths_N, sample_ids_N = (
        jnp.asarray(x) for x in (prompts_NP, prompt_lengths_N, sample_ids_N)
    )
    slots, batch = _check_sizes(prompts_NP, prompt_lengths_N, num_slots, refill_batch)
    if refill_interval < 0:
        raise ValueError(f"refill_interval must be 0 (refill at once) or more: {refill_interval}.")
    num_samples, width = prompts_NP.shape
    output = _empty_output(num_samples, sampling.max_new_tokens, pad_id)
    if num_samples == 0:
        return output

    has_prompt_N = prompt_lengths_N > 0
    queue = _Queue(
        prompts_NP,
        prompt_lengths_N,
        sample_ids_N,
        order_N=jnp.nonzero(has_prompt_N, size=num_samples, fill_value=0)[0].astype(jnp.int32),
        total=jnp.sum(has_prompt_N, dtype=jnp.int32),
    )
    zeros_B = jnp.zeros((slots,), jnp.int32)
    dtype = bind(spec, params).unembedding().dtype
    state = _State(
        cache=init_cache(spec.config, slots, width + sampling.max_new_tokens, dtype),
        row_B=zeros_B,
        token_B=zeros_B,
        length_B=zeros_B,
        count_B=zeros_B,
        live_B=jnp.zeros((slots,), bool),
        idle_B=zeros_B,
        head=jnp.int32(0),
        output=output,
    )

    def refill_due(state: _State) -> jax.Array:
        free_B = ~state.live_B
        waited = jnp.any(free_B & (state.idle_B >= refill_interval))
        return (state.head < queue.total) & (waited | (jnp.sum(free_B) >= batch))

    model_inputs = (spec, params, queue, seed_key, sampling)
    refill = partial(
        _refill, *model_inputs, batch=batch, attention=attention, heads_axis=heads_axis
    )
    decode = partial(_decode, *model_inputs)

    def refill_then_decode(state: _State) -> _State:
        return lax.while_loop(
            lambda state: jnp.any(state.live_B) & ~refill_due(state), decode, refill(state)
        )

    return lax.while_loop(
        lambda state: jnp.any(state.live_B) | (state.head < queue.total), refill_then_decode, state
    ).output


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
    rules: ShardingRules = GENERATION_RULES,
    num_slots: int = 0,
    refill_batch: int = 0,
    refill_interval: int = REFILL_INTERVAL,
    attention: Implementation = "auto",
    pad_id: int = 0,
) -> GenerationOutput:
    """`generate` on every replica of the mesh at once, each with its share of the prompts.

    The layout switch is inside: `params` come in any layout and leave for that of `rules`, whole
    over the replica axes, split over `tensor`. Each replica has its own `num_slots` and runs its
    own number of steps; only collectives over `tensor` are in the loops. N must be a multiple of
    the replicas. Call inside jit.
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

    def one_replica(*arguments: Any) -> GenerationOutput:
        output = generate(
            spec,
            *arguments,
            sampling=sampling,
            num_slots=num_slots,
            refill_batch=refill_batch,
            refill_interval=refill_interval,
            attention=attention,
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
        in_specs=(whole, rows, rows, rows, whole),
        out_specs=rows,
        axis_names=set(manual),
        check_vma=False,  # trip counts differ by replica, so the carries' types could not agree
    )(params, prompts_NP, prompt_lengths_N, sample_ids_N, seed_key)


def _check_sizes(
    prompts_NP: jax.Array, lengths_N: jax.Array, num_slots: int, refill_batch: int
) -> tuple[int, int]:
    """The slots and the rows of a refill; neither exceeds the number of prompts."""
    num_samples, width = prompts_NP.shape
    if lengths_N.shape != (num_samples,):
        raise ValueError(f"{num_samples} prompts but prompt lengths of shape {lengths_N.shape}.")
    if width == 0 and num_samples > 0:
        raise ValueError("prompts have a width of 0 tokens; pad them to 1 or more.")
    if num_slots < 0 or refill_batch < 0:
        raise ValueError(
            f"num_slots={num_slots} and refill_batch={refill_batch} must be 0 (automatic) or more."
        )
    slots = max(1, min(num_slots or num_samples, num_samples))
    return slots, min(refill_batch or -(-slots // 8), slots)


def _empty_output(num_samples: int, max_new_tokens: int, pad_id: int) -> GenerationOutput:
    shape = (num_samples, max_new_tokens)
    return GenerationOutput(
        tokens=jnp.full(shape, pad_id, jnp.int32),
        mask=jnp.zeros(shape, jnp.float32),
        logprobs=jnp.zeros(shape, jnp.float32),
        finished=jnp.zeros((num_samples,), bool),
        steps=jnp.int32(0),
        refills=jnp.int32(0),
        live_slot_steps=jnp.int32(0),
        max_refill_wait=jnp.int32(0),
    )


def _refill(
    spec: ModelSpec,
    params: Any,
    queue: _Queue,
    seed_key: jax.Array,
    sampling: SamplingParams,
    state: _State,
    *,
    batch: int,
    attention: Implementation,
    heads_axis: str | None,
) -> _State:
    """Prefill pending prompts into the slots free for longest, and sample their first tokens."""
    num_samples, width = queue.prompts_NP.shape
    num_slots = state.live_B.shape[0]
    waits_M, slots_M = lax.top_k(jnp.where(state.live_B, -1, state.idle_B), batch)
    next_M = state.head + jnp.arange(batch)
    used_M = (waits_M >= 0) & (next_M < queue.total)
    rows_M = queue.order_N[jnp.minimum(next_M, num_samples - 1)]
    # Distinct rows out of range: the scatters drop them, and stay free of duplicates.
    targets_M = jnp.where(used_M, slots_M, num_slots + jnp.arange(batch))

    model = bind(spec, params)
    lengths_M = queue.lengths_N[rows_M]
    positions_MP = jnp.broadcast_to(jnp.arange(width), (batch, width))
    # A pad id outside the vocabulary embeds as NaN, and NaN in the cache outlives any mask.
    prompts_MP = jnp.where(positions_MP < lengths_M[:, None], queue.prompts_NP[rows_M], 0)
    hidden_MPD, cache = model(
        prompts_MP,
        positions_MP,
        attend=prefill_attend(targets_M, attention, heads_axis),
        cache=state.cache,
    )
    logits_MV = model.logits(hidden_MPD[jnp.arange(batch), lengths_M - 1])
    first_M = jnp.zeros((batch,), jnp.int32)
    keys_M2 = token_keys(seed_key, queue.sample_ids_N[rows_M], first_M)
    tokens_M, logprobs_M = sample(logits_MV, keys_M2, sampling)
    output, ended_M = _record(state.output, rows_M, first_M, tokens_M, logprobs_M, used_M, sampling)

    def put(old_B: jax.Array, new_M: Any) -> jax.Array:
        return old_B.at[targets_M].set(new_M, mode="drop", unique_indices=True)

    wait = jnp.max(jnp.where(used_M, waits_M, 0))
    return _State(
        cache=cache,
        row_B=put(state.row_B, rows_M),
        token_B=put(state.token_B, tokens_M),
        length_B=put(state.length_B, lengths_M),
        count_B=put(state.count_B, 1),
        live_B=put(state.live_B, ~ended_M),
        idle_B=put(state.idle_B, 0),
        head=state.head + jnp.sum(used_M, dtype=jnp.int32),
        output=replace(
            output,
            refills=output.refills + 1,
            max_refill_wait=jnp.maximum(output.max_refill_wait, wait),
        ),
    )


def _decode(
    spec: ModelSpec,
    params: Any,
    queue: _Queue,
    seed_key: jax.Array,
    sampling: SamplingParams,
    state: _State,
) -> _State:
    """One token in every slot; a free slot computes along and leaves no trace."""
    model = bind(spec, params)
    live_B = state.live_B
    # In bounds for free slots too: at its end a row holds at most P + R - 1 = S - 1 entries.
    positions_B = state.length_B
    hidden_B1D, cache = model(
        state.token_B[:, None],
        positions_B[:, None],
        attend=decode_attend(positions_B),
        cache=state.cache,
    )
    keys_B2 = token_keys(seed_key, queue.sample_ids_N[state.row_B], state.count_B)
    tokens_B, logprobs_B = sample(model.logits(hidden_B1D[:, 0]), keys_B2, sampling)
    output, ended_B = _record(
        state.output, state.row_B, state.count_B, tokens_B, logprobs_B, live_B, sampling
    )
    advance_B = live_B.astype(jnp.int32)
    return state._replace(
        cache=cache,
        token_B=tokens_B,
        length_B=state.length_B + advance_B,
        count_B=state.count_B + advance_B,
        live_B=live_B & ~ended_B,
        idle_B=jnp.where(live_B, 0, state.idle_B + 1),
        output=replace(
            output,
            steps=output.steps + 1,
            live_slot_steps=output.live_slot_steps + jnp.sum(advance_B),
        ),
    )


def _record(
    output: GenerationOutput,
    rows: jax.Array,
    columns: jax.Array,
    tokens: jax.Array,
    logprobs: jax.Array,
    valid: jax.Array,
    sampling: SamplingParams,
) -> tuple[GenerationOutput, jax.Array]:
    """Write tokens where `valid`; also returns whether each response ended with its token."""
    num_samples, max_new_tokens = output.tokens.shape
    rows = jnp.where(valid, rows, num_samples)  # out of range: dropped
    stopped = sampling.is_stop(tokens)

    def put(old: jax.Array, new: Any) -> jax.Array:
        return old.at[rows, columns].set(new, mode="drop")

    written = replace(
        output,
        tokens=put(output.tokens, tokens),
        mask=put(output.mask, 1.0),
        logprobs=put(output.logprobs, logprobs),
        finished=output.finished.at[rows].max(stopped, mode="drop"),
    )
    return written, stopped | (columns + 1 >= max_new_tokens)
