"""Parts of both kernels of the grouped matmul: shared memory, the ring's steps, the stores.

A fixed number of CTAs goes through jobs. A job is one tile of the output. In a CTA a producer
warpgroup loads blocks of both operands by TMA into a ring of stages in shared memory, for job after
job without a pause. Two consumer warpgroups multiply and write 64 rows of the tile each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxrl_llm.kernels.hopper import Interpret, Ref, ScratchType
from jaxrl_llm.kernels.mosaic import plgpu

CONSUMERS = 2
CHUNK = 64  # rows of a consumer's accumulator
DEPTH = 64  # contracted entries of a step
PIECE = 64  # columns that are stored at a time
COLUMN_TILES = (256, 128)  # columns of a tile: the first that divides the outputs
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40


def compiler() -> "plgpu.CompilerParams":
    """The parameters of Mosaic for these kernels."""
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
    )


def column_tile(outputs: int) -> int:
    """Columns of a tile."""
    return next(c for c in COLUMN_TILES if outputs % c == 0)


def cumulative(counts: jax.Array) -> jax.Array:
    """`jnp.cumsum` of few counts, in one kernel."""
    index = jnp.arange(counts.shape[0])
    return jnp.where(index[:, None] >= index, counts, 0).sum(axis=1, dtype=jnp.int32)


def matrices(*shape: int) -> ScratchType:
    """Shared memory of bfloat16 matrices in the tiles that TMA writes and wgmma reads."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def views(*shape: int, interpret: Interpret) -> ScratchType:
    """Shared memory of matrices of 64 columns under three views: tiles, rows, plain rows.

    In tiles of 8 rows and in rows the same bytes are the same element: wgmma takes tiles. TMA
    takes rows from any row on, where it would round the first row of tiles to a multiple of 8.
    Plain rows are not swizzled, so that any number of them can be stored. The interpreter has one
    view.
    """
    if interpret is not None:
        return plgpu.SMEM(shape, jnp.bfloat16)
    rows = plgpu.SMEM(shape, jnp.bfloat16, transforms=(plgpu.SwizzleTransform(128),))
    return plgpu.RefUnion(matrices(*shape), rows, plgpu.SMEM(shape, jnp.bfloat16))


def view(ref: Ref, interpret: Interpret) -> tuple[Ref, Ref, Ref]:
    """The three views of what `views` allocates."""
    return (ref, ref, ref) if interpret is not None else tuple(ref)


def ring_barriers(stages: int, loads: int) -> dict[str, ScratchType]:
    """The barriers of a ring whose stages take `loads` loads each."""
    return dict(
        loaded=plgpu.Barrier(num_arrivals=loads, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    )


@dataclass(frozen=True)
class Ring:
    """The ring of a CTA. Its steps are counted through all jobs of the CTA."""

    loaded: Ref
    free: Ref
    stages: int

    def stage(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.asarray(self.stages, step.dtype))

    def multiplied(
        self,
        acc_ref: Ref,
        matmul: Callable[[Ref, jax.Array, jax.Array], None],
        at: jax.Array,
        steps: jax.Array,
    ) -> jax.Array:
        """The accumulator after `matmul(acc_ref, step, stage)` of the steps from `at` on.

        A stage is released when the next step's matmul has been issued and its own is done.
        """

        @pl.loop(0, steps)
        def _step(step: jax.Array) -> None:
            stage = self.stage(at + step)
            plgpu.barrier_wait(self.loaded.at[stage])
            matmul(acc_ref, step, stage)
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(partial(self._release, at + step - 1))

        result = acc_ref[...]
        pl.when(steps > 0)(partial(self._release, at + steps - 1))
        return result

    def _release(self, step: jax.Array) -> None:
        plgpu.barrier_arrive(self.free.at[self.stage(step)])

    def skip(self, at: jax.Array, steps: jax.Array) -> None:
        """Release the stages of some steps without a matmul."""

        @pl.loop(0, steps)
        def _step(step: jax.Array) -> None:
            plgpu.barrier_wait(self.loaded.at[self.stage(at + step)])
            self._release(at + step)

    def fill(self, step: jax.Array, loads: Callable[[jax.Array, Ref], None]) -> None:
        """Start `loads(stage, barrier)` of a step as soon as its stage is free."""
        stage = self.stage(step)
        pl.when(step >= self.stages)(partial(plgpu.barrier_wait, self.free.at[stage]))
        loads(stage, self.loaded.at[stage])

    def drain(self, steps: jax.Array) -> None:
        """Wait until the last stages are free: a CTA must not end before all barrier phases."""

        @pl.loop(jnp.maximum(steps - self.stages, 0), steps)
        def _wait(step: jax.Array) -> None:
            plgpu.barrier_wait(self.free.at[self.stage(step)])


def own_jobs(total: jax.Array | int, ctas: int) -> jax.Array:
    """The number of jobs of this CTA: it takes every `ctas`-th."""
    first = lax.axis_index("cta")
    return lax.div(total - first + (ctas - 1), jnp.asarray(ctas, first.dtype))


def store(acc: jax.Array, write: Ref, read: Ref, copy: Callable[[Ref, int], None]) -> None:
    """Write an accumulator in pieces of `PIECE` columns, through two buffers in turn.

    `write` and `read` are views of the buffers. `copy(buffer, column)` starts the copies of a
    piece from shared memory.
    """
    pieces = acc.shape[1] // PIECE
    in_flight = 1 if pieces % 2 == 0 else 0  # an odd one would write what is still being read
    for number in range(pieces):
        columns = slice(number * PIECE, (number + 1) * PIECE)
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        write[number % 2] = acc[:, columns].astype(jnp.bfloat16)
        plgpu.commit_smem()
        copy(read.at[number % 2], number * PIECE)
        plgpu.commit_smem_to_gmem_group()
