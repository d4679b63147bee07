"""The tail of a batch: when few samples are left, fewer slots go on.

The longest responses of a batch end long after the others. A decode step computes every slot, also
the free ones, so the live slots are moved together and the loop continues with fewer of them.

Shape letters: B slots, S slots of a tail.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.generation.kv_cache import of_slots
from jaxrl_llm.generation.slots import State

# With about 160 slots or more, matmuls bound a decode step. Each tail then has an eighth of the
# slots less, in multiples of the GEMM tile. With fewer slots, reading the weights bounds it, and
# the tails are 160 and 64. Every tail compiles one more decode step, so short responses have none.
TILE = 128
FEWEST_TILED = 256
SMALLEST_TAILS = (160, 64)
SHORTEST_RESPONSE = 512  # tokens; no tails where responses are shorter


def default_tails(num_slots: int, max_new_tokens: int) -> tuple[int, ...]:
    """Numbers of slots of the tails, falling; empty where responses are short."""
    if max_new_tokens < SHORTEST_RESPONSE:
        return ()
    step = TILE * max(1, math.ceil(num_slots / 8 / TILE))
    tiled = [n for n in range(step, num_slots, step) if n >= FEWEST_TILED]
    sizes = (*reversed(tiled), *SMALLEST_TAILS)
    return tuple(n for n in sizes if n <= num_slots * 7 / 8)


def compact(state: State, num_slots: int) -> State:
    """Keep `num_slots` slots, the live ones first. Pages stay where they are in the cache.

    Of a gated delta rule only the states of these slots stay.

    Requires: at most `num_slots` slots are live.
    """
    _, from_S = lax.top_k(state.slots.live_B.astype(jnp.int32), num_slots)
    table = state.table._replace(pages_BT=state.table.pages_BT[from_S])
    slots = jax.tree.map(lambda x_B: x_B[from_S], state.slots)
    cache = of_slots(state.cache, from_S, slots.count_B == 0, slots.prompt_row_B)
    return state._replace(cache=cache, table=table, slots=slots)
