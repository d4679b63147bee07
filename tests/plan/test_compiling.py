"""Programs compiled in threads: their order, what waits for what, and where errors appear."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from jaxrl_llm.plan import compiling
from jaxrl_llm.plan.compiling import Compilers, Marks, Work

TIMEOUT_S = 20


class Lowered:
    """A jitted function and its lowered program; `arguments` are none."""

    def __init__(self, name, seen, then=lambda: None):
        self.name, self.seen, self.then = name, seen, then

    def lower(self):
        self.seen.append(f"lower {self.name}")
        return self

    def as_text(self):
        return self.name

    def compile(self):
        self.then()
        self.seen.append(f"compile {self.name}")


def work(*programs, is_long=False):
    return Work(programs, iter([(program, ()) for program in programs]), is_long)


@pytest.fixture
def marks(tmp_path, monkeypatch):
    """A folder of marks of its own, on a device where XLA times kernels."""
    monkeypatch.setattr(compiling, "times_kernels", lambda: True)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / compiling.MARKS
    jax.config.update("jax_compilation_cache_dir", before)


def mark(*programs):
    """What an earlier run has left."""
    for program in programs:
        found = Marks().of(program)
        found.parent.mkdir(exist_ok=True)
        found.touch()


def lowered(seen):
    return [name.removeprefix("lower ") for name in seen if name.startswith("lower ")]


def test_programs_are_lowered_one_by_one_and_compiled_together():
    """Each compilation ends only when the other has begun too; no lowering sees another."""
    busy, meet = [], threading.Barrier(2, timeout=TIMEOUT_S)

    class Slow(Lowered):
        def lower(self):
            busy.append(self)
            time.sleep(0.05)
            assert busy == [self]
            busy.remove(self)
            return self

    compilers = Compilers()
    programs = [Slow(name, [], meet.wait) for name in "ab"]
    compilers.begin([work(*programs)])
    compilers.wait_for_all()
    assert all(program.seen == [f"compile {program.name}"] for program in programs)


def test_the_first_is_lowered_first_and_then_the_longest(marks):
    """`A` and `B` are the long ones."""
    seen = []
    a, b, A, B = (Lowered(name, seen) for name in "abAB")
    compilers = Compilers()
    compilers.begin([work(a, b), work(A, B, is_long=True)])
    compilers.wait_for_all()
    assert lowered(seen) == ["a", "A", "B", "b"]
    assert len(list(marks.iterdir())) == 4


def test_the_first_program_is_lowered_at_once_and_not_again(marks):
    seen = []
    a, b = Lowered("a", seen), Lowered("b", seen)
    compilers = Compilers()
    compilers.begin_first(work(a, b))
    assert lowered(seen) == ["a"] and not compilers.reads_cache
    compilers.begin([work(a, b)])
    compilers.wait_for_all()
    assert lowered(seen) == ["a", "b"]
    again = Compilers()
    again.begin_first(work(a, b))
    again.wait_for_all()
    assert again.reads_cache and lowered(seen) == ["a", "b", "a"]


def test_a_known_program_runs_before_the_next_one_is_lowered(marks):
    seen, ran = [], threading.Event()
    a, b = Lowered("a", seen), Lowered("b", seen)
    mark(a, b)

    def links():
        yield a, ()
        assert ran.wait(TIMEOUT_S)
        yield b, ()

    compilers = Compilers()
    compilers.begin([Work([a, b], links())])
    compilers.wait_for(a)
    assert lowered(seen) == ["a"]
    ran.set()
    compilers.wait_for(b)
    assert seen[-1] == "compile b"


def test_a_program_that_times_kernels_is_compiled_when_the_device_is_idle(marks):
    """`b` is new: it waits until `a` has run, and nothing else does."""
    seen, known_is_there = [], threading.Event()
    a, b, c = Lowered("a", seen), Lowered("b", seen), Lowered("c", seen, known_is_there.set)
    mark(a, c)
    began = threading.Event()

    def links():
        yield a, ()
        assert began.wait(TIMEOUT_S)
        yield b, ()
        yield c, ()

    class Running:
        """An array that is computed: `jax.block_until_ready` waits for it."""

        def block_until_ready(self):
            assert "compile b" not in seen
            seen.append("a has run")
            return self

    compilers = Compilers()
    compilers.begin([Work([a, b, c], links())])
    compilers.wait_for(a)
    began.set()
    assert known_is_there.wait(TIMEOUT_S)
    compilers.wait_for(b, [Running()])
    assert seen.index("a has run") < seen.index("compile b")


def test_a_program_that_is_timing_kernels_is_waited_for(marks):
    """A known one may not run at that time, though nothing else keeps it."""
    seen, go_on = [], threading.Event()
    a, b = Lowered("a", seen), Lowered("b", seen, lambda: go_on.wait(TIMEOUT_S))
    mark(a)
    compilers = Compilers()
    compilers.begin([work(a, b)])
    while lowered(seen) != ["a", "b"]:
        time.sleep(0.001)
    compilers._programs[b].independent.result(TIMEOUT_S)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(compilers.wait_for, a)
        time.sleep(0.05)
        assert not waiting.done()
        go_on.set()
        waiting.result(TIMEOUT_S)
    assert "compile b" in seen


def test_an_error_reaches_whoever_waits(marks):
    """One of the lowering thread belongs to all that it did not reach."""
    seen = []
    a, b, c = (Lowered(name, seen) for name in "abc")
    mark(a)

    def links():
        yield a, ()
        raise ValueError("does not fit")

    compilers = Compilers()
    compilers.begin([Work([a, b, c], links())])
    compilers.wait_for(a)
    for program in (b, c):
        with pytest.raises(ValueError, match="does not fit"):
            compilers.wait_for(program)

    def fail():
        raise RuntimeError("XLA cannot")

    bad = Lowered("bad", seen, fail)
    compilers = Compilers()
    compilers.begin([work(bad)])
    with pytest.raises(RuntimeError, match="XLA cannot"):
        compilers.wait_for(bad)
    assert not Marks().of(bad).exists()


def test_a_folder_that_takes_no_marks_ends_no_run(marks):
    """jax itself warns of such a cache, and computes."""
    marks.write_text("a file where the folder of marks would be")
    seen = []
    compilers = Compilers()
    compilers.begin([work(Lowered("one", seen))])
    compilers.wait_for_all()
    assert seen == ["lower one", "compile one"]
