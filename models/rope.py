"""Kinds of rope scaling, in numpy, without jax. Their fields are the keys of config.json.

The numbers equal transformers' (`modeling_rope_utils`), computed in float32 as it does. A
more exact table would give other angles than the ones that the weights were trained with, which
matters at long positions.

Two kinds depend on the length of a row. transformers takes the longest row of a call, and in
decoding each step is a call with a longer row. The log-probs of a token would then depend on later
tokens and on the other rows of its batch. So sampler and trainer could not agree. A run therefore
fixes the frequencies once, for the longest row that it allows (`ModelConfig.for_context`):

| kind | rows up to the trained length | longer rows |
|---|---|---|
| dynamic | no scaling, as in transformers | transformers' frequencies of the longest row |
| longrope | `short_factor`, as in transformers | `long_factor`, for the short rows too |

The trained length is `max_position_embeddings` of dynamic, and `original_max_position_embeddings`
of longrope. A run with longer rows trains and exports a config that no longer depends on the
length. transformers then computes the same log-probs for rows of every length.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, get_origin

import numpy as np


def rope_powers(theta: float, head_dim: int) -> np.ndarray:
    """theta ** (2 i / H) of each pair i of a head, float32 [H/2].

    Without scaling, a pair turns by 1 / power radians a position.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float32(theta), exponents)


@dataclass(frozen=True, kw_only=True)
class RopeScaling(ABC):
    """A stretch of rotary frequencies for longer contexts. Lengths are in tokens.

    Raises: ValueError that names the key of a value which no model can have.
    """

    kind: ClassVar[str]  # `rope_type` in config.json
    factor: float  # new context / old context

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (_is_valid(value, field.type) or (value is None and field.default is None)):
                right = "true or false" if field.type is bool else "a positive number"
                raise ValueError(f"{self.kind} rope has {field.name}={value!r}: give {right}")
        if self.factor < 1:
            raise ValueError(f"{self.kind} rope has factor={self.factor}: it must be at least 1")

    def check(self, head_dim: int, theta: float) -> None:  # noqa: B027 - most kinds fit any model
        """Raises: ValueError for values that do not fit the model's heads or its theta."""

    @abstractmethod
    def frequencies(self, powers: np.ndarray, theta: float) -> np.ndarray:
        """Radians a position of each pair, float32 [H/2], from `rope_powers`."""

    @property
    def attention_scale(self) -> float:
        """The factor of cosines and sines; the logits of attention get its square."""
        return 1.0

    @classmethod
    def required(cls) -> list[str]:
        """The keys without a default."""
        return [field.name for field in fields(cls) if field.default is MISSING]


def is_positive(value: Any) -> bool:
    """True if a value of config.json is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_valid(value: Any, kind: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    if isinstance(value, tuple) and get_origin(kind) is not tuple:
        return False
    return all(map(is_positive, value if isinstance(value, tuple) else (value,)))


@dataclass(frozen=True, kw_only=True)
class LinearRope(RopeScaling):
    """Every frequency divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    kind: ClassVar[str] = "linear"

    def frequencies(self, powers: np.ndarray, theta: float) -> np.ndarray:
        """See `RopeScaling`."""
        return 1 / powers / np.float32(self.factor)


@dataclass(frozen=True, kw_only=True)
class DynamicRope(RopeScaling):
    """A larger theta for rows beyond the trained length ("dynamic NTK")."""

    kind: ClassVar[str] = "dynamic"

    def check(self, head_dim: int, theta: float) -> None:
        """See `RopeScaling`."""
        if head_dim < 4:
            raise ValueError(f"dynamic rope needs a head_dim of at least 4, not {head_dim}")

    def frequencies(self, powers: np.ndarray, theta: float) -> np.ndarray:
        """Those of rows up to the trained length; `theta_at` gives the others."""
        return 1 / powers

    def theta_at(self, length: int, trained: int, head_dim: int, theta: float) -> float:
        """Theta of a row of `length` tokens; unchanged up to the `trained` length."""
        stretch = self.factor * max(length, trained) / trained - (self.factor - 1)
        return theta * stretch ** (head_dim / (head_dim - 2))


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(RopeScaling):
    """Low frequencies divided by `factor`, interpolated up to the high ones (arXiv:2407.21783)."""

    kind: ClassVar[str] = "llama3"
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"llama3 rope has low_freq_factor={self.low_freq_factor} and high_freq_factor="
                f"{self.high_freq_factor}: the second must be larger"
            )

    def frequencies(self, powers: np.ndarray, theta: float) -> np.ndarray:
        """See `RopeScaling`."""
        plain = 1 / powers
        # Turns of a pair in the old context.
        turns = self.original_max_position_embeddings * plain / np.float32(2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        stretched = plain / np.float32(self.factor)
        return ((1 - smooth) * stretched + smooth * plain).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class YarnRope(RopeScaling):
    """Low frequencies divided by `factor`, and sharper attention (YaRN, arXiv:2309.00071).

    A pair that turns less than `beta_slow` times in the old context is stretched, and one that
    turns more than `beta_fast` times is not. `truncate` rounds the two bounds to whole pairs.
    Attention is scaled by `attention_factor`. Where that is None, it follows from `factor`, and
    from `mscale` and `mscale_all_dim` if both are given.
    """

    kind: ClassVar[str] = "yarn"
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_slow > self.beta_fast:
            raise ValueError(
                f"yarn rope has beta_slow={self.beta_slow} and beta_fast={self.beta_fast}: the "
                "first must not be larger"
            )

    def check(self, head_dim: int, theta: float) -> None:
        """See `RopeScaling`."""
        if theta <= 1:
            raise ValueError(f"yarn rope needs a rope_theta above 1, not {theta}")

    def frequencies(self, powers: np.ndarray, theta: float) -> np.ndarray:
        """See `RopeScaling`."""
        stretched = 1 / (np.float32(self.factor) * powers)
        low = self._stretched_from(self.beta_fast, theta, powers.size)
        high = self._stretched_from(self.beta_slow, theta, powers.size)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * powers.size - 1)
        if low == high:
            high += 0.001  # as transformers does: a step instead of a ramp
        pairs = np.arange(powers.size, dtype=np.float32)
        kept = 1 - np.clip((pairs - low) / (high - low), 0, 1)
        return (stretched * (1 - kept) + 1 / powers * kept).astype(np.float32)

    def _stretched_from(self, turns: float, theta: float, num_pairs: int) -> float:
        """The pair, as a fraction, that turns this often in the old context."""
        length = self.original_max_position_embeddings
        return num_pairs * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    @property
    def attention_scale(self) -> float:
        """See `RopeScaling`."""
        if self.attention_factor is not None:
            return self.attention_factor

        def scale(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)

    @property
    def whole_head_scale(self) -> float:
        """The further factor of q and of k, all dims, in latent attention."""
        return 0.1 * (self.mscale_all_dim or 0.0) * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class LongRope(RopeScaling):
    """A searched factor for each pair, one set for short rows and one for long (arXiv:2402.13753).

    The frequencies belong to `short_factor`. `ModelConfig.for_context` puts `long_factor` in its
    place for a run of longer rows. Attention is scaled alike in both.
    """

    kind: ClassVar[str] = "longrope"
    original_max_position_embeddings: int
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float | None = None

    def check(self, head_dim: int, theta: float) -> None:
        """See `RopeScaling`."""
        for key in ("short_factor", "long_factor"):
            value = getattr(self, key)
            if not isinstance(value, tuple) or len(value) != head_dim // 2:
                raise ValueError(
                    f"longrope rope has {key}={value}: give {head_dim // 2} numbers, one for each "
                    f"pair of a head of {head_dim}"
                )
        if self.original_max_position_embeddings < 2:
            raise ValueError(
                f"longrope rope has original_max_position_embeddings="
                f"{self.original_max_position_embeddings}: it must be at least 2"
            )

    def frequencies(self, powers: np.ndarray, theta: float) -> np.ndarray:
        """See `RopeScaling`."""
        return 1 / (np.array(self.short_factor, np.float32) * powers)

    @property
    def attention_scale(self) -> float:
        """See `RopeScaling`."""
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(original))


ROPE_KINDS: dict[str, type[RopeScaling]] = {
    scaling.kind: scaling for scaling in (LinearRope, DynamicRope, Llama3Rope, YarnRope, LongRope)
}
