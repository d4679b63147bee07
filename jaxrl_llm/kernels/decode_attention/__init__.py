"""Decode attention: one new token per slot over a KV cache whose prompts are shared.

`prefix_decode_attention` chooses between the Hopper kernel (kernel.py) and XLA (reference.py).
docs/kernels.md has a picture of a step.

Shape letters: see inputs.py.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.kernels.decode_attention.inputs import DecodeInputs
from jaxrl_llm.kernels.decode_attention.kernel import (
    CACHE_DTYPES,
    HEAD_DIMS,
    check_supported,
    decode_attention_mosaic,
)
from jaxrl_llm.kernels.decode_attention.pipeline import (
    ROWS_HEAD_DIMS,
    TILE_ROWS,
    DecodeTuning,
    block_entries,
    default_tuning,
    max_group_size,
    padded_rows,
)
from jaxrl_llm.kernels.decode_attention.reference import (
    decode_attention_strict,
    decode_attention_xla,
    prefix_decode_attention_reference,
    with_new_entries,
)
from jaxrl_llm.kernels.decode_attention.schedule import (
    DecodeSchedule,
    choose_num_splits,
    decode_schedule,
    max_entries_read,
    split_blocks,
)
from jaxrl_llm.kernels.hopper import Interpret, on_hopper
from jaxrl_llm.kernels.strict import Strict

__all__ = [
    "ROWS_HEAD_DIMS",
    "DecodeImplementation",
    "DecodeInputs",
    "DecodeSchedule",
    "DecodeTuning",
    "block_entries",
    "cache_length",
    "decode_schedule",
    "default_tuning",
    "max_group_size",
    "prefix_decode_attention",
    "prefix_decode_attention_reference",
]

DecodeImplementation = Literal["auto", "pallas", "xla"]


def cache_length(num_tokens: int, head_dim: int) -> int:
    """Entries to allocate for `num_tokens`: the next multiple of the kernel's block."""
    block = block_entries(head_dim)
    return max(1, -(-num_tokens // block)) * block


def prefix_decode_attention(
    inputs: DecodeInputs,
    *,
    window: int | None = None,
    implementation: DecodeImplementation = "auto",
    num_splits: int | None = None,
    schedule: DecodeSchedule | None = None,
    tuning: DecodeTuning | None = None,
    interpret: Interpret = None,
    strict: Strict | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    shared_pages: bool = False,
) -> tuple[Float[Array, "B N H"], Float[Array, "O K 2 R H"]]:
    """softmax(q k^T / sqrt(H)) v of each slot's new token, and the pages with its key and value.

    A slot sees its prompt entries, then its own entries. The new token is the last own entry.
    With a `window`, a slot sees only the last `window` entries. `sinks` and
    `softcap` work as in `flash_attention.attention`.

    - "pallas" reads the blocks that hold visible entries, and nothing else. It reads `num_splits`
      splits of a slot in parallel and merges them. None chooses the number from the shapes. A
      `schedule` gives every CTA an equal share and reads a shared prompt once for several slots;
      it also sets `num_splits`. The schedule is not used with a `window`. `interpret` runs the
      kernel on a CPU.
    - "xla" reads both caches whole and copies every slot's prompt row and pages. It uses no
      schedule.
    - "auto" is "pallas" on a Hopper GPU if the kernel supports the dtypes, head dim and number of
      heads, else "xla".

    With `strict`, a slot's output has the bits of the same token in `flash_attention.attention`.
    "pallas" then needs a schedule with prompt tiles, and one split of each slot and prompt.

    With `shared_pages`, slots may be consecutive tokens of one sequence: they have its pages, and
    each sees the new entries of those before it.

    Requires: no two slots share a reachable page, or `shared_pages`. "pallas": P and R are
    multiples of the block, and `schedule` was made from the same rows, lengths and capacities.
    "xla": all cache entries are finite.
    Guarantees: a slot with own length 0 writes nothing; a slot that sees no entries returns 0.
    Indices of unused pages and prompt rows are ignored and may be out of range. The result has the
    dtype of q. "pallas": entries past a length, NaN included, change no result. With the same
    `num_splits` and cache capacities, a slot's result has the same bits in any batch.
    Raises: ValueError for shapes that do not fit together or that the kernel does not support.
    """
    inputs.check()
    assert strict is None or (sinks is None and softcap is None), "config rules refuse both"
    if implementation == "auto":
        implementation = "pallas" if _kernel_fits(inputs) else "xla"
    if implementation == "xla":
        if strict is not None:
            return decode_attention_strict(inputs, strict)
        return decode_attention_xla(inputs, window, sinks, softcap)
    if shared_pages:
        # The kernel reads them while it writes them again: the same values.
        inputs = inputs._replace(own_OK2RH=with_new_entries(inputs))
    B, _, H = inputs.q_BNH.shape
    K = inputs.own_OK2RH.shape[1]
    tuning = tuning or default_tuning(H, inputs.own_OK2RH.dtype)
    if window is not None:
        schedule = None
    if schedule is not None:
        _check_schedule(schedule, inputs, tuning.block)
        num_splits = schedule.jobs.num_splits
    elif num_splits is None:
        capacity = inputs.prefix_capacity + inputs.own_capacity
        entries = max_entries_read(capacity, window, tuning.block)
        num_splits = choose_num_splits(B, K, entries, tuning)
    check_supported(
        inputs,
        tuning,
        prompt_tiles=schedule is not None and schedule.prompts is not None,
        interpreted=interpret is not None,
    )
    return decode_attention_mosaic(
        inputs,
        window=window,
        num_splits=num_splits,
        tuning=tuning,
        schedule=schedule,
        interpret=interpret,
        strictly=strict is not None,
        sinks=sinks,
        softcap=softcap,
    )


def _kernel_fits(inputs: DecodeInputs) -> bool:
    """Check that "auto" chooses the kernel. Then a size that is not a whole block is an error."""
    return (
        inputs.q_BNH.dtype == jnp.bfloat16
        and inputs.own_OK2RH.dtype in CACHE_DTYPES
        and inputs.q_BNH.shape[-1] in HEAD_DIMS
        and inputs.group_size <= max_group_size(inputs.q_BNH.shape[-1])
        and on_hopper()
    )


def _check_schedule(schedule: DecodeSchedule, inputs: DecodeInputs, block: int) -> None:
    """Assert that it is of these inputs: else parts that nothing wrote would be merged."""
    jobs, prompts, B = schedule.jobs, schedule.prompts, inputs.q_BNH.shape[0]
    assert jobs.table_U4.shape == (B * jobs.num_splits, 4), jobs.table_U4.shape
    if prompts is not None:
        wanted = (B, TILE_ROWS // padded_rows(inputs.group_size))
        assert prompts.slots_WI.shape == wanted, prompts.slots_WI.shape
    capacity = inputs.own_capacity + (inputs.prefix_capacity if prompts is None else 0)
    wanted = (split_blocks(capacity, jobs.num_splits, block), block)
    assert (jobs.blocks_per_split, jobs.block) == wanted, (jobs.blocks_per_split, jobs.block)
