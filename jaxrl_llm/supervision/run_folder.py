"""The folder of a run: one process at a time, and one config for all its steps.

`run.lock` names the process that uses the folder. `config.json` holds the config of its run. A run
goes on only with that config, except for the keys in FREE_KEYS.
"""

import contextlib
import glob
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.checkpoint.identity import file_digests, package_versions
from jaxrl_llm.checkpoint.layout import (
    CHECKPOINTS,
    STEP_PREFIX,
    is_complete,
    step_of,
)
from jaxrl_llm.config import Config, ConfigError, from_json, run_folder, to_json
from jaxrl_llm.distributed.multihost import gather_objects, is_main
from jaxrl_llm.observability.jsonl import GLOBAL_STEP, read_jsonl
from jaxrl_llm.supervision.run_lock import RunLock, hold
from jaxrl_llm.whole_files import write_whole

CONFIG = "config.json"
METRICS = "metrics.jsonl"

# Keys that may change when a run goes on (fnmatch patterns). They say how long it runs, and what
# it writes and shows.
SCHEDULE_KEYS = (
    "name",
    "run_dir",
    "resume",
    "total_steps",
    "save_every",
    "compile_cache",
    "log.*",
    "alarms.*",
    "profile.*",
    "checkpoint.*",
    "watchdog.*",
    "validation.every",
    "validation.before_train",
)
# They say on which devices and in which portions it computes: the same run up to rounding. A run
# may have to change them to fit into memory or to move to other hardware.
DEVICE_KEYS = (
    "mesh.*",
    "placement",
    "placement.*",
    "node_groups",
    "node_groups.*",
    "fuse_stages",
    "data.num_workers",
    "data.prefetch",
    "reward.num_workers",
    "rollout.num_slots",
    "rollout.cache_tokens",
    "rollout.memory_gb",
    "validation.memory_gb",
    "*.micro_batch_size",
    "*.micro_batch_tokens",
    "*.remat",
    "*.scan_layers",
    "*.optimizer.offload",
)
FREE_KEYS = SCHEDULE_KEYS + DEVICE_KEYS

# Settings of jax that change numbers. The environment may give them to one process alone.
JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_threefry_partitionable",
)
MOST_SHOWN = 10  # differing keys in a message
ABSENT = "(not set)"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """An opened run folder."""

    path: Path  # absolute: a callback may change the working directory
    given: Path  # as the config has it, for messages
    latest_step: int | None  # step of the newest complete checkpoint; None without one
    config_text: str  # config of this process, as JSON
    lock: RunLock

    def changes(self) -> dict[str, list[Any]]:
        """The keys that differ from the start before, each with the value there and the one now."""
        try:
            stored = _with_new_keys(json.loads((self.path / CONFIG).read_text()))
        except (OSError, ValueError, RecursionError):
            return {}
        return {
            key: [None if value is ABSENT else value for value in values]
            for key, *values in _differences("", stored, json.loads(self.config_text))
        }

    def write_config(self) -> None:
        """Store the config, on the main process. It is the one that later starts compare with."""
        if is_main():
            write_whole(self.path / CONFIG, self.config_text)

    def is_new(self, config: Config) -> bool:
        """True when a start of `config` has no checkpoint to go on from, here or elsewhere."""
        return self.latest_step is None and config.resume in ("auto", "never")

    def is_finished(self, config: Config) -> bool:
        """True when a start of `config` finds all of its steps done."""
        return config.resume == "auto" and bool(self.nothing_to_do(config.total_steps))

    def nothing_to_do(self, total_steps: int) -> str:
        """The message when all steps were done before; empty when steps are left."""
        if self.latest_step is None or self.latest_step < total_steps:
            return ""
        return (
            f"{self.given} is already at step {self.latest_step} of {total_steps}; nothing to do. "
            "Raise --config.total_steps to go on, or give another folder: "
            f"--config.run_dir={free_folder(self.given)}"
        )


@contextmanager
def open_run_folder(
    config: Config, end_process: Callable[[int], object] | None = None
) -> Iterator[RunFolder]:
    """The folder of `config`, made if need be, for this run alone until the block ends.

    Every process must call it. The main one locks and checks, and all of them raise its error.
    `end_process` (os._exit) ends this one where another run takes the folder.

    Raises: ConfigError when another process uses the folder, when it holds a run with another
        config, or when it cannot be written. Nothing in the folder is changed then. Also when the
        processes of the run do not run the same.
    """
    given = run_folder(config)
    path = given.absolute()
    text, error, latest, lock = to_json(config), "", None, RunLock()
    own = _what_runs(config, text)
    # A config of each process would be a large message, so it is sent where digests differ alone.
    if len(set(gather_objects(_digest(own), "a digest of what runs"))) > 1:
        _check_same_run(gather_objects(own, "what runs"))
    with contextlib.ExitStack() as stack:
        if is_main():
            try:
                _make(path)
                stack.enter_context(hold(path, lock, free_folder(path), end_process))
                latest = _latest_step(path)
                _check_no_model(given, latest)
                _check_config(given, json.loads(text), latest)
            except ConfigError as refused:
                error = str(refused)
            except OSError as failed:
                error = str(_unusable(path, failed))
        error, latest = gather_objects([error, latest])[0]
        if error:
            raise ConfigError(error)
        yield RunFolder(path=path, given=given, latest_step=latest, config_text=text, lock=lock)


def _what_runs(config: Config, text: str) -> dict[str, Any]:
    """Everything that must be the same in all processes: each computes a part of a step."""
    return {
        "config": json.loads(text) | {"compile_cache": None},  # a node may have a disk of its own
        "file": file_digests(config),
        "package": package_versions(),
        "jax": {name: getattr(jax.config, name) for name in JAX_SETTINGS},
    }


def _digest(own: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def _check_same_run(processes: Sequence[Mapping[str, Any]]) -> None:
    """Raises: ConfigError that says in what the first other process differs from process 0."""
    for process, there in enumerate(processes):
        changed = list(_differences("", processes[0], there))
        if changed:
            lines = [
                f"  {key}: {_shown(first)} in process 0, {_shown(here)} in process {process}"
                for key, first, here in changed[:MOST_SHOWN]
            ]
            raise ConfigError(
                "the processes of this run differ:\n" + "\n".join(lines) + "\nStart all of them "
                "with the same flags, files, packages and environment"
            )


def free_folder(path: Path) -> Path:
    """The first of `path`-2, `path`-3, ... that does not exist."""
    number = 2
    while (candidate := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return candidate


def _make(path: Path) -> None:
    if glob.has_magic(str(path.absolute())):  # orbax looks for the files of a checkpoint by a glob
        raise ConfigError(
            f"the run folder {path.absolute()} has one of * ? [ in its path, and checkpoints in it "
            "could not be read; give another one with --config.run_dir=FOLDER"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the run folder {path} cannot be used: {error.strerror}; give another one with "
        "--config.run_dir=FOLDER"
    )


def _latest_step(path: Path) -> int | None:
    folders = (path / CHECKPOINTS).glob(f"{STEP_PREFIX}_*")
    steps = [step for p in folders if (step := step_of(p)) is not None and is_complete(p)]
    return max(steps, default=None)


# ------------------------------------------------------------------------- config


def _check_no_model(path: Path, latest: int | None) -> None:
    """Raises: ConfigError for a folder of a model or the like, whose config.json would be lost."""
    try:
        text = (path / CONFIG).read_bytes()
    except OSError:
        return
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError):
        if not text.strip() or latest is not None or has_steps(path):
            return  # it is a run's: `_check_config` reads it too
        stored = None
    if not isinstance(stored, dict) or "total_steps" not in stored:
        raise ConfigError(
            f"{path} is no folder of a run, and the run would overwrite its {CONFIG}; give "
            f"another one: --config.run_dir={free_folder(path)}"
        )


def has_steps(path: Path) -> bool:
    """True when the folder has metrics of a step, with or without a checkpoint."""
    try:
        return any(row.get(GLOBAL_STEP, 0) > 0 for row in read_jsonl([path / METRICS]))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):
        return True  # a file that cannot be read is not overwritten


def a_run(latest: int | None) -> str:
    """The run in a folder, in words; `latest` is the step of its newest checkpoint."""
    return "a run without a checkpoint" if latest is None else f"a run at step {latest}"


def _check_config(path: Path, new: Mapping[str, Any], latest: int | None) -> None:
    """Raises: ConfigError when the folder holds a run with another config."""
    file = path / CONFIG
    if not file.exists() or (latest is None and not has_steps(path)):
        return
    try:
        stored = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} is damaged ({error}), so the config of {a_run(latest)} is unknown; "
            f"repair it, or delete it to go on with this config, or give --config.run_dir="
            f"{free_folder(path)}"
        ) from None
    changed = differing_keys(_with_new_keys(stored), new)
    if not changed:
        return
    lines = [f"  {key}: {_shown(there)} there, {_shown(now)} now" for key, there, now in changed]
    if len(lines) > MOST_SHOWN:
        lines[MOST_SHOWN:] = [f"  and {len(lines) - MOST_SHOWN} more"]
    free = free_folder(path)
    text = f"{path} holds {a_run(latest)} with another config:\n" + "\n".join(lines)
    text += "\nA run goes on with its own config only. To start another run:\n"
    text += f"  --config.run_dir={free}"
    if latest is not None:
        text += _to_go_on(path / CHECKPOINTS / f"{STEP_PREFIX}_{latest}", free, changed, new)
    raise ConfigError(text)


def _to_go_on(
    checkpoint: Path, free: Path, changed: list[tuple[str, Any, Any]], new: Mapping[str, Any]
) -> str:
    """The flags by which the new config uses the checkpoint: its whole state, or its weights."""
    if not any(key == "seed" or key.startswith("data.") for key, *_ in changed):
        text, flags = "go on from its checkpoint", f"--config.resume={checkpoint}"
    else:  # the checkpoint's place in the order of the rows would be of other rows
        text, flags = "begin with its weights", f"--config.actor.path={checkpoint}"
        flags += " --config.warmup=null" if new.get("warmup") is not None else ""
    return f"\nTo {text} and the new config:\n  --config.run_dir={free} {flags}"


def _with_new_keys(stored: Any) -> Any:
    """A stored config with the defaults of keys that its version did not have.

    A new key's default is what versions without it did.
    """
    try:
        return json.loads(to_json(from_json(json.dumps(stored))))
    except (ConfigError, TypeError):
        return stored  # another version wrote it: it is compared as it stands


def differing_keys(stored: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """(dotted key, stored value, new value) where two configs differ, FREE_KEYS left out.

    Both are nested dicts and lists, as JSON has them. A key that one side lacks counts as ABSENT.
    """
    return [
        difference
        for difference in _differences("", stored, new)
        if not any(fnmatchcase(difference[0], pattern) for pattern in FREE_KEYS)
    ]


def _differences(key: str, stored: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    prefix = f"{key}." if key else ""
    if isinstance(stored, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*new, *stored]):
            yield from _differences(
                f"{prefix}{name}", stored.get(name, ABSENT), new.get(name, ABSENT)
            )
    elif isinstance(stored, list) and isinstance(new, list) and len(stored) == len(new):
        for i, (there, now) in enumerate(zip(stored, new, strict=True)):
            yield from _differences(f"{prefix}{i}", there, now)
    elif stored != new and not (stored is ABSENT and new is None):
        yield key, stored, new


def _shown(value: Any) -> str:
    text = value if value is ABSENT else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
