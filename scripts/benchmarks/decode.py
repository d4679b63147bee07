"""Decode attention alone: one token a slot over caches of uneven lengths, in bytes a second.

The layers of a step, one after the other, whose results are the next one's queries.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Case, poison, relative_error, require
from benchmarks.options import Options
from benchmarks.roofline import H200
from benchmarks.workloads import mix_limits
from jaxrl_llm.kernels.decode_attention import (
    DecodeImplementation,
    DecodeInputs,
    DecodeSchedule,
    block_entries,
    cache_length,
    decode_schedule,
    default_tuning,
    prefix_decode_attention,
    prefix_decode_attention_reference,
)
from jaxrl_llm.kernels.float8 import FLOAT8

MOST_ERROR = 1e-2
NUM_CHECKED = 8  # slots
LONG_ENOUGH_S = 0.05
# One after the other in one program, as a step's layers are: launched by themselves, calls of few
# slots would take as long as the launch.
CALLS = 32
# The caches of a call must not be in the GPU's second-level cache (50 MB) from the call before, so
# calls go round several copies. Those of one slot are so small that all of them stay there. Each
# copy is three arguments more, which the host hands over while the GPU waits if there are too many.
COPIES_BYTES = 512 * 2**20
MOST_COPIES = 16

Copy = tuple[jax.Array, jax.Array]  # prompts and the slots' lists of pages
# New entries, and each slot's prompt row, prompt length and own length.
Shared = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class Decode(Case):
    """One implementation on `slots` sequences, each `group` of which share a prompt.

    The schedule is made once, as generation makes one for all layers of a step.
    """

    benchmark = "attention"
    warm = True  # the check runs what is timed
    min_seconds = LONG_ENOUGH_S

    def __init__(
        self,
        shape: str,
        who: str,
        implementation: DecodeImplementation,
        sizes: tuple[int, int, int, int],
        options: Options,
    ) -> None:
        self.shape, self.who = shape, who
        self.implementation: DecodeImplementation = implementation
        self.slots, self.prompt, self.own, self.group = sizes
        heads = "" if options.head_dim is None else f"_d{options.head_dim}"
        shared = "_shared" if self.group > 1 else ""
        float8 = "_float8" if options.cache == "float8" else ""
        self.name = f"decode{heads}_{self.slots}x{self.own}{shared}{float8}"
        self.model, self.dtype = options.heads_of(shape), FLOAT8 if float8 else jnp.bfloat16
        rng = np.random.default_rng(3)
        limits = np.asarray(mix_limits(shape, self.slots))
        # Somewhere in its answer, the current token included.
        self.lengths = np.minimum(rng.integers(1, limits + 1), self.own).astype(np.int32)
        # Over all of them, the first and the last included.
        self.checked = np.unique(np.linspace(0, self.slots - 1, NUM_CHECKED).astype(int))
        itemsize = jnp.dtype(self.dtype).itemsize
        self.token_bytes = 2 * self.model.num_kv_heads * self.model.head_dim * itemsize

    def lower(self) -> dict[str, jax.stages.Lowered]:
        schedule, q, own, copy, shared = jax.eval_shape(self._inputs, jax.random.key(0))
        copies = self._num_copies()
        main = jax.jit(self._layers, donate_argnames="own").lower(
            schedule, q, own=[own] * copies, copies=[copy] * copies, shared=shared
        )
        self.results = main.out_info[:2]
        reference = jax.jit(self._reference).lower(q, own, copy, shared)
        return {"main": main, "reference": reference}

    def _num_copies(self) -> int:
        if jax.default_backend() != "gpu":
            return 1
        _, own, (prefix, _), _ = jax.eval_shape(self._arrays, jax.random.key(0))
        entries = (prefix.size + own.size) // (2 * self.model.num_kv_heads * self.model.head_dim)
        return min(MOST_COPIES, -(-COPIES_BYTES // (entries * self.token_bytes)))

    def prepare(self, programs: dict[str, jax.stages.Compiled]) -> None:
        self.programs, make = programs, jax.jit(self._inputs)
        made = [make(jax.random.key(seed)) for seed in range(self._num_copies())]
        self.schedule, self.q, _, _, self.shared = made[0]
        self.pages, self.copies = [own for _, _, own, _, _ in made], [x for *_, x, _ in made]

    def check(self) -> dict[str, float]:
        """Some slots of the first call against the float32 reference; the last call is finite.

        What the kernel leaves unwritten is NaN, as far as results lie where others were freed.
        """
        poison(self.results)
        first, last = self.run()
        expected = self.programs["reference"](self.q, self.pages[0], self.copies[0], self.shared)
        error = relative_error(first[self.checked], expected)
        require("output_error", error, MOST_ERROR)
        (_, pages), (new, *_, lengths) = self.copies[0], self.shared
        page = self.pages[0].shape[3]
        newest = pages[jnp.arange(self.slots), (lengths - 1) // page]
        written = self.pages[0][newest, :, :, (lengths - 1) % page]
        require("new entries not in their pages", float((written != new).sum()), 0.0)
        require("not finite", float(~jnp.isfinite(last).all()), 0.0)
        return {"output_error": error}

    def run(self) -> Any:
        # The pages are given away and come back with the same entries written once more.
        first, last, self.pages = self.programs["main"](
            self.schedule, self.q, own=self.pages, copies=self.copies, shared=self.shared
        )
        return first, last

    def figures(self, seconds: float) -> dict[str, float]:
        seconds /= CALLS
        own = int(self.lengths.sum())
        unique = own + self.slots // self.group * self.prompt
        read = own + self.slots * self.prompt
        figures = {"us a call": seconds * 1e6, "GB/s": unique * self.token_bytes / seconds / 1e9}
        if self.group > 1:
            figures["GB/s, each slot its prompt"] = read * self.token_bytes / seconds / 1e9
        figures["fraction of 4.46 TB/s"] = unique * self.token_bytes / seconds / H200.memory
        return figures

    def _layers(
        self,
        schedule: DecodeSchedule,
        q: jax.Array,
        own: list[jax.Array],
        copies: list[Copy],
        shared: Shared,
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """The first call's result and the last one's, and the pages."""
        attention = jax.jit(self._call)  # lowered once
        results, own = [q], list(own)
        for call in range(CALLS):
            copy = call % len(own)
            result, own[copy] = attention(schedule, results[-1], own[copy], copies[copy], shared)
            results.append(result)
        return results[1], results[-1], own

    def _call(
        self, schedule: DecodeSchedule, q: jax.Array, own: jax.Array, copy: Copy, shared: Shared
    ) -> tuple[jax.Array, jax.Array]:
        (prefix, pages), (new, rows, prefix_lengths, lengths) = copy, shared
        inputs = DecodeInputs(q, new, prefix, rows, prefix_lengths, own, pages, lengths)
        return prefix_decode_attention(
            inputs, implementation=self.implementation, schedule=schedule
        )

    def _reference(self, q: jax.Array, own: jax.Array, copy: Copy, shared: Shared) -> jax.Array:
        (prefix, pages), (new, rows, prefix_lengths, lengths) = copy, shared
        few = self.checked
        inputs = DecodeInputs(
            q[few],
            new[few],
            prefix[rows[few]],
            jnp.arange(len(rows[few])),
            prefix_lengths[few],
            own,
            pages[few],
            lengths[few],
        )
        return prefix_decode_attention_reference(inputs)

    def _inputs(self, key: jax.Array) -> tuple[DecodeSchedule, jax.Array, jax.Array, Copy, Shared]:
        q, own, copy, shared = self._arrays(key)
        (prefix, pages), (_, rows, prefix_lengths, lengths) = copy, shared
        schedule = decode_schedule(
            rows,
            prefix_lengths,
            lengths,
            group_size=self.model.num_heads // self.model.num_kv_heads,
            num_kv_heads=self.model.num_kv_heads,
            prefix_capacity=prefix.shape[3],
            own_capacity=pages.shape[1] * own.shape[3],
            slots_per_prompt=self.group,
            tuning=default_tuning(self.model.head_dim, self.dtype),
        )
        return schedule, q, own, copy, shared

    def _arrays(self, key: jax.Array) -> tuple[jax.Array, jax.Array, Copy, Shared]:
        """Queries, pages, the rest of a copy of the caches, and what all copies share."""
        B, K, H = self.slots, self.model.num_kv_heads, self.model.head_dim
        keys = iter(jax.random.split(key, 5))

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.bfloat16)

        prompts = (B // self.group, K, 2, cache_length(self.prompt, H), H)
        page = block_entries(H)
        pages_a_slot = cache_length(self.own, H) // page
        own = (B * pages_a_slot, K, 2, page, H)
        pages = jax.random.permutation(next(keys), B * pages_a_slot)
        q, own = normal(B, self.model.num_heads, H), normal(*own).astype(self.dtype)
        new = normal(B, K, 2, H).astype(self.dtype)
        prefix = normal(*prompts).astype(self.dtype)
        rows = jnp.arange(B, dtype=jnp.int32) // self.group
        prefix_lengths = jnp.full((B,), self.prompt, jnp.int32)
        copy = prefix, pages.reshape(B, pages_a_slot).astype(jnp.int32)
        return q, own, copy, (new, rows, prefix_lengths, jnp.asarray(self.lengths))


def decode_cases(options: Options, shape: str) -> list[Case]:
    """Every number of slots, with prompts of their own and with shared ones."""
    ours: DecodeImplementation = "pallas" if jax.default_backend() == "gpu" else "auto"
    who: list[tuple[str, DecodeImplementation]] = [("ours", ours)]
    if options.baseline:
        who.append(("xla", "xla"))
    prompt, samples = options.sizes(shape)[0], options.group_sizes(shape)[1]
    cases: list[Case] = []
    for slots, own in options.batches_of(shape, "decode"):
        groups = [1] if slots % samples or samples == 1 else [1, samples]
        for group in groups:
            cases += [Decode(shape, *pair, (slots, prompt, own, group), options) for pair in who]
    return cases
