"""What a checkpoint folder keeps, also when it is opened again after a kill."""

import shutil
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxrl_llm.checkpoint.manager import CheckpointManager, restore

ABSTRACT = {"actor": {"weight": jnp.zeros((3,))}}


def open_manager(folder: Path, **changes) -> CheckpointManager:
    settings = {"keep_latest": 2, "keep_best": 1, "best_metric": "reward", "asynchronous": True}
    return CheckpointManager(folder, **(settings | changes))


def save(manager: CheckpointManager, scores: dict[int, float]) -> None:
    for step, score in scores.items():
        items = {"actor": {"weight": jnp.full((3,), float(step))}}
        manager.save(step, items, {"step": step}, {"reward": score})
    manager.close()


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in folder.glob("global_step_*"))


def test_latest_and_best_are_kept_across_a_restart(tmp_path):
    save(open_manager(tmp_path), {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3})
    assert steps(tmp_path) == [2, 3, 4]
    again = open_manager(tmp_path)
    assert again.latest() == 4
    save(again, {5: 0.4, 6: 0.5})
    assert steps(tmp_path) == [2, 5, 6]  # 2 is still known to be the best
    save(open_manager(tmp_path), {7: 0.95})
    assert steps(tmp_path) == [6, 7]
    assert not list((tmp_path / "deleted").iterdir())


def test_a_best_metric_that_no_step_has_is_named_once(tmp_path, caplog):
    for number, (name, others, said) in enumerate(
        [
            ("actor/entropi", {"actor/entropy": 1.0}, 1),
            ("-eval_los", {"eval_loss": 1.0}, 1),
            ("-eval_loss", {"loss": 1.0}, 0),  # of a later step
        ]
    ):
        caplog.clear()
        manager = open_manager(tmp_path / str(number), best_metric=name)
        for step in range(3):
            manager.save(step, {"actor": {"weight": jnp.zeros((3,))}}, {"step": step}, others)
        manager.close()
        texts = [record.getMessage() for record in caplog.records]
        found = [text for text in texts if "no such metric at step 1" in text]
        assert len(found) == said and all("; did you mean" in text for text in found)


def test_first_validation_metric_is_the_default_measure(tmp_path):
    manager = open_manager(tmp_path, best_metric="", keep_latest=1)
    for step, accuracy in {1: 0.5, 2: 0.1, 3: 0.2}.items():
        metrics = {"loss": 1.0, "val-core/sums/acc/mean@1": accuracy}
        manager.save(step, {"actor": {"weight": jnp.zeros((3,))}}, {"step": step}, metrics)
    manager.close()
    assert steps(tmp_path) == [1, 3]


def test_a_validation_is_the_best_if_it_beats_all_checkpoints(tmp_path):
    name = "val-core/sums/reward/mean@1"
    manager = open_manager(tmp_path, best_metric="")
    assert not manager.is_best({"loss": 1.0}) and manager.is_best({name: 0.0})
    manager.save(1, {"actor": {"weight": jnp.zeros((3,))}}, {"step": 1}, {name: 0.5})
    assert manager.is_best({name: 0.6}) and not manager.is_best({name: 0.5})
    manager.close()
    again = open_manager(tmp_path, best_metric="-eval_loss", keep_best=0)
    assert not again.is_best({"eval_loss": -0.6})  # no best is kept
    again.close()
    again = open_manager(tmp_path, best_metric="-eval_loss")
    assert again.is_best({"eval_loss": -0.6}) and not again.is_best({"eval_loss": -0.4})
    again.close()


def test_the_best_follows_the_mean_reward_where_grades_are_not_0_or_1(tmp_path):
    manager = open_manager(tmp_path, best_metric="", keep_latest=1)
    for step, (accuracy, reward) in {1: (1.0, 2.0), 2: (1.0, 3.77), 3: (1.0, 1.5)}.items():
        metrics = {"val-core/x/acc/mean@1": accuracy, "val-core/x/reward/mean@1": reward}
        manager.save(step, {"actor": {"weight": jnp.zeros((3,))}}, {"step": step}, metrics)
    manager.close()
    assert steps(tmp_path) == [2, 3]


def test_what_a_kill_left_is_cleared_away(tmp_path):
    save(open_manager(tmp_path), {1: 0.1, 2: 0.2})
    unfinished = tmp_path / "global_step_3.orbax-checkpoint-tmp-5"
    shutil.copytree(tmp_path / "global_step_2", unfinished)
    half_deleted = tmp_path / "deleted" / "global_step_0"
    shutil.copytree(tmp_path / "global_step_1", half_deleted)
    shutil.rmtree(half_deleted / "actor")
    link = tmp_path / "deleted" / "link"
    link.symlink_to(tmp_path / "global_step_2")  # as where a user moved a checkpoint by a link
    manager = open_manager(tmp_path)
    assert not link.is_symlink()
    assert manager.latest() == 2
    assert not unfinished.exists() and not half_deleted.exists()
    save(manager, {3: 0.3})
    items, loop = restore(tmp_path / "global_step_3", ABSTRACT)
    np.testing.assert_array_equal(items["actor"]["weight"], np.full(3, 3.0))
    assert loop["step"] == 3


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    save(open_manager(tmp_path), {1: 0.1})
    with pytest.raises(ValueError, match="not a finished checkpoint"):
        restore(tmp_path, ABSTRACT)
    with pytest.raises(ValueError, match="holds actor, loop but not critic"):
        restore(tmp_path / "global_step_1", {"critic": {}})


def test_a_step_that_changes_the_loop_state_during_a_save_damages_nothing(tmp_path, monkeypatch):
    """Orbax writes it in a thread; what is generated ahead adds to its lists meanwhile."""
    changed, write = threading.Event(), ocp.JsonCheckpointHandler._save_fn

    async def write_late(*arguments):
        assert changed.wait(20)
        await write(*arguments)

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", write_late)
    rounds, manager = [{"tokens": 1}], open_manager(tmp_path)
    manager.save(1, {"actor": {"weight": jnp.zeros((3,))}}, {"rounds": rounds}, {})
    rounds[0]["tokens"] = 2
    rounds.append({"tokens": 3})
    changed.set()
    manager.close()
    _, loop = restore(tmp_path / "global_step_1", ABSTRACT)
    assert loop["rounds"] == [{"tokens": 1}]
