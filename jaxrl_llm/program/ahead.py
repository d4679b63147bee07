"""Programs that threads compile ahead, and what a step waits for before it runs one of them.

Tracing and lowering are Python's: one program at a time. XLA compiles side by side. The program
that runs first is lowered first, and may run while the others are lowered. Those for which XLA
takes longest come next: reading them from the compile cache takes longest, too.

On a GPU, XLA chooses kernels by timing them, and must have the device to itself. A program that
is on disk times nothing (stored.py).
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import jax
from jax import monitoring

from jaxrl_llm.program.counting import COMPILED
from jaxrl_llm.program.stored import Start, StoredPrograms, UnreadableProgram

T = TypeVar("T")
_log = logging.getLogger(__name__)

COMPILING = "compiling"  # begins the name of a thread that compiles ahead

Run = Callable[..., Any]
Link = tuple[Any, tuple[Any, ...]]  # a jitted function and its arguments


class CompileJob(NamedTuple):
    """The programs of a segment, to be compiled."""

    programs: Sequence[Any]  # jitted functions
    links: Iterator[Link]  # the same with arguments, in order; what comes next may trace them
    setting: str = ""  # options and devices, which are not in the programs
    is_long: bool = False  # XLA takes longer for it than for others


@dataclass(eq=False)
class _Program:
    # Set when it is lowered or stored: whether it can be compiled while the device works.
    independent: Future[bool] = field(default_factory=Future)
    compiled: Future[Run] | None = None  # None until a thread compiles it
    setting: str = ""  # options and devices, as in `CompileJob`
    name: str = ""  # name of its file, once it is lowered or stored
    run: Run | None = None  # what `compiled` gave, once it was waited for
    is_new: bool = False  # whether this process compiled it


class Compilers:
    """Threads that compile programs or read them from disk; they give what is called."""

    def __init__(self) -> None:
        self._programs: dict[Any, _Program] = {}  # by jitted function
        self.reads_cache = False  # whether what was begun first is on disk
        self.reads_stored = False  # whether everything is read by `begin_stored`
        self._lock = threading.Lock()
        self._device_works = False
        self._timing: list[Future[Run]] = []  # compilations that need the device
        self._deferred: list[Callable[[], None]] = []  # begun once it is free
        self._compare: Callable[[], None] | None = None  # comparison with what runs
        self._compared: Future[None] | None = None

    def begin_first(self, job: CompileJob) -> None:
        """Lower the first program, and begin to compile it.

        It is lowered here: another thread would take turns with this one, and both would be slow.
        """
        program, arguments = next(job.links)
        self._announce([program], job.setting)
        self.reads_cache = self._lower(program, arguments, StoredPrograms())

    def begin_stored(
        self, programs: Sequence[Any], start: Start, jobs: Callable[[], Sequence[CompileJob]]
    ) -> bool:
        """Begin to read the programs that an earlier `start` kept. False if they are not all there.

        They may be called before they are lowered. After the first call a thread lowers `jobs`,
        and compares: see `checked`. `start` keeps nothing until then, so that a process which dies
        of them is not the first of many.
        """
        stored, names = StoredPrograms(), start.names()
        if len(names) != len(programs) or not all(map(stored.has, names)):
            return False
        start.forget()
        for program, name in zip(programs, names, strict=True):
            entry = self._programs[program] = _Program(name=name)
            entry.independent.set_result(True)
            entry.compiled = _in_thread(partial(_load_or_call, stored, name, program))
        self._compare = partial(self._compare_all, jobs, stored, start)
        self.reads_cache = self.reads_stored = True
        return True

    def begin(self, jobs: Sequence[CompileJob], start: Start | None = None) -> None:
        """Begin to lower and to compile what was not begun before, the very first program first.

        `start` keeps the names of all of them.
        """
        programs: dict[Any, _Program] = {}
        for job in jobs:
            programs |= self._announce(job.programs, job.setting)
        lowering = _in_thread(partial(self._lower_all, jobs, set(programs), start))
        lowering.add_done_callback(partial(_pass_on, list(programs.values())))

    def _announce(self, programs: Sequence[Any], setting: str) -> "dict[Any, _Program]":
        """The ones of `programs` that were not begun before."""
        new = [program for program in programs if program not in self._programs]
        announced = {program: _Program(setting=setting) for program in new}
        self._programs |= announced
        return announced

    def ready(self, program: Any, running: Any = ()) -> Run:
        """The function to call for `program`, once it is there; itself if nothing was begun.

        `running` are arrays that the device still computes.

        Raises: what tracing, lowering, compiling or reading it raised.
        """
        entry = self._programs.get(program)
        if entry is None:
            return program
        if entry.run is not None:
            return entry.run
        if not entry.independent.result():
            jax.block_until_ready(running)
            self.wait_for_all()
        else:
            with self._lock:
                self._device_works = True
                timing = list(self._timing)
            wait(timing)
        assert entry.compiled is not None
        entry.run = entry.compiled.result()
        with self._lock:
            if self._compare is not None:
                self._compared, self._compare = _in_thread(self._compare), None
        return entry.run

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Results leave this block only after the called programs were compared.

        Raises: StalePrograms, also in place of an error inside; what tracing or lowering raised.
        """
        try:
            yield
        except Exception:
            self._wait_until_compared()
            raise
        self._wait_until_compared()

    def _wait_until_compared(self) -> None:
        if self._compared is not None:
            self._compared.result()

    def wait_for_all(self) -> None:
        """Wait for every program. Requires: the device is idle. Raises what `ready` raises."""
        with self._lock:
            self._device_works = False
            deferred, self._deferred = self._deferred, []
            for start in deferred:
                start()
        for entry in list(self._programs.values()):
            entry.independent.result()
            assert entry.compiled is not None
            entry.compiled.result()
        if deferred:
            _in_thread(partial(self._save_new, StoredPrograms()))

    def _lower_all(
        self, jobs: Sequence[CompileJob], programs: set[Any], start: Start | None
    ) -> None:
        """Lower each of `programs` and begin to compile it; others were begun before."""
        stored = StoredPrograms()
        by_length = sorted(jobs, key=lambda job: not job.is_long)
        rest = chain.from_iterable(job.links for job in by_length)
        for program, arguments in chain(islice(jobs[0].links, 1), rest):
            if program in programs:
                self._lower(program, arguments, stored)
        if start is not None:
            start.write([self._programs[each].name for job in jobs for each in job.programs])
        self._save_new(stored)  # after the lowering, which is waited for

    def _save_new(self, stored: StoredPrograms) -> None:
        """Write what was compiled; then, and not at every start, what is too much is deleted."""
        has_new = False
        for entry in list(self._programs.values()):
            if entry.compiled is not None and entry.compiled.exception() is None and entry.is_new:
                stored.save(entry.name, entry.compiled.result())
                has_new = True
        if has_new:
            stored.bound()

    def _lower(self, program: Any, arguments: tuple[Any, ...], stored: StoredPrograms) -> bool:
        """Lower a program and begin to compile it. Whether it is on disk."""
        entry = self._programs[program]
        lowered = program.lower(*arguments)
        entry.name = stored.name_of(lowered, entry.setting)
        is_known = stored.has(entry.name)
        independent = is_known or not times_kernels()
        start = partial(self._start, program, lowered, stored, independent)
        with self._lock:
            if self._device_works and not independent:
                self._deferred.append(start)
            else:
                start()
        entry.independent.set_result(independent)
        return is_known

    def _start(self, program: Any, lowered: Any, stored: StoredPrograms, independent: bool) -> None:
        entry = self._programs[program]
        entry.compiled = _in_thread(partial(_compile, program, entry, lowered, stored))
        if not independent:
            self._timing.append(entry.compiled)

    def _compare_all(
        self, jobs: Callable[[], Sequence[CompileJob]], stored: StoredPrograms, start: Start
    ) -> None:
        """Lower every program that was called before, and compare it with what was called."""
        names = [entry.name for entry in self._programs.values()]
        for job in jobs():
            for program, arguments in job.links:
                name = stored.name_of(program.lower(*arguments), job.setting)
                if name != self._programs[program].name:
                    raise StalePrograms(
                        "this run's programs are not those that an earlier start of this config "
                        "kept, so its first step is dropped: something that its key does not know "
                        "has changed (for example a file that your own code reads); start the "
                        "command again, which compiles them"
                    )
        start.write(names)


class StalePrograms(RuntimeError):
    """Kept programs have the key of this start, and differ from its own."""


def times_kernels() -> bool:
    """True if XLA chooses kernels by timing them on the device."""
    return jax.default_backend() == "gpu"


_first_calls = 0  # programs that this process calls for the first time now


@contextlib.contextmanager
def first_call() -> Iterator[None]:
    """Mark the first call of a program: jax compiles it there, if no thread did."""
    global _first_calls
    _first_calls += 1
    try:
        yield
    finally:
        _first_calls -= 1


def compiles() -> bool:
    """True while a program is compiled, by a thread of `Compilers` or at its first call.

    Nothing ends that before the program is made. A thread is no daemon: one that comes back from
    XLA while Python ends aborts the process.
    """
    ahead = any(thread.name.startswith(COMPILING) for thread in threading.enumerate())
    return ahead or _first_calls > 0


def _compile(program: Any, entry: _Program, lowered: Any, stored: StoredPrograms) -> Run:
    """Read a lowered program from disk, or compile it.

    What jax reads from its own cache is not new: XLA writes it without its functions, on a CPU.
    """
    if stored.has(entry.name):
        try:
            return _load(stored, entry.name, program)
        except UnreadableProgram as error:
            _log.warning("%s; it is compiled", error)
    _listen_to_hits()
    _own.hits = 0
    compiled = lowered.compile()
    entry.is_new = not _own.hits
    # XLA for a CPU cannot write a program that sorts, once it has run.
    if entry.is_new and not times_kernels():
        stored.save(entry.name, compiled)
    return compiled


def _load(stored: StoredPrograms, name: str, program: Any) -> Run:
    """Read an executable. It counts as compiled, as what jax reads from its cache does."""
    start = time.perf_counter()
    run = stored.load(name)
    seconds = time.perf_counter() - start
    monitoring.record_event_duration_secs(COMPILED, seconds, fun_name=program.__name__)
    return run


def _load_or_call(stored: StoredPrograms, name: str, program: Any) -> Run:
    """The executable of a file; the jitted function, which compiles, if it cannot be read."""
    try:
        return _load(stored, name, program)
    except UnreadableProgram as error:
        _log.warning("%s; it is compiled", error)
        return program


_own = threading.local()  # `hits`: what this thread reads from jax's compile cache


@functools.cache
def _listen_to_hits() -> None:
    def listen(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _own.hits = getattr(_own, "hits", 0) + 1

    monitoring.register_event_listener(listen)


def _in_thread(run: Callable[[], T]) -> Future[T]:
    """The result of `run`, in a thread that ends with it."""
    threads = ThreadPoolExecutor(1, COMPILING)
    result = threads.submit(run)
    threads.shutdown(wait=False)
    return result


def _pass_on(programs: Sequence[_Program], lowering: "Future[None]") -> None:
    """An error of the thread that lowers belongs to every program that it did not reach."""
    error = lowering.exception()
    for program in programs if error is not None else ():
        if not program.independent.done():
            program.independent.set_exception(error)
