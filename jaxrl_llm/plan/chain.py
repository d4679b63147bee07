"""A function as a chain of programs, which are compiled side by side and run one after the other.

XLA compiles one program on one core for most of the time. Generation has a decode step for each
number of slots, and each of them is compiled as long as a program of its own. A chain makes them
such programs. Nothing waits between them: the host dispatches all of them at once.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxrl_llm.plan.dataflow import Pieces, Segment

COMPILING = "compiling"  # begins the name of a thread of `compile_in_threads`
Link = tuple[Any, tuple[Any, ...]]  # a jitted function and its arguments
Run = Callable[..., Any]


class Chain:
    """What `jax.jit` of `whole` is, for a function that is cut: see `dataflow.Pieces`.

    `begin`, those of `middle` and `end` take the arguments of `whole`; then `middle` also takes
    what `Pieces` calls kept, passed and moved, and `end` what it calls passed.
    """

    def __init__(
        self,
        whole: Run,
        begin: Run,
        middle: Sequence[Run],
        end: Run,
        *,
        num_arguments: int,
        donated: tuple[int, ...] = (),
        place: NamedSharding,
        out_shardings: Any,
        compiler_options: dict[str, Any] | None,
    ) -> None:
        """What one program hands to the next lies on `place`. The last one donates `donated`."""
        jit = partial(jax.jit, compiler_options=compiler_options)
        name, moved = whole.__name__, num_arguments + 2
        self._place = place
        self._begin = jit(_named(name, begin), out_shardings=place)
        self._middle = [
            jit(_named(name, run), donate_argnums=(moved,), out_shardings=place) for run in middle
        ]
        ending = partial(jit, donate_argnums=donated, out_shardings=out_shardings)
        self._end, self._whole = ending(_named(name, end)), ending(whole)

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


def chain_of(
    segment: Segment,
    pieces: Pieces,
    place: NamedSharding,
    out_shardings: Any,
    compiler_options: dict[str, Any] | None,
) -> Chain:
    """`segment.iteration` as a chain; `pieces` are those of its first stage."""
    return Chain(
        segment.iteration,
        partial(segment.begin, pieces),
        [partial(segment.go_on, pieces, number) for number in range(pieces.count)],
        partial(segment.end, pieces),
        num_arguments=4,
        donated=(0,),
        place=place,
        out_shardings=out_shardings,
        compiler_options=compiler_options,
    )


def links_of(program: Any, arguments: tuple[Any, ...]) -> list[Link]:
    """The programs that are compiled for a function, a chain or one that is jitted."""
    return list(program.links(*arguments)) if isinstance(program, Chain) else [(program, arguments)]


def compile_in_threads(links: Sequence[Link]) -> list[Future[None]]:
    """Begin to compile jitted functions; jax finds what is compiled when it calls them.

    They are lowered one by one, in their order: Python runs one thread at a time, and the first of
    them is in XLA sooner.
    """
    lowering = ThreadPoolExecutor(1, COMPILING)
    compiling = ThreadPoolExecutor(len(links) or 1, COMPILING)
    lowered = [lowering.submit(program.lower, *arguments) for program, arguments in links]
    compiled = [compiling.submit(_compile, each) for each in lowered]
    for threads in (lowering, compiling):
        threads.shutdown(wait=False)
    return compiled


def _compile(lowered: "Future[jax.stages.Lowered]") -> None:
    lowered.result().compile()


def _named(name: str, run: Run) -> Run:
    """`run` under the name by which compilations are counted and traces are read."""

    def named(*arguments: Any) -> Any:
        return run(*arguments)

    named.__name__ = name
    return named
