"""Memory of generation on a device, and the slots and cache tokens that fit into it.

`fitted` finds what the settings leave at 0. Every place that generates calls it: the rollout,
greedy answers, validation, `generate` and `chat`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxrl_llm.generation.kv_cache import page_entries
from jaxrl_llm.generation.pages import PageSizes, page_sizes
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.sizes import (
    FEWEST_SLOTS,
    EngineSizes,
    engine_sizes,
    prefill_implementation,
    slots_of,
)
from jaxrl_llm.generation.tail import TILE
from jaxrl_llm.kernels.decode_attention import cache_length
from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.kernels.gated_delta.runs import CHUNK
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.flops import kv_bytes_per_token, state_bytes_per_slot
from jaxrl_llm.models.shapes import copied_elements

GB = 1e9
# Share of the longest response for which a slot has room, where memory does not suffice for all of
# it. In simulations of 3B to 14B, batches of the RL mix then took up to 3 % longer than with the
# best number of slots, and responses that all reach the limit 1.1 to 1.6 times as long.
EXPECTED = 0.3
FEW_SLOTS = (192, 128, 96, 64, 48, 32, 24, 16, FEWEST_SLOTS)  # below two GEMM tiles
# Float32 numbers of a token and head in a gated delta rule: for each dim of a key or value, each
# token of a chunk, and each chunk's share of a state.
RULE_DIMS, RULE_PAIRS, RULE_STATES = 6, 16, 3
RULE_PREFILL = 0.25  # what a prefill has at once, as a multiple of them
OUTPUT = 16  # bytes of a response token: id and log-prob, in the loops and in the result


@dataclass(frozen=True, kw_only=True)
class Replica:
    """What one replica generates, as far as memory depends on it."""

    config: ModelConfig
    dtype: str  # dtype of the weights that generate
    tensor: int  # devices that share the heads
    samples: int  # rows of prompts
    width: int  # tokens of a row
    live: int = 0  # rows that hold a prompt; 0: all


def fitted(settings: GenerationSettings, replica: Replica, memory: float) -> GenerationSettings:
    """`settings` with the slots and cache tokens that fit into `memory`, where they are 0.

    `memory` are the bytes of a device that generation may take, weights aside; with 0, which is not
    known, nothing changes. The most slots are taken that have room for `EXPECTED` of the longest
    response each, and for them the whole memory. Where even one response does not fit, the result
    has the fewest slots, and a cache for one.

    Guarantees: the result depends on the arguments only. Settings whose memory suffices are kept.
    """
    if not memory or (settings.num_slots and settings.cache_tokens):
        return settings
    every = slots_of(replace(settings, num_slots=0), replica.samples)
    most = slots_of(replace(settings, num_slots=0), replica.live or replica.samples)
    asked = settings.num_slots
    trial = settings
    for slots in (asked,) if asked else _numbers_of_slots(most):
        trial = replace(settings, num_slots=0 if slots == every else slots)
        sizes, pages = _sizes(replace(trial, cache_tokens=0), replica)
        fixed = _bytes(trial, replica, sizes, 0.0)
        page = pages.entries * _kv_bytes(settings, replica)
        room = min(int((memory - fixed) // page), _most_pages(pages.entries, replica))
        wanted = -(-settings.cache_tokens // pages.entries) or room
        expected = 0 if asked else slots * math.ceil(EXPECTED * pages.per_slot)
        least = max(pages.per_slot, expected)
        if least <= wanted <= room:
            if not settings.cache_tokens and wanted < pages.num_pages:
                trial = replace(trial, cache_tokens=wanted * pages.entries)
            return trial
    return replace(trial, cache_tokens=settings.cache_tokens or settings.sampling.max_new_tokens)


def generation_bytes(settings: GenerationSettings, replica: Replica) -> float:
    """Bytes of a device that a generation takes, weights aside."""
    sizes, own = _used(settings, replica)
    return _bytes(settings, replica, sizes, own)


def cache_bytes(settings: GenerationSettings, replica: Replica) -> float:
    """Bytes of the cache alone."""
    sizes, own = _used(settings, replica)
    return _cache_bytes(settings, replica, sizes, own)


def _used(settings: GenerationSettings, replica: Replica) -> tuple[EngineSizes, float]:
    """The sizes of the engine's arrays, and the bytes of the pages."""
    sizes, pages = _sizes(settings, replica)
    return sizes, pages.num_pages * pages.entries * _kv_bytes(settings, replica)


def words_of(settings: GenerationSettings, samples: int) -> str:
    """The slots and the cache of a generation of `samples`, for people."""
    slots = slots_of(settings, samples)
    longest = settings.sampling.max_new_tokens
    if not settings.cache_tokens:
        return f"{slots:,} slots, each with room for {longest:,} response tokens"
    return f"{slots:,} slots, {settings.cache_tokens:,} response tokens in the cache"


def _numbers_of_slots(most: int) -> Iterator[int]:
    """Numbers of slots to try, falling: all samples, then whole GEMM tiles."""
    yield most
    yield from range((most - 1) // TILE * TILE, FEW_SLOTS[0], -TILE)
    yield from (slots for slots in FEW_SLOTS if slots < most)


def _sizes(settings: GenerationSettings, replica: Replica) -> tuple[EngineSizes, PageSizes]:
    """The sizes of the engine's arrays."""
    settings = replace(settings, group=math.gcd(settings.group, replica.samples))
    config, dtype = replica.config, jnp.dtype(replica.dtype)
    sizes = engine_sizes(
        settings,
        jax.ShapeDtypeStruct((replica.samples, replica.width), jnp.int32),
        prefill_implementation(settings.attention, dtype, config),
    )
    longest = settings.sampling.max_new_tokens
    cache_dtype = jnp.dtype(FLOAT8) if settings.quantization == "float8" else dtype
    pages = page_sizes(
        num_slots=sizes.num_slots,
        own_length=longest,
        page_entries=settings.tokens_a_page or page_entries(config, cache_dtype, longest),
        cache_tokens=settings.cache_tokens,
    )
    return sizes, pages


def _most_pages(entries: int, replica: Replica) -> int:
    """The most pages of a layer of one device, of which an int32 still numbers every element."""
    heads, size = replica.config.cache_heads
    parts = min(replica.tensor, heads)
    return (2**31 - 1) // (entries * 2 * size * -(-heads // parts))


def _kv_bytes(settings: GenerationSettings, replica: Replica) -> float:
    """Bytes of a token in the cache of one device."""
    size = 1 if settings.quantization == "float8" else jnp.dtype(replica.dtype).itemsize
    return kv_bytes(replica.config, size, replica.tensor)


def kv_bytes(config: ModelConfig, itemsize: float, tensor: int) -> float:
    """Bytes of a token in the cache of one of `tensor` devices that share the heads.

    With few KV heads some devices hold copies. Each has the one head of latent attention.
    """
    return kv_bytes_per_token(config, itemsize) / min(tensor, config.cache_heads[0])


def _bytes(settings: GenerationSettings, replica: Replica, sizes: EngineSizes, own: float) -> float:
    """Bytes of all arrays, with `own` bytes of response tokens in the cache."""
    config, itemsize = replica.config, jnp.dtype(replica.dtype).itemsize
    # Logits of the slots, a prefill, and again the states of the slots of the first tail.
    split = sizes.num_slots * config.vocab_size * 4
    split += prefill_bytes(config, sizes.prefill.rows * sizes.prefill.tokens, itemsize)
    split += (*sizes.tails, 0)[0] * state_bytes_per_slot(config, itemsize)
    cache = _cache_bytes(settings, replica, sizes, own)
    return cache + split / replica.tensor + _output_bytes(settings, replica)


def _cache_bytes(
    settings: GenerationSettings, replica: Replica, sizes: EngineSizes, own: float
) -> float:
    """Bytes of the cache: of prompts, of `own` response tokens, of the states of both."""
    config, width = replica.config, replica.width
    if replica.dtype != "float32":
        width = cache_length(width, config.cache_heads[1])
    prompts = sizes.prompt_rows * width * _kv_bytes(settings, replica)
    each = state_bytes_per_slot(config, jnp.dtype(replica.dtype).itemsize) / replica.tensor
    return prompts + own + (sizes.num_slots + sizes.prompt_rows) * each


def _output_bytes(settings: GenerationSettings, replica: Replica) -> float:
    """Bytes of the responses, and of what was recorded of them."""
    config, longest = replica.config, settings.sampling.max_new_tokens
    size = float(OUTPUT)
    if settings.record_kept:
        size += 4.0 * settings.sampling.num_kept(config.vocab_size)
    total = replica.samples * longest * size
    if settings.record_routes and config.mixture is not None:
        number = 1 if config.mixture.num_experts <= 128 else 2
        token = number * config.num_expert_layers * config.mixture.experts_per_token
        total += 2.0 * replica.samples * (replica.width + longest) * token
    return total


def prefill_bytes(config: ModelConfig, tokens: int, itemsize: int) -> float:
    """Bytes that a prefill has at once: of one MLP, and of one gated delta rule."""
    numbers = 3 * config.active_size + 2 * config.hidden_size + copied_elements(config)
    return tokens * (numbers * itemsize + RULE_PREFILL * rule_bytes(config))


def rule_bytes(config: ModelConfig) -> float:
    """The size of what a gated delta rule has of one token; 0 without one."""
    if (delta := config.delta) is None:
        return 0.0
    numbers = RULE_DIMS * (delta.key_dim + delta.value_dim) + RULE_PAIRS * CHUNK
    numbers += RULE_STATES * delta.key_dim * delta.value_dim / CHUNK
    return 4.0 * delta.value_heads * numbers
