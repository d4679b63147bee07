"""A whole run, start to end: open or resume, warm up, train, summarise."""

import dataclasses
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.checkpoint import layout, manager
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import barrier, is_main
from jaxrl_llm.overrides import to_json
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.initialise import find_tokenizer, write_huggingface_files
from jaxrl_llm.trainer.loop import Interrupted, Loop, Totals, Work
from jaxrl_llm.trainer.offline_run import OfflineRun
from jaxrl_llm.trainer.online_run import OnlineRun
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.trainer.program import States
from jaxrl_llm.trainer.states import from_items, to_items
from jaxrl_llm.validation import is_offline


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a finished (or interrupted) run tells its caller."""

    run_dir: Path
    step: int
    totals: Totals
    seconds: float  # of this process, start to end
    interrupted: bool
    checkpoint: Path


def train(config: Config) -> Summary:
    """Run `config` to its end, from wherever its run_dir stands."""
    started = time.perf_counter()
    run_dir = run_directory(config)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    tokenizer = find_tokenizer(config.data.tokenizer, config.actor)
    with ExitStack() as stack:
        work = open_work(config, tokenizer, mesh, run_dir, stack)
        checkpoints = open_checkpoints(config, run_dir, work.best_metric)
        stack.callback(checkpoints.close)
        resume = _resume_point(config, checkpoints)
        output = stack.enter_context(
            RunOutput(
                config,
                run_dir,
                tokenizer=tokenizer,
                stop_ids=work.stop_ids,
                resume_step=None if resume is None else _step_of(resume),
            )
        )
        if is_main():
            (run_dir / "config.json").write_text(to_json(config) + "\n")
        totals, step = Totals(), 0
        if resume is None:
            states = work.first_states(output)
            _save_once(checkpoints, work, states, tokenizer)
        else:
            states, loop_state = _restore(resume, work)
            if resume.parent != checkpoints.directory:
                _save_once(checkpoints, work, states, tokenizer)
            step, totals = loop_state["step"], Totals(**loop_state["totals"])
            output.message(f"resumed from {resume}")
        work.begin(states, output, totals)

        def save(step: int, states: States, metrics: dict[str, float]) -> None:
            loop_state = {
                "step": step,
                "data": work.batches.get_state(),
                "totals": dataclasses.asdict(totals),
            }
            checkpoints.save(step, to_items(states, work.frozen), loop_state, metrics)

        loop = Loop(
            config=config,
            work=work,
            output=output,
            save=save,
            totals=totals,
            step=step,
            resumed=resume is not None,
        )
        interrupted = False
        try:
            loop.run()
        except Interrupted:
            interrupted = True
    return Summary(
        run_dir=run_dir,
        step=loop.step,
        totals=totals,
        seconds=time.perf_counter() - started,
        interrupted=interrupted,
        checkpoint=checkpoints.path(loop.step),
    )


def open_work(
    config: Config, tokenizer: Tokenizer, mesh: Mesh, run_dir: Path, stack: ExitStack
) -> Work:
    """What the algorithm of `config` makes of a run. `stack` closes what was opened."""
    kind = OfflineRun if is_offline(config) else OnlineRun
    return kind(config, tokenizer=tokenizer, mesh=mesh, run_dir=run_dir, stack=stack)


def run_directory(config: Config) -> Path:
    """Where the run writes."""
    run_dir = Path(config.run_dir or Path("runs") / config.name)
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def open_checkpoints(config: Config, run_dir: Path, best_metric: str) -> CheckpointManager:
    """The run's checkpoints; ConfigError when `resume` and what is there contradict each other."""
    checkpoints = CheckpointManager(
        run_dir / "checkpoints",
        keep_latest=config.checkpoint.keep_latest,
        keep_best=config.checkpoint.keep_best,
        best_metric=best_metric,
        asynchronous=config.checkpoint.asynchronous,
    )
    latest = checkpoints.latest()
    if latest is not None and config.resume != "auto":
        checkpoints.close()
        raise ConfigError(
            f"config.resume={config.resume}, but {run_dir} holds a run at step {latest}, which "
            "would be overwritten. Give another --config.run_dir, or go on with it by "
            "--config.resume=auto"
        )
    return checkpoints


def _resume_point(config: Config, checkpoints: CheckpointManager) -> Path | None:
    """The checkpoint folder to go on from, or None to begin."""
    latest = checkpoints.latest()
    if latest is not None:
        return checkpoints.path(latest)
    return None if config.resume in ("auto", "never") else Path(config.resume).absolute()


def _step_of(path: Path) -> int:
    return manager.restore(path, {})[1]["step"]


def _save_once(
    checkpoints: CheckpointManager, work: Work, states: States, tokenizer: Tokenizer
) -> None:
    """What every checkpoint needs but no step changes."""
    if work.frozen:
        frozen = {name: states[name] for name in work.frozen}
        manager.save_frozen(checkpoints.directory, frozen)
    if is_main():
        directory = checkpoints.directory / layout.HUGGINGFACE
        write_huggingface_files(directory, work.learner.spec, tokenizer)
    barrier("first_files")


def _restore(path: Path, work: Work) -> tuple[States, dict[str, Any]]:
    """All states of a checkpoint, laid out for this run's mesh, and the loop state.

    `work.batches` go on from there: first, as other data may have states of other shapes.
    """
    _, loop_state = manager.restore(path, {})
    work.batches.set_state(loop_state["data"])
    abstract = work.abstract_states()
    items, _ = manager.restore(path, to_items(abstract, work.frozen))
    kept = {name: abstract[name] for name in work.frozen}
    fixed = manager.restore_frozen(path.parent, kept) if kept else {}
    return from_items(items, fixed), loop_state
