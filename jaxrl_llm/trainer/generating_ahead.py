"""Sources of batches that are generated before their step, by an older policy.

The batch of step t comes from the policy after max(0, t - 1 - s) updates, where s is
`max_staleness`. Which policy that is depends on the step only, not on the clock, so a run has the
same bits each time.

- If the rollout has its own devices, it generates in a thread while the other devices update.
- On one group of devices, generation comes before the updates of a step. Only the host overlaps:
  reward functions grade the batches ahead in a thread, while the devices work.
- With partial rollouts a response is generated in parts, by successive policies
  (`generation/partial_responses.py`). The next batch begins in the same call.
- With dynamic sampling, all rounds of a batch come from one policy.
- With several processes, all must enter their exchanges in the same order. So the main thread moves
  fields and weights: a batch reaches the actor before the next weights leave it. A step grades its
  own batch.

A checkpoint holds what was generated, also unfinished responses. After a resume the loader draws
the prompts again, and the host grades them again.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.agents.setup import has_turns
from jaxrl_llm.agents.trajectory import restored, without_ids
from jaxrl_llm.config import Config
from jaxrl_llm.distributed import transfer
from jaxrl_llm.distributed.multihost import fetch, fetch_rows, gather_objects, place_held
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.generation.partial_responses import NO_VERSION
from jaxrl_llm.generation.slots import no_kept, no_routes
from jaxrl_llm.learner.rows import KEPT, ROUTES
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.generating import ASKED, CONTINUED, OLDER, UNFINISHED, older_fields
from jaxrl_llm.plan.plan import AHEAD, Phase
from jaxrl_llm.plan.roles import ROLLOUT_ROLE
from jaxrl_llm.program.program import MOVED
from jaxrl_llm.program.stage import States, StepContext
from jaxrl_llm.supervision.signals import host_work
from jaxrl_llm.trainer.batches import GroupFilter, PromptBatches, means_of, moved_metric

WAITING_FOR_ROLLOUT = "rollout_wait"  # until a batch that is generated ahead is there
# Metrics of the parts of a batch that are added up.
COUNTS = ("rollout/decode_steps", "rollout/prefills", MOVED)
Graded = tuple[Any, dict[str, Any]]  # a batch, and the metrics of grading it


@dataclass(kw_only=True)
class Round:
    """Samples that were generated together."""

    context: StepContext
    batch: Any  # with what generation wrote
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of generation
    grading: dict[str, Any] = field(default_factory=dict)  # metrics of grading

    def add(self, batch: Any, metrics: Mapping[str, Any]) -> int:
        """Take in what a part of generation wrote; how many responses are unfinished."""
        self.batch = batch
        new = {name: float(value) for name, value in fetch(dict(metrics)).items()}
        unfinished = int(new.pop(UNFINISHED, 0))
        counted = {name: self.metrics.get(name, 0.0) + new[name] for name in COUNTS if name in new}
        self.metrics = new | self.metrics | counted
        return unfinished


@dataclass(kw_only=True)
class Ahead:
    """A batch that is made before its step."""

    step: int
    version: int  # last policy that generates for it
    epoch: int = 0  # epoch of the loader after its prompts
    loader: Any = None  # dynamic sampling: the loader's state before its prompts
    rounds: list[Round] = field(default_factory=list)  # one without dynamic sampling
    timer: Timer = field(default_factory=Timer)  # times of work outside of a step
    generated: Future[None] = field(default_factory=Future)  # done: nothing is left to generate
    graded: Future[Graded] = field(default_factory=Future)
    priorities: dict[str, float] = field(default_factory=dict)  # dynamic sampling: metrics
    groups: GroupFilter | None = None  # dynamic sampling: the groups so far

    def fail(self, error: BaseException) -> None:
        """Whoever waits for the batch gets the error."""
        for future in (self.generated, self.graded):
            if not future.done():
                future.set_exception(error)


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """A batch that a thread generates on devices of other processes."""

    each: Ahead
    iteration: Phase
    gigabytes: float  # size of the fields that moved to the rollout
    timer: Timer
    generated: "Future[tuple[States, Any, dict[str, Any]]]"


def kept_sizes(loop_state: Mapping[str, Any], config: Config) -> list[tuple[int, int]]:
    """The step and the rounds of each batch of a checkpoint that a run with `config` can use.

    Without them the batches are generated again, from the same prompts.
    """
    kept = loop_state.get(AHEAD)
    if not isinstance(kept, dict):  # none, or of a version that kept less
        return []
    settings, now = kept.get("settings"), _settings(config)
    # A version without the key kept batches of one form.
    if not settings or {"routing_replay": now["routing_replay"]} | settings != now:
        return []
    return [(each["step"], len(each["rounds"])) for each in kept["batches"]]


def _settings(config: Config) -> dict[str, Any]:
    """The settings without which kept batches have no use, in JSON's types."""
    rollout, groups = config.rollout, config.rollout.filter_groups
    return {
        "max_staleness": config.max_staleness,
        "partial_rollouts": config.partial_rollouts,
        "filter_groups": asdict(groups) if groups.enable else None,
        "n": config.rollout.n,
        "routing_replay": config.rollout.routing_replay,
        "filters": [rollout.top_k, rollout.top_p, rollout.min_p, rollout.temperature == 0],
        "max_response_length": config.data.max_response_length,
    }


@dataclass(kw_only=True)
class AheadBatches(PromptBatches):
    """The next prompts with their responses, generated and graded before their step."""

    _ahead: deque[Ahead] = field(default_factory=deque)
    _current: Ahead | None = None
    _metrics: dict[str, Any] = field(default_factory=dict)
    _under_way: UnderWay | None = None  # with groups on several processes
    _saving: Timer = field(default_factory=Timer)  # times of what `saved` generated
    # The thread that grades; None with several processes: each step grades its own batch.
    _host: ThreadPoolExecutor | None = field(init=False)
    # The thread that generates; None on one group, where the main thread does.
    _worker: ThreadPoolExecutor | None = field(init=False)

    def __post_init__(self) -> None:
        # Made here, not where they are first used: both threads may come there at the same time.
        self._host = ThreadPoolExecutor(1, "grading") if jax.process_count() == 1 else None
        stages = [stage for segment in self.plan.at(1).generating for stage in segment.stages]
        apart = any(stage.role == ROLLOUT_ROLE for stage in stages)
        self._worker = ThreadPoolExecutor(1, "rollout") if apart else None

    @property
    def epoch(self) -> int:
        return self.loader.epoch if self._current is None else self._current.epoch

    def next(self, step: int, states: States, timer: Timer) -> tuple[Any, Any]:
        self._fill(step - 1, step + self.plan.config.max_staleness, states, timer)
        first = self._current = self._ahead.popleft()
        with timer(WAITING_FOR_ROLLOUT):
            first.generated.result()
        if self._host is None:
            self._grade(first)
        with timer(WAITING_FOR_ROLLOUT), host_work():
            batch, metrics = first.graded.result()
        saving, self._saving = self._saving, Timer()
        for each in (first.timer, saving):
            for name, seconds in each.timings().items():
                timer.add(name, seconds)
        self._metrics |= metrics | self._staleness(first, batch)
        return batch, first.rounds[0].context

    def finish(
        self, step: int, batch: Any, context: Any, metrics: dict[str, Any]
    ) -> dict[str, Any]:
        assert self._current is not None
        generated, (own, self._metrics) = self._current.rounds[0].metrics, (self._metrics, {})
        metrics = generated | own | metrics | moved_metric(generated, own, metrics)
        return super().finish(step, batch, context, metrics)

    def saved(self, step: int, states: States) -> tuple[dict[str, Any], States]:
        started = time.perf_counter()
        if step == 0:
            self._fill(0, self.plan.config.max_staleness, states, self._saving)
        # Later the next step lets this policy do its part, here or in a run that goes on: what it
        # would generate now is of no use to a run that ends.
        self._take_over(self._saving)
        ahead = tuple(self._ahead) if self._settled() else ()
        self.saving_s = max(self.saving_s, time.perf_counter() - started)
        batches = [
            {
                "step": each.step,
                "version": each.version,
                "complete": each.generated.done(),
                "rounds": [
                    {
                        "policy_version": round.context.policy_version,
                        "metrics": round.metrics,
                        "trajectories": self._trajectories(round),
                    }
                    for round in each.rounds
                ],
            }
            for each in ahead
        ]
        kept = {"settings": _settings(self.plan.config), "batches": batches}
        arrays = [
            [
                {name: round.batch[name] for name in self.plan.at(each.step).generated}
                for round in each.rounds
            ]
            for each in ahead
        ]
        return {"data": self._position(), AHEAD: kept}, {AHEAD: arrays} if ahead else {}

    def restore(self, position: Mapping[str, Any], ahead: Any) -> None:
        """Go on from what `saved` gave. The loader stands there already."""
        for kept, arrays in zip(position[AHEAD]["batches"], ahead, strict=True):
            each = Ahead(step=kept["step"], version=kept["version"])
            self._restore(each, kept, arrays)
            self._ahead.append(each)

    def close(self) -> None:
        """Begin nothing more. What runs is not waited for."""
        for executor in (self._host, self._worker):
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------- making a batch

    def _fill(self, version: int, last: int, states: States, timer: Timer) -> None:
        """Let the policy after `version` updates do its part, for the batches up to step `last`.

        Its weights are copied to the rollout's devices before this returns: the next update takes
        the actor's memory. On one group the responses are there before this returns.
        """
        going: tuple[Ahead, ...] = ()
        if self.plan.config.partial_rollouts:
            going = tuple(each for each in self._ahead if each.version < version)
            for each in going:
                each.version = version
            if version and not self._ahead:
                going = self._begun_late(version, timer)
                self._ahead.extend(going)
        for step in range(version + len(self._ahead) + 1, last + 1):
            each = Ahead(step=step, version=version)
            self._begin(each, states, timer, going)
            self._ahead.append(each)
            going = ()

    def _begun_late(self, version: int, timer: Timer) -> tuple[Ahead, ...]:
        """Batches to generate again, because the checkpoint's copies cannot be used.

        They have no token yet, and go on in the call that begins the next batch.
        """
        number, late = self.plan.config.max_staleness, []
        for step in range(version + 1, version + 1 + number):
            each = Ahead(step=step, version=version)
            only = self._draw(each, timer, version)
            blank = self._blanks(only.batch)
            only.batch = only.batch.replace(
                **{name: x for name, x in blank.items() if name not in ASKED}
            )
            late.append(each)
        return tuple(late)

    def _begin(
        self, each: Ahead, states: States, timer: Timer, going: tuple[Ahead, ...] = ()
    ) -> None:
        """Draw the prompts of a batch, and begin to generate; those `going` on share its call."""
        self._draw(each, timer, each.version)
        work = partial(self._together, going) if going else self._first_part
        self._generate(each, work, states, timer)

    def _draw(self, each: Ahead, timer: Timer, version: int) -> Round:
        """The prompts of the next round of a batch, which `version` begins to answer."""
        rows = self.plan.config.data.train_batch_size * self.plan.config.rollout.n
        batch, context = self._prompts(each.step, timer, len(each.rounds) * rows)
        context.policy_version = version
        each.epoch = self.loader.epoch
        each.rounds.append(Round(context=context, batch=batch))
        return each.rounds[-1]

    def _generate(
        self,
        each: Ahead,
        work: Callable[[Ahead, Phase, States, Timer], None],
        states: States,
        timer: Timer,
    ) -> None:
        """Run `work` with the weights of `states`: now, or in the rollout's thread."""
        self._take_over(timer)
        iteration = self.plan.at(each.step)
        roles = {role for segment in iteration.collecting for role in segment.roles}
        weights = {role: states[role] for role in roles & states.keys()}
        weights |= iteration.program.follow(roles, states, timer, self._metrics)
        if self._worker is None:
            work(each, iteration, weights, timer)
        elif iteration.program.is_spread:
            self._send(each, iteration, weights)
        else:
            self._worker.submit(_guarded, each, partial(work, each, iteration, weights, each.timer))

    def _send(self, each: Ahead, iteration: Phase, weights: States) -> None:
        """Have a thread generate where the rollout lies; `_take_over` takes the responses."""
        assert self._worker is not None
        (only,), segments, timer = each.rounds, iteration.generating, Timer()
        there = batch_sharding(iteration.program.mesh_of(segments[0]))
        names = sorted({name for segment in segments for name in segment.reads})
        reads = {name: transfer.moved(only.batch[name], there) for name in names}
        run = partial(iteration.program.run, segments=segments, stay=True)
        batch = only.batch.replace(**reads)
        self._under_way = UnderWay(
            each=each,
            iteration=iteration,
            gigabytes=sum(x.nbytes for x in reads.values()) / 1e9,
            timer=timer,
            generated=self._worker.submit(run, weights, batch, each.step, only.context, timer),
        )

    def _take_over(self, timer: Timer) -> None:
        """Bring what is under way to the actor's devices. All processes call it."""
        if self._under_way is None:
            return
        way, self._under_way = self._under_way, None
        (only,), stages = way.each.rounds, [g for s in way.iteration.generating for g in s.stages]
        here = batch_sharding(way.iteration.mesh)
        with timer(WAITING_FOR_ROLLOUT):
            _, batch, metrics = way.generated.result()
            names = [name for stage in stages for name in stage.writes]
            writes = {name: transfer.moved(batch[name], here) for name in names}
            way.iteration.program.share_times(way.timer)
        for name, seconds in way.timer.timings().items():
            way.each.timer.add(name, seconds)
        gigabytes = way.gigabytes + sum(x.nbytes for x in writes.values()) / 1e9
        if not only.add(only.batch.replace(**writes), {**metrics, MOVED: gigabytes}):
            self._completed(way.each)

    def _first_part(self, each: Ahead, iteration: Phase, weights: States, timer: Timer) -> None:
        run = partial(iteration.program.run, segments=iteration.generating)
        self._run_part(each, run, weights, timer)

    def _together(
        self,
        going: tuple[Ahead, ...],
        each: Ahead,
        iteration: Phase,
        weights: States,
        timer: Timer,
    ) -> None:
        """Begin a batch, and go on with the responses of those before it, in one call."""
        try:
            unfinished = self._run_together(going, each, iteration, weights, timer)
        except BaseException as error:
            for older in going:
                if (
                    not older.generated.done()
                ):  # else its responses are whole, and may be graded now
                    older.fail(error)
            raise
        for batch, left in zip((*going, each), unfinished, strict=True):
            if not left and not batch.generated.done():
                self._completed(batch)

    def _run_together(
        self,
        going: tuple[Ahead, ...],
        each: Ahead,
        iteration: Phase,
        weights: States,
        timer: Timer,
    ) -> list[int]:
        """The unfinished responses of every batch after its part, the new batch the last."""
        program, (only,) = iteration.continuing, each.rounds
        assert program is not None
        failed = [older.generated.done() and older.generated.exception() for older in going]
        sound = [older for older, error in zip(going, failed, strict=True) if not error]
        older_parts = self._older([older.rounds[0].batch for older in sound], sound, only.batch)
        together = only.batch.replace(**older_parts)
        _, batch, metrics = program.run(weights, together, each.step, None, timer)
        parts = self._apart({name: batch[OLDER + name] for name in iteration.generated})
        counts = [metrics.pop(f"{UNFINISHED}_{i}") for i in range(len(parts))]
        left = {
            id(older): older.rounds[0].add(
                older.rounds[0].batch.replace(**part), {UNFINISHED: count}
            )
            for older, part, count in zip(sound, parts, counts, strict=False)
        }
        for (
            older
        ) in sound:  # one that began late has the metrics of this call, and none of its work
            own = older.rounds[0]
            own.metrics = own.metrics or {
                name: 0.0 if name in COUNTS else float(value)
                for name, value in fetch(dict(metrics)).items()
                if name != UNFINISHED
            }
        new = only.batch.replace(**{name: batch[name] for name in iteration.generated})
        return [*(left.get(id(older), 0) for older in going), only.add(new, metrics)]

    def _older(self, batches: list[Any], ahead: list[Ahead], new: Any) -> dict[str, jax.Array]:
        """The fields of the batches before the new one, which the program reads; step 0 is none."""
        number = self.plan.config.max_staleness
        steps = [*(each.step for each in ahead), *[0] * (number - len(ahead))]
        fill = batches[0] if batches else self._blanks(new)
        filled = [*batches, *[fill] * (number - len(batches))]
        reads = self.plan.at(1).continuing_reads
        fields = [{name: batch[name] for name in reads} for batch in filled]
        return self._stacked(fields, np.array(steps, np.int32))

    def _run_part(
        self, each: Ahead, run: Callable[..., Any], weights: States, timer: Timer
    ) -> None:
        (only,) = each.rounds
        _, batch, metrics = run(weights, only.batch, each.step, only.context, timer)
        if not only.add(batch, metrics):
            self._completed(each)

    def _completed(self, each: Ahead) -> None:
        """Nothing is left to generate: the host grades the responses, now or in their step."""
        each.generated.set_result(None)
        if self._host is not None:
            self._host.submit(_guarded, each, partial(self._grade, each))

    def _grade(self, each: Ahead) -> None:
        (only,) = each.rounds
        each.graded.set_result(self._graded(each, only))

    def _graded(self, each: Ahead, one: Round) -> Graded:
        """The samples of a round with what host stages write, and their metrics."""
        iteration = self.plan.at(each.step)
        _, batch, metrics = iteration.program.run(
            {}, one.batch, each.step, one.context, each.timer, iteration.grading
        )
        return batch, fetch(metrics)

    # ------------------------------------------------------------------------- checkpoints

    def _settled(self) -> bool:
        """Wait until everything that was to be generated is; whether nothing went wrong with it.

        The step of a batch that failed raises the error. The steps before it are saved.
        """
        if self._worker is not None:
            self._worker.submit(int).result()
        done = [each.generated for each in self._ahead if each.generated.done()]
        return all(generated.exception() is None for generated in done)

    def _position(self) -> dict[str, Any]:
        """The loader's state from which the prompts of the batches ahead come again."""
        return self.loader.get_state(len(self._ahead))

    def _restore(self, each: Ahead, kept: Mapping[str, Any], arrays: Any) -> None:
        (old,), (fields,) = kept["rounds"], arrays
        self._redraw(each, old, fields)
        if kept["complete"]:
            self._completed(each)

    def _redraw(self, each: Ahead, old: Mapping[str, Any], fields: Mapping[str, Any]) -> Round:
        """The prompts of a round again, and what was generated for them."""
        one = self._draw(each, Timer(), old["policy_version"])
        one.batch, one.metrics = one.batch.replace(**fields), dict(old["metrics"])
        known = {each["sample"]: each for each in old.get("trajectories", ())}
        if known:
            names = ("sample_ids", "responses", "mask", "rollout_logprobs")
            rows = fetch_rows(tuple(one.batch[name] for name in names), one.context.rows)
            one.context.trajectories = [
                restored(known[sample], *ids)
                for sample, *ids in zip(*(x.tolist() for x in rows), strict=True)
            ]
        return one

    def _trajectories(self, one: Round) -> list[dict[str, Any]]:
        """The answers of several turns of all processes, without their tokens."""
        if not has_turns(self.plan.config):
            return []
        own = [without_ids(trajectory) for trajectory in one.context.trajectories]
        return [each for part in gather_objects(own, "trajectories") for each in part]

    # ------------------------------------------------------------------------- metrics

    def _staleness(self, each: Ahead, batch: Any) -> dict[str, float]:
        """The number of updates by which the tokens of a batch are behind."""
        context = each.rounds[0].context
        if not self.plan.config.partial_rollouts:
            behind = float(each.step - 1 - context.policy_version)
            return {"rollout/staleness": behind, "rollout/staleness_max": behind}
        versions = fetch_rows(batch.policy_versions, context.rows)
        context.last_policy_versions = versions.max(axis=1)
        metrics = self._measure(each.step - 1, batch.policy_versions)
        return {name: float(value) for name, value in fetch(metrics).items()}

    @cached_property
    def _stacked(self) -> Callable[..., dict[str, jax.Array]]:
        return jax.jit(older_fields, out_shardings=batch_sharding(self.plan.learner.mesh))

    @cached_property
    def _blanks(self) -> Callable[..., dict[str, jax.Array]]:
        return jax.jit(self._blank, out_shardings=batch_sharding(self.plan.learner.mesh))

    def _blank(self, new: Any) -> dict[str, Any]:
        """The fields of a batch that has no responses, with the prompts of `new`."""
        iteration = self.plan.at(1)
        (rows, prompt), response = new.prompts.shape, self.plan.config.data.max_response_length
        none = jnp.zeros_like(new.prompts, shape=(rows, response))
        blanks = (none, none[:, 0], none * 0.0, none * 0.0, none + NO_VERSION)
        empty = dict(zip(CONTINUED, blanks, strict=True))
        actor = iteration.roles["actor"].spec.config
        if ROUTES in iteration.generated:
            empty[ROUTES] = no_routes(actor, rows, prompt + response)
        if KEPT in iteration.generated:
            most = iteration.abstract_generated()[KEPT].shape[-1]
            empty[KEPT] = no_kept(rows, response, most)
        return {name: new[name] for name in ASKED} | empty

    @cached_property
    def _apart(self) -> Callable[..., list[dict[str, jax.Array]]]:
        number = self.plan.config.max_staleness

        def parts(fields: dict[str, jax.Array]) -> list[dict[str, jax.Array]]:
            return [{name: x[:, i] for name, x in fields.items()} for i in range(number)]

        return jax.jit(parts, out_shardings=batch_sharding(self.plan.learner.mesh))

    @cached_property
    def _measure(self) -> Callable[..., dict[str, jax.Array]]:
        return jax.jit(token_staleness, out_shardings=replicated(self.plan.learner.mesh))


def token_staleness(newest: int, versions_NR: jax.Array) -> dict[str, jax.Array]:
    """Mean and maximum over tokens of `newest` less their version; responses of several versions.

    `versions_NR` is `RolloutBatch.policy_versions`.
    """
    real_NR = versions_NR >= 0
    behind_NR = jnp.where(real_NR, newest - versions_NR, 0)
    return {
        "rollout/staleness": behind_NR.sum() / jnp.maximum(real_NR.sum(), 1),
        "rollout/staleness_max": behind_NR.max(),
        "rollout/continued": jnp.sum(versions_NR.max(axis=1) > versions_NR[:, 0]),
    }


def _guarded(each: Ahead, work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:  # raised in the main thread, where the batch is taken
        each.fail(error)


# ------------------------------------------------------------------------- dynamic sampling


@dataclass(kw_only=True)
class AheadFilteredBatches(AheadBatches):
    """Dynamic sampling ahead: the rollout's thread runs all rounds of a batch, with one policy.

    The rounds are put together on the host: the devices that learn are busy.
    """

    def next(self, step: int, states: States, timer: Timer) -> tuple[Any, Any]:
        batch, _ = super().next(step, states, timer)
        return batch, None

    def finish(
        self, step: int, batch: Any, context: Any, metrics: dict[str, Any]
    ) -> dict[str, Any]:
        current, (own, self._metrics) = self._current, (self._metrics, {})
        assert current is not None and current.groups is not None
        for one in current.rounds:
            self._trace(step, one.context, one.batch)
        rounds = [one.metrics | one.grading for one in current.rounds]
        parts = [part for one in current.rounds for part in (one.metrics, one.grading)]
        metrics = means_of(rounds) | own | metrics | moved_metric(*parts, own, metrics)
        return metrics | current.groups.metrics() | current.priorities | self._repetition.take()

    def _begin(
        self, each: Ahead, states: States, timer: Timer, going: tuple[Ahead, ...] = ()
    ) -> None:
        self._generate(each, self._all_rounds, states, timer)

    def _all_rounds(self, each: Ahead, iteration: Phase, weights: States, timer: Timer) -> None:
        groups = self._open(each, iteration)
        while not groups.complete:
            one = self._draw(each, timer, each.version)
            _, batch, metrics = iteration.program.run(
                weights, one.batch, each.step, one.context, timer, iteration.generating
            )
            one.add(batch, metrics)
            self._add(each, groups, one)
        self._close(each, groups)

    def _open(self, each: Ahead, iteration: Phase) -> GroupFilter:
        config = self.plan.config
        each.loader = self.loader.get_state()
        each.groups = GroupFilter(
            config=config.rollout.filter_groups,
            num_groups=config.data.train_batch_size,
            group=config.rollout.n,
            column=iteration.filter_column,
        )
        return each.groups

    def _add(self, each: Ahead, groups: GroupFilter, one: Round) -> None:
        one.batch, one.grading = self._graded(each, one)
        groups.add(fetch(one.batch))
        self._prioritise(each.step, one.batch)

    def _close(self, each: Ahead, groups: GroupFilter) -> None:
        batch = place_held(groups.batch(), batch_sharding(self.plan.learner.mesh), self._rows)
        each.priorities = self._priorities(each.step)
        each.generated.set_result(None)
        each.graded.set_result((batch, {}))

    def _position(self) -> dict[str, Any]:
        return self._ahead[0].loader

    def _restore(self, each: Ahead, kept: Mapping[str, Any], arrays: Any) -> None:
        groups = self._open(each, self.plan.at(each.step))
        for old, fields in zip(kept["rounds"], arrays, strict=True):
            self._add(each, groups, self._redraw(each, old, fields))
        self._close(each, groups)
