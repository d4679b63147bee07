"""Attention of whole rows: our Hopper kernels, cuDNN or XLA.

`attention` chooses the implementation. Rows are padded on the right: under a causal mask no real
token sees padding, so `lengths` is needed only without one. A `Visibility` describes packed rows,
prompts that several responses share, and padding anywhere. docs/kernels.md has pictures.

Shape letters: see common.py.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.flash_attention.common import HEAD_DIMS, default_tuning, strict_tuning
from jaxrl_llm.kernels.flash_attention.kernel import ATTENTION, SCHEDULE, hopper_attention
from jaxrl_llm.kernels.flash_attention.reference import (
    attention_reference,
    attention_strict,
    attention_xla,
    check_inputs,
    visible_keys,
)
from jaxrl_llm.kernels.flash_attention.split import gathered, split_attention
from jaxrl_llm.kernels.flash_attention.visibility import Visibility, packed_visibility
from jaxrl_llm.kernels.hopper import on_hopper
from jaxrl_llm.kernels.mesh_split import MeshSplit, token_order
from jaxrl_llm.kernels.strict import Strict

__all__ = [
    "ATTENTION",
    "SCHEDULE",
    "Implementation",
    "Visibility",
    "attention",
    "attention_reference",
    "chosen_attention",
    "gathered",
    "packed_visibility",
    "token_order",
    "visible_keys",
]

# By head dim: lengths of plain causal rows at which our kernels are at least as fast as cuDNN, both
# passes together. (4,096 at head dim 128 is 1 % slower.) Measured on an H200: docs/benchmarks.md.
FASTER_THAN_CUDNN = {
    64: range(1024, 4096 + 1),
    96: range(1024, 16384 + 1),  # measured at 1,024, 4,096 and 16,384
    128: range(1024, 4096 + 1),
}

# "exact" is "auto" without cuDNN, whose gradient sums have no fixed order.
Implementation = Literal["auto", "exact", "pallas", "cudnn", "xla"]


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B S K H"],
    v_BTKH: Float[Array, "B S K H"],
    *,
    causal: bool = True,
    window: int | None = None,
    lengths: Int[Array, " B"] | None = None,
    visibility: Visibility | None = None,
    split: MeshSplit | None = None,
    sinks: Float[Array, " N"] | None = None,
    softcap: float | None = None,
    implementation: Implementation = "auto",
    strict: Strict | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v with grouped KV heads, in the dtype of q.

    With a `window` a token sees the last `window` positions, its own included. `lengths` (int32,
    tokens) hides keys at or past a row's length. `visibility` replaces these three: it says for
    each token which keys it sees. `split` says how the devices of the mesh in scope share the work;
    those that share a row hold its tokens in `token_order`. `sinks` are a logit of each head. Their
    exponentials are added to the softmax's sums. So the weights of a token's keys add up to less
    than 1 (arXiv:2309.17453, learnt as in gpt-oss). With a `softcap` scaled scores s become softcap
    * tanh(s / softcap) (arXiv:2408.00118); our kernels' tanh has a relative error of 2^-11.

    - "pallas": our Hopper kernels, for bf16 and H of 64, 96, 128 or 256. Best if T is a multiple
      of 128. Gradients have the same bits in every run. On several devices it needs `split` or a
      shard_map around it; otherwise each device computes all rows.
    - "cudnn": an NVIDIA GPU, bf16 or float16, and H a multiple of 8 up to 256. It takes no
      visibility, no sinks and no soft cap. An odd T costs a padded copy.
    - "xla": any device and dtype.
    - "auto": the fastest by measurement, both passes together (see `chosen_attention`). "exact":
      the fastest whose gradient has the same bits in every run.

    With `strict`, a token's output has the same bits in every row, and in a decode step.

    Requires: `window` only with `causal`; no causal=False, window or lengths with `visibility`. A
        split of tokens needs a visibility with `last`. Elsewhere `last` allows keys that are more
        than the queries; they are finite. No sinks, no soft cap with `strict`.
    Guarantees: outputs of queries at or past a row's length are 0. With `visibility`, what padding
    tokens hold, NaN included, reaches no output and no gradient, and their own are 0.
    Raises: ValueError for shapes that do not fit together or that the implementation cannot take.
    """
    check_inputs(q_BTNH, k_BTKH, v_BTKH, causal, window, lengths, visibility)
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    plain = causal and window is None and lengths is None and visibility is None
    implementation = chosen_attention(
        implementation,
        q_BTNH.dtype,
        H,
        ranges=visibility is not None or sinks is not None or softcap is not None,
        plain_length=T if plain else None,
    )
    if strict is not None:
        assert sinks is None and softcap is None, "config rules refuse both"
        return _strictly(strict, q_BTNH, k_BTKH, v_BTKH, window, visibility, implementation)
    # XLA and cuDNN follow the layout of their operands, as long as rows are whole.
    if split is not None and (
        split.num_token_parts > 1 or (implementation == "pallas" and split.num_devices > 1)
    ):

        def own(
            q: Array,
            k: Array,
            v: Array,
            lengths: Array | None,
            visibility: Visibility | None,
            sinks: Array | None,
        ) -> Array:
            return attention(
                q,
                k,
                v,
                causal=causal,
                window=window,
                lengths=lengths,
                visibility=visibility,
                sinks=sinks,
                softcap=softcap,
                implementation=implementation,
            )

        return split_attention(own, q_BTNH, k_BTKH, v_BTKH, lengths, visibility, split, sinks)
    if implementation == "pallas":
        return hopper_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            causal=causal,
            window=window,
            lengths=lengths,
            visibility=visibility,
            sinks=sinks,
            softcap=softcap,
        )
    if implementation == "cudnn":
        refused = {"sinks": sinks, "soft cap": softcap, "visibility": visibility}
        for what in (name for name, given in refused.items() if given is not None):
            raise ValueError(f"cudnn attention takes no {what}: use pallas, xla or auto")
        out_BTNH = _attention_cudnn(q_BTNH, k_BTKH, v_BTKH, causal, window, lengths)
        return checkpoint_name(out_BTNH, ATTENTION)
    how = (causal, window, lengths, visibility, sinks, softcap)
    out_BTNH = attention_xla(q_BTNH, k_BTKH, v_BTKH, *how)
    return checkpoint_name(out_BTNH, ATTENTION)


def _strictly(
    strict: Strict,
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    window: int | None,
    visibility: Visibility | None,
    implementation: Implementation,
) -> Array:
    assert window is None, "config rules refuse windows"
    if visibility is None:
        visibility = Visibility(start_BT=jnp.zeros(q_BTNH.shape[:2], jnp.int32))
    if implementation == "pallas":
        tuning = strict_tuning(q_BTNH.shape[3], strict.block)
        return hopper_attention(
            q_BTNH, k_BTKH, v_BTKH, visibility=visibility, tuning=tuning, by_runs=True
        )
    out_BTNH = attention_strict(strict, q_BTNH, k_BTKH, v_BTKH, visibility)
    return checkpoint_name(out_BTNH, ATTENTION)


def chosen_attention(
    implementation: Implementation,
    dtype: jax.typing.DTypeLike,
    head_dim: int,
    *,
    ranges: bool,
    plain_length: int | None = None,
) -> Implementation:
    """The implementation that "auto" and "exact" stand for; others are returned as they are.

    `ranges` says whether rows come with a `Visibility`, sinks or a soft cap. `plain_length` is the
    tokens of rows that are causal and nothing else. Our kernels precede cuDNN for rows with ranges
    and for plain rows in `FASTER_THAN_CUDNN`. Elsewhere cuDNN's backward pass was faster, or
    nothing was measured.
    """
    if implementation not in ("auto", "exact"):
        return implementation
    half = dtype in (jnp.bfloat16, jnp.float16)
    cudnn_fits = half and head_dim % 8 == 0 and head_dim <= 256 and _on_nvidia_gpu()
    pallas_fits = dtype == jnp.bfloat16 and head_dim in HEAD_DIMS and on_hopper()
    faster = (
        plain_length is not None
        and plain_length in FASTER_THAN_CUDNN.get(head_dim, ())
        and default_tuning(head_dim, plain=True).padded(plain_length) == plain_length
    )
    if not ranges and implementation == "auto" and cudnn_fits and not (pallas_fits and faster):
        return "cudnn"
    return "pallas" if pallas_fits else "xla"


def _attention_cudnn(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    causal: bool,
    window: int | None,
    lengths: Array | None,
) -> Array:
    # By name and not as a dense mask, which would be materialised as a bias.
    B, T = q_BTNH.shape[:2]
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
    if T % 2:
        # jax refuses the backward pass of an odd length: it mistakes an absent bias for a bias. One
        # more token at the end changes no other token, as long as no query sees it.
        if not causal and lengths is None:
            lengths = jnp.full(B, T, jnp.int32)
        q_BTNH, k_BSKH, v_BSKH = (
            jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q_BTNH, k_BSKH, v_BSKH)
        )
    out = jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return out[:, :T]


def _on_nvidia_gpu() -> bool:
    if jax.default_backend() != "gpu":
        return False
    return "cuda" in jax.devices()[0].client.platform_version
