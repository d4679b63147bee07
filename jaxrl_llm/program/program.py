"""Planned stages as compiled programs with donated state.

Consecutive device stages are one `jax.jit`: with a model reward the whole iteration is one
program. The states of roles that learn are donated, so an update needs no second copy. On one
device generation is cut where that compiles sooner: see `program/chain.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.distributed.multihost import (
    HostRows,
    compile_together,
    fetch_rows,
    gather_objects,
    host_rows,
    make_global,
    place_owned,
)
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.distributed.transfer import call, results_elsewhere, spread, takes_part
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.program.ahead import CompileJob, Compilers, first_call
from jaxrl_llm.program.chain import Chain, job_of, programs_of, setting_of
from jaxrl_llm.program.followers import Follower
from jaxrl_llm.program.guards import transfer_guard
from jaxrl_llm.program.moves import Moves, sharding_of
from jaxrl_llm.program.progress import B, Progress, Results, joined, segment_memory_guard
from jaxrl_llm.program.segment import Segment
from jaxrl_llm.program.stage import Stage, States, StepContext
from jaxrl_llm.program.stored import Start
from jaxrl_llm.types import Batch

MOVED = "perf/moved_between_groups_gb"  # bytes of one call of `Program.run`
PROGRAM = Segment.iteration.__name__  # under which compilations are counted


class Program:
    """The stages of one step, on one mesh or on several.

    `run` takes and returns a batch, a `RolloutBatch` or an `OfflineBatch`.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        mesh: Mesh,
        state_shardings: Mapping[str, Any],
        role_meshes: Mapping[str, Mesh] | None = None,
        followers: Sequence[Follower] = (),
        overlap: bool = True,
        supervised: bool = False,
        group: int = 1,
    ):
        """`state_shardings` has one entry for each role that keeps state.

        `role_meshes` has the mesh of each role on devices of its own. Their segments run at the
        same time as others, as far as their fields allow. A field moves where it is read. With
        several meshes a thread dispatches each segment: on a GPU the call of a program with loops
        returns late, and another mesh would wait for it.
        `followers` are the roles whose weights come from another role in each step.

        `group` samples in a row answer one prompt: hosts divide rows by whole groups if they can.
        `overlap` lets a device segment run while a host stage does that reads nothing of it.
        Without it, each segment has ended before the next begins, and its time is its own.
        `supervised` programs are counted apart from the run's own steps.
        """
        self.segments = tuple(segments)
        self._overlap = overlap
        self.mesh = mesh
        self._role_meshes = dict(role_meshes or {})
        self._followers = {follower.name: follower for follower in followers}
        apart = len(set(self._role_meshes.values()))
        self._threads = ThreadPoolExecutor(apart + 1, "segments") if apart else None
        self.is_spread = spread(self.meshes)  # several groups of several processes
        self.runs: Counter[str] = Counter()  # runs of each device segment since the start
        self._batch_sharding = batch_sharding(mesh)
        self._shardings = dict(state_shardings)
        self._supervised = supervised
        self._group = group
        self._traced: set[str] = set()
        self._compilers = Compilers()  # threads of `compile_ahead`
        self._start: Start | None = None
        self._settings: dict[str, str] = {}  # what a segment is compiled with, see `CompileJob`
        self._numbers: dict[str, Any] = {}  # rates, coefficients and seeds of a segment, placed
        self._called: dict[str, Any] = {}  # abstract arguments of the first call, on a mesh
        self._reads = {segment.name: segment.reads for segment in self.segments}
        self._compiled = {s.name: self._compile(s) for s in self.segments if not s.is_host}

    def run(
        self,
        states: States,
        batch: B,
        step: int,
        context: StepContext | None,
        timer: Timer,
        segments: Sequence[Segment] | None = None,
        *,
        stay: bool = False,
    ) -> tuple[States, B, dict[str, Any]]:
        """Run every segment once, or `segments`: new states, the full batch, metrics on device.

        `context` is what host stages read, with the batch. The donated `states` must not be used
        again.

        With `stay` nothing moves, and no process waits for another: a thread may run it. Then all
        segments, the fields that they read and their states lie on one mesh.

        At most one segment is in flight on a mesh, so the times of its devices do not overlap.
        Nothing is lost: a device segment follows another only where the host reads the fields of
        the first, and so waits for it.
        """
        with self._compilers.checked():
            now, moves = Progress(states, batch, step, timer), Moves()
            segments = self.segments if segments is None else segments
            between = self.is_spread and not stay
            for number, segment in enumerate(segments):
                rest = segments[number:] if between else ()
                if segment.is_host:
                    self._run_host(segment, now, moves, context, rest)
                    continue
                mesh = self.mesh_of(segment)
                arguments = self._begin(segment, now, moves, rest)
                compiled, known = self._compiled[segment.name], segment.name in self._traced
                if self._threads is not None and known:
                    ready = self._ready(compiled)
                    result = self._threads.submit(_call, ready, arguments, segment, mesh, now)
                    now.add(mesh, segment, result.result)
                else:
                    if self._role_meshes and not known:
                        now.wait()  # kernels may be timed on any of the devices
                    compiled = self._ready(compiled)
                    if mesh.size > 1 and segment.name not in self._called:
                        self._called[segment.name] = jax.tree.map(_abstract, arguments)
                    with (
                        transfer_guard() if known else first_call(),
                        segment_memory_guard(segment),
                    ):
                        if not known and jax.process_count() > 1:
                            compile_together(compiled, arguments, segment.name, takes_part(mesh))
                        if takes_part(mesh):
                            results = compiled(*arguments)
                        else:
                            results = results_elsewhere(compiled, arguments)
                    self._traced.add(segment.name)
                    now.add(mesh, segment, partial(now.end, segment, results, mesh))
                self.runs[segment.name] += 1
                if not self._overlap or (self._feeds_host(segment) and not self._role_meshes):
                    now.wait()
            now.wait()
            if self._role_meshes and not stay:
                written = [
                    name for each in segments for stage in each.stages for name in stage.writes
                ]
                moved = moves.to(self.mesh, {name: now.batch[name] for name in written})
                now.batch = now.batch.replace(**moved)
                now.metrics[MOVED] = moves.bytes / 1e9
            if between:
                self.share_times(timer)
            return now.states, now.batch, now.metrics

    def _begin(
        self, segment: Segment, now: Progress[Any], moves: Moves, rest: Sequence[Segment]
    ) -> tuple[Any, ...]:
        """The arguments of a device segment, once its devices and its fields are there.

        Its clock starts. `rest` are the segments from it on, where processes differ.
        """
        mesh = self.mesh_of(segment)
        # Before the clock starts: a program with loops may wait for the device.
        now.wait(mesh)
        now.wait_for([*self._reads[segment.name], *self._sources(segment)])
        if rest:
            self._before(mesh, rest, now, moves)
        reads = {name: now.batch[name] for name in self._reads[segment.name]}
        if self._role_meshes:
            reads = moves.to(mesh, reads)
        followed = now.states | self.follow(segment.roles, now.states, now.timer, now.metrics)
        if takes_part(mesh):
            now.timer.start(segment.name)
        device_step = make_global(np.int32(now.step), replicated(mesh))
        if segment.name not in self._numbers:
            self._numbers[segment.name] = make_global(segment.arguments, replicated(mesh))
        numbers = self._numbers[segment.name]
        return (*_split_states(followed, segment), reads, numbers, device_step)

    def _run_host(
        self,
        segment: Segment,
        now: Progress[Any],
        moves: Moves,
        context: StepContext | None,
        rest: Sequence[Segment],
    ) -> None:
        """Run a host segment while devices compute. `rest` is as for `_begin`."""
        now.wait_for(segment.reads)
        if rest:  # hosts read the rows of their own devices
            self._before(self.mesh, rest, now, moves)
            fields = {name: now.batch[name] for name in segment.reads}
            now.batch = now.batch.replace(**moves.to(self.mesh, fields))
        with now.timer(segment.name):
            metrics = self._call_host(segment.stages[0], now, context)
        now.wait()
        now.metrics = joined(now.metrics, metrics)

    def _before(
        self, mesh: Mesh, segments: Sequence[Segment], now: Progress[Any], moves: Moves
    ) -> None:
        """Wait and move fields before the first of `segments` runs on `mesh`, if processes differ.

        All processes that hold a device must enter the programs of it in one order. So nothing
        else is in flight where a field or weights move. What later segments elsewhere read leaves
        before the devices are busy.
        """
        first, *later = segments
        if {stage.role for stage in first.stages} & self._followers.keys():
            now.wait()
        for name in first.reads:
            if not moves.is_there(mesh, name, now.batch[name]):
                now.wait(mesh, sharding_of(now.batch[name]).mesh)
        if now.is_busy(mesh):
            return
        for segment in later:
            target = self.mesh if segment.is_host else self.mesh_of(segment)
            if now.is_busy(target):
                continue
            fields = {name: now.batch[name] for name in segment.reads}
            known = {name: x for name, x in fields.items() if x is not None}
            here = {name: x for name, x in known.items() if sharding_of(x).mesh == mesh}
            moves.to(target, here)

    def share_times(self, timer: Timer) -> None:
        """The times of a stage count on the process where it took longest: others had no part.

        Requires: every process calls it.
        """
        own = timer.timings()
        everyone = gather_objects(own, "times of stages")
        for name in {name for one in everyone for name in one}:
            longest = max(one.get(name, 0.0) for one in everyone)
            timer.add(name, longest - own.get(name, 0.0))

    def _sources(self, segment: Segment) -> set[str]:
        """The roles whose states a device segment needs, its own or those that its roles follow."""
        roles = {stage.role for stage in segment.stages}
        followers = (self._followers[name] for name in roles & self._followers.keys())
        return roles.union(*(each.sources for each in followers))

    def mesh_of(self, segment: Segment) -> Mesh:
        """The mesh on which a device segment runs."""
        return _mesh_of(segment.stages[0], self._role_meshes) or self.mesh

    @property
    def meshes(self) -> set[Mesh]:
        """The meshes of all groups of devices."""
        return {self.mesh, *self._role_meshes.values()}

    @property
    def num_devices(self) -> int:
        """All devices of the program, whatever their group."""
        return len({device for mesh in self.meshes for device in mesh.devices.flat})

    def host_rows(self, num_rows: int) -> HostRows:
        """The rows of a batch of `num_rows` that this process holds, and those that it owns."""
        return host_rows(self._batch_sharding, num_rows, self._group)

    def trace(self, states: States, batch: Batch, *, compiles_first: bool = False) -> Any:
        """Shapes of the whole step without computing: a config that is wrong fails here.

        `states` and `batch` are abstract, with the shardings of those that run. What is traced here
        is not traced again by `run`. The programs in the middle of a chain are not traced: none of
        them reads or writes what the first one does not.

        `compiles_first` lowers the first program when it is traced, and begins to compile it. The
        others follow with `compile_ahead`.
        """
        for segment in self.segments:
            before, batch = batch, self._traced_batch(segment, states, batch)
            if compiles_first and not segment.is_host and jax.process_count() == 1:
                self._compilers.begin_first(self._job(segment, states, before))
                compiles_first = False
        return batch

    @property
    def reads_cache(self) -> bool:
        """True if the program that `trace` began to compile is in the compile cache."""
        return self._compilers.reads_cache

    def begin_stored(self, states: States, batch: Batch, start: Start) -> bool:
        """Begin to read the programs that an earlier `start` kept; False if it kept none.

        `states` and `batch` are as for `trace`, which need not be called before: the first `run`
        traces and compares. Without any, `start` keeps what `compile_ahead` compiles.
        """
        self._start = start
        if jax.process_count() > 1:
            return False
        every = [program for each in self._compiled.values() for program in programs_of(each)]
        return self._compilers.begin_stored(every, start, partial(self._jobs, states, batch))

    def compile_ahead(self, states: States, batch: Batch) -> None:
        """Begin to compile every device segment, side by side in threads; `run` finds the results.

        `states` and `batch` are as for `trace`. Several processes compile together in `run`
        instead, as they wait for one another.
        """
        if jax.process_count() > 1 or self._compilers.reads_stored:
            return
        jobs = self._jobs(states, batch)
        if jobs:
            self._compilers.begin(jobs, self._start)

    def _jobs(self, states: States, batch: Batch) -> list[CompileJob]:
        jobs: list[CompileJob] = []
        for segment in self.segments:
            if not segment.is_host:
                jobs.append(self._job(segment, states, batch))
            batch = self._traced_batch(segment, states, batch)
        return jobs

    def _job(self, segment: Segment, states: States, batch: Batch) -> CompileJob:
        arguments = self._arguments(segment, states, batch)
        compiled, setting = self._compiled[segment.name], self._settings[segment.name]
        return job_of(compiled, arguments, setting, is_long=bool(segment.updated))

    def wait_for_compilers(self) -> None:
        """Wait for all programs. Requires: the device is idle."""
        self._compilers.wait_for_all()

    def _traced_batch(self, segment: Segment, states: States, batch: Batch) -> Any:
        """The abstract batch after a segment."""
        if segment.is_host:
            writes = segment.stages[0].shapes(jax.tree.leaves(batch)[0].shape[0])
        else:
            compiled = self._compiled[segment.name]
            _, writes, _ = compiled.eval_shape(*self._arguments(segment, states, batch))
        placed = partial(_placed, sharding=self._batch_sharding)
        return batch.replace(**jax.tree.map(placed, writes))

    def number_of_programs(self, segment: Segment) -> int:
        """The programs that `run` dispatches for a segment; 0 for one on the host."""
        return 0 if segment.is_host else len(programs_of(self._compiled[segment.name]))

    def lower(self, segment: Segment, states: States, batch: Batch) -> jax.stages.Lowered:
        """The lowered program of a device segment, to look into or to compile elsewhere."""
        return self._compiled[segment.name].lower(*self._arguments(segment, states, batch))

    def lower_each(
        self, segment: Segment, states: States, batch: Batch
    ) -> Iterator[jax.stages.Lowered]:
        """The lowered programs that `run` dispatches for a device segment, all of a chain."""
        arguments = self._arguments(segment, states, batch)
        for program, inputs in job_of(self._compiled[segment.name], arguments).links:
            yield program.lower(*inputs)

    def compiled(self, segment: Segment) -> jax.stages.Compiled | None:
        """The program that `run` has compiled, to look into; None on one device.

        It is not compiled again.

        Requires: `run` has run the segment; every process calls this.
        """
        called, program = self._called.get(segment.name), self._compiled[segment.name]
        if called is None:
            return None
        ready: Any = self._compilers.ready(program)
        return ready if ready is not program else program.lower(*called).compile()

    def _ready(self, program: Any) -> Any:
        """The function to call for a segment. A chain waits for each of its programs itself."""
        return program if isinstance(program, Chain) else self._compilers.ready(program)

    def _arguments(self, segment: Segment, states: States, batch: Batch) -> tuple[Any, ...]:
        """Abstract arguments, placed as `run` places them.

        Otherwise `jit` would trace again for `run`, and the compile cache would not find the
        program.
        """
        mesh = self.mesh_of(segment)
        states = states | {name: each.abstract() for name, each in self._followers.items()}
        reads = {name: batch[name] for name in self._reads[segment.name]}
        if self._role_meshes:
            placed = partial(_placed, sharding=batch_sharding(mesh))
            reads = jax.tree.map(placed, reads)
        step, numbers = jax.tree.map(
            partial(_placed, sharding=replicated(mesh)), (np.int32(0), segment.arguments)
        )
        return *_split_states(states, segment), reads, numbers, step

    def follow(
        self, roles: Iterable[str], states: States, timer: Timer, metrics: dict[str, Any]
    ) -> States:
        """Up-to-date states of the followers among `roles` that `states` lacks."""
        weights: States = {}
        for name in sorted((set(roles) & self._followers.keys()) - states.keys()):
            follower = self._followers[name]
            with timer(follower.timing):
                weights[name], size = follower.follow(states)
                jax.block_until_ready(weights[name])
            metrics[f"perf/{name}_weights_gb"] = size / 1e9
        return weights

    def _feeds_host(self, segment: Segment) -> bool:
        after = self.segments[self.segments.index(segment) + 1 :]
        host_reads = {n for s in after if s.is_host for stage in s.stages for n in stage.reads}
        return any(set(stage.writes) & host_reads for stage in segment.stages)

    def _call_host(
        self, stage: Stage, now: Progress[Any], context: StepContext | None
    ) -> dict[str, Any]:
        """Call a host stage with the rows that this process owns; its metrics."""
        rows = self.host_rows(jax.tree.leaves(now.batch)[0].shape[0])
        fields = fetch_rows({name: now.batch[name] for name in stage.reads}, rows)
        if stage.shares:
            states = now.states | self.follow(stage.shares, now.states, now.timer, now.metrics)
            fields["states"] = {name: states[name] for name in stage.shares}
        output = stage(context, now.step, **fields)
        stage.check(output, len(rows.owned))
        if self.is_spread and rows.shared:
            now.wait(self.mesh)  # a thread may not have dispatched yet what is in flight there
        dtypes = stage.shapes(len(rows.owned))
        arrays = {k: np.asarray(x, dtypes[k].dtype) for k, x in output.writes.items()}
        writes = place_owned(arrays, self._batch_sharding, rows)
        metrics = dict(output.metrics)
        if not stage.gathers and jax.process_count() > 1:
            metrics = _mean_over_hosts(metrics, len(rows.owned))
        now.batch = now.batch.replace(**writes)
        return metrics

    def _compile(self, segment: Segment) -> Any:
        mesh = self.mesh_of(segment)
        options, *others = (dict(stage.compiler_options) for stage in segment.stages)
        learning_shardings = {role: self._shardings[role] for role in segment.updated}
        out_shardings = (learning_shardings, batch_sharding(mesh), replicated(mesh))
        if any(other != options for other in others):
            options = None
        self._settings[segment.name] = setting_of(mesh, options)
        # Several processes compile a segment together.
        on_one = mesh.size == 1 and jax.process_count() == 1
        if on_one and (count := segment.stages[0].num_pieces):
            return Chain(
                segment.iteration,
                segment.pieces,
                count,
                num_arguments=5,
                donated=(0,),
                place=replicated(mesh),
                out_shardings=out_shardings,
                compiler_options=options,
                compilers=self._compilers,
            )
        return jax.jit(
            segment.supervised if self._supervised else segment.iteration,
            donate_argnums=(0,),
            out_shardings=out_shardings,
            compiler_options=options,
        )


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    """The properties of an argument that decide which program it needs."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)


def _mean_over_hosts(metrics: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """Means over the rows of all hosts, from each host's means over its `num_rows` rows.

    A host that did not measure something does not count for it.
    """
    own = {name: float(value) for name, value in metrics.items()} if num_rows else {}
    everyone = gather_objects([num_rows, own], "host_metrics")
    means: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, one in everyone for name in one):
        parts = [(rows, one[name]) for rows, one in everyone if name in one]
        means[name] = sum(n * value for n, value in parts) / sum(n for n, _ in parts)
    return means


def _split_states(states: States, segment: Segment) -> tuple[States, States]:
    """The states that the segment replaces (donated) and those that it only reads."""
    learning = set(segment.updated)
    used = segment.roles & states.keys()
    return (
        {role: states[role] for role in sorted(used & learning)},
        {role: states[role] for role in sorted(used - learning)},
    )


def _placed(field: Any, *, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=sharding)


def _mesh_of(stage: Stage, role_meshes: Mapping[str, Mesh]) -> Mesh | None:
    return role_meshes.get(stage.role)


def by_mesh(role_meshes: Mapping[str, Mesh]) -> Callable[[Stage], Any]:
    """Tells stages apart that one program cannot hold, for `segments`."""
    return partial(_mesh_of, role_meshes=role_meshes)


def _call(
    compiled: Any, arguments: tuple[Any, ...], segment: Segment, mesh: Mesh, now: Progress[Any]
) -> Results:
    """Dispatch, in a thread, a segment that was traced before, and wait for it."""
    with transfer_guard(), segment_memory_guard(segment):
        results = call(compiled, arguments, mesh)
    return now.end(segment, results, mesh)
