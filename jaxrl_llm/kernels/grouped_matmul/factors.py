"""Low-rank factors in the kernel for rows: the result is x w + x a b.

A consumer adds up x a next to x w, and multiplies it with b at the end of a tile. Two matmuls of
their own would read x, and write all outputs, again.

Shape letters: see the package; R rank.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxrl_llm.kernels.grouped_matmul.common import CHUNK, CONSUMERS, DEPTH, matrices
from jaxrl_llm.kernels.hopper import Interpret, Ref, accumulate, multiply_add
from jaxrl_llm.kernels.mosaic import plgpu

RANKS = (16, 32, 64)  # widths of a line of shared memory that wgmma reads


class FactorMemory(NamedTuple):
    """Shared memory and barriers of a CTA, or their types."""

    a: Ref  # [R, DEPTH] in each stage of the ring
    b: Ref  # [R, columns of a tile]
    loaded: Ref  # barrier of the load of b
    free: Ref
    spill: Ref | None  # buffer of `multiply_add` in interpret mode


def factor_memory(rank: int, columns: int, stages: int, interpret: Interpret) -> FactorMemory:
    """The types for tiles of so many columns."""
    # Lines of the rank, as the rank is contracted.
    lines = (plgpu.TilingTransform((8, rank)), plgpu.SwizzleTransform(2 * rank))
    spill = plgpu.SMEM((CONSUMERS, CHUNK, rank), jnp.bfloat16)
    return FactorMemory(
        a=matrices(stages, rank, DEPTH),
        b=plgpu.SMEM((rank, columns), jnp.bfloat16, transforms=lines),
        loaded=plgpu.Barrier(),
        free=plgpu.Barrier(num_arrivals=CONSUMERS),
        spill=None if interpret is None else spill,
    )


@dataclass(frozen=True)
class Factors:
    """The factors in global memory, and where a CTA holds parts of them."""

    a_GRD: Ref
    b_GRF: Ref
    memory: FactorMemory

    @property
    def rank(self) -> int:
        return self.a_GRD.shape[1]

    def load_step(
        self, group: jax.Array, entries: pl.Slice | slice, stage: jax.Array, loaded: Ref
    ) -> None:
        """Start the load of a step's block of a."""
        own = self.a_GRD.at[group, :, entries]
        plgpu.copy_gmem_to_smem(own, self.memory.a.at[stage], loaded)

    def load_second(self, group: jax.Array, columns: pl.Slice | slice, at: jax.Array) -> None:
        """Start the load of b for a tile, when the tile before has read its own.

        `at` is 0 for the first tile of a CTA.
        """
        self.wait_for_reads(at)
        own = self.b_GRF.at[group, :, columns]
        plgpu.copy_gmem_to_smem(own, self.memory.b, self.memory.loaded)

    def wait_for_reads(self, at: jax.Array) -> None:
        """Wait until b may be replaced. Before step 0 there is none."""
        pl.when(at > 0)(partial(plgpu.barrier_wait, self.memory.free))

    def multiply_step(self, low_ref: Ref, x: Ref, stage: jax.Array) -> None:
        """Add a step of x a to an accumulator."""
        plgpu.wgmma(low_ref, x, self.memory.a.at[stage].transpose((1, 0)))

    def added(
        self, acc: jax.Array, low: jax.Array, has_group: jax.Array, mine: pl.Slice | slice
    ) -> jax.Array:
        """The accumulator plus x a, rounded to bfloat16, times the columns `mine` of b."""
        spill = self.memory.spill
        low = low.astype(jnp.bfloat16)

        def matmul(ref: Ref) -> None:
            own = None if spill is None else spill.at[jax.lax.axis_index("warpgroup")]
            multiply_add(ref, low, self.memory.b.at[:, mine], own)
            plgpu.wgmma_wait(0)

        pl.when(has_group)(partial(plgpu.barrier_wait, self.memory.loaded))
        acc = accumulate(acc, matmul, spill is not None)
        pl.when(has_group)(partial(plgpu.barrier_arrive, self.memory.free))
        # Without a group shared memory held whatever was there.
        return jnp.where(has_group, acc, 0.0)
