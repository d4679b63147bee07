"""An open run: it is opened or resumed, saves checkpoints, and is summarised."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxrl_llm.checkpoint import digests, layout, manager
from jaxrl_llm.checkpoint.digests import DamagedCheckpoint
from jaxrl_llm.checkpoint.identity import (
    CODE,
    IDENTITY,
    ROWS,
    Identity,
    check_resume,
    code_record,
)
from jaxrl_llm.checkpoint.manager import CheckpointManager
from jaxrl_llm.checkpoint.stored_models import BASES
from jaxrl_llm.config import Config, ConfigError, run_folder
from jaxrl_llm.distributed.multihost import barrier, is_main
from jaxrl_llm.observability.status import STATUS
from jaxrl_llm.observability.trackers import import_packages, tracker_names
from jaxrl_llm.plan.models import find_tokenizer, open_meshes, stops_of, write_huggingface_files
from jaxrl_llm.plan.plan import AHEAD, Plan
from jaxrl_llm.program.ahead import compiles
from jaxrl_llm.program.counting import CompileCounter, count_compilations
from jaxrl_llm.program.stage import States
from jaxrl_llm.supervision.alarms import AlarmBell, Alarms, alarms_after
from jaxrl_llm.supervision.callbacks import Callback, Callbacks
from jaxrl_llm.supervision.communication_report import CommunicationReport
from jaxrl_llm.supervision.deadline import Deadline, StopRequest, read_deadline
from jaxrl_llm.supervision.disk_space import (
    bytes_of,
    check_space,
    check_writable,
    until_there_is_room,
    wait_for_space,
)
from jaxrl_llm.supervision.listener import Listener
from jaxrl_llm.supervision.masked_steps import MOST_STEPS, MaskedSteps
from jaxrl_llm.supervision.profiling import StepProfiler
from jaxrl_llm.supervision.run_folder import RunFolder, a_run, has_steps
from jaxrl_llm.supervision.run_lock import RunLock
from jaxrl_llm.supervision.signals import stop_requests
from jaxrl_llm.supervision.starts import Starts
from jaxrl_llm.supervision.watchdog import END, EndProcess, Watch
from jaxrl_llm.tokenizer import Tokenizer, set_chat_variables
from jaxrl_llm.trainer.batches import (
    Batches,
    FilteredBatches,
    PromptBatches,
    RecordBatches,
)
from jaxrl_llm.trainer.clock import Clock, Progress
from jaxrl_llm.trainer.data import RunData, open_plan_and_data
from jaxrl_llm.trainer.executor import AheadBatches, AheadFilteredBatches, kept_sizes
from jaxrl_llm.trainer.output import (
    RunOutput,
    RunTotals,
    Summary,
    about,
    about_lines,
    devices_line,
    write_about,
)
from jaxrl_llm.trainer.shown_settings import warnings_of_run
from jaxrl_llm.trainer.states import (
    FirstStates,
    Supervised,
    bases_record,
    first_states,
    from_items,
    has_supervised,
    open_supervised,
    read_bases,
    run_identity,
    to_items,
)
from jaxrl_llm.trainer.training import Training

# ------------------------------------------------------------------------- an open run


@dataclass(kw_only=True)
class Run:
    """An open run: its plan, data, output and checkpoints."""

    config: Config
    run_dir: Path
    tokenizer: Tokenizer
    plan: Plan
    data: RunData
    supervised: Supervised  # trainings that a new run begins with
    output: RunOutput
    checkpoints: CheckpointManager
    identity: Identity  # identity of models and data
    save_by: float  # epoch seconds before which it saves and ends
    resume: Path | None  # checkpoint to go on from; None in a new run
    resume_step: int | None  # step of that checkpoint
    stop_came: Callable[[], bool]  # a signal asked for the end
    stack: ExitStack
    watch: Watch
    started: float
    bell: AlarmBell
    lock: RunLock
    callbacks: Callbacks
    compilations: CompileCounter
    starts: Starts
    ended: str = ""  # end of this start in words
    totals: RunTotals = field(default_factory=RunTotals)
    _own: Training | None = None
    _kept: int = 0  # step up to which nothing is lost
    _bases: dict[str, Any] = field(default_factory=dict)  # records by `bases_record`
    _frozen: dict[str, Any] = field(default_factory=dict)  # digests of the frozen roles

    def trainings(self) -> Iterator[Training]:
        """The supervised trainings that a new run begins with, then the run's own steps."""
        # What a checkpoint holds of generation ahead, at most.
        ahead = [(step, 1) for step in range(1, self.config.max_staleness + 1)]
        check_space(self.run_dir, bytes_of(self.plan.abstract_states(ahead)))
        self._say_what_it_is()
        resume = self.resume
        self.output.status("loading the checkpoint" if resume else "loading or drawing weights")
        # The device is free now, and after other trainings: see `Program.compile_ahead`.
        trains_first = resume is None and has_supervised(self.config)
        # With a full cache Python is the bottleneck, and the states are needed first.
        states_first = trains_first or self._reads_cache
        if not states_first:
            self._compile_ahead()
        if resume is None:
            states, loop_state = (yield from self._first_states()), {"step": 0}
            self._save_once(states)
            if not saves_first(self.config):
                self.checkpoints.begin(to_items(states, self._apart))
        else:
            states, loop_state = self._resumed(resume)
        if states_first:
            self._compile_ahead()
        generated = states.pop(AHEAD, None)
        self.output.begin(loop_state["step"])
        self._own = self._training(states, loop_state["step"])
        if generated is not None and isinstance(self._own.batches, AheadBatches):
            self._own.batches.restore(loop_state, generated)
        del states
        yield self._own

    def _resumed(self, checkpoint: Path) -> tuple[States, dict[str, Any]]:
        """The states of a checkpoint and its loop state. Totals and alarms go on from there."""
        states, loop_state = self._restore(checkpoint)
        if checkpoint.parent != self.checkpoints.directory:
            self._save_once(states)
        self.totals = RunTotals(**loop_state["totals"])
        self.bell.alarms.restore(loop_state.get("alarms", {}))
        if loop_state["step"] and loop_state.get(AHEAD) and not kept_sizes(loop_state, self.config):
            self.output.message(
                "what was generated ahead is generated again: it is of another "
                "config.max_staleness, config.partial_rollouts, config.rollout.filter_groups, "
                "config.rollout.n or config.data.max_response_length, of an older version, or "
                "one of its batches failed"
            )
        self.output.message(f"resumed from {checkpoint}")
        return states, loop_state

    def _compile_ahead(self) -> None:
        """Begin to compile the programs of the first step, while other things are done."""
        if self._first_step <= self.config.total_steps:
            self.plan.at(self._first_step).compile_ahead()

    @property
    def _reads_cache(self) -> bool:
        return self.plan.at(self._first_step).program.reads_cache

    @property
    def _first_step(self) -> int:
        return (self.resume_step or 0) + 1

    def _say_what_it_is(self) -> None:
        """The banner, on the main process: on the console and in RUN/about.json."""
        if not is_main():
            return
        lines = about(
            self.plan,
            run_dir=run_folder(self.config),
            num_train=self.data.num_rows,
            num_held_out=self.data.num_held_out,
            step=self.resume_step,
            steps=self.config.total_steps,
        )
        write_about(self.run_dir, lines)
        self.output.message(about_lines(lines))
        for line in warnings_of_run(self.plan):
            self.output.message(line)

    def summary(self) -> Summary:
        """The run as it ended."""
        own = self._own
        assert own is not None
        early = own.step < own.total_steps
        alarmed = early and self.bell in own.stopped_by
        called_off = early and self.callbacks in own.stopped_by and not alarmed
        summary = Summary(
            run_dir=self.run_dir,
            step=own.step,
            totals=self.totals,
            seconds=time.perf_counter() - self.started,
            interrupted=early and own.stopped and not alarmed and not called_off,
            alarmed=alarmed,
            called_off=called_off,
            reason=self.callbacks.reason,
            checkpoint=self.checkpoints.path(own.step),
        )
        self.ended = summary.state
        return summary

    def ends(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write how this start ended, on the main process."""
        how = self.ended if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
        self.starts.end(how, self._own.step if self._own else self.resume_step or 0)

    def _training(self, states: States, step: int) -> Training:
        """The run's own steps, from `step` on."""
        config, batches = self.config, self._batches()
        self.stack.callback(batches.close)
        return Training(
            plan=self.plan,
            batches=batches,
            states=states,
            total_steps=config.total_steps,
            evaluations=self.data.evaluations(self.plan, self.output),
            output=self.output,
            validate_every=config.validation.every,
            validate_first=config.validation.before_train,
            listeners=self._listeners(batches),
            step=step,
            is_new=self.resume is None,
            save_with=self._save,
            is_best=self.checkpoints.is_best,
            save_every=config.save_every,
            save_first=saves_first(config),
        )

    def _listeners(self, batches: Batches) -> list[Listener]:
        """The listeners of the run's own steps; the first is the innermost."""
        config, plan, message = self.config, self.plan, self.output.message
        profiler = StepProfiler(
            run_dir=self.run_dir, steps=config.profile.steps, message=message, watch=self.watch
        )
        self.stack.callback(profiler.close)
        return [
            Clock(
                plan=plan,
                batches=batches,
                totals=self.totals,
                compilations=self.compilations,
                message=message,
            ),
            profiler,
            CommunicationReport(
                program_of=lambda step: plan.at(step).program,
                profiler=profiler,
                folder=self.run_dir,
                every=config.log.communication_every,
                total_steps=config.total_steps,
                message=message,
            ),
            MaskedSteps(most=min(MOST_STEPS, config.total_steps)),
            Progress(batches=batches, totals=self.totals, compared=self.checkpoints.compared),
            self.lock,
            self.callbacks,
            self.bell,
            Deadline(
                at=self.save_by,
                # What is generated ahead is made ready before it is written.
                save_s=lambda: self.checkpoints.save_seconds() + batches.saving_s,
                message=message,
            ),
            StopRequest(came=self.stop_came),
        ]

    def _batches(self) -> Batches:
        plan, loader = self.plan, self.data.loader
        if self.data.records is not None:
            return RecordBatches(loader=loader, plan=plan)  # pyright: ignore[reportArgumentType]
        kinds = (PromptBatches, FilteredBatches)
        if self.config.max_staleness:
            # Generation and updates run at the same time: no program may time kernels any more.
            plan.at(self._first_step).program.wait_for_compilers()
            kinds = (AheadBatches, AheadFilteredBatches)
        return kinds[self.config.rollout.filter_groups.enable](
            loader=loader,  # pyright: ignore[reportArgumentType]
            plan=plan,
            tokenizer=self.tokenizer,
            output=self.output,
        )

    def _first_states(self) -> FirstStates:
        return first_states(self.plan, self.supervised, self.output, self.data.records)

    def _save(
        self, step: int, states: States, metrics: dict[str, float], position: dict[str, Any]
    ) -> None:
        """Write a checkpoint: every state that steps change, and where the run stands."""
        loop_state = {"step": step, "totals": dataclasses.asdict(self.totals)} | position
        loop_state["alarms"] = self.bell.alarms.state()
        loop_state[IDENTITY] = self.identity
        if self.plan.reloaded and not self._bases:
            self._bases = bases_record(self.plan, states)
        loop_state[BASES] = self._bases
        if self.plan.frozen and not self._frozen:
            frozen = {name: states[name] for name in self.plan.frozen}
            self._frozen = digests.array_digests(frozen)
        loop_state[layout.FROZEN] = self._frozen
        items = to_items(states, self._apart)
        self.output.flush()
        self.watch.enter("disk space", learn=False)
        wait_for_space(self.run_dir, bytes_of(items), self.output.message)
        self.watch.enter("save")
        own = self._own
        assert own is not None

        def save() -> None:
            self.checkpoints.save(step, items, loop_state, metrics)
            if step == own.total_steps or own.stopped:
                self.checkpoints.wait()  # after the last save nobody waits for room

        until_there_is_room(save, self.output.message)
        if self.data.turns is not None:
            self.data.turns.saved(step)
        self._kept = step

    def loses_nothing(self) -> bool:
        """True while the run starts, and while it compiles with every step saved."""
        if self._own is None:
            return True
        return compiles() and self._own.step <= self._kept + 1 and self.checkpoints.is_idle()

    @property
    def _apart(self) -> list[str]:
        """The states that are not in every checkpoint."""
        return [*self.plan.frozen, *self.plan.reloaded]

    def _save_once(self, states: States) -> None:
        """Write what every checkpoint needs and no step changes."""
        if self.plan.frozen:
            frozen = {name: states[name] for name in self.plan.frozen}
            manager.save_frozen(self.checkpoints.directory, frozen)
        if is_main():
            directory = self.checkpoints.directory / layout.HUGGINGFACE
            learner = self.plan.learner
            image_model = self.plan.sources[learner.name].image_model
            write_huggingface_files(directory, learner.spec, self.tokenizer, image_model)
        barrier("first_files")

    def _restore(self, path: Path) -> tuple[States, dict[str, Any]]:
        """All states of a checkpoint, laid out for this run's mesh, and the loop state.

        The loader goes on from there first, as other data may have states of other shapes.
        """
        _, loop_state = manager.restore(path, {})
        self.data.loader.set_state(loop_state["data"])
        abstract = self.plan.abstract_states(kept_sizes(loop_state, self.config))
        frozen = self.plan.frozen
        try:
            items, stored = manager.restore(path, to_items(abstract, self._apart))
            self.checkpoints.growth.begin(stored[manager.NORMS])
        except DamagedCheckpoint as error:
            if path.parent != self.checkpoints.directory:
                raise
            what = self.checkpoints.move_aside(path, str(error))
            raise DamagedCheckpoint(
                f"{what}. The same command goes on from the checkpoint before it"
            ) from None
        kept = {name: abstract[name] for name in frozen}
        bases = read_bases(self.plan, loop_state.get(BASES, {}))
        self._frozen = loop_state.get(layout.FROZEN, {})
        fixed = manager.restore_frozen(path.parent, kept, loop_state) if kept else {}
        states = from_items(items, bases | fixed)
        return self.plan.resumed(loop_state["step"], states), loop_state


def saves_first(config: Config) -> bool:
    """True when a run writes a checkpoint before its first step.

    Without one, a killed run starts again from step 0, with the same bits. But a run with a warm-up
    would repeat it, and a deadline needs to know how long a save takes.
    """
    asked = config.save_every or config.checkpoint.save_by or not config.total_steps
    return bool(asked or has_supervised(config))


def finished_summary(folder: RunFolder, config: Config) -> Summary:
    """The summary of a run that was already finished; prints a line about it."""
    if is_main():
        print(folder.nothing_to_do(config.total_steps), flush=True)
    checkpoint = folder.path / layout.CHECKPOINTS / f"{layout.STEP_PREFIX}_{folder.latest_step}"
    step, totals = _loop_state(checkpoint.absolute())
    return Summary(
        run_dir=folder.path,
        step=step,
        totals=totals,
        seconds=0.0,
        interrupted=False,
        checkpoint=checkpoint.absolute(),
    )


@contextmanager
def open_run(
    config: Config,
    folder: RunFolder,
    watch: Watch | None = None,
    callbacks: Sequence[Callback] = (),
    end_process: EndProcess | None = None,
) -> Iterator[Run]:
    """Plan the run, read its data, find its checkpoints, and open its output.

    Raises ValueError for a config that cannot work, before any array exists.
    """
    started, opened = time.perf_counter(), list[Run]()
    run_dir, save_by = folder.path, read_deadline(config.checkpoint.save_by)
    with ExitStack() as stack:
        stop_came = stack.enter_context(
            stop_requests(
                loses_nothing=lambda: all(run.loses_nothing() for run in opened),
                end_process=end_process,
            )
        )
        if is_main():
            import_packages(tracker_names(config.log))
        STATUS("opening the tokenizer")
        tokenizer = find_tokenizer(config.data.tokenizer, config.actor)
        set_chat_variables(tokenizer, config.data.chat_template_kwargs)
        meshes = open_meshes(config, tokenizer)
        STATUS("reading the data and tracing the programs")
        compilations = stack.enter_context(count_compilations())
        begins = config.total_steps > 0 and not has_supervised(config)  # with the plan's programs
        plan, data = open_plan_and_data(
            config, tokenizer, meshes, run_dir, stack, new=folder.is_new(config), begins=begins
        )
        checkpoints = open_checkpoints(config, run_dir, data.best_metric)
        stack.callback(checkpoints.close)
        resume = _resume_point(config, checkpoints)
        identity = run_identity(plan, tokenizer) | {CODE: code_record(config), ROWS: data.digests}
        differs = "" if resume is None else check_resume(resume, identity)
        supervised: Supervised = {}
        if resume is None:
            supervised = open_supervised(plan, tokenizer, data.validator, run_dir)
        resume_step = None if resume is None else _loop_state(resume)[0]  # every process reads it
        begins_again = is_main() and resume is None and has_steps(run_dir)
        undone = alarms_after(run_dir, resume_step or 0) if is_main() else []
        called = Callbacks(functions=callbacks, run_dir=run_dir, total_steps=config.total_steps)
        output = stack.enter_context(
            RunOutput(
                config,
                run_dir,
                tokenizer=tokenizer,
                stops=stops_of(config, tokenizer),
                resume_step=resume_step,
                callbacks=called,
            )
        )
        watch = watch or Watch()
        stack.callback(watch.enter, END, learn=False)
        changed = folder.changes()
        folder.write_config()
        if differs:
            output.message(differs)
        if begins_again:
            output.message(
                "no checkpoint was written in this folder, so the run begins again, from step 0; "
                "--config.save_every=N writes one every N steps"
            )
        run = Run(
            config=config,
            run_dir=run_dir,
            tokenizer=tokenizer,
            plan=plan,
            data=data,
            supervised=supervised,
            output=output,
            checkpoints=checkpoints,
            identity=identity,
            save_by=save_by,
            resume=resume,
            resume_step=resume_step,
            stop_came=stop_came,
            stack=stack,
            watch=watch,
            started=started,
            lock=folder.lock,
            bell=AlarmBell(alarms=Alarms(config=config.alarms), write=output.event),
            callbacks=called,
            compilations=compilations,
            starts=Starts(folder=run_dir),
        )
        if is_main():
            last = run.starts.begin(
                step=resume_step or 0,
                config_text=folder.config_text,
                changed=changed,
                devices=devices_line(plan),
                undone=undone,
            )
            stack.push(run.ends)
            watch.note_end = run.starts.end
            if last:
                output.message(f"start {run.starts.number} of this run; the last one ended: {last}")
        # A warm-up is kept by the save before the first step.
        run._kept = -2 if supervised else resume_step or 0
        opened.append(run)
        yield run


# ------------------------------------------------------------------------- folders


def open_checkpoints(config: Config, run_dir: Path, best_metric: str) -> CheckpointManager:
    """The run's checkpoints; ConfigError when `resume` and the folder contradict each other."""
    if is_main():
        check_writable(run_dir / layout.CHECKPOINTS)
    checkpoints = CheckpointManager(
        run_dir / layout.CHECKPOINTS,
        keep_latest=config.checkpoint.keep_latest,
        keep_best=config.checkpoint.keep_best,
        best_metric=best_metric,
        asynchronous=config.checkpoint.asynchronous,
        max_growth=config.checkpoint.max_growth,
    )
    for what in checkpoints.set_aside if is_main() else ():
        print(what, file=sys.stderr, flush=True)
    latest, damaged = checkpoints.latest(), checkpoints.damaged_ones()
    if latest is None and damaged and config.resume == "auto":
        checkpoints.close()
        raise ConfigError(
            f"{run_dir} has no sound checkpoint; the damaged ones are in {damaged[0].parent}. To "
            "begin again from step 0, give another --config.run_dir"
        )
    try:
        refuse_overwriting(config, run_dir, latest)
    except ConfigError:
        checkpoints.close()
        raise
    return checkpoints


def refuse_overwriting(config: Config, run_dir: Path, latest: int | None) -> None:
    """ConfigError where the folder holds a run, and `resume` asks for another.

    `latest` is the step of its newest checkpoint.
    """
    if config.resume != "auto" and (latest is not None or has_steps(run_dir)):
        raise ConfigError(
            f"config.resume={config.resume}, but {run_dir} holds {a_run(latest)}, which "
            "would be overwritten. Give another --config.run_dir, or go on with it by "
            "--config.resume=auto"
        )


def _resume_point(config: Config, checkpoints: CheckpointManager) -> Path | None:
    """The checkpoint folder to go on from, or None to begin."""
    latest = checkpoints.latest()
    if latest is not None:
        return checkpoints.path(latest)
    if config.resume in ("auto", "never"):
        return None
    path = Path(config.resume).absolute()
    manager.check(path)
    return path


def _loop_state(path: Path) -> tuple[int, RunTotals]:
    """The step of a checkpoint, and the totals of the run up to it."""
    _, state = manager.restore(path, {})
    return state["step"], RunTotals(**state["totals"])
