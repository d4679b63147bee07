"""Settings of the engine: sampling, slots, cache and number format."""

from dataclasses import dataclass
from typing import Literal

from jaxrl_llm.generation.in_graph import InGraphTurns
from jaxrl_llm.generation.packed_prompts import RowSizes
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.kernels.flash_attention import Implementation
from jaxrl_llm.kernels.strict import Strict

# "float8": layer projections and KV cache in float8_e4m3fn. It is faster, but its log-probs are
# further from the trainer's, so such a run needs importance weights.
Quantization = Literal["none", "float8"]


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Settings of one generation program. Hashable, so it may be a static argument of `jax.jit`.

    Only `sampling`, `quantization` and `turns` change results; `attention` changes rounding. The
    other settings change memory and speed. Numbers of slots and cache tokens are for one replica.
    """

    sampling: SamplingParams
    # Each `group` consecutive rows hold the same prompt. It is computed and stored once.
    group: int = 1
    num_slots: int = 0  # sequences decoded at once; 0 is all samples, and at least 8 on a GPU
    # Response tokens that fit into the cache; 0 is `num_slots` responses of the longest. With less,
    # a slot may have to wait for another one. Waiting changes no result.
    cache_tokens: int = 0
    pad_id: int = 0  # written after the end of a response
    quantization: Quantization = "none"
    # "cudnn" is for prefills only; decoding then uses "auto".
    attention: Implementation = "auto"
    prefill: RowSizes | None = None  # prompt rows computed at once; None: see `row_sizes`
    # Falling numbers of slots for the end of a batch; None: see `default_tails`.
    tail_slots: tuple[int, ...] | None = None
    drafts: int = 0  # most draft tokens of a sequence in a step of a tail; 0: none
    tokens_a_page: int = 0  # 0 is the block size of the decode kernel
    record_routes: bool = False  # the experts of every token, for the trainer to take the same
    record_kept: bool = False  # the tokens that filters kept, for the trainer's log-probs
    strict: Strict | None = None  # log-probs with the bits of a strict forward pass
    turns: InGraphTurns | None = None  # environment that answers turns inside the program
