"""Sizes of the engine's arrays, from the settings and the shapes of the prompts."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxrl_llm.generation.packed_prompts import RowSizes, row_sizes
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.tail import SHORTEST_RESPONSE, default_tails
from jaxrl_llm.kernels.flash_attention import Implementation, chosen_attention
from jaxrl_llm.kernels.hopper import on_gpu
from jaxrl_llm.models.config import ModelConfig

# Automatic `num_slots` on a GPU: XLA computes matmuls with fewer rows as matrix-vector products,
# and a step of one slot then takes 9 % longer than a step of eight (4 layers of 1.5B, H200).
FEWEST_SLOTS = 8
# Tails with more slots have no drafts, because few of their slots are free. No GPU has timed it.
MOST_DRAFT_SLOTS = 256


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """Static sizes of one generation program on one replica."""

    num_slots: int
    group: int
    prefill: RowSizes
    prompt_rows: int  # C, rows of the cache that hold prompts
    tails: tuple[int, ...]  # slots of each tail, falling


def engine_sizes(
    settings: GenerationSettings,
    prompts_NP: jax.Array | jax.ShapeDtypeStruct,
    prefill_attention: Implementation,
) -> EngineSizes:
    """Sizes for these prompts."""
    num_samples, width = prompts_NP.shape
    group, prefill = settings.group, settings.prefill
    assert num_samples % group == 0, (num_samples, group)
    num_groups = num_samples // group
    slots = slots_of(settings, num_samples)
    if settings.strict is not None:
        width = -(-width // settings.strict.align) * settings.strict.align
    # Room for as many prompts of full width as all slots can take at once. More of the shorter ones
    # fit: they cost no memory, because each prompt has its own row of the cache anyway.
    prefill = prefill or row_sizes(
        width,
        max(1, min(num_groups, -(-slots // group))),
        most=num_groups if num_groups <= slots else slots // 4,
        attention=prefill_attention,
    )
    tails = tails_of(settings, num_samples)
    # Live slots read at most `slots` prompts, so rows are free whenever a prefill is due.
    most = prefill.rows * prefill.prompts
    return EngineSizes(
        num_slots=slots,
        group=group,
        prefill=prefill,
        prompt_rows=max(1, min(num_groups, slots + most)),
        tails=tails,
    )


def slots_of(settings: GenerationSettings, num_samples: int) -> int:
    """Sequences that are decoded at once."""
    fewest = FEWEST_SLOTS if on_gpu() else 1
    most = max(num_samples, fewest)
    return min(settings.num_slots or most, most)


def tails_of(settings: GenerationSettings, num_samples: int) -> tuple[int, ...]:
    """Slots of each tail, falling."""
    if settings.tail_slots is not None:
        return settings.tail_slots
    slots, longest = slots_of(settings, num_samples), settings.sampling.max_new_tokens
    tails = default_tails(slots, longest)
    # Slots get free in a small batch too. Then drafts need a loop in which no sample begins.
    alone = settings.drafts and settings.turns is None and longest >= SHORTEST_RESPONSE
    return tails or ((slots,) if alone else ())


def most_drafts(settings: GenerationSettings, config: ModelConfig, sizes: EngineSizes) -> int:
    """Draft tokens of a sequence in a step of a tail at most; 0: no tail has drafts.

    A recurrent state cannot be taken back, and a turn may end at any token.
    """
    if config.delta is not None or settings.turns is not None:
        return 0
    return settings.drafts if any(n <= MOST_DRAFT_SLOTS for n in sizes.tails) else 0


def prefill_implementation(
    attention: Implementation, dtype: Any, config: ModelConfig
) -> Implementation:
    """The attention of a prefill: over packed rows, or cuDNN's where our kernels cannot run."""
    head_dim = config.attended_size
    packed = chosen_attention(attention, dtype, head_dim, ranges=True)
    unlike = config.attention_sinks or config.attention_softcap is not None
    whole = chosen_attention(attention, dtype, head_dim, ranges=unlike)
    return whole if whole == "cudnn" and packed == "xla" else packed
