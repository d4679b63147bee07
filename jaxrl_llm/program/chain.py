"""A function as a chain of programs, which are compiled side by side and run one after the other.

XLA compiles one program on one core for most of the time. Generation has a decode step for each
number of slots, and each of them is compiled as long as a program of its own. A chain makes them
such programs. Once they are compiled, the host dispatches all of them at once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.program.ahead import CompileJob, Compilers, Link, Run
from jaxrl_llm.program.stage import Pieces


class Chain:
    """A function that is cut into programs; it is called as `jax.jit(whole)` is."""

    def __init__(
        self,
        whole: Run,
        pieces: Callable[..., Pieces],
        count: int,
        *,
        num_arguments: int,
        donated: tuple[int, ...] = (),
        place: NamedSharding,
        out_shardings: Any,
        compiler_options: dict[str, Any] | None,
        compilers: Compilers,
    ) -> None:
        """`pieces` takes the arguments of `whole`; `count` of them are between first and last.

        Arrays that one program hands to the next lie on `place`. The last one donates `donated`.
        A call waits for each program that `compilers` compile ahead.
        """
        self._compilers = compilers
        assert isinstance(place.mesh, Mesh)
        self.setting = setting_of(place.mesh, compiler_options)
        jit = partial(jax.jit, compiler_options=compiler_options)
        name, moved = whole.__name__, num_arguments + 2

        def begin(*arguments: Any) -> Any:
            return pieces(*arguments).begin()

        def go_on(number: int, *arguments: Any) -> Any:
            carried = arguments[num_arguments:]
            return pieces(*arguments[:num_arguments]).go_on(number, *carried)

        def end(*arguments: Any) -> Any:
            return pieces(*arguments[:num_arguments]).end(*arguments[num_arguments:])

        self._place = place
        self._begin = jit(_named(name, begin), out_shardings=place)
        self._middle = [
            jit(_named(name, partial(go_on, i)), donate_argnums=(moved,), out_shardings=place)
            for i in range(count)
        ]
        ending = partial(jit, donate_argnums=donated, out_shardings=out_shardings)
        self._end, self._whole = ending(_named(name, end)), ending(whole)

    @property
    def programs(self) -> Sequence[Any]:
        """The jitted functions, in order."""
        return [self._begin, *self._middle, self._end]

    def __call__(self, *arguments: Any) -> Any:
        """Dispatch every program, as soon as it is compiled."""
        ready = self._compilers.ready
        kept, passed, moved = ready(self._begin)(*arguments)
        for piece in self._middle:
            passed, moved = ready(piece, passed)(*arguments, kept, passed, moved)
        del kept, moved  # memory that `end` does not read
        return ready(self._end, passed)(*arguments, passed)

    def eval_shape(self, *arguments: Any) -> Any:
        """Shapes of the results. The first program and the last one are traced."""
        _, passed, _ = self._placed(self._begin.eval_shape(*arguments))
        return self._end.eval_shape(*arguments, passed)

    def links(self, *arguments: Any) -> Iterator[Link]:
        """Each program with its abstract arguments, placed as a call places them.

        A program is traced when the next one is asked for.
        """
        yield self._begin, arguments
        kept, passed, moved = self._placed(self._begin.eval_shape(*arguments))
        for piece in self._middle:
            inputs = (*arguments, kept, passed, moved)
            yield piece, inputs
            passed, moved = self._placed(piece.eval_shape(*inputs))
        yield self._end, (*arguments, passed)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """One program that computes the same, to look into."""
        return self._whole.lower(*arguments)

    def _placed(self, tree: Any) -> Any:
        def one(x: Any) -> jax.ShapeDtypeStruct:
            weak = x.weak_type
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place, weak_type=weak)

        return jax.tree.map(one, tree)


def job_of(
    program: Any, arguments: tuple[Any, ...], setting: str = "", *, is_long: bool = False
) -> CompileJob:
    """The programs that are compiled for a function, a chain or one that is jitted.

    `setting` is for a jitted one; a chain knows its own.
    """
    if isinstance(program, Chain):
        return CompileJob(program.programs, program.links(*arguments), program.setting, is_long)
    return CompileJob([program], iter([(program, arguments)]), setting, is_long)


def programs_of(program: Any) -> Sequence[Any]:
    """The jitted functions that are called for a function, a chain or one that is jitted."""
    return program.programs if isinstance(program, Chain) else [program]


def setting_of(mesh: Mesh, compiler_options: dict[str, Any] | None) -> str:
    """Devices and options, which decide an executable and are not in its lowered program."""
    devices = [device.id for device in mesh.devices.flat]
    return f"devices {devices}, options {sorted((compiler_options or {}).items())}"


def _named(name: str, run: Run) -> Run:
    """`run` under the name by which compilations are counted and traces are read."""

    def named(*arguments: Any) -> Any:
        return run(*arguments)

    named.__name__ = name
    return named
