"""The engine that the host talks to: sequences come, wait, go on and end, in one cache.

    engine = Engine(spec, params, settings)
    sequence = engine.add(prompt_ids, limit=100, seed_key=key, sample_id=0)
    while engine.has_work:
        for sequence in engine.step():  # sequences that got ids
            if sequence.status == "waiting":
                engine.append(sequence, observation_ids, limit=100)   # or engine.finish(sequence)

A call of `step` computes ids that were given (`extend`), then decodes some steps (`decode_steps`).
A sequence holds pages, and a slot only while it decodes. So many more sequences may wait for a tool
than are decoded at once. docs/engine.md has a picture.

`generate` (engine.py) answers a batch without the host, with the same decode step.

Shape letters: see calls.py.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed.layout import Layout
from jaxrl_llm.generation.calls import (
    CallSettings,
    Given,
    Shape,
    Turns,
    decode_steps,
    extend,
)
from jaxrl_llm.generation.engine import compiler_options, generation_form, split_of
from jaxrl_llm.generation.kv_cache import Cache, HeadAxes, cache_specs, init_cache
from jaxrl_llm.generation.page_pool import Key, PagePool
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.sequence import Beginning, Sampling, Sequence
from jaxrl_llm.generation.settings import Quantization
from jaxrl_llm.generation.sizes import FEWEST_SLOTS
from jaxrl_llm.kernels.decode_attention.pipeline import block_entries
from jaxrl_llm.kernels.flash_attention import Implementation
from jaxrl_llm.kernels.float8 import FLOAT8
from jaxrl_llm.kernels.hopper import on_gpu
from jaxrl_llm.models.base import ModelConfig, ModelSpec, bind

# Given ids up to this number are decoded one a step, with others that decode. More are computed at
# once (docs/engine.md has the times).
FEWEST_EXTENDED = 16
# Numbers of slots of a call: steps of SLOT_STEP where matmuls bound it.
FEW_SLOTS, SLOT_STEP = (FEWEST_SLOTS, 32, 64, 160, 256, 384), 256
FREE = (0,) * (len(Turns._fields) - 2)  # numbers of a slot without a sequence
EXTENDED = 2048  # most ids of one row of `extend`
# We assume that a GPU computes COMPUTED ids in about the time of one. Rows of `extend`, and pages
# that it reads, come in steps of COARSE. Each pair of sizes compiles a program, so they are few.
COMPUTED, COARSE = 512, 4
FLOAT32_PAGE = 32  # entries of a page where no kernel reads it


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of an `Engine`. Numbers of slots and pages are for one replica."""

    max_context: int  # most ids of a sequence
    num_slots: int  # most sequences that decode at once
    cache_tokens: int  # ids that fit into the pages, of all sequences; 0: as many as slots can hold
    stop_ids: tuple[int, ...] = ()  # each of them ends a turn
    sampling: SamplingParams | None = None  # one for all sequences; None: each has its own
    num_beginnings: int = 0  # prompts that are shared by groups, in rows of their own
    beginning_tokens: int = 0  # most ids of such a prompt
    group: int = 1  # sequences that share a prompt, about
    steps: int = 32  # most decode steps of a call
    prefill_tokens: int = 8192  # ids of one call of `extend`, about
    quantization: Quantization = "none"
    in_generation_form: bool = False  # the weights have been through `formed`
    attention: Implementation = "auto"
    record_routes: bool = False
    record_kept: bool = False
    # The same program for one sequence and for many, so that a sequence has the same bits whatever
    # else runs. None: where the model computes in float32.
    fixed_shapes: bool | None = None
    entries: int = 0  # ids of a page; 0: the block of the decode kernel


@dataclass(eq=False)
class Engine:
    """A model, its cache, and the sequences in it. One thread calls it."""

    spec: ModelSpec
    params: Any  # in the dtype to compute in
    settings: EngineSettings
    layout: Layout | None = None  # where several devices share the heads; weights lie so
    _queued: list[Sequence] = field(default_factory=list, init=False)
    _running: dict[Sequence, None] = field(default_factory=dict, init=False)
    _unfinished: dict[int, Sequence] = field(default_factory=dict, init=False)  # by arrival
    _waiting: set[Sequence] = field(default_factory=set, init=False)
    _arrived: int = field(default=0, init=False)
    num_steps: int = field(default=0, init=False)  # decode steps so far
    num_computed: int = field(default=0, init=False)  # given ids that were computed at once

    def __post_init__(self) -> None:
        settings, config = self.settings, self.spec.config
        heads, experts = split_of(config, self.layout)
        if not settings.in_generation_form:
            assert heads is None
            self.spec, self.params = formed(self.spec, self.params, settings.quantization)
        dtype = bind(self.spec, self.params).dtype
        cache_dtype = dtype if settings.quantization == "none" else FLOAT8
        plain = dtype == jnp.float32
        entries = settings.entries or (FLOAT32_PAGE if plain else _block(config))
        self._fixed = plain if settings.fixed_shapes is None else settings.fixed_shapes
        self._slots = max(settings.num_slots, FEWEST_SLOTS if on_gpu() else 1)
        self._sizes = slot_sizes(self._slots)
        self._pages_each = -(-settings.max_context // entries)
        number = -(-settings.cache_tokens // entries)
        if not settings.cache_tokens:
            own = -(-(settings.max_context - settings.beginning_tokens) // entries)
            number = self._slots * own + self._pages_each  # the oldest one may hold some back
        number = max(self._pages_each, number)
        self._pool = PagePool(number, entries)
        self._rows = list(range(settings.num_beginnings - 1, -1, -1))
        # Of a model with states, or latent keys, tokens are given in decode steps alone.
        self._extends = config.delta is None and config.latent is None
        # Entries of another sequence come without the experts that its ids took.
        self._reads_equal = self._extends and not settings.record_routes
        # A state stays in its slot, so a sequence keeps the slot until it ends.
        self._free_slots = list(range(self._slots)) if config.delta is not None else None
        sizes: dict[str, Any] = dict(
            num_prompts=settings.num_beginnings + 1 if settings.num_beginnings else 1,
            prompt_length=max(settings.beginning_tokens, 1),
            num_pages=number,
            page_entries=entries,
            num_slots=self._slots,
            dtype=cache_dtype,
            state_dtype=dtype,
        )
        # On the devices of the weights from the first call on, or each program is compiled twice.
        place = jax.tree.leaves(self.params)[0].sharding
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, PartitionSpec())
        if self.layout is None or heads is None:
            self._cache = jax.device_put(init_cache(config, **sizes), place)
        else:
            self._cache = _split_cache(self.layout.mesh, heads, config, tuple(sizes.items()))()
        self._how = CallSettings(
            sampling=replace(
                settings.sampling or SamplingParams(max_new_tokens=settings.max_context),
                stop_token_ids=settings.stop_ids,
                stop_strings=None,
            ),
            by_request=settings.sampling is None,
            filters=False,
            attention=settings.attention,
            slots_per_prompt=settings.group,
            record_routes=settings.record_routes,
            record_kept=settings.record_kept,
            heads=heads,
            experts=experts,
        )

    # -------------------------------------------------------------------------- sequences

    @property
    def has_work(self) -> bool:
        """True while a sequence can go on without `append`."""
        return bool(self._queued or self._running)

    @property
    def num_free_tokens(self) -> int:
        """Ids for which pages are free."""
        return self._pool.num_free * self._pool.entries

    def counts(self) -> dict[str, int]:
        """The numbers of sequences by status."""
        return {
            "queued": len(self._queued),
            "running": len(self._running),
            "waiting": len(self._waiting),
        }

    def beginning(self, tokens: Seq[int]) -> Beginning:
        """A prompt that several sequences share; give it to `add` in place of the ids."""
        if not 1 <= len(tokens) - 1 <= self.settings.beginning_tokens or not self._extends:
            return Beginning(tokens=())
        return Beginning(tokens=tuple(tokens[:-1]))

    def add(
        self,
        prompt: Seq[int],
        *,
        limit: int,
        seed_key: np.ndarray,
        sample_id: int,
        sampling: Sampling | None = None,
        beginning: Beginning | None = None,
        response: Seq[int] = (),
    ) -> Sequence:
        """A new sequence, whose first turn has at most `limit` sampled ids.

        It goes on after `response`, which older weights sampled; those ids count as given.

        The id at place i of the response, appended ids counted, is drawn with the key
        fold_in(fold_in(`seed_key`, `sample_id`), i). `beginning` was made of the same prompt.

        Raises: ValueError for a prompt that leaves no room.
        """
        given = [*prompt, *response]
        if not prompt or len(given) >= self.settings.max_context:
            raise ValueError(
                f"the prompt has {len(given)} ids, and a sequence at most "
                f"{self.settings.max_context}"
            )
        shared = beginning if beginning is not None and beginning.tokens else None
        sequence = Sequence(
            tokens=given,
            sampled=[False] * len(given),
            logprobs=[0.0] * len(given),
            num_prompt=len(prompt),
            seed_key=np.asarray(seed_key, np.uint32),
            sample_id=sample_id,
            sampling=sampling or Sampling(),
            beginning=shared,
            number=self._arrived,
        )
        if shared is not None:
            shared.readers += 1
        self._unfinished[sequence.number] = sequence
        self._arrived += 1
        self._set_limit(sequence, limit)
        self._queued.append(sequence)
        return sequence

    def append(self, sequence: Sequence, tokens: Seq[int], *, limit: int) -> None:
        """Let a waiting sequence go on after `tokens`, with at most `limit` sampled ids.

        Raises: ValueError if it has no room for them and one more.
        """
        assert sequence.status == "waiting", sequence.status
        if len(sequence.tokens) + len(tokens) >= self.settings.max_context:
            raise ValueError(
                f"{len(tokens)} ids after {len(sequence.tokens)} leave no room in a sequence of at "
                f"most {self.settings.max_context}"
            )
        sequence.tokens += tokens
        sequence.sampled += [False] * len(tokens)
        sequence.logprobs += [0.0] * len(tokens)
        self._set_limit(sequence, limit)
        self._waiting.discard(sequence)
        sequence.status = "queued"
        self._queued.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence: its pages are free, and stay readable for equal beginnings."""
        self._end(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence at once, in the middle of a turn too."""
        if sequence.status != "ended":
            sequence.stop_reason = "aborted"
        self._end(sequence)

    def _set_limit(self, sequence: Sequence, limit: int) -> None:
        sequence.limit = min(len(sequence.tokens) + max(limit, 1), self.settings.max_context)
        sequence.stop_reason = None

    def _end(self, sequence: Sequence) -> None:
        if sequence.status == "ended":
            return
        if sequence.status == "queued":
            self._queued.remove(sequence)
        self._running.pop(sequence, None)
        self._waiting.discard(sequence)
        del self._unfinished[sequence.number]
        self._note(sequence)
        self._pool.release(sequence.pages)
        sequence.pages, sequence.status = [], "ended"
        if self._free_slots is not None and sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
        if (shared := sequence.beginning) is not None:
            shared.readers -= 1
            if not shared.readers and shared.row != -1:  # below -1: taken, and not computed
                self._rows.append(shared.row if shared.row >= 0 else -2 - shared.row)
                shared.row = -1

    # ------------------------------------------------------------------------------- step

    def step(self, most: int = 0, *, enough: int = 0) -> list[Sequence]:
        """Compute given ids, then decode up to `most` steps; the sequences that changed.

        It returns earlier when `enough` sequences have ended their turn; 0: a sixteenth of them.
        """
        with nullcontext() if self.layout is None else jax.set_mesh(self.layout.mesh):
            while self._admit():
                self._compute()
            self._compute()
            return self._decode(most or self.settings.steps, enough)

    def _oldest(self) -> Sequence | None:
        return next(iter(self._unfinished.values()), None)

    def _held_back(self, oldest: Sequence | None, sequence: Sequence) -> int:
        """Pages that `sequence` may not take: the oldest one needs them to end."""
        if oldest is None or sequence is oldest:
            return 0
        return max(0, self._pages_each - len(oldest.pages))

    def _admit(self) -> bool:
        """Let queued sequences run, in the order of their arrival, while memory lasts.

        A sequence is passed over while another begins to compute a page that both begin with.
        Returns: whether one was, so that it is asked again once that page is there.
        """
        oldest, begun, passed = self._oldest(), set[Key](), False
        self._queued.sort(key=lambda x: x.number)
        place = 0
        while place < len(self._queued) and len(self._running) < self._slots:
            sequence = self._queued[place]
            shared = sequence.beginning
            if self._free_slots is not None and sequence.slot < 0 and not self._free_slots:
                break
            if shared is not None and shared.row == -1:
                if not self._rows:  # readers of the rows may stand behind it, and go on
                    place += 1
                    continue
                shared.row = -2 - self._rows.pop()  # taken, and not computed
            if not sequence.pages and shared is None and self._reads_equal:
                sequence.pages = self._pool.match(sequence.own[:-1])
                following = self._pool.key_after(sequence.pages, sequence.own[:-1])
                if following in begun:
                    self._pool.release(sequence.pages)
                    sequence.pages, passed = [], True
                    place += 1
                    continue
                sequence.computed = len(sequence.pages) * self._pool.entries
            else:
                following = None
            needed = self._missing(sequence, len(sequence.own))
            if needed > self._pool.num_free - self._held_back(oldest, sequence):
                break
            if following is not None:
                begun.add(following)
            sequence.pages += self._pool.take(needed)
            if self._free_slots is not None and sequence.slot < 0:
                sequence.slot = self._free_slots.pop(0)
            sequence.status = "running"
            self._running[self._queued.pop(place)] = None
        return passed

    def _missing(self, sequence: Sequence, entries: int) -> int:
        return max(0, -(-entries // self._pool.entries) - len(sequence.pages))

    def _compute(self) -> None:
        """Compute what running sequences were given."""
        self._compute_beginnings()
        self._compute_given()

    def _compute_beginnings(self) -> None:
        """Compute the shared prompts of sequences that begin to run."""
        new = {id(s.beginning): s.beginning for s in self._running if s.beginning is not None}
        todo = [shared for shared in new.values() if shared.row < -1]
        for shared in todo:
            shared.row = -2 - shared.row
        for width, group in _by_width([(len(s.tokens), s) for s in todo]).items():
            for rows, part in self._parts(group, width):
                given = _given(rows, width, pages=1)
                for i, shared in enumerate(part):
                    given.tokens_AL[i, : len(shared.tokens)] = shared.tokens
                    given.length_A[i], given.prompt_row_A[i] = len(shared.tokens), shared.row
                routes = self._extend(given, into_row=True, sees_cache=False)
                for i, shared in enumerate(part):
                    self.num_computed += len(shared.tokens)
                    if routes is not None:
                        shared.routes = routes[i, : len(shared.tokens)]

    def _compute_given(self) -> None:
        """Compute the given ids of running sequences, but for the few that decode steps take."""
        while self._extends:
            todo = [s for s in self._running if s.left_to_compute > self._fewest_extended(s)]
            if not todo:
                return
            groups: dict[Any, list[Sequence]] = {}
            for sequence in todo:
                number = self._extended(sequence)
                end = sequence.computed + number
                sees = sequence.computed > 0 or sequence.base > 0
                pages = -(-end // self._pool.entries) if sees else 1
                pages = _coarse(pages, 1, self._pages_each)
                groups.setdefault((self._width(number), sees, pages), []).append(sequence)
            for (width, sees, pages), group in sorted(groups.items(), key=lambda x: x[0]):
                for rows, part in self._parts(group, width):
                    self._extend_some(part, rows, width, sees, pages)

    def _fewest_extended(self, sequence: Sequence) -> int:
        """Given ids that decode steps take. With fixed shapes they take none of a prompt.

        An equal beginning may be found in the cache, and decode steps give entries other bits.
        """
        of_prompt = sequence.computed < sequence.num_prompt - 1 - sequence.base
        return 0 if self._fixed and of_prompt else FEWEST_EXTENDED

    def _extend_some(
        self, part: list[Sequence], rows: int, width: int, sees: bool, pages: int
    ) -> None:
        numbers = [self._extended(s) for s in part]
        if not sees:  # the pages are written all the same
            pages = _power(-(-width // self._pool.entries), self._pages_each)
        given = _given(rows, width, pages)
        for i, (sequence, number) in enumerate(zip(part, numbers, strict=True)):
            start, own = sequence.computed, sequence.own
            given.tokens_AL[i, :number] = own[start : start + number]
            given.length_A[i], given.start_A[i] = number, start
            given.beginning_A[i] = sequence.base
            if sequence.beginning is not None:
                given.prompt_row_A[i] = sequence.beginning.row
            table = sequence.pages[:pages]
            given.pages_AT[i, : len(table)] = table
        routes = self._extend(given, into_row=False, sees_cache=sees)
        for i, (sequence, number) in enumerate(zip(part, numbers, strict=True)):
            sequence.computed += number
            self.num_computed += number
            if routes is not None:
                sequence.routes.append(routes[i, :number])
            self._note(sequence)

    def _note(self, sequence: Sequence) -> None:
        """Let other sequences read the pages that are full."""
        if sequence.beginning is None and self._reads_equal:
            # Decode steps give entries other bits than `extend`.
            shared = sequence.num_prompt - 1 if self._fixed else sequence.computed
            self._pool.note(sequence.pages, sequence.tokens, min(shared, sequence.computed))

    def _extended(self, sequence: Sequence) -> int:
        """Given ids that the next call computes; with fixed shapes up to the end of a page."""
        most = self._pool.entries - sequence.computed % self._pool.entries
        return min(sequence.left_to_compute, most if self._fixed else EXTENDED)

    def _width(self, number: int) -> int:
        return self._pool.entries if self._fixed else max(_power(number), FEWEST_EXTENDED)

    def _parts(self, group: list[T], width: int) -> Iterator[tuple[int, list[T]]]:
        """The rows of each call of `extend`, and what it computes. At most half of a call is empty.

        The smallest call is an exception.
        """
        most = 1 if self._fixed else max(1, self.settings.prefill_tokens // width)
        least = COMPUTED // width if on_gpu() else 1
        while group:
            rows = _coarse(len(group), least, most)
            if rows > least and 2 * len(group) < rows:
                rows //= COARSE
            yield rows, group[:rows]
            group = group[rows:]

    def _extend(self, given: Given, *, into_row: bool, sees_cache: bool) -> np.ndarray | None:
        self._cache, routes = _extend(
            self.spec,
            self.params,
            self._cache,
            given,
            self._how,
            into_row=into_row,
            sees_cache=sees_cache,
        )
        return None if routes is None else np.asarray(routes)

    def _decode(self, most: int, enough: int) -> list[Sequence]:
        steps, oldest = self.settings.steps, self._oldest()
        live = []
        for sequence in sorted(self._running, key=lambda x: x.number):
            entries = min(sequence.computed + most, sequence.limit - sequence.base - 1)
            if missing := self._missing(sequence, entries):
                room = self._pool.num_free - self._held_back(oldest, sequence)
                sequence.pages += self._pool.take(min(missing, max(room, 0)))
            if len(sequence.pages) * self._pool.entries > sequence.computed:
                live.append(sequence)
        if not live:
            holders = [x for x in (*self._running, *self._queued) if x.pages]
            if holders and not self._waiting:
                self._evict(max(holders, key=lambda x: x.number))
            return []
        whole = self._fixed or self._free_slots is not None
        slots = self._slots if whole else min(x for x in self._sizes if x >= len(live))
        # Of a model with states, a sequence keeps its slot.
        placed = live if self._free_slots is None else _in_slots(live)
        shape = Shape(slots, self._pages_each, steps)
        enough = enough or max(1, len(live) // 16)
        filters = any(sequence.sampling.has_filter for sequence in live)
        self._cache, decoded = _decoding(slots)(
            self.spec,
            self.params,
            self._cache,
            self._packed(placed, shape),
            np.int32(min(most, steps)),
            np.int32(enough),
            self._how._replace(filters=filters),
            steps=steps,
        )
        results = decoded.read()
        self.num_steps += int(decoded.steps)
        for sequence, *sampled in zip(placed, *results.rows(), strict=False):
            if sequence is not None:
                self._take(sequence, *sampled)
        return live

    def _evict(self, sequence: Sequence) -> None:
        """Take the pages of a sequence, as none could go on. It is computed again."""
        self._pool.release(sequence.pages)
        sequence.pages, sequence.computed, sequence.routes = [], 0, []
        if sequence.status == "running":
            sequence.status = "queued"
            del self._running[sequence]
            self._queued.append(sequence)

    def _packed(self, placed: Seq[Sequence | None], shape: Shape) -> np.ndarray:
        """What the slots do, as `Turns` has it."""
        numbers, pages, given, entries = [], [], [], self._pool.entries
        for sequence in placed:
            if sequence is None:
                numbers.append(FREE)
                pages.append(())
                given.append(())
                continue
            base, computed, tokens = sequence.base, sequence.computed, sequence.tokens
            numbers.append(
                (
                    1,
                    0 if sequence.beginning is None else sequence.beginning.row,
                    base,
                    computed,
                    tokens[base + computed],
                    min(sequence.limit - base - 1, len(sequence.pages) * entries),
                    base + 1 - sequence.num_prompt,
                    sequence.sample_id,
                    *sequence.words,
                )
            )
            pages.append(sequence.pages)
            next_ = base + computed + 1
            given.append(tokens[next_ : next_ + shape.steps])
        return Turns.packed(numbers, pages, given, shape)

    def _take(
        self,
        sequence: Sequence,
        tokens: list[int],
        logprobs: list[float],
        count: int,
        is_live: bool,
        routes: np.ndarray | None,
        kept: np.ndarray | None,
    ) -> None:
        """Take over what a slot sampled."""
        number = count - sequence.computed
        pending = len(sequence.tokens) - sequence.base - 1 - sequence.computed
        new = tokens[pending:number]
        if routes is not None:
            sequence.routes.append(routes[:number])
        if kept is not None:
            first = len(sequence.tokens)
            for i in range(len(new)):
                sequence.kept[first + i] = kept[pending + i]
        sequence.computed += number
        sequence.tokens += new
        sequence.sampled += [True] * len(new)
        sequence.logprobs += logprobs[pending:number]
        if is_live or (not new and len(sequence.tokens) < sequence.limit):
            return
        if new and new[-1] in self.settings.stop_ids:
            sequence.stop_reason = "stop"
        elif len(sequence.tokens) >= sequence.limit:
            full = len(sequence.tokens) >= self.settings.max_context
            sequence.stop_reason = "context" if full else "length"
        else:
            return  # it waits for a page
        sequence.status = "waiting"
        del self._running[sequence]
        self._waiting.add(sequence)


@functools.cache
def _split_cache(
    mesh: Mesh, heads: HeadAxes, config: ModelConfig, sizes: tuple[tuple[str, Any], ...]
) -> Callable[[], Cache]:
    """A program that makes an empty cache in parts: no device has memory for all of them."""
    make = partial(init_cache, config, **dict(sizes))
    specs = cache_specs(jax.eval_shape(make), heads)
    return jax.jit(make, out_shardings=jax.tree.map(partial(NamedSharding, mesh), specs))


def _in_slots(live: Seq[Sequence]) -> list[Sequence | None]:
    """The sequences in their slots."""
    placed: list[Sequence | None] = [None] * (max(sequence.slot for sequence in live) + 1)
    for sequence in live:
        placed[sequence.slot] = sequence
    return placed


def formed(spec: ModelSpec, params: Any, quantization: Quantization) -> tuple[ModelSpec, Any]:
    """The model in generation form; as it is, where it has that form."""
    spec = spec.of_dtype(bind(spec, params).dtype)
    form = _form(spec, quantization)
    return spec if form is None else form[0], params if form is None else form[1](params)


@functools.cache
def _form(spec: ModelSpec, quantization: Quantization) -> tuple[ModelSpec, Any] | None:
    """The generation form of `spec`, and the program that makes its weights; None: it has it."""
    made = []

    def form(params: Any) -> Any:
        after, out = generation_form(spec, params, quantization, split=False)
        made.append(after)
        return out

    jax.eval_shape(form, spec.params)
    return None if made[0] == spec else (made[0], jax.jit(form))


def _block(config: Any) -> int:
    return block_entries(config.cache_heads[1])


def slot_sizes(most: int) -> tuple[int, ...]:
    """The numbers of slots of a call. Each compiles a program, so they are few."""
    tiled = range(2 * SLOT_STEP, most, SLOT_STEP)
    return tuple(sorted({n for n in (*FEW_SLOTS, *tiled) if n < most} | {most}))


def _power(number: int, most: int = 0) -> int:
    """The next power of two, at most `most`."""
    power = 1 << max(number - 1, 0).bit_length()
    return min(power, most) if most else power


def _given(rows: int, width: int, pages: int) -> Given:
    """Empty rows for a call."""
    zeros = partial(np.zeros, dtype=np.int32)
    numbers = [zeros(rows) for _ in Given._fields[1:-1]]
    return Given._make([zeros((rows, width)), *numbers, zeros((rows, pages))])


def _coarse(number: int, least: int, most: int) -> int:
    """The first size from `least` on, in steps of COARSE, that `number` fits; at most `most`."""
    size = max(least, 1)
    while size < number:
        size *= COARSE
    return min(size, most)


def _by_width(items: Iterable[tuple[int, Any]]) -> dict[int, list[Any]]:
    groups: dict[int, list[Any]] = {}
    for length, item in items:
        groups.setdefault(max(_power(length), FEWEST_EXTENDED), []).append(item)
    return dict(sorted(groups.items()))


@functools.cache
def _decoding(slots: int) -> Any:
    """The jitted `decode_steps` for this number of slots."""
    return jax.jit(
        decode_steps,
        static_argnames=("spec", "settings", "steps"),
        donate_argnames="cache",
        compiler_options=compiler_options(slots, slots),
    )


_extend = jax.jit(
    extend,
    static_argnames=("spec", "settings", "into_row", "sees_cache"),
    donate_argnames="cache",
)
