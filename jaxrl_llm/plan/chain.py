"""A segment as a chain of programs, which are compiled side by side and run one after the other.

XLA compiles one program on one core for most of the time. Generation has a decode step for each
number of slots, and each of them is compiled as long as a program of its own. A chain makes them
such programs. Nothing waits between them: the host dispatches all of them at once.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxrl_llm.plan.dataflow import Pieces, Segment

Link = tuple[Any, tuple[Any, ...]]  # a jitted function and its arguments
MOVED = 6  # the argument of a piece that is donated: see `Pieces`


class Chain:
    """What `jax.jit` of `segment.iteration` is, for a segment whose first stage has pieces."""

    def __init__(
        self,
        segment: Segment,
        pieces: Pieces,
        jit: Callable[..., Any],
        ends_in: Any,
        place: NamedSharding,
    ) -> None:
        """`jit` is `jax.jit` with the segment's options; `ends_in` the shardings of its results.

        What one program hands to the next lies on `place`.
        """
        self._pieces, self._place = pieces, place
        self._begin = jit(_named(segment, partial(segment.begin, pieces)), out_shardings=place)
        self._middle = [
            jit(
                _named(segment, partial(segment.go_on, pieces, number)),
                donate_argnums=(MOVED,),
                out_shardings=place,
            )
            for number in range(pieces.count)
        ]
        end = partial(segment.end, pieces)
        self._end = jit(_named(segment, end), donate_argnums=(0,), out_shardings=ends_in)
        self._whole = jit(segment.iteration, donate_argnums=(0,), out_shardings=ends_in)

    def __call__(self, *arguments: Any) -> Any:
        """Dispatch every program."""
        kept, passed, moved = self._begin(*arguments)
        for piece in self._middle:
            passed, moved = piece(*arguments, kept, passed, moved)
        del kept, moved  # memory that `end` does not read
        return self._end(*arguments, passed)

    def eval_shape(self, *arguments: Any) -> Any:
        """Shapes of the results; every program is traced."""
        *_, (end, last) = self.links(*arguments)
        return end.eval_shape(*last)

    def links(self, *arguments: Any) -> Iterator[Link]:
        """Each program with its abstract arguments, placed as a call places them."""
        yield self._begin, arguments
        kept, passed, moved = self._placed(self._begin.eval_shape(*arguments))
        for piece in self._middle:
            given = (*arguments, kept, passed, moved)
            yield piece, given
            passed, moved = self._placed(piece.eval_shape(*given))
        yield self._end, (*arguments, passed)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """One program that computes the same, to look into."""
        return self._whole.lower(*arguments)

    def _placed(self, tree: Any) -> Any:
        def one(x: Any) -> jax.ShapeDtypeStruct:
            weak = x.weak_type
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place, weak_type=weak)

        return jax.tree.map(one, tree)


def links_of(program: Any, arguments: tuple[Any, ...]) -> list[Link]:
    """The programs that are compiled for a segment, a chain or one jitted function."""
    return list(program.links(*arguments)) if isinstance(program, Chain) else [(program, arguments)]


def _named(segment: Segment, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` under the name by which compilations are counted and traces are read."""

    def iteration(*arguments: Any) -> Any:
        return run(*arguments)

    assert iteration.__name__ == segment.iteration.__name__
    return iteration
