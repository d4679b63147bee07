"""Decode attention in plain jax.numpy: the float32 reference and XLA's implementation.

Shape letters: see inputs.py; S entries of a slot.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.kernels.decode_attention.inputs import DecodeInputs
from jaxrl_llm.kernels.partial_softmax import soft_cap, softmax_with_sinks
from jaxrl_llm.kernels.strict import Block, Runs, Strict, attend_in_blocks


def prefix_decode_attention_reference(
    inputs: DecodeInputs,
    *,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "B N H"]:
    """The attention in float32 with repeated KV heads: what the implementations must equal.

    Entries that a slot does not see may be NaN.
    """
    q_BNH, groups = inputs.q_BNH, inputs.group_size
    own_OK2RH = with_new_entries(inputs)
    visible_BS = _visible(inputs, inputs.own_capacity, window)
    rows = _prompt_rows(inputs), _own_rows(own_OK2RH, inputs.page_table_BT)
    both_BK2SH = jnp.concatenate(rows, axis=3).astype(jnp.float32)
    both_BK2SH = jnp.where(visible_BS[:, None, None, :, None], both_BK2SH, 0.0)

    k_BNSH = jnp.repeat(both_BK2SH[:, :, 0], groups, axis=1)
    v_BNSH = jnp.repeat(both_BK2SH[:, :, 1], groups, axis=1)
    scores = jnp.einsum("BNH,BNSH->BNS", q_BNH.astype(jnp.float32), k_BNSH, precision="highest")
    scores = soft_cap(scores / jnp.sqrt(k_BNSH.shape[-1]), softcap)
    scores = jnp.where(visible_BS[:, None], scores, -1e30)
    if sinks is not None:  # one more entry, whose value is 0
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
        visible_BS = jnp.pad(visible_BS, ((0, 0), (0, 1)), constant_values=True)
        v_BNSH = jnp.pad(v_BNSH, ((0, 0), (0, 0), (0, 1), (0, 0)))
    weights = jnp.exp(scores - scores.max(-1, keepdims=True)) * visible_BS[:, None]
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return jnp.einsum("BNS,BNSH->BNH", weights, v_BNSH, precision="highest")


def decode_attention_xla(
    inputs: DecodeInputs,
    window: int | None,
    sinks_N: Array | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "O K 2 R H"]]:
    """One softmax over the scores of prompt and own entries, and the pages with the new entries.

    Requires: all cache entries are finite.
    """
    own_OK2RH = with_new_entries(inputs)
    q_BNH = inputs.q_BNH
    B, N, H = q_BNH.shape
    K, P = own_OK2RH.shape[1], inputs.prefix_capacity
    prefix_BK2PH = _prompt_rows(inputs)
    own_BK2SH = _own_rows(own_OK2RH, inputs.page_table_BT)
    q_BKGH = q_BNH.reshape(B, K, N // K, H)

    def scores_of(k_BKSH: Array) -> Array:
        return jnp.einsum(
            "BKGH,BKSH->BKGS",
            q_BKGH,
            k_BKSH.astype(q_BNH.dtype),
            preferred_element_type=jnp.float32,
        )

    # The scores are joined. Joining the caches would copy them.
    scores = [scores_of(prefix_BK2PH[:, :, 0]), scores_of(own_BK2SH[:, :, 0])]
    scores = soft_cap(jnp.concatenate(scores, axis=-1) * H**-0.5, softcap)
    visible = _visible(inputs, own_BK2SH.shape[3], window)[:, None, None]
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    sinks_KG1 = None if sinks_N is None else sinks_N.reshape(K, N // K, 1)
    weights = softmax_with_sinks(scores, sinks_KG1)
    weights = jnp.where(visible, weights, 0.0).astype(q_BNH.dtype)

    def values_of(weights_BKGS: Array, v_BKSH: Array) -> Array:
        return jnp.einsum(
            "BKGS,BKSH->BKGH",
            weights_BKGS,
            v_BKSH.astype(q_BNH.dtype),
            preferred_element_type=jnp.float32,
        )

    out_BKGH = values_of(weights[..., :P], prefix_BK2PH[:, :, 1])
    out_BKGH += values_of(weights[..., P:], own_BK2SH[:, :, 1])
    return out_BKGH.reshape(B, N, H).astype(q_BNH.dtype), own_OK2RH


def decode_attention_strict(
    inputs: DecodeInputs, strict: Strict
) -> tuple[Float[Array, "B N H"], Float[Array, "O K 2 R H"]]:
    """The attention with the sums of `attention_strict`, and the pages with the new entries."""
    own_OK2RH, prefix_CK2PH = with_new_entries(inputs), inputs.prefix_CK2PH
    num_pages, R = own_OK2RH.shape[0], own_OK2RH.shape[3]
    C, P = prefix_CK2PH.shape[0], inputs.prefix_capacity
    none_B = jnp.zeros_like(inputs.own_lengths_B)
    runs = Runs(none_B, inputs.prefix_lengths_B, none_B, inputs.own_lengths_B)
    place = inputs.prefix_rows_B, inputs.page_table_BT, runs

    def block_at(place: tuple[Array, Array, Runs], step: Array) -> Block:
        row_C, pages_CT, runs = place
        in_prefix_C, entry_CJ, has_CJ = runs.block(step, strict.block)
        number_CJ = jnp.clip(entry_CJ // R, 0, pages_CT.shape[1] - 1)
        page_CJ = jnp.clip(jnp.take_along_axis(pages_CT, number_CJ, axis=1), 0, num_pages - 1)
        own_CJK2H = own_OK2RH[page_CJ, :, :, entry_CJ % R]
        row_C1 = jnp.clip(row_C, 0, C - 1)[:, None]
        prefix_CJK2H = prefix_CK2PH[row_C1, :, :, jnp.clip(entry_CJ, 0, P - 1)]
        both = jnp.where(in_prefix_C[:, None, None, None, None], prefix_CJK2H, own_CJK2H)
        return both[:, :, :, 0], both[:, :, :, 1], has_CJ

    steps_B = runs.steps(strict.block)
    return attend_in_blocks(strict, inputs.q_BNH, steps_B, place, block_at), own_OK2RH


def with_new_entries(inputs: DecodeInputs) -> Float[Array, "O K 2 R H"]:
    """The pages with each slot's new entry. A slot with own length 0 writes nothing."""
    own_OK2RH, lengths_B = inputs.own_OK2RH, inputs.own_lengths_B
    R = own_OK2RH.shape[3]
    slots_B = jnp.arange(lengths_B.shape[0])
    newest_B = jnp.maximum(lengths_B - 1, 0)
    page_B = inputs.page_table_BT[slots_B, newest_B // R]
    # Out of range and different in each slot: the scatter drops them, and indices stay unique.
    page_B = jnp.where(lengths_B > 0, page_B, own_OK2RH.shape[0] + slots_B)
    entries = own_OK2RH.at[page_B, :, :, newest_B % R]
    return entries.set(inputs.new_BK2H, mode="drop", unique_indices=True)


def _prompt_rows(inputs: DecodeInputs) -> Array:
    """Each slot's prompt row, [B, K, 2, P, H]. A single prompt is broadcast, not copied."""
    prefix_CK2PH, rows_B = inputs.prefix_CK2PH, inputs.prefix_rows_B
    if prefix_CK2PH.shape[0] == 1:
        return jnp.broadcast_to(prefix_CK2PH, (rows_B.shape[0], *prefix_CK2PH.shape[1:]))
    return prefix_CK2PH.at[rows_B].get(mode="clip")


def _own_rows(own_OK2RH: Array, page_table_BT: Array) -> Array:
    """Each slot's pages, concatenated: [B, K, 2, T R, H]."""
    own_BTK2RH = own_OK2RH.at[page_table_BT].get(mode="clip")
    B, T, K, _, R, H = own_BTK2RH.shape
    return jnp.moveaxis(own_BTK2RH, 1, 3).reshape(B, K, 2, T * R, H)


def _visible(inputs: DecodeInputs, own_entries: int, window: int | None) -> Array:
    """Which prompt and own entries a slot sees: bool [B, P + own_entries]."""
    p, r = jnp.arange(inputs.prefix_capacity)[None], jnp.arange(own_entries)[None]
    prefix_lengths, lengths = inputs.prefix_lengths_B[:, None], inputs.own_lengths_B[:, None]
    in_prefix, in_own = p < prefix_lengths, r < lengths
    if window is not None:
        first = prefix_lengths + lengths - window
        in_prefix &= p >= first
        in_own &= r + prefix_lengths >= first
    return jnp.concatenate([in_prefix, in_own], axis=1)
