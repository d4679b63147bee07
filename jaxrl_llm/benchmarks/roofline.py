"""What the hardware allows: bytes of each piece of work, and the measured limits.

Counts are of useful work, as those of `models/flops.py`: what is done beside it lowers the fraction
that is reached. Nothing here imports jax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.flops import forward_flops, matmul_parameters


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one device sustains: bytes a second from its memory, FLOPs a second in bf16."""

    memory: float
    matmul: float  # of a large matrix product, for lower bounds on time
    peak: float  # the figure that utilisation is a fraction of


# Measured through JAX on one H200: HBM read, 8192^3 bf16 GEMM (NT 695, NN 726). 790 TFLOP/s is an
# estimate of the dense rate at the clock that long products leave; the data sheet says 989, which a
# run's `perf/mfu` goes by (`models/flops.py`).
H200 = Limits(memory=4.46e12, matmul=700e12, peak=790e12)


def weight_bytes(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes of weights that a decode step reads."""
    return matmul_parameters(config) * itemsize


def kv_bytes_per_token(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes that one token holds in the cache."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def decode_seconds(
    config: ModelConfig, prompt_length: int, lengths: Sequence[int], *, limits: Limits = H200
) -> float:
    """Least seconds of decoding `lengths` tokens, every response from the first step on.

    A step takes max(weights / memory, FLOPs / matmul) + KV bytes / memory. Each sequence reads its
    own prompt, also where a group could share it, so sharing may exceed this bound.
    """
    ends = np.sort(np.asarray(lengths))
    steps = np.arange(ends[-1])
    live = len(ends) - np.searchsorted(ends, steps, side="right")
    flops = 2.0 * matmul_parameters(config) * live
    dense = np.maximum(weight_bytes(config) / limits.memory, flops / limits.matmul)
    entries = live * (prompt_length + steps)
    return float(np.sum(dense + entries * kv_bytes_per_token(config) / limits.memory))


def prefill_flops(config: ModelConfig, lengths: Sequence[int]) -> float:
    """FLOPs of the layers on distinct prompts; no token of a prompt needs the head."""
    head = 2.0 * config.vocab_size * config.hidden_size
    return forward_flops(config, lengths) - head * sum(lengths)


def prefill_seconds(config: ModelConfig, lengths: Sequence[int], *, limits: Limits = H200) -> float:
    """Least seconds of computing distinct prompts."""
    return prefill_flops(config, lengths) / limits.matmul
