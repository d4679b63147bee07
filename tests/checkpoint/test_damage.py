"""Whatever happens to a file of a checkpoint, it is named, and nothing is deleted."""

import json
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm.checkpoint import digests, manager
from jaxrl_llm.checkpoint.digests import DamagedCheckpoint
from jaxrl_llm.checkpoint.manager import CheckpointManager

MUTATIONS = 500
SEED = 7


def items(step: int) -> dict[str, dict[str, jax.Array]]:
    values = jax.random.normal(jax.random.key(step), (40, 25))
    low = values.astype(jnp.bfloat16)
    return {"actor": {"weight": values, "low": low}, "critic": {"step": jnp.int32(step)}}


def open_manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, keep_latest=4, keep_best=0, best_metric="", asynchronous=True)


def saved(folder: Path, *steps: int) -> Path:
    checkpoints = open_manager(folder)
    for step in steps:
        checkpoints.save(step, items(step), {"step": step, "data": {"at": step}}, {})
    checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sound checkpoints, of steps 1 and 2."""
    return saved(tmp_path_factory.mktemp("whole"), 1, 2)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def mutate(file: Path, other: Path, chance: random.Random) -> str:
    """Change a file; says how. `other` is the same file of another step, or of its neighbour."""
    content = bytearray(file.read_bytes())
    place = chance.randrange(len(content)) if content else 0
    kinds = ["flip", "cut", "zero", "grow", "exchange", "delete"]
    if not any(content[place:]):
        kinds.remove("zero")
    if not content:
        kinds = ["grow", "delete"]
    if other.read_bytes() == content:
        kinds = [kind for kind in kinds if kind != "exchange"]
    kind = chance.choice(kinds)
    if kind == "delete":
        file.unlink()
        return kind
    if kind == "flip":
        content[place] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "zero":
        content[place:] = bytes(len(content) - place)
    elif kind == "grow":
        content += bytes(1 + chance.randrange(9))
    else:
        content = bytearray(other.read_bytes())
    file.write_bytes(content)
    return f"{kind} at {place}"


def test_no_mutation_is_silent(folder: Path) -> None:
    """500 changes of any file: flipped, cut, zeroed, grown, exchanged between steps, deleted."""
    chance, path, old = random.Random(SEED), folder / "global_step_2", folder / "global_step_1"
    names, kinds = files(path), set()
    silent = []
    for _ in range(MUTATIONS):
        file = chance.choice(names)
        before = file.read_bytes()
        twin = old / file.relative_to(path)
        how = mutate(file, twin if twin.exists() else chance.choice(names), chance)
        try:
            manager.check(path)
            # Only a deleted digests.json passes: a kill may leave a checkpoint without it.
            if file.name != digests.DIGESTS or file.exists():
                silent.append((file.relative_to(path), how))
        except DamagedCheckpoint as error:
            assert str(path) in str(error)
            kinds.add((file.name, how.partition(" ")[0]))
        file.write_bytes(before)
    assert not silent
    manager.check(path)
    assert len(kinds) > 30, kinds


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_is_used(folder: Path) -> None:
    file = max(files(folder / "global_step_2" / "actor"), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = open_manager(folder)
    assert again.latest() == 1
    (message,) = again.set_aside
    name = file.relative_to(folder / "global_step_2")
    assert f"global_step_2 is damaged: {name} has other bytes" in message
    kept = folder / "damaged" / "global_step_2"
    assert f"moved to {kept}" in message
    assert (kept / name).read_bytes() == content
    again.save(2, items(2), {"step": 2}, {})  # the step can be written again
    again.close()
    assert not open_manager(folder).set_aside


def test_folders_of_the_user_are_left_alone(folder: Path) -> None:
    kept = ["global_step_2_backup", "global_step_best", "global_step_2.old", "notes"]
    for name in kept:
        shutil.copytree(folder / "global_step_1", folder / name)
    (folder / "global_step_5").write_text("a file")
    checkpoints = open_manager(folder)
    assert checkpoints.latest() == 2
    for step in (3, 4, 6, 7, 8):
        checkpoints.save(step, items(step), {"step": step}, {})
    checkpoints.close()
    assert all((folder / name / "loop").exists() for name in kept)


def test_a_step_that_lost_its_marker_is_not_deleted(folder: Path) -> None:
    for step in (1, 2):
        (folder / f"global_step_{step}" / "_CHECKPOINT_METADATA").unlink()
    checkpoints = open_manager(folder)
    assert checkpoints.latest() is None
    assert [path.name for path in checkpoints.damaged_ones()] == ["global_step_1", "global_step_2"]
    assert (folder / "damaged" / "global_step_2" / "actor").exists()


def test_a_renamed_checkpoint_is_named(folder: Path) -> None:
    (folder / "global_step_1").rename(folder / "global_step_9")
    checkpoints = open_manager(folder)
    assert checkpoints.latest() == 2
    assert "its loop state is of step 1" in checkpoints.set_aside[0]


def test_items_of_two_steps_are_named(folder: Path) -> None:
    shutil.rmtree(folder / "global_step_2" / "actor")
    shutil.copytree(folder / "global_step_1" / "actor", folder / "global_step_2" / "actor")
    with pytest.raises(DamagedCheckpoint, match="global_step_2 is damaged: actor/"):
        manager.check(folder / "global_step_2")
    # As a kill may leave it: without the digests of its files.
    (folder / "global_step_2" / digests.DIGESTS).unlink()
    manager.check(folder / "global_step_2")
    with pytest.raises(DamagedCheckpoint, match="array actor/low has other values, array actor/w"):
        manager.restore(folder / "global_step_2", items(0))


def test_another_dtype_is_refused(folder: Path) -> None:
    wanted = items(0)
    wanted["actor"]["weight"] = wanted["actor"]["weight"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match=r"has float32\[40,25\] for actor/weight, .* bfloat16"):
        manager.restore(folder / "global_step_2", wanted)


def test_a_checkpoint_may_move_or_be_a_link(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "global_step_2"
    shutil.copytree(folder / "global_step_2", moved)
    manager.check(moved)
    link = tmp_path / "global_step_2"
    link.symlink_to(moved)
    manager.check(link)
    found, loop = manager.restore(link, items(0))
    np.testing.assert_array_equal(found["actor"]["weight"], items(2)["actor"]["weight"])
    assert loop == {"step": 2, "data": {"at": 2}, "start_norms": {}}


def expected_digest(x: np.ndarray) -> str:
    """The same sums with numpy, by hand."""
    bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(np.uint64).ravel()
    index = np.arange(bits.size, dtype=np.uint64)
    mask, text = np.uint64(2**32 - 1), ""
    for place, factor in ((0x9E3779B9, 0x85EBCA6B), (0xB5297A4D, 0xC2B2AE35)):
        mixed = (bits ^ (index * np.uint64(place) & mask)) * np.uint64(factor) & mask
        mixed = (mixed ^ (mixed >> np.uint64(15))) * np.uint64(0x2C1B3C6D) & mask
        text += f"{int((mixed ^ (mixed >> np.uint64(13))).sum()) % 2**32:08x}"
    return text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("on_host", [0, 384])
def test_the_digest_of_an_array_does_not_depend_on_the_sharding(
    dtype: str, on_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MOST_ON_HOST", on_host)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    x = (np.random.default_rng(0).normal(size=(8, 3, 16)) * 50).astype(kind)
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    for spec in (("a", None, "b"), (None, None, ("a", "b")), (None, None, None)):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        found = digests.array_digests({"item": {"x": jax.device_put(x, sharding)}})
        assert found == {"item": {"x": f"{dtype}[8,3,16] {expected_digest(x)}"}}
    changed = x.copy()
    changed.view(np.uint8).ravel()[17] ^= 4
    again = digests.array_digests({"item": {"x": jnp.asarray(changed)}})
    assert again != found
    exchanged = x[::-1].copy()
    assert digests.array_digests({"item": {"x": jnp.asarray(exchanged)}}) != found


def test_processes_share_the_digests_of_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, shared = folder / "global_step_2", tmp_path / "global_step_2"
    shutil.copytree(whole, shared)
    expected = json.loads((whole / digests.DIGESTS).read_text())
    (shared / digests.DIGESTS).unlink()
    for process in (2, 1, 0):
        digests.write_digests(shared, (process, 3))
    assert json.loads((shared / digests.DIGESTS).read_text()) == expected
    assert not list(shared.glob("digests-*"))
    # Process 1 is lost, and the share of process 2 is of other files.
    monkeypatch.setattr(digests, "PATIENCE_S", 0.0)
    (shared / "digests-2.json").write_text('{"other": [1, "a"]}')
    digests.write_digests(shared, (0, 3))
    assert json.loads((shared / digests.DIGESTS).read_text()) == expected
    assert digests.damaged_files(shared) == []
