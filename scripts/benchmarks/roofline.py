"""The limits of the hardware: bytes of each piece of work, and measured rates.

Only useful work is counted, as in `models/flops.py`, so other work lowers the fraction. No jax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.flops import (
    forward_flops,
    kv_bytes_per_token,
    matmul_parameters,
    state_bytes_per_slot,
)
from jaxrl_llm.models.shapes import expert_matmuls, experts_hit, wide_matmuls


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sustained rates of one device: bytes and FLOPs a second."""

    memory: float
    matmul: float  # rate of a large bf16 matmul, for lower bounds on time
    matmul_float8: float  # in float8
    peak: float  # the denominator of utilisation
    link: float  # bytes a second into one device from the others of its host


# Measured through JAX on one H200: HBM read; 8192^3 GEMM (bf16 NT 695, NN 726; float8 NT 1372 with
# operands already converted); bytes into each of four devices in an all-gather. 790 TFLOP/s is an
# estimate of the dense rate at the clock of long matmuls. A run's `perf/mfu` uses the data sheet's
# 989 (`distributed/hardware.py`).
H200 = Limits(memory=4.46e12, matmul=700e12, matmul_float8=1372e12, peak=790e12, link=273e9)
# One H100 80GB: a sum of 8.6 GB; the same GEMM for nine seconds (bf16 NT and NN 701, float8 NT
# 1310; bf16 820 in the first 0.1 s). It is the same chip, so `peak` and `link` are the H200's.
H100 = Limits(memory=3.16e12, matmul=700e12, matmul_float8=1310e12, peak=790e12, link=273e9)
CARDS = {"H200": H200, "H100 80GB": H100}


def limits_of(device_kind: str) -> Limits | None:
    """The limits of a device by the name that jax gives it; None where none were measured."""
    return next((each for name, each in CARDS.items() if name in device_kind), None)


def decode_seconds(
    config: ModelConfig,
    prompt_length: float,
    lengths: Sequence[int],
    *,
    float8: bool = False,
    limits: Limits = H200,
) -> float:
    """Least seconds of decoding `lengths` tokens, every response from the first step on.

    `prompt_length` is the mean over the decoded tokens where prompts are uneven.

    A step takes max(weights / memory, FLOPs / matmul) + KV bytes / memory. Each sequence reads its
    own prompt, also where a group could share it, so sharing may exceed this bound. States of a
    gated delta rule are read and written. Experts are read that a token chose; with even loads a
    step hits `experts_hit` of a layer, so uneven loads may exceed this bound. In bf16; with
    `float8` the cache is in 8 bits, and so is what `_layers` says.
    """
    ends = np.sort(np.asarray(lengths))
    steps = np.arange(ends[-1])
    live = len(ends) - np.searchsorted(ends, steps, side="right")
    head = config.vocab_size * config.hidden_size
    read, of_expert, of_token = _layers(config, float8, limits)
    hit = 0.0 if config.mixture is None else experts_hit(config.mixture, live)
    weights = (read + of_expert * hit + head * 2) / limits.memory
    dense = np.maximum(weights, live * (of_token + 2.0 * head / limits.matmul))
    moved = live * (prompt_length + steps) * kv_bytes_per_token(config, 1 if float8 else 2)
    moved = moved + 2.0 * live * state_bytes_per_slot(config)
    return float(np.sum(dense + moved / limits.memory))


def prefill_flops(config: ModelConfig, lengths: Sequence[int]) -> float:
    """FLOPs of the layers on distinct prompts; no token of a prompt needs the head."""
    head = 2.0 * config.vocab_size * config.hidden_size
    return forward_flops(config, lengths) - head * sum(lengths)


def prefill_seconds(
    config: ModelConfig, lengths: Sequence[int], *, float8: bool = False, limits: Limits = H200
) -> float:
    """Least seconds of computing distinct prompts; with `float8` as `_layers` says."""
    head = config.vocab_size * config.hidden_size
    projections = 2.0 * (matmul_parameters(config) - head) * sum(lengths)
    attention = prefill_flops(config, lengths) - projections
    _, _, of_token = _layers(config, float8, limits)
    return of_token * sum(lengths) + attention / limits.matmul


def _layers(config: ModelConfig, float8: bool, limits: Limits) -> tuple[float, float, float]:
    """Bytes of the layers' weights that each step reads, bytes of an expert that a token chose,
    over all layers, and the seconds of a token's matmuls.

    In float8, chosen experts have 8-bit weights and bf16 inputs. Routers, latent attention and
    gated delta rules stay in bf16.
    """
    layers = matmul_parameters(config) - config.vocab_size * config.hidden_size
    of_expert, chosen = config.num_expert_layers * expert_matmuls(config), 0
    if config.mixture is not None:
        chosen = config.mixture.experts_per_token * of_expert
    if not float8:
        return 2.0 * (layers - chosen), 2.0 * of_expert, 2.0 * layers / limits.matmul
    in_bf16 = sum(wide_matmuls(config, i) for i in range(config.num_layers))
    by_bf16 = in_bf16 + chosen
    seconds = by_bf16 / limits.matmul + (layers - by_bf16) / limits.matmul_float8
    return float(layers - chosen + in_bf16), float(of_expert), 2.0 * seconds
