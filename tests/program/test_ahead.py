"""Programs compiled in threads: their order, what waits for what, and where errors appear."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import pytest

from jaxrl_llm.program import ahead, stored
from jaxrl_llm.program.ahead import CompileJob, Compilers, StalePrograms
from jaxrl_llm.program.stored import Start, StoredPrograms, UnreadableProgram

TIMEOUT_S = 20


class Lowered:
    """A jitted function and its lowered program; `arguments` are none."""

    __name__ = "iteration"
    args_info, out_tree = (), ()
    _lowering = SimpleNamespace(compile_args={"kept_var_idx": set(), "global_out_avals": ()})

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
        return f"compiled {self.name}"


def work(*programs, is_long=False):
    return CompileJob(programs, iter([(program, ()) for program in programs]), is_long=is_long)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of programs of its own, on a device where XLA times kernels.

    A file holds the name of its program.
    """

    def save(self, name, compiled):
        if name and not self.has(name):
            self._file(name).parent.mkdir(exist_ok=True)
            self._file(name).write_text(str(compiled))

    def load(self, name):
        text = self._file(name).read_text()
        if text == "cut":
            self._file(name).unlink()
            raise UnreadableProgram("cut")
        return f"read {text}"

    monkeypatch.setattr(ahead, "times_kernels", lambda: True)
    monkeypatch.setattr(StoredPrograms, "save", save)
    monkeypatch.setattr(StoredPrograms, "load", load)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / stored.PROGRAMS
    jax.config.update("jax_compilation_cache_dir", before)


def store(*programs):
    """What an earlier run has left; the names of the files."""
    kept = StoredPrograms()
    names = [kept.name_of(program, "") for program in programs]
    for name, program in zip(names, programs, strict=True):
        kept.save(name, program.name)
    return names


def wait_until(condition):
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def lowered(seen):
    return [name.removeprefix("lower ") for name in seen if name.startswith("lower ")]


def test_programs_are_lowered_one_by_one_and_compiled_together(folder):
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


def test_the_first_is_lowered_first_and_then_the_longest(folder):
    """`A` and `B` are the long ones."""
    seen = []
    a, b, A, B = (Lowered(name, seen) for name in "abAB")
    compilers = Compilers()
    compilers.begin([work(a, b), work(A, B, is_long=True)])
    compilers.wait_for_all()
    assert lowered(seen) == ["a", "A", "B", "b"]
    wait_until(lambda: folder.exists() and len(list(folder.iterdir())) == 4)


def test_the_first_program_is_lowered_at_once_and_not_again(folder):
    seen = []
    a, b = Lowered("a", seen), Lowered("b", seen)
    compilers = Compilers()
    compilers.begin_first(work(a, b))
    assert lowered(seen) == ["a"] and not compilers.reads_cache
    compilers.begin([work(a, b)])
    compilers.wait_for_all()
    assert lowered(seen) == ["a", "b"]
    wait_until(lambda: folder.exists() and len(list(folder.iterdir())) == 2)
    again = Compilers()
    again.begin_first(work(a, b))
    again.wait_for_all()
    assert again.reads_cache and lowered(seen) == ["a", "b", "a"]


def one_after_a_run(first, second, ran):
    """The links of two programs. The second one comes when `ran` is set."""
    yield first, ()
    assert ran.wait(TIMEOUT_S)
    yield second, ()


def test_a_known_program_runs_before_the_next_one_is_lowered(folder):
    seen, ran = [], threading.Event()
    a, b = Lowered("a", seen), Lowered("b", seen)
    store(a, b)

    compilers = Compilers()
    compilers.begin([CompileJob([a, b], one_after_a_run(a, b, ran))])
    compilers.ready(a)
    assert lowered(seen) == ["a"]
    ran.set()
    compilers.ready(b)
    assert seen == ["lower a", "lower b"], "what is on disk was compiled"


def test_a_new_program_of_a_cpu_is_on_disk_before_it_runs(folder, monkeypatch):
    """XLA writes none there that sorts and has run. Another is still lowered when it runs."""
    monkeypatch.setattr(ahead, "times_kernels", lambda: False)
    seen, ran = [], threading.Event()
    a, b = Lowered("a", seen), Lowered("b", seen)

    compilers = Compilers()
    compilers.begin([CompileJob([a, b], one_after_a_run(a, b, ran))])
    assert compilers.ready(a) == "compiled a"
    assert [file.read_text() for file in folder.iterdir()] == ["compiled a"]
    ran.set()
    compilers.ready(b)


def test_a_program_that_times_kernels_is_compiled_when_the_device_is_idle(folder):
    """`b` is new: it waits until `a` has run, and nothing else does."""
    seen = []
    a, b, c = (Lowered(name, seen) for name in "abc")
    store(a, c)
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
    compilers.begin([CompileJob([a, b, c], links())])
    compilers.ready(a)
    began.set()
    known = compilers._programs[c]
    wait_until(lambda: known.compiled is not None and known.compiled.done())
    compilers.ready(b, [Running()])
    assert seen.index("a has run") < seen.index("compile b")
    wait_until(lambda: len(list(folder.iterdir())) == 3)  # the next start is not held up


def test_a_program_that_is_timing_kernels_is_waited_for(folder):
    """A known one may not run at that time, though nothing else keeps it."""
    seen, go_on = [], threading.Event()
    a, b = Lowered("a", seen), Lowered("b", seen, lambda: go_on.wait(TIMEOUT_S))
    store(a)
    compilers = Compilers()
    compilers.begin([work(a, b)])
    while lowered(seen) != ["a", "b"]:
        time.sleep(0.001)
    compilers._programs[b].independent.result(TIMEOUT_S)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(compilers.ready, a)
        time.sleep(0.05)
        assert not waiting.done()
        go_on.set()
        waiting.result(TIMEOUT_S)
    assert "compile b" in seen


def test_an_error_reaches_whoever_waits(folder):
    """One of the lowering thread belongs to all that it did not reach."""
    seen = []
    a, b, c = (Lowered(name, seen) for name in "abc")
    store(a)

    def links():
        yield a, ()
        raise ValueError("does not fit")

    compilers = Compilers()
    compilers.begin([CompileJob([a, b, c], links())])
    compilers.ready(a)
    for program in (b, c):
        with pytest.raises(ValueError, match="does not fit"):
            compilers.ready(program)

    def fail():
        raise RuntimeError("XLA cannot")

    bad = Lowered("bad", seen, fail)
    compilers = Compilers()
    compilers.begin([work(bad)])
    with pytest.raises(RuntimeError, match="XLA cannot"):
        compilers.ready(bad)
    assert not folder.exists() or len(list(folder.iterdir())) == 1  # `a` alone


def test_what_a_start_kept_runs_before_it_is_lowered(folder):
    """It is lowered after the first call, and whoever called waits for that in `check`."""
    seen = []
    a, b = Lowered("a", seen), Lowered("b", seen)
    start = Start("key")
    assert not Compilers().begin_stored([a, b], start, list), "nothing was kept"
    compilers = Compilers()
    compilers.begin([work(a, b)], start)
    compilers.wait_for_all()
    wait_until(lambda: folder.exists() and len(list(folder.iterdir())) == 2)

    seen.clear()
    again = Compilers()
    assert again.begin_stored([a, b], start, lambda: [work(a, b)]) and again.reads_cache
    assert not seen
    assert start.names() == [], "a process that dies of them would be the first of many"
    with again.checked():
        assert again.ready(a) == "read compiled a" and again.ready(b) == "read compiled b"
    assert seen == ["lower a", "lower b"]
    assert Compilers().begin_stored([a, b], start, list)


def test_a_start_whose_programs_changed_is_refused_and_forgotten(folder):
    """Before anything leaves the step, an error in it too; the next start compiles."""
    a, other = Lowered("a", []), Lowered("other", [])
    start = Start("key")
    start.write(store(a))
    compilers = Compilers()
    assert compilers.begin_stored([other], start, lambda: [work(other)])
    with pytest.raises(StalePrograms, match="start the command again"), compilers.checked():
        assert compilers.ready(other) == "read a"
        raise TypeError("argument types differ")
    with pytest.raises(StalePrograms), compilers.checked():
        assert compilers.ready(other) == "read a"
    assert not Compilers().begin_stored([other], start, list)


def test_an_error_of_lowering_what_was_kept_is_raised(folder):
    a, start = Lowered("a", []), Start("key")
    start.write(store(a))

    def works():
        raise ValueError("does not fit")

    compilers = Compilers()
    assert compilers.begin_stored([a], start, works)
    with pytest.raises(ValueError, match="does not fit"), compilers.checked():
        compilers.ready(a)


def test_a_start_is_kept_only_while_all_its_files_are_there(folder):
    a, b = Lowered("a", []), Lowered("b", [])
    start = Start("key")
    names = store(a, b)
    start.write(names)
    assert not Compilers().begin_stored([a], start, list), "of other programs"
    (folder / names[1]).unlink()
    assert not Compilers().begin_stored([a, b], start, list)
    start.write([*names[:1], ""])
    assert start.names() == names, "a start without a folder for one of its programs"
    (folder.parent / stored.STARTS / "key.json").write_text("[1,")
    assert start.names() == []


def test_old_files_are_deleted_where_something_was_compiled(folder, monkeypatch):
    monkeypatch.setattr(stored, "MOST_BYTES", 0)
    program, other = Lowered("a", []), Lowered("b", [])
    (name,) = store(program)
    os.utime(folder / name, (0, 0))
    compilers = Compilers()
    compilers.begin([work(program)])
    compilers.wait_for_all()
    assert (folder / name).exists(), "nothing is new"
    os.utime(folder / name, (0, 0))  # it was read, and so used
    compilers.begin([work(other)])
    compilers.wait_for_all()
    wait_until(lambda: not (folder / name).exists())


def test_a_file_that_cannot_be_read_is_compiled_and_said(folder, caplog):
    seen = []
    a = Lowered("a", seen)
    [name] = store(a)
    (folder / name).write_text("cut")
    compilers = Compilers()
    compilers.begin([work(a)])
    assert compilers.ready(a) == "compiled a"
    wait_until(lambda: (folder / name).exists() and (folder / name).read_text() == "compiled a")

    (folder / name).write_text("cut")
    start = Start("key")
    start.write([name])
    compilers = Compilers()
    assert compilers.begin_stored([a], start, lambda: [work(a)])
    assert compilers.ready(a) is a, "jax compiles it where it is called"
    assert [record.getMessage() for record in caplog.records] == ["cut; it is compiled"] * 2


def test_a_folder_that_takes_no_files_ends_no_run(folder, tmp_path):
    """jax itself warns of such a cache, and computes."""
    (tmp_path / stored.PROGRAMS).write_text("a file where the folder of programs would be")
    seen = []
    compilers = Compilers()
    compilers.begin([work(Lowered("one", seen))])
    compilers.wait_for_all()
    assert seen == ["lower one", "compile one"]
