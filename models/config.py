"""The sizes and features of a decoder, as hashable records without jax."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from jaxrl_llm.models.rope import DynamicRope, LongRope, RopeScaling

Kind = Literal["causal_lm", "scalar"]
SWIGLU_ALPHA = 1.702  # factor in gpt-oss's activation, `experts.clamped_swiglu`
# Names of a sigmoid router's parameters, which are float32 in every dtype of the model.
CENTROIDS = "centroids"  # the vector of each expert that a token is multiplied with, [D, E]
# Added to the scores for the choice alone. No gradient: `learner/router_balance.py` changes it.
BALANCE = "balance"


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A mixture of experts instead of the MLP: each token uses some of the experts."""

    num_experts: int
    experts_per_token: int
    expert_size: int  # inner size of an expert
    normalized: bool  # whether the weights of a token's experts add up to 1

    # "sigmoid": each expert has a score of its own, and a balance bias is added for the choice.
    scores: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1  # groups of experts; a token chooses within some of them
    groups_per_token: int = 1
    scaling: float = 1.0  # factor of the weights of a token's experts
    shared_size: int = 0  # inner size of the experts that every token has, together
    shared_gate: bool = False  # whether a sigmoid of the token multiplies the shared output
    dense_layers: int = 0  # the first layers, with an MLP in place of experts

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than num_experts "
                f"{self.num_experts}: a token chooses different experts"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        each, odd = divmod(self.num_experts, self.num_groups)
        if odd or (self.num_groups > 1 and each < 2):
            raise ValueError(
                f"{self.num_experts} experts do not make {self.num_groups} groups of two or more "
                "equal parts: change num_groups"
            )
        open_experts = self.groups_per_token * each
        if self.groups_per_token > self.num_groups or open_experts < self.experts_per_token:
            raise ValueError(
                f"groups_per_token {self.groups_per_token} of {self.num_groups} groups leaves "
                f"{open_experts} experts to choose {self.experts_per_token} of: change it"
            )


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention: keys and values come from a small latent vector of each token.

    A head of q and k has its own dims first, then `rope_dim` dims with rope. All heads of k have
    the same dims with rope.
    """

    kv_rank: int  # size of the vector that makes keys and values
    query_rank: int | None  # size of the vector that makes queries; None: the hidden state
    rope_dim: int
    value_dim: int  # dims of a value head


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """A gated delta rule (arXiv:2412.06464), which replaces attention in most layers.

    Each has a short causal convolution, and a state of one matrix a value head.
    """

    period: int  # every layer whose number is a multiple of it, counted from 1, has attention
    key_heads: int  # heads of queries and keys; each serves neighbouring value heads
    value_heads: int
    key_dim: int  # dims of a key head
    value_dim: int
    conv_size: int  # tokens that the convolution sees, its own included

    def __post_init__(self) -> None:
        if self.conv_size < 2:
            raise ValueError(f"conv_size is {self.conv_size}: it must be at least 2")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads {self.value_heads} is not a multiple of key_heads {self.key_heads}: "
                "every key head serves the same number of value heads"
            )


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """How pixels become the values that an image encoder reads."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # mean of red, green and blue, each between 0 and 1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: int = 3  # Pillow's number of the filter that resizes: 3 is bicubic


@dataclass(frozen=True, kw_only=True)
class Vision(Pixels):
    """An image encoder of fixed-size images and its projector (arXiv:2408.12637).

    A token of an image has a square of `scale` x `scale` patches.
    """

    model_type: str  # key of `image_models.IMAGE_MODELS`
    image_size: int  # pixels of a side
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    scale: int
    image_token_id: int
    norm_eps: float = 1e-6
    resample: int = 1  # Lanczos
    # Longer side of an image after a first resize, which keeps its shape. None: one resize.
    longest_side: int | None = None
    # How a run computes it: the parts that learn.
    train: Literal["none", "projector", "all"] = "none"

    def __post_init__(self) -> None:
        side, rest = divmod(self.image_size, self.patch_size)
        if rest or side % self.scale:
            raise ValueError(
                f"image_size {self.image_size} does not divide into squares of {self.scale} "
                f"patches of {self.patch_size}: change one of them"
            )
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"the image encoder has hidden_size {self.hidden_size}, no multiple of its "
                f"{self.num_heads} heads: change one of them"
            )

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Tokens of an image, patches of a token, and values of a patch."""
        cells = self.scale**2
        return self.num_patches // cells, cells, 3 * self.patch_size**2


FEWEST_IMAGE_TOKENS = 4  # tokens of the smallest image of a `QwenVision`


@dataclass(frozen=True, kw_only=True)
class QwenVision(Pixels):
    """An image encoder of Qwen-VL (arXiv:2502.13923), for images of any size.

    A token of an image has a square of `scale` x `scale` patches. Tokens of an image have rope
    positions on three axes.
    """

    model_type: str  # key of `image_models.IMAGE_MODELS`
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    scale: int
    image_token_id: int
    other_token_ids: tuple[int, int, int]  # a video, and begin and end of an image
    min_pixels: int  # an image with fewer is enlarged
    max_pixels: int  # an image with more is shrunk
    rope_sections: tuple[int, int, int]  # pairs of a decoder's head by axis: time, height, width
    sections_in_turns: bool = False  # axes take turns, in place of blocks
    # Side of a window in pixels. Layers not in `whole_layers` attend within one. None: no windows.
    window_size: int | None = None
    whole_layers: tuple[int, ...] = ()
    deep_layers: tuple[int, ...] = ()  # layers whose features the first decoder layers add
    table_side: int = 0  # side of the learned table of positions; 0: no table
    tokens_per_second: int = 4  # for videos, which are not read
    # How a run computes it: the parts that learn.
    train: Literal["none", "projector", "all"] = "none"

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"the image encoder has hidden_size {self.hidden_size} and {self.num_heads} heads: "
                "the size of a head must be a multiple of 4, for rope on two axes"
            )
        if self.min_pixels < FEWEST_IMAGE_TOKENS * self.side**2:
            raise ValueError(
                f"images of {self.min_pixels} pixels are too small: take min_pixels (or "
                f"size.shortest_edge) of {FEWEST_IMAGE_TOKENS * self.side**2} or more"
            )

    @property
    def side(self) -> int:
        """Pixels of a side of a token."""
        return self.patch_size * self.scale

    @property
    def axes_of_pairs(self) -> tuple[int, ...]:
        """The axis of each rotated pair of a decoder's head: 0 time, 1 height, 2 width."""
        if not self.sections_in_turns:
            return tuple(axis for axis, size in enumerate(self.rope_sections) for _ in range(size))
        axes = [0] * sum(self.rope_sections)
        for axis in (1, 2):
            for pair in range(axis, 3 * self.rope_sections[axis], 3):
                axes[pair] = axis
        return tuple(axes)


LINEAR = -1  # in `ModelConfig.layer_kinds`: a gated delta rule in place of attention


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
    mixture: Mixture | None = None  # experts; None: each layer has one MLP
    sliding_window: tuple[int | None, ...] = ()
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02  # standard deviation of fresh weights

    # Features of few families.
    norms: Literal["before", "after", "both"] = "before"  # which side of attention and MLP
    unit_offset: bool = False  # norms multiply by 1 + their weights
    qk_norm_whole: bool = False  # with `qk_norm`: one norm over all heads
    activation: Literal["silu", "gelu_tanh"] = "silu"  # activation of the MLP's gate
    rope_layers: tuple[bool, ...] = ()
    rotary_factor: float = 1.0  # the share of a head that rope rotates: its first dims
    interleaved_rope: bool = False  # pairs are neighbours, not halves of the head
    local_rope_theta: float | None = None  # theta of layers with a window, without scaling
    attention_multiplier: float | None = None  # factor of attention logits; None: head_dim**-0.5
    # Soft caps: x becomes cap * tanh(x / cap). None: x stays.
    attention_softcap: float | None = None  # cap of attention logits, after their multiplier
    logits_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # factor of the outputs of attention and MLP
    logits_scaling: float = 1.0  # divides the logits
    attention_out_bias: bool = False  # on the output projection of attention
    attention_sinks: bool = False  # a learnt logit of each head that adds to no output
    expert_bias: bool = False  # on the router and on the projections of experts
    # Experts compute (up + 1) * gate * sigmoid(1.702 gate), with gate at most this, and up between
    # this and its negative. None: they use `activation`.
    swiglu_limit: float | None = None
    latent: Latent | None = None  # multi-head latent attention
    attention_gate: bool = False  # a sigmoid of the layer's input multiplies attention's output
    delta: GatedDelta | None = None  # layers of a gated delta rule between attention layers
    vision: Vision | QwenVision | None = None  # image encoder; None: a model of text alone
    # How a run computes it: weights and matmul of a language model's head are float32 in any dtype.
    float32_head: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}: every KV head serves the same number of query heads"
            )
        if self.head_dim % 2 and self.latent is None:  # there only a part of a head has rope
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
        self._check_latent()
        if self.delta is not None and not self.num_attention_layers:
            raise ValueError(
                f"{self.num_layers} layers with attention in every {self.delta.period}th: at least "
                "one layer has attention"
            )
        if self.mixture is not None and not 0 <= self.mixture.dense_layers < self.num_layers:
            raise ValueError(
                f"dense_layers {self.mixture.dense_layers} of {self.num_layers} layers: at least "
                "one layer has experts"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary_factor {self.rotary_factor} of a head_dim of {self.head_dim} rotates "
                f"{self.rotary_dim} dims: take an even number of them, at least 2"
            )
        if self.rope_scaling is not None:
            self.rope_scaling.check(self.rotary_dim, self.rope_theta)
        if isinstance(self.vision, QwenVision) and (
            2 * sum(self.vision.rope_sections) != self.rotary_dim
        ):
            raise ValueError(
                f"mrope_section {self.vision.rope_sections} has another sum than the "
                f"{self.rotary_dim // 2} pairs that rope rotates: correct config.json"
            )

    def _check_multipliers(self) -> None:
        if not 0 < self.rotary_factor <= 1:
            raise ValueError(f"rotary_factor is {self.rotary_factor}: it must be in (0, 1]")
        names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier")
        names += ("attention_softcap", "logits_softcap", "logits_scaling")
        for name in (*names, "local_rope_theta", "swiglu_limit"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}: it must be a positive number")

    def _check_latent(self) -> None:
        latent = self.latent
        if latent is None:
            return
        if latent.rope_dim >= self.head_dim or latent.value_dim > self.head_dim:
            raise ValueError(
                f"a head of {self.head_dim} with rope_dim {latent.rope_dim} and value_dim "
                f"{latent.value_dim}: the first must be smaller, the second not larger"
            )
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} with latent attention: it makes a key for each "
                f"query head, so take {self.num_heads}"
            )

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that rope rotates."""
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.rotary_factor)

    @property
    def layer_kinds(self) -> tuple[tuple[int | None, int | None], ...]:
        """The window of each layer, and the number of its rope tables; None: no rope."""

        def table(layer: int) -> int | None:
            if self.is_linear(layer):
                return LINEAR
            if self.rope_layers and not self.rope_layers[layer]:
                return None
            return int(self.local_rope_theta is not None and self._has_window(layer))

        return tuple((window, table(i)) for i, window in enumerate(self.sliding_window))

    def is_linear(self, layer: int) -> bool:
        """True if the layer has a gated delta rule in place of attention."""
        return self.delta is not None and (layer + 1) % self.delta.period != 0

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention, and so with keys and values in the cache."""
        return self.num_layers if self.delta is None else self.num_layers // self.delta.period

    def _has_window(self, layer: int) -> bool:
        return self.sliding_window[layer] is not None

    @property
    def active_size(self) -> int:
        """The inner size that a token is computed with: of the MLP, or of its experts together."""
        mixture = self.mixture
        if mixture is None:
            return self.intermediate_size
        return mixture.experts_per_token * mixture.expert_size + mixture.shared_size

    @property
    def num_leading_layers(self) -> int:
        """Dense layers before the layers of experts; 0 in a dense model."""
        return 0 if self.mixture is None else self.mixture.dense_layers

    def mixture_of(self, layer: int) -> Mixture | None:
        """The experts of a layer; None where it has an MLP."""
        mixture = self.mixture
        return None if mixture is None or layer < mixture.dense_layers else mixture

    def splits_alike(self, groups: int) -> bool:
        """True if so many equal groups of layers have the same kinds of layers in the same order.

        Leading dense layers are in none of them.
        """
        kinds = self.layer_kinds[self.num_leading_layers :]
        size, rest = divmod(len(kinds), groups)
        return not rest and kinds == kinds[:size] * groups

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts; they are the last ones."""
        return 0 if self.mixture is None else self.num_layers - self.mixture.dense_layers

    @property
    def attended_size(self) -> int:
        """The size of a head as attention over whole rows gets it.

        Our kernels have no head between 128 and 256, so latent attention pads those with zeros.
        """
        padded = self.latent is not None and 128 < self.head_dim < 256
        return 256 if padded else self.head_dim

    @property
    def cache_heads(self) -> tuple[int, int]:
        """KV heads that a token has in the cache of generation, and their size.

        With latent attention the cache holds the latent vector, as one head.
        """
        if self.latent is None:
            return self.num_kv_heads, self.head_dim
        return 1, self.latent.kv_rank + self.latent.rope_dim

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
