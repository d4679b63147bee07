"""The engine that answers requests to an open model, in the memory that the device has free."""

import jax
import jax.numpy as jnp

from jaxrl_llm.config import ConfigError
from jaxrl_llm.generation.session import Engine, EngineSettings
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.models.base import ModelSpec, model_spec
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.flops import kv_bytes_per_token, state_bytes_per_slot

GPU_SLOTS, CPU_SLOTS = 256, 8
FILLED = 0.8  # share of the free memory for the cache; the rest is for the arrays of a step
CPU_BYTES = 2 << 30  # cache on a CPU
STEPS = 16  # decode steps of a call; new requests wait for its end, and streams come so often


def serving_engine(
    spec: ModelSpec,
    params: Params,
    stop_ids: tuple[int, ...],
    *,
    context: int = 0,
    slots: int = 0,
    steps: int = 0,
) -> Engine:
    """An engine for requests of any kind. Numbers that are 0 are found.

    ConfigError for a context that the model or the memory does not have.
    """
    config, free = spec.config, _free_bytes()
    slots = slots or (GPU_SLOTS if free else CPU_SLOTS)
    positions = config.max_position_embeddings
    if context > positions:
        raise ConfigError(f"--context={context}: the model has {positions} positions")
    room = _room(config, jnp.dtype(spec.dtype).itemsize, slots, free)
    wanted = context or positions
    if room < wanted and context:
        raise ConfigError(f"--context={context}: the cache has room for {room} tokens")
    context = min(wanted, room)
    settings = EngineSettings(
        max_context=context,
        num_slots=slots,
        cache_tokens=min(room, slots * context),
        stop_ids=stop_ids,
        steps=steps or STEPS,
    )
    # Rope may depend on the longest row.
    return Engine(model_spec(config.for_context(context), dtype=spec.dtype), params, settings)


def _free_bytes() -> int:
    """Free memory of the first device; 0 where it does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return max(stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0), 0)


def _room(config: ModelConfig, itemsize: int, slots: int, free: int) -> int:
    """Tokens that fit into the cache."""
    states = slots * (state_bytes_per_slot(config, itemsize) + 4 * config.vocab_size)
    memory = FILLED * (free - states) if free else CPU_BYTES
    return max(int(memory // kv_bytes_per_token(config, itemsize)), 1)
