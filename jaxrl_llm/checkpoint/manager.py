"""Resumable checkpoints with Orbax: everything that a step depends on.

The latest and the best checkpoints are kept. `layout.py` describes their files. Orbax takes
0.4 CPU-seconds to import, so it is imported where it is used.
"""

import contextlib
import copy
import json
import logging
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.checkpoint import digests, soundness
from jaxrl_llm.checkpoint.digests import DamagedCheckpoint
from jaxrl_llm.checkpoint.layout import (
    DAMAGED,
    FROZEN,
    LOOP,
    OPTIMIZER,
    STEP_PREFIX,
    is_complete,
    step_of,
)
from jaxrl_llm.checkpoint.save_failures import save_failed
from jaxrl_llm.distributed.multihost import barrier, gather_objects, is_main, value_of_main
from jaxrl_llm.distributed.sharding import in_host_memory, second_array
from jaxrl_llm.references import nearest

VALIDATION = "val-core/"
HELD_OUT = (VALIDATION, "val-aux/", "eval_")  # metrics of steps with validation
ROLES = ("actor", "critic", "reward", "reference")  # roles of ours in a step's folder
DELETED = "deleted"  # a checkpoint is moved here before its files are removed
LOOP_FILE = "metadata"  # Orbax's name for the file of the loop state
# Entries of the loop state: the step, the metric that selects the best checkpoint, and digests of
# the arrays and of the loop state itself.
STEP, SCORE, ARRAYS, DIGEST = "step", "score", "array_digests", "digest"
NORMS = "start_norms"  # norm of each role's weights when the run began
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a checkpoint that Orbax is writing
POLL_S = 0.05
RECENT = 5  # saves whose longest counts

log = logging.getLogger(__name__)


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
        max_growth: float = math.inf,
    ):
        """`best_metric` names one of the metrics given to `save`. Larger is better.

        `max_growth` is the limit of `soundness.Growth`.

        With a leading minus, smaller is better (`-eval_loss`). An empty name means the first mean
        validation reward (`val-core/<source>/reward/mean@N`), else the first validation metric.
        For grades of 0 and 1 the mean reward is the accuracy.
        """
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers

        from jaxrl_llm.checkpoint.array_handler import save_on_any_processes

        save_on_any_processes()
        logging.getLogger("absl").addFilter(_is_not_of_a_save)
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        if is_main():
            self._remove_unfinished()
        self._remove_deleted()
        barrier("checkpoint_directory")
        self.set_aside: list[str] = []  # what was found damaged, a message each
        self._set_damaged_aside()
        self._best = _KeepBest(keep_best, self._stored_scores())
        self._sealing: list[_Seal] = []
        self._save_s: deque[float] = deque(maxlen=RECENT)
        self.growth = soundness.Growth(most=max_growth)
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
        self._warned = False  # whether a missing metric was named

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def begin(self, items: Mapping[str, Any]) -> None:
        """Take the norms of a run that saves nothing before its first step.

        Raises: UselessWeights when no run could begin with them.
        """
        self.growth.check(digests.measure(items), 0)

    def save(
        self, step: int, items: Mapping[str, Any], loop: dict[str, Any], metrics: dict[str, float]
    ) -> None:
        """Start saving. Returns once the arrays are copied from the devices.

        Arrays in host memory are not copied: with them, this returns when all is on disk. A step
        counts as complete only when all of it is on disk, also if the process is killed.

        Raises: UselessWeights when no run could go on from them; nothing is written then.
            SaveFailed when the disk fails, for this save or the one before.
        """
        import orbax.checkpoint as ocp

        started = time.monotonic()
        measured = digests.measure(items)
        self.growth.check(measured, step)
        loop = copy.deepcopy({STEP: step} | loop)  # Orbax reads it later, when steps changed it
        score, name = self._score(metrics), self._best_metric.removeprefix("-")
        if score is not None:
            loop[SCORE] = self._best.scores[step] = score
        elif name and step and not self._warned and _is_due(name, metrics):
            self._warned = True
            log.warning(
                "config.checkpoint.best_metric=%s: there is no such metric at step %d, so no best "
                "checkpoint is kept%s",
                self._best_metric,
                step,
                nearest(name, metrics),
            )
        loop[NORMS], loop[ARRAYS] = self.growth.start, digests.as_text(measured)
        loop[DIGEST] = digests.text_digest(loop)
        args: dict[str, Any] = {
            name: ocp.args.StandardSave(jax.tree.map(_read_apart, item))
            for name, item in items.items()
        }
        args[LOOP] = ocp.args.JsonSave(loop)
        with self._disk_errors():
            self._manager.save(step, args=ocp.args.Composite(**args))
        self._sealing = [seal for seal in self._sealing if not seal.done()]
        self._sealing.append(_Seal(self.path(step), started, self._save_s))
        if any(in_host_memory(x) for x in jax.tree.leaves(dict(items))):
            self.wait()
        self._remove_deleted()

    def is_best(self, metrics: dict[str, float]) -> bool:
        """True for metrics of a validation that are better than in all checkpoints."""
        score = self._score(metrics)
        return bool(self._best.number) and score is not None and score > self._best.highest()

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        """The number by which checkpoints are compared; None where the metrics do not have it."""
        metric, value = self.compared(metrics) or ("", None)
        return -value if value is not None and metric.startswith("-") else value

    def compared(self, metrics: Mapping[str, float]) -> tuple[str, float] | None:
        """The metric by which checkpoints are compared, as `best_metric` names it, and its value.

        None where the metrics do not have it.
        """
        candidates = [name for name in metrics if name.startswith(VALIDATION)]
        candidates.sort(key=lambda name: "/reward/mean@" not in name)  # stable: rewards first
        metric = self._best_metric or next(iter(candidates), "")
        value = metrics.get(metric.removeprefix("-"))
        return None if value is None else (metric, value)

    def save_seconds(self) -> float:
        """The longest recent save, until its digests were on disk, as far as this process knows."""
        return max(self._save_s, default=0.0)

    def restore(self, step: int, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict]:
        """The items of `step`, with the shardings of `abstract`, and the loop state."""
        return restore(self.path(step), abstract)

    def path(self, step: int) -> Path:
        """The folder of a step, which need not exist."""
        return self.directory / f"{STEP_PREFIX}_{step}"

    def wait(self) -> None:
        """Wait until every started save is on disk, with its digests."""
        try:
            with self._disk_errors():
                self._manager.wait_until_finished()
        finally:
            self._finish_seals()

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Raises: SaveFailed in place of an error of a disk, of this save or the one before."""
        try:
            yield
        except Exception as error:
            failed = save_failed(error, self.directory)
            if failed is None:
                raise
            self._finish_seals()
            raise failed from None

    def _finish_seals(self) -> None:
        while self._sealing:
            self._sealing.pop().finish()

    def is_idle(self) -> bool:
        """True when every started save is on disk."""
        return not self._manager.is_saving_in_progress() and all(s.done() for s in self._sealing)

    def close(self) -> None:
        """Finish pending saves and release the directory."""
        self.wait()
        self._manager.close()
        self._remove_deleted()

    def damaged_ones(self) -> list[Path]:
        """The checkpoints that were set aside, now or before."""
        return sorted((self.directory / DAMAGED).glob("*"))

    def move_aside(self, path: Path, why: str) -> str:
        """Move a damaged checkpoint out of the way; returns what happened.

        Every process must call it.
        """
        moved = value_of_main(str(_move_aside(path)) if is_main() else None, "damaged_checkpoint")
        return f"{why}; it was moved to {moved}"

    def _set_damaged_aside(self) -> None:
        """Check the newest checkpoint, and older ones until one is sound."""
        while (newest := value_of_main(self._newest(), "newest_checkpoint")) is not None:
            try:
                check(self.path(newest))
            except ValueError as error:
                self.set_aside.append(self.move_aside(self.path(newest), str(error)))
            else:
                return

    def _newest(self) -> int | None:
        steps = [step_of(path) for path in self.directory.glob(f"{STEP_PREFIX}_*")]
        return max((step for step in steps if step is not None), default=None)

    def _stored_scores(self) -> dict[int, float]:
        """The score of each checkpoint on disk, so that a restart keeps the best one."""
        scores = {}
        # Sorted, so that all processes read them in the same order.
        for path in sorted(self.directory.glob(f"{STEP_PREFIX}_*")):
            step = step_of(path)
            if step is None or not is_complete(path):
                continue
            try:
                _, loop = restore(path, {})
            except ValueError:  # an old checkpoint that is damaged is not the best
                continue
            if SCORE in loop:
                scores[step] = loop[SCORE]
        return scores

    def _remove_unfinished(self) -> None:
        """Remove interrupted saves, which only Orbax can have written."""
        for path in self.directory.glob(f"{STEP_PREFIX}_*{TEMPORARY}*"):
            if step_of(path.with_name(path.name.partition(TEMPORARY)[0])) is not None:
                shutil.rmtree(path)

    def _remove_deleted(self) -> None:
        """Remove the files of checkpoints that are no longer kept."""
        if is_main():
            for path in (self.directory / DELETED).glob("*"):
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)


def _is_not_of_a_save(record: logging.LogRecord) -> bool:
    """False for tracebacks that Orbax's threads log. The same errors are raised."""
    return record.levelno != logging.ERROR or "orbax" not in record.pathname


def _is_due(name: str, metrics: Mapping[str, Any]) -> bool:
    """True if a step with these metrics has `name`: held-out ones are not of every step."""
    held_out = next((start for start in HELD_OUT if name.startswith(start)), "")
    return not held_out or any(other.startswith(held_out) for other in metrics)


class _KeepBest:
    """An Orbax PreservationPolicy: the `number` highest scores; of equal ones, the later."""

    def __init__(self, number: int, scores: dict[int, float]):
        self.number = number
        self.scores = scores

    def highest(self) -> float:
        """The highest score of a checkpoint that was saved."""
        return max(self.scores.values(), default=-math.inf)

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        steps = [info.step for info in checkpoints]
        scored = [step for step in steps if step in self.scores]
        ranked = sorted(scored, key=lambda step: (self.scores[step], step), reverse=True)
        return [step in ranked[: self.number] for step in steps]


def restore(path: str | Path, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict]:
    """Items and loop state of the checkpoint folder `path` (`.../global_step_N`).

    Every process must call it.

    Raises:
        DamagedCheckpoint: the loop state or an array is not what was saved.
        ValueError: it is not a finished checkpoint, or `abstract` has other items or arrays.
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
    loop = _checked_loop(path, out[LOOP])
    items = {name: out[name] for name in abstract}
    digests.check_arrays(path, loop.pop(ARRAYS), digests.measure(items))
    return items, loop


def loop_state(path: Path) -> dict[str, Any]:
    """The loop state of a finished checkpoint, read by this process alone, without a device.

    Raises: DamagedCheckpoint.
    """
    try:
        loop = _checked_loop(path, json.loads((path / LOOP / LOOP_FILE).read_bytes()))
    except (ValueError, TypeError, FileNotFoundError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{path} is damaged: its loop state: {error}") from None
    loop.pop(ARRAYS, None)
    return loop


def check(path: Path) -> None:
    """Compare the files and the loop state of a checkpoint with what was saved; reads no array.

    Every process must call it. Each reads its share of the files.
    Raises: DamagedCheckpoint.
    """
    if is_complete(path):
        wrong = digests.damaged_files(path, _own_part()) or []
    else:
        wrong = ["files of it are missing"]
    parts = gather_objects(wrong, "checked_checkpoint")
    lines = dict.fromkeys(line for part in parts for line in part)
    if lines:
        raise DamagedCheckpoint(f"{path} is damaged: {digests.listed(list(lines))}")
    try:
        restore(path, {})  # all processes or none: Orbax may wait for all of them
    except DamagedCheckpoint:
        raise
    # Not OSError: a disk that fails is no damage.
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}") from None


def _checked_loop(path: Path, loop: dict[str, Any]) -> dict[str, Any]:
    """The loop state without its digest. Raises: DamagedCheckpoint."""
    loop = dict(loop)
    if loop.pop(DIGEST, None) != digests.text_digest(loop):
        raise DamagedCheckpoint(f"{path} is damaged: its loop state is not what was saved")
    if step_of(path) not in (None, loop[STEP]):
        raise DamagedCheckpoint(f"{path} is damaged: its loop state is of step {loop[STEP]}")
    return loop


def save_frozen(directory: str | Path, items: Mapping[str, Any]) -> None:
    """Write the roles that never change, once in a run."""
    import orbax.checkpoint as ocp

    path = Path(directory).absolute() / FROZEN
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, dict(items), force=True)
    digests.write_digests(path, _own_part())


def _own_part() -> tuple[int, int]:
    """The share of this process in work on files."""
    return jax.process_index(), jax.process_count()


def restore_frozen(
    directory: str | Path, abstract: Mapping[str, Any], loop: Mapping[str, Any]
) -> dict[str, Any]:
    """The frozen roles of a run's checkpoint directory. `loop` is a checkpoint's loop state.

    Raises: ValueError if they are missing, damaged, or belong to another run.
    """
    import orbax.checkpoint as ocp

    path = Path(directory).absolute() / FROZEN
    if not path.exists():
        raise ValueError(
            f"{path} is missing: it holds {', '.join(abstract)}, which every checkpoint of the "
            "run needs; copy it along with the checkpoint"
        )
    check_frozen(path)
    with ocp.StandardCheckpointer() as checkpointer:
        items = checkpointer.restore(path, dict(abstract))
    saved, now = loop[FROZEN], digests.array_digests(items)
    if others := [name for name in now if now[name] != saved.get(name)]:
        raise DamagedCheckpoint(
            f"{path} belongs to another run: the checkpoint was saved with other weights of "
            f"{', '.join(others)}. Put the folder {FROZEN} of its own run there"
        )
    return items


def check_frozen(path: Path) -> None:
    """Compare the files of the frozen roles. Raises: DamagedCheckpoint, also without digests."""
    wrong = digests.damaged_files(path)
    if wrong is None:
        wrong = [f"{digests.DIGESTS} is missing"]
    if wrong:
        raise DamagedCheckpoint(
            f"{path} is damaged: {digests.listed(wrong)}. Every checkpoint of the run needs it: "
            "put a copy there, or begin again with another --config.run_dir"
        )


def stored_roles(checkpoint: str | Path) -> dict[str, Any]:
    """Shapes and dtypes of the parameters of every role, also frozen ones, on one device."""
    checkpoint = Path(checkpoint).absolute()
    frozen = checkpoint.parent / FROZEN
    optimizers = sorted(checkpoint.glob(f"*{OPTIMIZER}"))
    own = [path.name.removesuffix(OPTIMIZER) for path in optimizers]  # a user's models learn too
    names = dict.fromkeys([*ROLES, *own])
    roles = {name: _abstract(checkpoint / name) for name in names if (checkpoint / name).exists()}
    return roles | (_abstract(frozen) if frozen.exists() else {})


def restore_role(checkpoint: str | Path, role: str, abstract: Any) -> Any:
    """The parameters of one role, with the shardings of `abstract`, an entry of `stored_roles`.

    Raises: DamagedCheckpoint when a file of the role is not what was saved.
    """
    import orbax.checkpoint as ocp

    checkpoint = Path(checkpoint).absolute()
    path, tree = checkpoint / role, abstract
    if path.exists():
        digests.check_files(checkpoint, f"{role}/")
    else:
        path, tree = checkpoint.parent / FROZEN, {role: abstract}
        check_frozen(path)
    args = ocp.args.PyTreeRestore(
        item=tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=True,  # only this one of the frozen roles is read
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(path, args=args)
    return restored if tree is abstract else restored[role]


def _move_aside(path: Path) -> Path:
    """Move a checkpoint into the folder of damaged ones, under a name that is free."""
    aside = path.parent / DAMAGED
    aside.mkdir(exist_ok=True)
    target, number = aside / path.name, 2
    while target.exists():
        target, number = aside / f"{path.name}-{number}", number + 1
    return path.rename(target)


class _Seal:
    """Writes this process's share of digests of files in a thread, as soon as all are there."""

    def __init__(self, path: Path, started: float, seconds: "deque[float]") -> None:
        """`seconds` gets the time from `started` until all is written."""
        self._path = path
        self._started, self._seconds = started, seconds
        self._saved = threading.Event()
        self._thread = threading.Thread(target=self._run, name="digests", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """True if the digests are written, or never will be."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the digests. Requires: the save has ended, whether well or not."""
        self._saved.set()
        self._thread.join()

    def _run(self) -> None:
        while not is_complete(self._path):
            if self._saved.wait(POLL_S) and not is_complete(self._path):
                return  # the save failed
        # The checkpoint may not be kept, and be deleted meanwhile.
        with contextlib.suppress(FileNotFoundError):
            try:
                digests.write_digests(self._path, _own_part())
                self._seconds.append(time.monotonic() - self._started)
            except OSError as error:
                if self._path.exists():
                    log.warning("%s has no digests of its files: %s", self._path, error)


def _read_apart(x: Any) -> Any:
    """For an array in host memory, which Orbax reads through a view, a second array."""
    return second_array(x) if in_host_memory(x) else x


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
