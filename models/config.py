"""The sizes and features of a decoder, as hashable records without jax."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from jaxrl_llm.models.rope import DynamicRope, LongRope, RopeScaling

Kind = Literal["causal_lm", "scalar"]
SWIGLU_ALPHA = 1.702  # of gpt-oss's activation, `experts.clamped_swiglu`


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Experts in place of the feed-forward layer: each token is computed by some of them."""

    num_experts: int
    experts_per_token: int
    expert_size: int  # inner size of an expert
    normalized: bool  # whether the weights of a token's experts add up to 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "expert_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than num_experts "
                f"{self.num_experts}: a token chooses different experts"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and features of a decoder of any family.

    `sliding_window` has one entry a layer: the number of positions that a token attends to,
    including its own, or None for all earlier ones. An empty tuple means None for every layer.

    `rope_layers` has one entry a layer too: whether it rotates queries and keys. An empty tuple
    means that every layer does.
    """

    family: str  # a key of `families.FAMILIES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on the q, k and v projections
    qk_norm: bool = False  # RMS norm of each q and k head before rope
    mixture: Mixture | None = None  # in every layer; None: each layer has one MLP
    sliding_window: tuple[int | None, ...] = ()
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02  # standard deviation of fresh weights

    # Features of few families. `hf.check_features` refuses them elsewhere.
    norms: Literal["before", "after", "both"] = "before"  # which side of attention and MLP
    unit_offset: bool = False  # norms multiply by 1 + their weights
    qk_norm_whole: bool = False  # with `qk_norm`: one norm over all heads
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the MLP's gate
    rope_layers: tuple[bool, ...] = ()
    rotary_factor: float = 1.0  # the share of a head that rope rotates: its first dims
    interleaved_rope: bool = False  # pairs are neighbours, not halves of the head
    local_rope_theta: float | None = None  # of layers with a window; they are not scaled
    attention_multiplier: float | None = None  # of attention's logits; None: head_dim**-0.5
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add
    logits_scaling: float = 1.0  # divides the logits
    attention_out_bias: bool = False  # on the output projection of attention
    attention_sinks: bool = False  # a learnt logit of each head that adds to no output
    expert_bias: bool = False  # on the router and on the projections of experts
    # Experts compute (up + 1) * gate * sigmoid(1.702 gate), with gate at most this, and up between
    # this and its negative. None: they use `activation`.
    swiglu_limit: float | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}: every KV head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rope rotates pairs, make it even")
        if not self.sliding_window:
            object.__setattr__(self, "sliding_window", (None,) * self.num_layers)
        if len(self.sliding_window) != self.num_layers:
            raise ValueError(
                f"sliding_window has {len(self.sliding_window)} entries for {self.num_layers} "
                "layers: give one a layer, None for full attention"
            )
        if any(window is not None and window < 1 for window in self.sliding_window):
            raise ValueError(f"sliding_window {self.sliding_window}: a window must be at least 1")
        if self.rope_layers and len(self.rope_layers) != self.num_layers:
            raise ValueError(
                f"rope_layers has {len(self.rope_layers)} entries for {self.num_layers} layers: "
                "give one a layer"
            )
        self._check_multipliers()
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary_factor {self.rotary_factor} of a head_dim of {self.head_dim} rotates "
                f"{self.rotary_dim} dims: take an even number of them, at least 2"
            )
        if self.rope_scaling is not None:
            self.rope_scaling.check(self.rotary_dim, self.rope_theta)

    def _check_multipliers(self) -> None:
        if not 0 < self.rotary_factor <= 1:
            raise ValueError(f"rotary_factor is {self.rotary_factor}: it must be in (0, 1]")
        names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier")
        for name in (*names, "logits_scaling", "local_rope_theta", "swiglu_limit"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}: it must be a positive number")

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that rope rotates."""
        return int(self.head_dim * self.rotary_factor)

    @property
    def layer_kinds(self) -> tuple[tuple[int | None, int | None], ...]:
        """The window of each layer, and the number of its rope tables; None: no rope."""

        def table(layer: int) -> int | None:
            if self.rope_layers and not self.rope_layers[layer]:
                return None
            return int(self.local_rope_theta is not None and self._has_window(layer))

        return tuple((window, table(i)) for i, window in enumerate(self.sliding_window))

    def _has_window(self, layer: int) -> bool:
        return self.sliding_window[layer] is not None

    @property
    def active_size(self) -> int:
        """The inner size that a token is computed with: of the MLP, or of its experts together."""
        if self.mixture is None:
            return self.intermediate_size
        return self.mixture.experts_per_token * self.mixture.expert_size

    def for_context(self, length: int) -> "ModelConfig":
        """This model with the rope frequencies of a run whose rows have up to `length` tokens.

        Only dynamic and longrope depend on it; models/rope.py states the rule and its reason.

        Guarantees: the result is its own `for_context` of any length up to `length`.
        """
        scaling, trained = self.rope_scaling, self.max_position_embeddings
        if isinstance(scaling, DynamicRope) and length > trained:
            theta = scaling.theta_at(length, trained, self.rotary_dim, self.rope_theta)
            return replace(
                self, rope_theta=theta, rope_scaling=None, max_position_embeddings=length
            )
        if isinstance(scaling, LongRope) and length > scaling.original_max_position_embeddings:
            fixed = replace(scaling, short_factor=scaling.long_factor)
            return replace(self, rope_scaling=fixed)
        return self
