"""A whole run, start to end: open or resume, warm up, train, summarise."""

import dataclasses
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoint import layout, manager
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.distributed.mesh import make_mesh
from jaxrl_llm.distributed.multihost import barrier, is_main
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.overrides import to_json
from jaxrl_llm.rewards.combine import RewardManager
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.evaluate import Validator
from jaxrl_llm.trainer.initialise import find_tokenizer, write_huggingface_files
from jaxrl_llm.trainer.loop import Interrupted, Loop, Totals
from jaxrl_llm.trainer.online import Iteration, plan_iteration, stop_ids
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.trainer.program import States
from jaxrl_llm.trainer.rewarding import RewardFunctions
from jaxrl_llm.trainer.roles import Role
from jaxrl_llm.trainer.run_data import (
    held_out_sources,
    load_run_prompts,
    train_batches,
    train_sources,
)
from jaxrl_llm.trainer.states import first_states, from_items, frozen_roles, to_items


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
        reward = open_reward(config, tokenizer, stack)
        iteration = plan_iteration(config, tokenizer, mesh, reward)
        validator = open_validator(config, iteration.roles["actor"], tokenizer, run_dir, stack)
        batches = train_batches(
            config, load_run_prompts(config, train_sources(config), tokenizer, run_dir)
        )
        stack.callback(batches.close)
        checkpoints = open_checkpoints(config, run_dir)
        stack.callback(checkpoints.close)
        resume = _resume_point(config, checkpoints)
        output = stack.enter_context(
            RunOutput(
                config,
                run_dir,
                tokenizer=tokenizer,
                stop_ids=iteration.sampling.stop_token_ids,
                resume_step=None if resume is None else _step_of(resume),
            )
        )
        if is_main():
            (run_dir / "config.json").write_text(to_json(config) + "\n")
        frozen = frozen_roles(iteration)
        totals, step = Totals(), 0
        if resume is None:
            states = first_states(iteration, tokenizer, validator, output)
            _save_once(checkpoints, iteration, states, frozen, tokenizer)
        else:
            states, loop_state = _restore(resume, iteration, frozen)
            if resume.parent != checkpoints.directory:
                _save_once(checkpoints, iteration, states, frozen, tokenizer)
            step, totals = loop_state["step"], Totals(**loop_state["totals"])
            batches.set_state(loop_state["data"])
            output.message(f"resumed from {resume}")

        def save(step: int, states: States, metrics: dict[str, float]) -> None:
            loop_state = {
                "step": step,
                "data": batches.get_state(),
                "totals": dataclasses.asdict(loop.totals),
            }
            checkpoints.save(step, to_items(states, frozen), loop_state, metrics)

        loop = Loop(
            iteration=iteration,
            states=states,
            batches=batches,
            validator=validator,
            output=output,
            save=save,
            totals=totals,
            pad_id=tokenizer.pad_id,
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
        totals=loop.totals,
        seconds=time.perf_counter() - started,
        interrupted=interrupted,
        checkpoint=checkpoints.path(loop.step),
    )


def run_directory(config: Config) -> Path:
    """Where the run writes."""
    run_dir = Path(config.run_dir or Path("runs") / config.name)
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def open_reward(config: Config, tokenizer: Tokenizer, stack: ExitStack) -> RewardFunctions | None:
    """The Python reward functions; None when a model gives the reward."""
    if not config.reward.functions:
        return None
    rewards = config.reward
    rewards_manager = RewardManager(
        rewards.functions,
        weights=rewards.weights or None,
        failure_value=rewards.failure_value,
        timeout=rewards.timeout_s,
        num_workers=rewards.num_workers,
        total_steps=config.total_steps,
    )
    return RewardFunctions(
        manager=stack.enter_context(rewards_manager),
        tokenizer=tokenizer,
        stop_ids=stop_ids(config, tokenizer),
    )


def open_validator(
    config: Config, actor: Role, tokenizer: Tokenizer, run_dir: Path | None, stack: ExitStack
) -> Validator:
    """Held-out prompts, their grader, and the program that answers them."""
    validation = config.validation
    grader = RewardManager([validation.grader], failure_value=0.0)
    prompts = load_run_prompts(config, held_out_sources(config), tokenizer, run_dir)
    return Validator(
        prompts,
        role=actor,
        tokenizer=tokenizer,
        grader=stack.enter_context(grader),
        sampling=SamplingParams(
            max_new_tokens=config.data.max_response_length,
            temperature=validation.temperature,
            top_p=validation.top_p,
            stop_token_ids=stop_ids(config, tokenizer),
        ),
        n=validation.n,
        batch_size=config.data.val_batch_size,
        num_slots=config.rollout.num_slots,
        max_prompt_length=config.data.max_prompt_length,
        dtype=config.rollout.dtype or config.actor.dtype,
        seed=config.seed,
    )


def open_checkpoints(config: Config, run_dir: Path) -> CheckpointManager:
    """The run's checkpoints; ConfigError when `resume` and what is there contradict each other."""
    checkpoints = CheckpointManager(
        run_dir / "checkpoints",
        keep_latest=config.checkpoint.keep_latest,
        keep_best=config.checkpoint.keep_best,
        best_metric=config.checkpoint.best_metric,
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
    checkpoints: CheckpointManager,
    iteration: Iteration,
    states: States,
    frozen: list[str],
    tokenizer: Tokenizer,
) -> None:
    """What every checkpoint needs but no step changes."""
    if frozen:
        manager.save_frozen(checkpoints.directory, {name: states[name] for name in frozen})
    if is_main():
        spec = iteration.roles["actor"].spec
        write_huggingface_files(checkpoints.directory / layout.HUGGINGFACE, spec, tokenizer)
    barrier("first_files")


def _restore(path: Path, iteration: Iteration, frozen: list[str]) -> tuple[States, dict[str, Any]]:
    """All states of a checkpoint, laid out for this run's mesh, and the loop state."""
    abstract = iteration.abstract_states()
    items, loop_state = manager.restore(path, to_items(abstract, frozen))
    kept = {name: abstract[name] for name in frozen}
    fixed = manager.restore_frozen(path.parent, kept) if kept else {}
    return from_items(items, fixed), loop_state
