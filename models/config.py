"""The sizes and features of a decoder, as hashable records without jax."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxrl_llm.models.rope import DynamicRope, LongRope, RopeScaling

Kind = Literal["causal_lm", "scalar"]


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
    """

    family: str  # a module of this package: "llama", "mistral", "qwen2", "qwen3"
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
    attention_bias: bool = False  # on the q, k and v projections; never on the output
    qk_norm: bool = False  # RMS norm of each q and k head before rope
    qk_norm_whole: bool = False  # one RMS norm over all heads of q, and one over those of k
    mixture: Mixture | None = None  # in every layer; None: each layer has one MLP
    sliding_window: tuple[int | None, ...] = ()
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02  # standard deviation of fresh weights

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
        if self.rope_scaling is not None:
            self.rope_scaling.check(self.head_dim, self.rope_theta)

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
            theta = scaling.theta_at(length, trained, self.head_dim, self.rope_theta)
            return replace(
                self, rope_theta=theta, rope_scaling=None, max_position_embeddings=length
            )
        if isinstance(scaling, LongRope) and length > scaling.original_max_position_embeddings:
            fixed = replace(scaling, short_factor=scaling.long_factor)
            return replace(self, rope_scaling=fixed)
        return self
