"""Programs that threads compile ahead, and what a step waits for before it runs one of them.

Tracing and lowering are Python's: one program at a time. XLA compiles side by side. The program
that runs first is lowered first, and may run while the others are lowered. Those for which XLA
takes longest come next: reading them from the compile cache takes longest, too.

On a GPU, XLA chooses kernels by timing them, and must have the device to itself. A program that is
in the compile cache times nothing. A mark in the cache's folder says that it is there. It is only
a hint: with a wrong mark, kernels are timed while the device works.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib.version

COMPILING = "compiling"  # begins the name of a thread that compiles ahead
MARKS = "programs"  # folder of the marks, in the compile cache's

Run = Callable[..., Any]
Link = tuple[Any, tuple[Any, ...]]  # a jitted function and its arguments


class Work(NamedTuple):
    """The programs of a segment, to be compiled."""

    programs: Sequence[Any]  # jitted functions
    links: Iterator[Link]  # the same with arguments, in order; what comes next may trace them
    is_long: bool = False  # XLA takes longer for it than for others


@dataclass(eq=False)
class _Program:
    # Set when it is lowered: whether it can be compiled while the device works.
    independent: Future[bool] = field(default_factory=Future)
    compiled: Future[None] | None = None  # None until a thread compiles it


class Compilers:
    """Threads that compile programs; jax finds what is compiled when it calls them."""

    def __init__(self) -> None:
        self._programs: dict[Any, _Program] = {}  # by jitted function; those not waited for yet
        self._begun: set[Any] = set()  # jitted functions
        self.reads_cache = False  # whether what `begin_first` lowered is in the compile cache
        self._lock = threading.Lock()
        self._device_works = False
        self._timing: list[Future[None]] = []  # compilations that need the device
        self._deferred: list[Callable[[], None]] = []  # those until the device is free

    def begin_first(self, work: Work) -> None:
        """Lower the first program, and begin to compile it.

        It is lowered here: another thread would take turns with this one, and both would be slow.
        """
        program, arguments = next(work.links)
        self._announce([program])
        self.reads_cache = self._lower(program, arguments, Marks())

    def begin(self, works: Sequence[Work]) -> None:
        """Begin to lower and to compile what was not begun before, the very first program first."""
        every = [program for work in works for program in work.programs]
        programs = self._announce([program for program in every if program not in self._begun])
        lowering = _in_thread(partial(self._lower_all, works, set(programs)))
        lowering.add_done_callback(partial(_pass_on, list(programs.values())))

    def _announce(self, programs: Sequence[Any]) -> "dict[Any, _Program]":
        found = {program: _Program() for program in programs}
        self._begun |= found.keys()
        self._programs |= found
        return found

    def wait_for(self, program: Any, running: Any = ()) -> None:
        """Wait until `program` may be called; at once if nothing was begun for it.

        `running` are arrays that the device still computes.

        Raises: what tracing, lowering or compiling it raised.
        """
        found = self._programs.get(program)
        if found is None:
            return
        if not found.independent.result():
            jax.block_until_ready(running)
            self.wait_for_all()
            return
        with self._lock:
            self._device_works = True
            timing = list(self._timing)
        wait(timing)
        assert found.compiled is not None
        found.compiled.result()
        self._programs.pop(program, None)

    def wait_for_all(self) -> None:
        """Wait for every program. Requires: the device is idle. Raises what `wait_for` raises."""
        with self._lock:
            self._device_works = False
            deferred, self._deferred = self._deferred, []
            for start in deferred:
                start()
        for found in list(self._programs.values()):
            found.independent.result()
            assert found.compiled is not None
            found.compiled.result()
        self._programs.clear()

    def _lower_all(self, works: Sequence[Work], programs: set[Any]) -> None:
        """Lower each of `programs` and begin to compile it; others were begun before."""
        marks = Marks()
        by_length = sorted(works, key=lambda work: not work.is_long)
        rest = chain.from_iterable(work.links for work in by_length)
        for program, arguments in chain(islice(works[0].links, 1), rest):
            if program in programs:
                self._lower(program, arguments, marks)

    def _lower(self, program: Any, arguments: tuple[Any, ...], marks: "Marks") -> bool:
        """Lower a program and begin to compile it. Whether the compile cache has it."""
        found = self._programs[program]
        lowered = program.lower(*arguments)
        mark = marks.of(lowered)
        is_known = _exists(mark)
        independent = is_known or not times_kernels()
        start = partial(self._start, found, lowered, mark, independent)
        with self._lock:
            if self._device_works and not independent:
                self._deferred.append(start)
            else:
                start()
        found.independent.set_result(independent)
        return is_known

    def _start(self, found: _Program, lowered: Any, mark: Path | None, independent: bool) -> None:
        found.compiled = _in_thread(partial(_compile, lowered, mark))
        if not independent:
            self._timing.append(found.compiled)


class Marks:
    """Files that say which programs the compile cache has."""

    def __init__(self) -> None:
        settings: Any = jax.config  # its attributes are made at run time
        folder: str = settings.jax_compilation_cache_dir or ""
        # A cache in the cloud has none: asking for each would take long.
        is_local = folder and "://" not in folder
        self._folder = Path(folder) / MARKS if is_local else None
        devices = ",".join(sorted({device.device_kind for device in jax.local_devices()}))
        versions = f"{jax.__version__} {jaxlib.version.__version__}"
        self._where = f"{versions} {devices} {os.environ.get('XLA_FLAGS', '')}"

    def of(self, lowered: Any) -> Path | None:
        """The mark of a lowered program; None without a folder."""
        if self._folder is None:
            return None
        digest = hashlib.sha256(f"{self._where} {lowered.as_text()}".encode()).hexdigest()
        return self._folder / digest[:32]


def times_kernels() -> bool:
    """Whether XLA chooses kernels by timing them on the device."""
    return jax.default_backend() == "gpu"


def compiles_ahead() -> bool:
    """Whether a thread of `Compilers` is at work.

    Nothing ends it before its program is made, and Python waits for it at its exit. It is no
    daemon: one that comes back from XLA while Python ends aborts the process.
    """
    return any(thread.name.startswith(COMPILING) for thread in threading.enumerate())


def _compile(lowered: Any, mark: Path | None) -> None:
    lowered.compile()
    if mark is not None:
        with contextlib.suppress(OSError):  # a full or read-only folder ends no run
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _exists(mark: Path | None) -> bool:
    """Whether there is a mark; False where its folder may not be read."""
    try:
        return mark is not None and mark.exists()
    except OSError:
        return False


def _in_thread(run: Callable[[], None]) -> Future[None]:
    """What `run` gives, in a thread that ends with it."""
    threads = ThreadPoolExecutor(1, COMPILING)
    found = threads.submit(run)
    threads.shutdown(wait=False)
    return found


def _pass_on(programs: Sequence[_Program], lowering: "Future[None]") -> None:
    """An error of the thread that lowers belongs to every program that it did not reach."""
    error = lowering.exception()
    for program in programs if error is not None else ():
        if not program.independent.done():
            program.independent.set_exception(error)
