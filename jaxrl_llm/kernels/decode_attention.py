"""Attention of one new token a slot over its KV cache, whose prompts are shared.

The cache is in two parts: rows of prompts, each read by every slot that answers it, and pages for
what the slots added, of which each slot has a list. A slot sees the first entries of its prompt's
row, then the first entries of its own pages, one page after the other. The new token's key and
value become the last of these, and are written there on the way.

Shape letters: B slots, O pages, T pages a slot at most, R entries of a page, N query heads,
K KV heads, G = N / K, C prompt rows, P prompt entries, S entries, H head dim.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.decode_attention_mosaic import (
    CACHE_DTYPES,
    HEAD_DIMS,
    check_supported,
    decode_attention_mosaic,
)
from jaxrl_llm.kernels.decode_attention_plan import (
    DecodePlan,
    choose_num_splits,
    decode_plan,
    entries_seen,
    part_blocks,
)
from jaxrl_llm.kernels.decode_attention_program import (
    MOST_GROUP_ROWS,
    TILE_ROWS,
    DecodeTuning,
    block_entries,
    default_tuning,
    rows_a_slot,
)
from jaxrl_llm.kernels.hopper import on_hopper

__all__ = [
    "MOST_GROUP_ROWS",
    "DecodeImplementation",
    "DecodePlan",
    "DecodeTuning",
    "block_entries",
    "cache_length",
    "decode_plan",
    "default_tuning",
    "prefix_decode_attention",
    "prefix_decode_attention_reference",
]

DecodeImplementation = Literal["auto", "pallas", "xla"]


def cache_length(num_tokens: int, head_dim: int) -> int:
    """Entries to allocate for `num_tokens`: the next multiple of the kernel's block."""
    block = block_entries(head_dim)
    return max(1, -(-num_tokens // block)) * block


def prefix_decode_attention(
    q_BNH: Float[Array, "B N H"],
    new_BK2H: Float[Array, "B K 2 H"],
    prefix_CK2PH: Float[Array, "C K 2 P H"],
    prefix_rows_B: Int[Array, " B"],
    prefix_lengths_B: Int[Array, " B"],
    own_OK2RH: Float[Array, "O K 2 R H"],
    pages_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    *,
    window: int | None = None,
    implementation: DecodeImplementation = "auto",
    num_splits: int | None = None,
    plan: DecodePlan | None = None,
    tuning: DecodeTuning | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "O K 2 R H"]]:
    """softmax(q k^T / sqrt(H)) v of one token a slot, in the dtype of q, and the pages with it.

    Slot b sees the first `prefix_lengths_B[b]` entries of prompt row `prefix_rows_B[b]`, then its
    first `lengths_B[b]` own entries, the current token's included (all int32): own entry i is entry
    i % R of page `pages_BT[b, i // R]`. The last of them is `new_BK2H[b]`, key and value, whatever
    the page holds there; the pages are returned with it. No two slots may have a page in common
    that they reach. `window` keeps the last `window` of them. A slot without own entries writes
    nothing, one that sees nothing gives 0; its prompt row, and a page that it does not reach, may
    be any number. The cache is in the dtype of q, or in float8_e4m3fn; the new entries are in its.

    "auto" takes the Pallas kernel on a Hopper GPU for the dtypes, head dims and numbers of heads
    that it takes (prompt rows and pages must then be whole blocks), XLA elsewhere.
    - "pallas" reads a slot's visible entries, rounded to blocks, and nothing else. What lies
      past a length, NaN included, never changes a result. Parts of a slot run in parallel and are
      merged: `num_splits` of one whose entries are all visible, fewer of others; None chooses from
      the shapes of the arguments alone. For one `num_splits` and one room of the caches (P and T R)
      a slot's result has the same bits in any batch, at any index: give the number where batches of
      different sizes must agree to the bit. `tuning` is the kernel's (see `DecodeTuning`),
      `interpret` runs it on the CPU. `plan`, from `decode_plan` of the same rows, lengths and room,
      which also has the number of parts, gives programs equal shares of the work, and makes the
      kernel read a prompt once for all the slots that share it. With a `window` no plan is used.
    - "xla" reads both caches whole, the prompt row once a slot, and copies the slots' pages: all
      entries must be finite (start the cache from zeros). It takes no notice of a plan.
    Raises ValueError for shapes that do not fit together, or that the kernel cannot take.
    """
    arguments = (
        q_BNH,
        new_BK2H,
        prefix_CK2PH,
        prefix_rows_B,
        prefix_lengths_B,
        own_OK2RH,
        pages_BT,
        lengths_B,
    )
    _check_prefix(*arguments, window)
    if implementation == "auto":
        implementation = "pallas" if _kernel_fits(q_BNH, own_OK2RH) else "xla"
    if implementation == "xla":
        own_OK2RH = _with_newest(own_OK2RH, new_BK2H, pages_BT, lengths_B)
        seen = (prefix_CK2PH, prefix_rows_B, prefix_lengths_B, own_OK2RH, pages_BT, lengths_B)
        return _prefix_decode_xla(q_BNH, *seen, window), own_OK2RH
    if implementation != "pallas":
        raise ValueError(f"implementation is {implementation!r}: use auto, pallas or xla")
    B, N, H = q_BNH.shape
    K, own_entries = own_OK2RH.shape[1], pages_BT.shape[1] * own_OK2RH.shape[3]
    tuning = tuning or default_tuning(H, own_OK2RH.dtype)
    if window is not None:
        plan = None
    if plan is not None:
        entries = own_entries + (prefix_CK2PH.shape[3] if plan.prompts is None else 0)
        _check_plan(plan, B, N // K, num_splits, entries, tuning.block)
        num_splits = plan.units.num_splits
    elif num_splits is None:
        entries = entries_seen(prefix_CK2PH.shape[3] + own_entries, window, tuning.block)
        num_splits = choose_num_splits(B, K, entries, tuning)
    check_supported(q_BNH, prefix_CK2PH, own_OK2RH, tuning, num_splits, interpret is not None)
    return decode_attention_mosaic(
        *arguments,
        window=window,
        num_splits=num_splits,
        tuning=tuning,
        plan=plan,
        interpret=interpret,
    )


def prefix_decode_attention_reference(
    q_BNH: Float[Array, "B N H"],
    new_BK2H: Float[Array, "B K 2 H"],
    prefix_CK2PH: Float[Array, "C K 2 P H"],
    prefix_rows_B: Int[Array, " B"],
    prefix_lengths_B: Int[Array, " B"],
    own_OK2RH: Float[Array, "O K 2 R H"],
    pages_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    *,
    window: int | None = None,
) -> Float[Array, "B N H"]:
    """The attention in float32, KV heads repeated, both parts joined: what the others must equal.

    Entries that a slot does not see are replaced by zeros first, so they may be NaN.
    """
    groups = q_BNH.shape[1] // own_OK2RH.shape[1]
    own_OK2RH = _with_newest(own_OK2RH, new_BK2H, pages_BT, lengths_B)
    P, own_entries = prefix_CK2PH.shape[3], pages_BT.shape[1] * own_OK2RH.shape[3]
    seen_BS = _seen(P, own_entries, prefix_lengths_B, lengths_B, window)
    rows = _rows(prefix_CK2PH, prefix_rows_B), _own_rows(own_OK2RH, pages_BT)
    both_BK2SH = jnp.concatenate(rows, axis=3).astype(jnp.float32)
    both_BK2SH = jnp.where(seen_BS[:, None, None, :, None], both_BK2SH, 0.0)

    k_BNSH = jnp.repeat(both_BK2SH[:, :, 0], groups, axis=1)
    v_BNSH = jnp.repeat(both_BK2SH[:, :, 1], groups, axis=1)
    scores = jnp.einsum("BNH,BNSH->BNS", q_BNH.astype(jnp.float32), k_BNSH, precision="highest")
    scores = jnp.where(seen_BS[:, None], scores / jnp.sqrt(k_BNSH.shape[-1]), -1e30)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True)) * seen_BS[:, None]
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return jnp.einsum("BNS,BNSH->BNH", weights, v_BNSH, precision="highest")


def _prefix_decode_xla(
    q_BNH: Array,
    prefix_CK2PH: Array,
    prefix_rows_B: Array,
    prefix_lengths_B: Array,
    own_OK2RH: Array,
    pages_BT: Array,
    lengths_B: Array,
    window: int | None,
) -> Array:
    """One softmax over the scores of both parts; the caches themselves are never joined."""
    B, N, H = q_BNH.shape
    K, P = own_OK2RH.shape[1], prefix_CK2PH.shape[3]
    prefix_BK2PH = _rows(prefix_CK2PH, prefix_rows_B)
    own_BK2SH = _own_rows(own_OK2RH, pages_BT)
    q_BKGH = q_BNH.reshape(B, K, N // K, H)

    def scores_of(k_BKSH: Array) -> Array:
        return jnp.einsum(
            "BKGH,BKSH->BKGS",
            q_BKGH,
            k_BKSH.astype(q_BNH.dtype),
            preferred_element_type=jnp.float32,
        )

    scores = [scores_of(prefix_BK2PH[:, :, 0]), scores_of(own_BK2SH[:, :, 0])]
    scores = jnp.concatenate(scores, axis=-1) * H**-0.5
    seen = _seen(P, own_BK2SH.shape[3], prefix_lengths_B, lengths_B, window)[:, None, None]
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0.0).astype(q_BNH.dtype)

    def values_of(weights_BKGS: Array, v_BKSH: Array) -> Array:
        return jnp.einsum(
            "BKGS,BKSH->BKGH",
            weights_BKGS,
            v_BKSH.astype(q_BNH.dtype),
            preferred_element_type=jnp.float32,
        )

    out_BKGH = values_of(weights[..., :P], prefix_BK2PH[:, :, 1])
    out_BKGH += values_of(weights[..., P:], own_BK2SH[:, :, 1])
    return out_BKGH.reshape(B, N, H).astype(q_BNH.dtype)


def _rows(prefix_CK2PH: Array, prefix_rows_B: Array) -> Array:
    """Each slot's prompt row, [B, K, 2, P, H]; a single prompt is broadcast, not copied."""
    if prefix_CK2PH.shape[0] == 1:
        return jnp.broadcast_to(prefix_CK2PH, (prefix_rows_B.shape[0], *prefix_CK2PH.shape[1:]))
    return prefix_CK2PH.at[prefix_rows_B].get(mode="clip")


def _with_newest(own_OK2RH: Array, new_BK2H: Array, pages_BT: Array, lengths_B: Array) -> Array:
    """The pages with each slot's newest entry, if it has any of its own."""
    R = own_OK2RH.shape[3]
    slots_B = jnp.arange(lengths_B.shape[0])
    newest_B = jnp.maximum(lengths_B - 1, 0)
    page_B = pages_BT[slots_B, newest_B // R]
    # Out of range, another in each slot: the scatter drops them and stays free of duplicates.
    page_B = jnp.where(lengths_B > 0, page_B, own_OK2RH.shape[0] + slots_B)
    entries = own_OK2RH.at[page_B, :, :, newest_B % R]
    return entries.set(new_BK2H, mode="drop", unique_indices=True)


def _own_rows(own_OK2RH: Array, pages_BT: Array) -> Array:
    """Each slot's pages, one after the other: [B, K, 2, T R, H]."""
    own_BTK2RH = own_OK2RH.at[pages_BT].get(mode="clip")
    B, T, K, _, R, H = own_BTK2RH.shape
    return jnp.moveaxis(own_BTK2RH, 1, 3).reshape(B, K, 2, T * R, H)


def _seen(P: int, R: int, prefix_lengths_B: Array, lengths_B: Array, window: int | None) -> Array:
    """Which of the P prompt and R own entries a slot sees: bool [B, P + R]."""
    p, r = jnp.arange(P)[None], jnp.arange(R)[None]
    prefix_lengths, lengths = prefix_lengths_B[:, None], lengths_B[:, None]
    in_prefix, in_own = p < prefix_lengths, r < lengths
    if window is not None:
        first = prefix_lengths + lengths - window
        in_prefix &= p >= first
        in_own &= r + prefix_lengths >= first
    return jnp.concatenate([in_prefix, in_own], axis=1)


def _kernel_fits(q_BNH: Array, own_OK2RH: Array) -> bool:
    """Whether "auto" takes the kernel. Its other needs are the caller's to meet (ValueError)."""
    return (
        q_BNH.dtype == jnp.bfloat16
        and own_OK2RH.dtype in CACHE_DTYPES
        and q_BNH.shape[-1] in HEAD_DIMS
        and q_BNH.shape[1] // own_OK2RH.shape[1] <= MOST_GROUP_ROWS
        and on_hopper()
    )


def _check_prefix(
    q_BNH: Array,
    new_BK2H: Array,
    prefix_CK2PH: Array,
    prefix_rows_B: Array,
    prefix_lengths_B: Array,
    own_OK2RH: Array,
    pages_BT: Array,
    lengths_B: Array,
    window: int | None,
) -> None:
    B, N, H = q_BNH.shape
    K, P, R = prefix_CK2PH.shape[1], prefix_CK2PH.shape[3], own_OK2RH.shape[3]
    caches = [x.shape[1:] for x in (prefix_CK2PH, own_OK2RH)]
    if caches != [(K, 2, P, H), (K, 2, R, H)] or N % K:
        raise ValueError(
            f"q {q_BNH.shape} needs keys and values of prompts [prompts, K, 2, entries, {H}] and "
            f"pages [pages, K, 2, entries, {H}] where K divides {N}, not "
            f"{[x.shape for x in (prefix_CK2PH, own_OK2RH)]}"
        )
    if not prefix_CK2PH.dtype == own_OK2RH.dtype == new_BK2H.dtype:
        raise ValueError("the two caches and the new entries have different dtypes: give them one")
    if new_BK2H.shape != (B, K, 2, H):
        raise ValueError(
            f"the new keys and values have shape {new_BK2H.shape}: give one of each a slot and KV "
            f"head, {(B, K, 2, H)}"
        )
    for name, x in (
        ("prefix_rows", prefix_rows_B),
        ("prefix_lengths", prefix_lengths_B),
        ("lengths", lengths_B),
    ):
        if x.shape != (B,):
            raise ValueError(f"{name} has shape {x.shape}: give one number a slot, ({B},)")
    if pages_BT.ndim != 2 or pages_BT.shape[0] != B:
        raise ValueError(
            f"pages have shape {pages_BT.shape}: give a list of pages a slot, ({B}, T)"
        )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: use at least 1, or None to see everything")


def _check_plan(
    plan: DecodePlan, B: int, G: int, num_splits: int | None, entries: int, block: int
) -> None:
    planned = plan.units.num_splits
    if num_splits not in (None, planned):
        raise ValueError(f"num_splits is {num_splits}, the plan's {planned}: give it to the plan")
    items = None if plan.prompts is None else plan.prompts.item_slots_WI.shape
    wanted = (B, TILE_ROWS // rows_a_slot(G))
    if plan.units.table_U4.shape != (B * planned, 4) or items not in (None, wanted):
        raise ValueError(
            f"the plan is of {plan.units.table_U4.shape[0] // planned} slots, its items are "
            f"{items}: plan for these {B} slots, with group_rows={G}"
        )
    sizes = plan.units.blocks_of_part, plan.units.block
    if sizes != (part_blocks(entries, planned, block), block):
        raise ValueError(
            f"the plan's parts have {sizes[0]} blocks of {sizes[1]} entries, not those of caches "
            f"with room for {entries} in blocks of {block}: plan with this call's prefix_entries, "
            "own_entries and tuning"
        )
