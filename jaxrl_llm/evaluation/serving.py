"""The engine that answers requests to an open model, in the memory that its devices have free."""

import jax.numpy as jnp

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.layout import Layout
from jaxrl_llm.generation.memory import kv_bytes, prefill_bytes
from jaxrl_llm.generation.session import Engine, EngineSettings
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.models.base import ModelSpec, model_spec
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.flops import state_bytes_per_slot

GPU_SLOTS, CPU_SLOTS = 256, 8
LOGITS = 4  # arrays of the size of the logits that sampling has at once
CPU_BYTES = 2 << 30  # cache on a CPU
PREFILL_TOKENS = 8192  # prompt tokens computed at once
STEPS = 32  # most decode steps of a call


def serving_engine(
    spec: ModelSpec,
    params: Params,
    stop_ids: tuple[int, ...],
    *,
    memory: float,
    layout: Layout | None = None,
    context: int = 0,
    slots: int = 0,
    steps: int = STEPS,
) -> Engine:
    """An engine for requests of any kind, in `memory` bytes next to the weights; 0: on a CPU.

    `memory` is of each device. `layout` has the devices that share the heads; None: one device.
    Other numbers that are 0 are found. ConfigError for a context that the model or the memory does
    not have.
    """
    config = spec.config
    slots = slots or (GPU_SLOTS if memory else CPU_SLOTS)
    positions = config.max_position_embeddings
    if context > positions:
        raise ConfigError(f"--context={context}: the model has {positions} positions")
    tensor = 1 if layout is None else layout.mesh.size
    room = _room(config, jnp.dtype(spec.dtype).itemsize, slots, memory, tensor)
    wanted = context or positions
    if room < wanted and context:
        raise ConfigError(f"--context={context}: the cache has room for {room} tokens")
    context = min(wanted, room)
    settings = EngineSettings(
        max_context=context,
        num_slots=slots,
        cache_tokens=min(room, slots * context),
        stop_ids=stop_ids,
        steps=steps,
        prefill_tokens=PREFILL_TOKENS,
        in_generation_form=True,
    )
    config = config.for_context(context)  # rope may depend on the longest row
    return Engine(model_spec(config, dtype=spec.dtype, form=spec.form), params, settings, layout)


def _room(config: ModelConfig, itemsize: int, slots: int, memory: float, tensor: int) -> int:
    """Tokens that fit into the cache. `memory` is of one of `tensor` devices."""
    if memory:
        memory -= slots * (state_bytes_per_slot(config, itemsize) + LOGITS * 4 * config.vocab_size)
        memory -= prefill_bytes(config, PREFILL_TOKENS, itemsize)
    room = (memory or CPU_BYTES) / kv_bytes(config, itemsize, tensor)
    return max(int(room), 1)
