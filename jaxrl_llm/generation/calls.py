"""The programs of sessions: the host says what each slot does, and a call does a part of it.

All state is in the cache, which is donated from call to call. A call gets everything else from the
host: `extend` computes tokens that are given into the cache, `decode_steps` samples.

A sequence is a shared beginning in a prompt row, which may be empty, and its own entries in pages.
Own entry i is the token at position b + i, where b is the number of entries of the beginning.

Shape letters: B slots, M decode steps of a call at most, T pages of a slot, A rows of `extend` and
L their tokens, O pages, R entries of a page, P entries of a prompt row, V vocabulary.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_llm.distributed.layout import Layout
from jaxrl_llm.generation.decode import decode
from jaxrl_llm.generation.kv_cache import (
    RESIDUAL_DTYPE,
    Cache,
    HeadAxes,
    cache_specs,
    extend_attend,
    keys_and_values,
)
from jaxrl_llm.generation.pages import PageSizes, PageTable
from jaxrl_llm.generation.queue import Rows
from jaxrl_llm.generation.sampler import RowSampling, SamplingParams
from jaxrl_llm.generation.slots import Slots, State, empty_routes, no_kept
from jaxrl_llm.kernels.flash_attention import Implementation
from jaxrl_llm.models.base import ModelSpec, bind
from jaxrl_llm.models.experts import Routing

DTYPES: dict[str, Any] = {
    **dict.fromkeys(("sample_B", "key_B", "key2_B"), np.uint32),
    **dict.fromkeys(("temperature_B", "top_p_B", "min_p_B"), np.float32),
}


class Shape(NamedTuple):
    """The sizes of a call."""

    slots: int
    pages: int  # most pages of a slot
    steps: int  # most decode steps


def bits(number: float) -> int:
    """The bits of a float32 number."""
    return int(np.float32(number).view(np.int32))


class Turns(NamedTuple):
    """What the slots of a call do. On the host it is one int32 matrix, so that one copy moves it.

    Fields of one number a slot come first, then the pages, then the tokens that are given.
    """

    live_B: Any  # 1: the slot decodes
    prompt_row_B: Any  # row of the cache with its beginning
    beginning_B: Any  # entries of the beginning
    count_B: Any  # own entries so far
    token_B: Any  # last token, which is not in the cache
    limit_B: Any  # own entries at which the turn ends
    begun_B: Any  # place in the response of the token after the beginning
    sample_B: Any  # uint32, the sample's number
    key_B: Any  # uint32, first word of fold_in(key(seed), step)
    key2_B: Any  # uint32, second word
    temperature_B: Any  # float32
    top_k_B: Any
    top_p_B: Any  # float32
    min_p_B: Any  # float32
    pages_BT: Any
    given_BM: Any  # tokens to take in place of sampled ones; -1: sample

    @classmethod
    def packed(
        cls, numbers: Seq[Seq[int]], pages: Seq[Seq[int]], given: Seq[Seq[int]], shape: Shape
    ) -> np.ndarray:
        """The matrix, int32 [B, numbers + T + M], of the first slots; the others are free.

        `numbers` has the fields of one number, floats and unsigned words as `bits`.
        """
        first = len(cls._fields) - 2
        matrix = np.zeros((shape.slots, first + shape.pages + shape.steps), np.int32)
        matrix[:, first + shape.pages :] = -1
        # Words above 2^31 wrap around.
        matrix[: len(numbers), :first] = np.array(numbers, np.int64).astype(np.int32)
        for slot, (table, tokens) in enumerate(zip(pages, given, strict=True)):
            matrix[slot, first : first + len(table)] = table
            if tokens:
                begin = first + shape.pages
                matrix[slot, begin : begin + len(tokens)] = tokens
        return matrix

    @classmethod
    def unpacked(cls, matrix: jax.Array, steps: int) -> "Turns":
        """The fields of the matrix, on the device."""
        numbers = len(cls._fields) - 2
        fields = [
            lax.bitcast_convert_type(matrix[:, i], DTYPES.get(name, np.int32))
            for i, name in enumerate(cls._fields[:-2])
        ]
        return cls._make([*fields, matrix[:, numbers:-steps], matrix[:, -steps:]])


@jax.tree_util.register_static
class CallSettings(NamedTuple):
    """Static settings of the calls. Hashable."""

    sampling: SamplingParams  # one for all slots, unless `by_request`
    by_request: bool  # each slot has its own temperature and filters
    filters: bool  # some slot of `by_request` may have a filter
    attention: Implementation
    slots_per_prompt: int = 1  # slots that read one prompt row, about
    record_routes: bool = False
    record_kept: bool = False
    heads: HeadAxes | None = None  # axes of the mesh in scope that split the heads
    experts: Layout | None = None  # layout of experts, whose layers split themselves

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Layers of experts find their layout while the block runs."""
        with self.experts.for_layers() if self.experts else nullcontext():
            yield


class Decoded(NamedTuple):
    """What a call sampled. Columns count from the slot's entries at the call's start."""

    packed_BX: jax.Array  # int32: tokens [B, M], bits of the log-probs [B, M], counts, live slots
    steps: jax.Array  # decode steps
    routes: jax.Array | None  # experts of the tokens that were read, [B, M, L, K]
    kept: jax.Array | None  # ids that filters kept, [B, M, K]

    def read(self) -> "Results":
        """The arrays on the host."""
        packed, routes, kept = jax.device_get((self.packed_BX, self.routes, self.kept))
        steps = (packed.shape[1] - 2) // 2
        return Results(
            packed[:, :steps],
            packed[:, steps : 2 * steps].copy().view(np.float32),
            packed[:, -2],
            packed[:, -1] != 0,
            routes,
            kept,
        )


class Results(NamedTuple):
    """A `Decoded` on the host."""

    tokens_BM: np.ndarray
    logprobs_BM: np.ndarray
    count_B: np.ndarray
    live_B: np.ndarray
    routes: np.ndarray | None
    kept: np.ndarray | None

    def rows(self) -> list[Any]:
        """The fields by slot, as lists."""
        none = [None] * len(self.count_B)
        numbers = (self.tokens_BM, self.logprobs_BM, self.count_B, self.live_B)
        records = [none if x is None else x for x in (self.routes, self.kept)]
        return [*(x.tolist() for x in numbers), *records]


def decode_steps(
    spec: ModelSpec,
    params: Any,
    cache: Cache,
    turns_BX: jax.Array,
    most: jax.Array,
    enough: jax.Array,
    settings: CallSettings,
    *,
    steps: int,
) -> tuple[Cache, Decoded]:
    """Up to `most` decode steps in the live slots; fewer once `enough` of them have ended.

    `turns_BX` is a packed `Turns` with `steps` given tokens; `most` is at most `steps`.
    """
    turns = Turns.unpacked(turns_BX, steps)
    slots = turns.live_B.shape[0]
    own = keys_and_values(cache).own
    pages = PageSizes(
        entries=own.shape[3],
        num_pages=own.shape[0],
        per_slot=turns.pages_BT.shape[1],
        scarce=False,  # the host gave each slot its pages
    )
    zero = jnp.int32(0)
    sampling = settings.sampling
    kept = sampling.num_kept(spec.config.vocab_size) if settings.record_kept else 0
    state = State(
        cache=cache,
        table=PageTable(turns.pages_BT, jnp.zeros((1,), jnp.int32)),
        slots=Slots(
            row_B=jnp.arange(slots),
            prompt_row_B=turns.prompt_row_B,
            token_B=turns.token_B,
            count_B=turns.count_B,
            live_B=turns.live_B != 0,
        ),
        prompt_row_G=jnp.zeros((1,), jnp.int32),
        prefilled=zero,
        head=zero,
        tokens_NR=jnp.full((slots, steps), -1, jnp.int32),
        logprobs_NR=jnp.zeros((slots, steps), jnp.float32),
        stop_states_N=None,
        steps=zero,
        prefills=zero,
        slot_steps=zero,
        live_slot_steps=zero,
        stalled_slot_steps=zero,
        routes=empty_routes(spec.config, 1, slots, 1, steps) if settings.record_routes else None,
        kept_NRK=no_kept(slots, steps, kept) if kept else None,
    )
    rows = Rows(
        lengths_N=turns.beginning_B + 1,
        sample_ids_N=turns.sample_B,
        limits_N=turns.limit_B,
        begun_N=turns.begun_B,
        first_N=turns.count_B,
        given_NR=turns.given_BM,
        sampling=RowSampling(turns.temperature_B, turns.top_k_B, turns.top_p_B, turns.min_p_B)
        if settings.by_request
        else None,
    )
    keys = jax.random.wrap_key_data(jnp.stack([turns.key_B, turns.key2_B], axis=-1))
    body = partial(
        decode,
        spec,
        params,
        rows,
        settings.slots_per_prompt,
        pages,
        keys,
        sampling,
        attention=settings.attention,
        heads=settings.heads,
        filters=settings.filters,
    )
    num_live = state.slots.num_live

    def goes_on(now: State) -> jax.Array:
        live = now.slots.num_live
        return (now.steps < most) & (live > 0) & (num_live - live < enough)

    with settings.scope():
        after = lax.while_loop(goes_on, body, state)
    columns = (after.slots.count_B, after.slots.live_B)
    packed = [after.tokens_NR, lax.bitcast_convert_type(after.logprobs_NR, jnp.int32)]
    packed += [x.astype(jnp.int32)[:, None] for x in columns]
    routes = None if after.routes is None else after.routes.read_NR
    return _in_place(after.cache, settings.heads), Decoded(
        jnp.concatenate(packed, axis=1), after.steps, routes, after.kept_NRK
    )


class Given(NamedTuple):
    """Tokens to compute into the cache, in rows that are padded on the right."""

    tokens_AL: Any
    length_A: Any
    start_A: Any  # own entries before them
    prompt_row_A: Any
    beginning_A: Any  # entries of the beginning
    pages_AT: Any  # pages from the sequence's first on


def extend(
    spec: ModelSpec,
    params: Any,
    cache: Cache,
    given: Given,
    settings: CallSettings,
    *,
    into_row: bool,
    sees_cache: bool,
) -> tuple[Cache, jax.Array | None]:
    """Compute given tokens into the cache; the experts that they took, [A, L, layers, K].

    `into_row` writes them into their prompt rows, as a beginning, in place of the pages.
    `sees_cache` False is for tokens before which the sequence has none: then no entry is read.
    """
    tokens_AL = given.tokens_AL
    place_L = jnp.arange(tokens_AL.shape[1], dtype=jnp.int32)
    real_AL = place_L < given.length_A[:, None]
    entry_AL = given.start_A[:, None] + place_L
    attend = extend_attend(
        given.prompt_row_A,
        given.beginning_A,
        given.pages_AT,
        entry_AL,
        real_AL,
        into_row=into_row,
        sees_cache=sees_cache,
        implementation=settings.attention,
        heads=settings.heads,
    )
    with settings.scope():
        _, cache, routed = bind(spec, params).routed(
            jnp.where(real_AL, tokens_AL, 0),
            entry_AL if into_row else given.beginning_A[:, None] + entry_AL,
            attend=attend,
            cache=cache,
            residual_dtype=RESIDUAL_DTYPE,
            routing=None if spec.config.mixture is None else Routing(real_BT=real_AL),
        )
    cache = _in_place(cache, settings.heads)
    if not settings.record_routes or routed is None:
        return cache, None
    return cache, jnp.moveaxis(routed.chosen_BTK, 0, 2)


def _in_place(cache: Cache, heads: HeadAxes | None) -> Cache:
    """The cache split as the next call gets it, so that its memory can be donated."""
    if heads is None:
        return cache
    return jax.tree.map(lax.with_sharding_constraint, cache, cache_specs(cache, heads))
