"""Decode attention by itself: one token a slot over caches of uneven lengths, in bytes a second."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.benchmarks.harness import Case, relative_error, require
from jaxrl_llm.benchmarks.options import Options
from jaxrl_llm.benchmarks.roofline import H200
from jaxrl_llm.benchmarks.workloads import mix_limits
from jaxrl_llm.kernels.decode_attention import (
    DecodeImplementation,
    block_entries,
    cache_length,
    prefix_decode_attention,
    prefix_decode_attention_reference,
)
from jaxrl_llm.models.shapes import SHAPES

MOST_ERROR = 1e-2
NUM_CHECKED = 8  # slots
LONG_ENOUGH_S = 0.05
# The caches of a call must not be in the GPU's second-level cache (50 MB) from the call before, so
# calls go round several copies.
COPIES_BYTES = 512 * 2**20
MOST_COPIES = 16


class Decode(Case):
    """One implementation on `slots` sequences, each `group` of which share a prompt."""

    benchmark = "attention"
    min_seconds = LONG_ENOUGH_S

    def __init__(
        self,
        shape: str,
        who: str,
        implementation: DecodeImplementation,
        sizes: tuple[int, int, int, int],
    ) -> None:
        self.shape, self.who = shape, who
        self.implementation: DecodeImplementation = implementation
        self.slots, self.prompt, self.own, self.group = sizes
        self.name = f"decode_{self.slots}x{self.own}" + ("_shared" if self.group > 1 else "")
        self.model = SHAPES[shape]
        rng = np.random.default_rng(3)
        limits = np.resize(mix_limits(shape, self.slots), self.slots)
        # Somewhere in its answer, the current token included.
        self.lengths = np.minimum(rng.integers(1, limits + 1), self.own).astype(np.int32)
        self.token_bytes = 2 * self.model.num_kv_heads * self.model.head_dim * 2

    def lower(self) -> dict[str, jax.stages.Lowered]:
        arrays = jax.eval_shape(self._arrays, jax.random.key(0))
        return {
            "main": jax.jit(self._call).lower(*arrays),
            "reference": jax.jit(self._reference).lower(*arrays),
        }

    def prepare(self, programs: dict[str, jax.stages.Compiled]) -> None:
        self.programs, self.calls = programs, 0
        H = self.model.head_dim
        entries = self.slots * (cache_length(self.own, H) + cache_length(self.prompt, H))
        copies = -(-COPIES_BYTES // (entries * self.token_bytes))
        copies = min(copies, MOST_COPIES) if jax.default_backend() == "gpu" else 1
        make = jax.jit(self._arrays)
        self.inputs = [make(jax.random.key(seed)) for seed in range(copies)]

    def check(self) -> dict[str, float]:
        """The first slots against the float32 reference."""
        (out,) = self.run()
        expected = self.programs["reference"](*self.inputs[0])
        error = relative_error(out[:NUM_CHECKED], expected)
        require("output_error", error, MOST_ERROR)
        return {"output_error": error}

    def run(self) -> Any:
        inputs = self.inputs[self.calls % len(self.inputs)]
        self.calls += 1
        return self.programs["main"](*inputs)

    def figures(self, seconds: float) -> dict[str, float]:
        own = int(self.lengths.sum())
        unique = own + self.slots // self.group * self.prompt
        read = own + self.slots * self.prompt
        figures = {"GB/s": unique * self.token_bytes / seconds / 1e9}
        if self.group > 1:
            figures["GB/s, each slot its prompt"] = read * self.token_bytes / seconds / 1e9
        figures["fraction of 4.46 TB/s"] = unique * self.token_bytes / seconds / H200.memory
        return figures

    def _call(self, *arrays: jax.Array) -> tuple[jax.Array]:
        return (prefix_decode_attention(*arrays, implementation=self.implementation),)

    def _reference(self, *arrays: jax.Array) -> jax.Array:
        q, k_prefix, v_prefix, rows, prefix_lengths, k_own, v_own, pages, lengths = arrays
        few = slice(0, NUM_CHECKED)
        return prefix_decode_attention_reference(
            q[few],
            k_prefix[rows[few]],
            v_prefix[rows[few]],
            jnp.arange(len(rows[few])),
            prefix_lengths[few],
            k_own,
            v_own,
            pages[few],
            lengths[few],
        )

    def _arrays(self, key: jax.Array) -> tuple[jax.Array, ...]:
        B, K, H = self.slots, self.model.num_kv_heads, self.model.head_dim
        keys = iter(jax.random.split(key, 6))

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.bfloat16)

        prompts = (B // self.group, K, cache_length(self.prompt, H), H)
        page = block_entries(H)
        pages_a_slot = cache_length(self.own, H) // page
        own = (B * pages_a_slot, K, page, H)
        pages = jax.random.permutation(next(keys), B * pages_a_slot)
        return (
            normal(B, self.model.num_heads, H),
            normal(*prompts),
            normal(*prompts),
            jnp.arange(B, dtype=jnp.int32) // self.group,
            jnp.full((B,), self.prompt, jnp.int32),
            normal(*own),
            normal(*own),
            pages.reshape(B, pages_a_slot).astype(jnp.int32),
            jnp.asarray(self.lengths),
        )


def decode_cases(options: Options, shape: str) -> list[Case]:
    """Every number of slots, with prompts of their own and with shared ones."""
    ours: DecodeImplementation = "pallas" if jax.default_backend() == "gpu" else "auto"
    who: list[tuple[str, DecodeImplementation]] = [("ours", ours)]
    if options.baseline:
        who.append(("xla", "xla"))
    prompt, samples = options.sizes(shape)[0], options.group_sizes(shape)[1]
    cases: list[Case] = []
    for slots, own in options.decode_batches(shape):
        groups = [1] if slots % samples or samples == 1 else [1, samples]
        for group in groups:
            cases += [Decode(shape, *pair, (slots, prompt, own, group)) for pair in who]
    return cases
