"""Executables on disk: what they compute, what names them, and files that cannot be read."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.program.chain import setting_of
from jaxrl_llm.program.stored import PROGRAMS, STARTS, Start, StoredPrograms, UnreadableProgram


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / PROGRAMS
    jax.config.update("jax_compilation_cache_dir", before)


def mesh_of(*numbers):
    return Mesh(np.array([jax.devices()[number] for number in numbers]), "data")


def lowered(fn, mesh, names="ab", **how):
    place = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=place)
    return jax.jit(fn, out_shardings=place, **how).lower(dict.fromkeys(names, x))


@pytest.mark.parametrize("numbers", [(0,), (3,), (2, 1)])
def test_what_is_read_computes_what_was_saved_on_the_same_devices(folder, numbers):
    mesh = mesh_of(*numbers)
    program = lowered(lambda x: x | {"a": x["a"] + 2 * x["b"]}, mesh, donate_argnums=(0,))
    stored, setting = StoredPrograms(), setting_of(mesh, None)
    name = stored.name_of(program, setting)
    assert not stored.has(name)
    stored.save(name, program.compile())
    assert StoredPrograms().has(name)
    place = NamedSharding(mesh, PartitionSpec("data"))
    a, b = (jax.device_put(np.arange(4.0, dtype=np.float32) + n, place) for n in (0, 1))
    found = StoredPrograms().load(name)({"a": a, "b": b})["a"]
    np.testing.assert_array_equal(found, [2, 5, 8, 11])
    assert list(found.sharding.mesh.devices.flat) == [jax.devices()[n] for n in numbers]
    assert a.is_deleted() and b.is_deleted(), "nothing was donated"


def test_the_name_knows_all_that_decides_an_executable(folder, monkeypatch):
    """One argument of two has the same text as the other one: jax drops what is not used."""
    mesh, other = mesh_of(0), mesh_of(1)
    fns = {
        "first": lambda x: x["a"] * 2,
        "second": lambda x: x["b"] * 2,
        "by name": lambda x: {"found": x["a"] * 2},
    }
    programs = {key: lowered(fn, mesh) for key, fn in fns.items()}
    texts = {key: program.as_text() for key, program in programs.items()}
    assert texts["first"].replace("x_a", "x") == texts["second"].replace("x_b", "x")
    stored, setting = StoredPrograms(), setting_of(mesh, None)
    names = {stored.name_of(program, setting) for program in programs.values()}
    names |= {stored.name_of(lowered(fns["first"], mesh, "abc"), setting)}
    names |= {stored.name_of(lowered(fns["first"], mesh, donate_argnums=(0,)), setting)}
    for changed in (setting_of(other, None), setting_of(mesh, {"xla_option": "1"})):
        names |= {stored.name_of(programs["first"], changed)}
    assert len(names) == 7
    again = stored.name_of(lowered(fns["first"], mesh), setting_of(mesh, {}))
    assert again in names
    before = jax.config.jax_optimization_level
    jax.config.update("jax_optimization_level", "O1")
    names |= {StoredPrograms().name_of(programs["first"], setting)}
    jax.config.update("jax_optimization_level", before)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--another")
        names |= {StoredPrograms().name_of(programs["first"], setting)}
    assert len(names) == 9
    weak = [jax.jit(lambda x, one=one: one).lower(1) for one in (2.0, jnp.float32(2.0))]
    assert weak[0].as_text() == weak[1].as_text()
    assert stored.name_of(weak[0], "") != stored.name_of(weak[1], "")


def test_a_file_that_is_cut_is_deleted_and_said(folder):
    mesh = mesh_of(0)
    program, stored = lowered(lambda x: x["a"], mesh), StoredPrograms()
    name = stored.name_of(program, "")
    stored.save(name, program.compile())
    file = folder / name
    whole = file.read_bytes()
    for damaged in (whole[:-100], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        with pytest.raises(UnreadableProgram, match="cannot be read"):
            stored.load(name)
        assert not stored.has(name)


def test_a_file_that_finds_no_memory_stays(folder, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    program, stored = lowered(lambda x: x["a"], mesh_of(0)), StoredPrograms()
    name = stored.name_of(program, "")
    stored.save(name, program.compile())
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", full)
    with pytest.raises(UnreadableProgram, match="out of memory"):
        stored.load(name)
    assert stored.has(name)


def test_a_disk_that_is_full_keeps_no_part(folder, monkeypatch):
    def full(self, data):
        Path.touch(self)
        raise OSError(errno.ENOSPC, "No space left on device")

    mesh = mesh_of(0)
    program, stored = lowered(lambda x: x["a"], mesh), StoredPrograms()
    monkeypatch.setattr(Path, "write_bytes", full)
    stored.save(stored.name_of(program, ""), program.compile())
    assert list(folder.iterdir()) == []


def aged(file, hours, size=1000):
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_bytes(bytes(size))
    os.utime(file, (time.time() - 3600 * hours,) * 2)
    return file


def test_what_was_not_used_for_longest_is_deleted_beyond_a_size(folder, monkeypatch):
    names = ["new", "day", "week", "month"]
    day, week, month = (aged(folder / n, h) for n, h in zip(names[1:], (24, 168, 720), strict=True))
    new, part = aged(folder / "new", 0, size=1500), aged(folder / "day.1f0c", 2)
    fresh = aged(folder / "day.2e1d", 0)  # of a process that writes it now
    lists = {name: Start(name) for name in names}
    for hours, name in enumerate(names):
        lists[name].write(["new", name])
        aged(folder.with_name(STARTS) / f"{name}.json", 24 * hours)
    lists["writing"] = Start("writing")
    lists["writing"].write(["not there yet"])
    stored = StoredPrograms()
    stored.bound()
    assert not part.exists() and all(map(stored.has, names)), "10 GB are not reached"
    monkeypatch.setattr("jaxrl_llm.program.stored.MOST_BYTES", 4500)
    stored.bound()
    assert not month.exists() and week.exists() and day.exists()
    assert [name for name, start in lists.items() if start.names()] == [*names[:3], "writing"]
    before = jax.config.jax_compilation_cache_max_size
    try:
        jax.config.update("jax_compilation_cache_max_size", 100)
        stored.bound()
    finally:
        jax.config.update("jax_compilation_cache_max_size", before)
    assert {file.name for file in folder.iterdir()} == {new.name, fresh.name}, "they are in use"


def test_a_program_that_is_read_counts_as_used(folder, monkeypatch):
    program, stored = lowered(lambda x: x["a"], mesh_of(0)), StoredPrograms()
    name = stored.name_of(program, "")
    stored.save(name, program.compile())
    before = aged(folder / name, 48).stat()
    aged(folder / "other", 24)
    monkeypatch.setattr("jaxrl_llm.program.stored.MOST_BYTES", 0)
    stored.load(name)
    stored.bound()
    assert stored.has(name) and not stored.has("other")
    assert (folder / name).stat().st_mtime_ns == before.st_mtime_ns, "it was not written"


def test_two_processes_delete_at_the_same_time(folder, monkeypatch):
    """Each finds that the other one was faster."""
    monkeypatch.setattr("jaxrl_llm.program.stored.MOST_BYTES", 0)
    for hours in range(2, 9):
        aged(folder / f"old-{hours}", hours)
    unlink = Path.unlink

    def twice(self, missing_ok=False):
        unlink(self)
        unlink(self)

    monkeypatch.setattr(Path, "unlink", twice)
    StoredPrograms().bound()
    assert list(folder.iterdir()) == []
    folder.rmdir()
    StoredPrograms().bound()


def test_a_program_that_xla_cannot_write_is_not_kept(folder):
    """On a CPU that is one that sorts, once it has run. Those after it are kept."""
    stored = StoredPrograms()
    sorts = lowered(lambda x: {"found": jnp.sort(jnp.tile(x["a"], 64))}, mesh_of(0))
    other = lowered(lambda x: x["b"], mesh_of(0))
    names = [stored.name_of(program, "") for program in (sorts, other)]
    compiled, place = sorts.compile(), NamedSharding(mesh_of(0), PartitionSpec("data"))
    x = jax.device_put(np.arange(4, dtype=np.float32), place)
    jax.block_until_ready(compiled({"a": x, "b": x}))
    for name, program in zip(names, (compiled, other.compile()), strict=True):
        stored.save(name, program)
    assert [stored.has(name) for name in names] == [False, True]


def test_a_program_whose_results_pickle_refuses_is_named(folder, caplog):
    class Local(NamedTuple):
        found: jax.Array

    stored, program = StoredPrograms(), lowered(lambda x: Local(x["b"]), mesh_of(0))
    name = stored.name_of(program, "")
    stored.save(name, program.compile())
    assert not stored.has(name)
    assert "not kept" in caplog.text and "Local" in caplog.text


# Lowering tells jax's library of linear algebra where to find what a CPU's program calls.
READS = """
import sys, jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
from jaxrl_llm.program.stored import StoredPrograms
print(StoredPrograms().load(sys.argv[2])({"a": jnp.float32([[4.0]])})["a"])
"""


def test_a_program_that_calls_a_library_is_read_in_another_process(folder):
    place = NamedSharding(mesh_of(0), PartitionSpec())
    x = jax.ShapeDtypeStruct((1, 1), jnp.float32, sharding=place)
    run = jax.jit(lambda x: {"a": jnp.linalg.cholesky(x["a"])}, out_shardings=place)
    program, stored = run.lower({"a": x}), StoredPrograms()
    name = stored.name_of(program, "")
    stored.save(name, program.compile())
    found = subprocess.run(
        [sys.executable, "-c", READS, str(folder.parent), name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert found.stdout == "[[2.]]\n", found.stderr


@pytest.mark.parametrize("cache", ["", "gs://bucket/cache"])
def test_without_a_folder_nothing_is_kept(folder, cache):
    jax.config.update("jax_compilation_cache_dir", cache)
    stored, program = StoredPrograms(), lowered(lambda x: x["a"], mesh_of(0))
    assert stored.name_of(program, "") == "" and not stored.has("")
    stored.save("", program.compile())
    stored.bound()
    assert not folder.exists()
