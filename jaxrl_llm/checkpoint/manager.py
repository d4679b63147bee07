"""Resumable checkpoints with Orbax: everything that a step depends on.

The latest and the best checkpoints are kept. `layout.py` describes their files. Orbax takes
0.4 CPU-seconds to import, so it is imported where it is used.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.checkpoint.layout import FROZEN, LOOP, STEP_PREFIX, is_complete
from jaxrl_llm.distributed.multihost import barrier, is_main
from jaxrl_llm.distributed.sharding import in_host_memory

VALIDATION = "val-core/"
ROLES = ("actor", "critic", "reward", "reference")  # roles with parameters in a step's folder
DELETED = "deleted"  # a checkpoint is moved here before its files are removed
SCORE = "score"  # entry of the loop state: the metric that selects the best checkpoint


class CheckpointManager:
    """Saves and restores a dict of pytrees (`items`) and `loop`, a dict in JSON's types."""

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_latest: int,
        keep_best: int,
        best_metric: str,
        asynchronous: bool,
    ):
        """`best_metric` names one of the metrics given to `save`. Larger is better.

        With a leading minus, smaller is better (`-eval_loss`). An empty name means the first mean
        validation reward (`val-core/<source>/reward/mean@N`), else the first validation metric.
        For grades of 0 and 1 the mean reward is the accuracy.
        """
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers

        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        if is_main():
            self._remove_unfinished()
        self._remove_deleted()
        barrier("checkpoint_directory")
        self._best = _KeepBest(keep_best, self._stored_scores())
        policies = [checkpoint_managers.LatestN(keep_latest), self._best]
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                step_prefix=STEP_PREFIX,
                enable_async_checkpointing=asynchronous,
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
                # If a kill interrupted the removal of a checkpoint's files in place, the rest
                # would look like a whole checkpoint.
                todelete_subdir=DELETED,
            ),
        )
        self._best_metric = best_metric

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(
        self, step: int, items: Mapping[str, Any], loop: dict[str, Any], metrics: dict[str, float]
    ) -> None:
        """Start saving. Returns once the arrays are copied from the devices.

        Arrays in host memory are not copied: with them, this returns when all is on disk. A step
        counts as complete only when all of it is on disk, also if the process is killed.
        """
        import orbax.checkpoint as ocp

        loop = dict(loop)
        candidates = [name for name in metrics if name.startswith(VALIDATION)]
        candidates.sort(key=lambda name: "/reward/mean@" not in name)  # stable: rewards first
        given = self._best_metric or next(iter(candidates), "")
        name, sign = given.removeprefix("-"), -1.0 if given.startswith("-") else 1.0
        if name in metrics:
            loop[SCORE] = self._best.scores[step] = sign * metrics[name]
        args: dict[str, Any] = {
            name: ocp.args.StandardSave(jax.tree.map(_alias, item)) for name, item in items.items()
        }
        args[LOOP] = ocp.args.JsonSave(loop)
        self._manager.save(step, args=ocp.args.Composite(**args))
        if any(in_host_memory(x) for x in jax.tree.leaves(dict(items))):
            self.wait()
        self._remove_deleted()

    def restore(self, step: int, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict]:
        """The items of `step`, with the shardings of `abstract`, and the loop state."""
        return restore(self.path(step), abstract)

    def path(self, step: int) -> Path:
        """The folder of a step, which need not exist."""
        return self.directory / f"{STEP_PREFIX}_{step}"

    def wait(self) -> None:
        """Wait until every started save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish pending saves and release the directory."""
        self._manager.close()
        self._remove_deleted()

    def _stored_scores(self) -> dict[int, float]:
        """The score of each checkpoint on disk, so that a restart keeps the best one."""
        scores = {}
        # Sorted, so that all processes read them in the same order.
        for path in sorted(self.directory.glob(f"{STEP_PREFIX}_*")):
            _, loop = restore(path, {})
            if SCORE in loop:
                scores[int(path.name.rpartition("_")[2])] = loop[SCORE]
        return scores

    def _remove_unfinished(self) -> None:
        """Remove interrupted saves: Orbax would refuse to write such a step again."""
        for path in self.directory.glob(f"{STEP_PREFIX}_*"):
            finished = path.name.removeprefix(f"{STEP_PREFIX}_").isdigit() and is_complete(path)
            if not finished:
                shutil.rmtree(path)

    def _remove_deleted(self) -> None:
        """Remove the files of checkpoints that are no longer kept."""
        if is_main():
            for path in (self.directory / DELETED).glob("*"):
                shutil.rmtree(path)


class _KeepBest:
    """An Orbax PreservationPolicy: the `number` highest scores; of equal ones, the later."""

    def __init__(self, number: int, scores: dict[int, float]):
        self.number = number
        self.scores = scores

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        steps = [info.step for info in checkpoints]
        scored = [step for step in steps if step in self.scores]
        ranked = sorted(scored, key=lambda step: (self.scores[step], step), reverse=True)
        return [step in ranked[: self.number] for step in steps]


def restore(path: str | Path, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict]:
    """Items and loop state of the checkpoint folder `path` (`.../global_step_N`).

    ValueError if it is not a finished checkpoint, or lacks an item of `abstract`.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    if not is_complete(path):
        raise ValueError(
            f"{path} is not a finished checkpoint; give a folder such as "
            f"RUN_DIR/checkpoints/{STEP_PREFIX}_100"
        )
    missing = [name for name in abstract if not (path / name).exists()]
    if missing:
        held = sorted(p.name for p in path.iterdir() if p.is_dir())
        raise ValueError(
            f"{path} holds {', '.join(held)} but not {', '.join(missing)}: it was saved by a run "
            "with other roles; use the config it was made with"
        )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args: dict[str, Any] = {
            name: ocp.args.StandardRestore(item) for name, item in abstract.items()
        }
        args[LOOP] = ocp.args.JsonRestore()
        out = checkpointer.restore(path, args=ocp.args.Composite(**args))
    return {name: out[name] for name in abstract}, out[LOOP]


def save_frozen(directory: str | Path, items: Mapping[str, Any]) -> None:
    """Write the roles that never change, once in a run."""
    import orbax.checkpoint as ocp

    path = Path(directory).absolute() / FROZEN
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, dict(items), force=True)


def restore_frozen(directory: str | Path, abstract: Mapping[str, Any]) -> dict[str, Any]:
    """The frozen roles of a run's checkpoint directory. ValueError if they are missing."""
    import orbax.checkpoint as ocp

    path = Path(directory).absolute() / FROZEN
    if not path.exists():
        raise ValueError(
            f"{path} is missing: it holds {', '.join(abstract)}, which every checkpoint of the "
            "run needs; copy it along with the checkpoint"
        )
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, dict(abstract))


def stored_roles(checkpoint: str | Path) -> dict[str, Any]:
    """Shapes and dtypes of the parameters of every role, also frozen ones, on one device."""
    checkpoint = Path(checkpoint).absolute()
    frozen = checkpoint.parent / FROZEN
    found = {name: _abstract(checkpoint / name) for name in ROLES if (checkpoint / name).exists()}
    return found | (_abstract(frozen) if frozen.exists() else {})


def restore_role(checkpoint: str | Path, role: str, abstract: Any) -> Any:
    """The parameters of one role, with the shardings of `abstract`, an entry of `stored_roles`."""
    import orbax.checkpoint as ocp

    checkpoint = Path(checkpoint).absolute()
    path, tree = checkpoint / role, abstract
    if not path.exists():
        path, tree = checkpoint.parent / FROZEN, {role: abstract}
    args = ocp.args.PyTreeRestore(
        item=tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=True,  # of the frozen roles, only this one is read
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(path, args=args)
    return restored if tree is abstract else restored[role]


def _alias(x: Any) -> Any:
    """For an array in host memory, a second array on the same memory.

    Orbax reads an array in host memory through a view that the array then keeps, and memory with
    views cannot be donated to a GPU program. Here the view goes away with the second array.
    """
    if not in_host_memory(x):
        return x
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def _abstract(item: Any) -> dict[str, Any]:
    """Shapes and dtypes in the folder of one item, on one device."""
    import orbax.checkpoint as ocp

    # Read by the handler: a Checkpointer would warn that one item has no metadata of its own.
    tree: Any = ocp.StandardCheckpointHandler().metadata(item)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=device), _plain(tree.tree)
    )


def _plain(tree: Any) -> Any:
    return {k: _plain(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree
