"""Sources of batches that are generated before their step, by an older policy.

`schedule.py` says which policy generates which batch. This file does it, and keeps the batches
until their steps.

- If the rollout has its own devices, it generates in a thread while the other devices update.
- On one group of devices, generation comes before the updates of a step. Only the host overlaps:
  reward functions grade the batches ahead in a thread, while the devices work.
- With partial rollouts, all batches of a line of the schedule are generated in one call
  (`plan/parts.py`).
- With dynamic sampling, a batch has several rounds, all of one policy.
- With several processes and a rollout of its own, all must enter their exchanges in the same order.
  So the thread runs a round, and the main thread moves fields and weights and grades: a batch is
  whole before the next weights leave the actor.

A checkpoint holds what was generated, also unfinished responses. After a resume the loader draws
the prompts again, and the host grades them again.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.agents.setup import has_turns
from jaxrl_llm.agents.trajectory import restored, without_ids
from jaxrl_llm.config import Config
from jaxrl_llm.distributed import transfer
from jaxrl_llm.distributed.multihost import fetch, fetch_rows, gather_objects, place_held
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.parts import Part
from jaxrl_llm.plan.plan import AHEAD
from jaxrl_llm.plan.roles import ROLLOUT_ROLE
from jaxrl_llm.program.program import MOVED
from jaxrl_llm.program.stage import States, StepContext
from jaxrl_llm.supervision.signals import host_work
from jaxrl_llm.trainer.batches import GroupFilter, PromptBatches, means_of, moved_metric
from jaxrl_llm.trainer.schedule import Work, work_of_step

WAITING_FOR_ROLLOUT = "rollout_wait"  # until a batch that is generated ahead is there
Graded = tuple[Any, dict[str, Any]]  # a batch, and the metrics of grading it


@dataclass(kw_only=True)
class Round:
    """Samples that were generated together."""

    context: StepContext
    batch: Any  # with what generation wrote
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of generation
    grading: dict[str, Any] = field(default_factory=dict)  # metrics of grading

    def take(self, batch: Any, metrics: Mapping[str, Any]) -> None:
        """Take in what was generated."""
        self.batch = batch
        self.metrics |= {name: float(value) for name, value in fetch(dict(metrics)).items()}


@dataclass(kw_only=True)
class Ahead:
    """A batch that is made before its step."""

    step: int
    begun: int  # policy that begins it
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
    """A round that a thread generates on devices of other processes."""

    each: Ahead
    one: Round
    weights: States
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
    _under_way: UnderWay | None = None  # with a rollout of its own on several processes
    # The thread that grades; None with several processes: each step grades its own batch.
    _host: ThreadPoolExecutor | None = field(init=False)
    # The thread that generates; None on one group, where the main thread does.
    _worker: ThreadPoolExecutor | None = field(init=False)

    def __post_init__(self) -> None:
        # Made here, not where they are first used: both threads may come there at the same time.
        self._host = ThreadPoolExecutor(1, "grading") if jax.process_count() == 1 else None
        roles = {role for segment in self.plan.at(1).generating for role in segment.roles}
        self._worker = ThreadPoolExecutor(1, "rollout") if ROLLOUT_ROLE in roles else None

    @property
    def epoch(self) -> int:
        return self.loader.epoch if self._current is None else self._current.epoch

    def next(self, step: int, states: States, timer: Timer) -> tuple[Any, Any]:
        self._run(step, states, timer)
        first = self._current = self._ahead.popleft()
        # A thread may wait for tools.
        waiting = host_work() if has_turns(self.plan.config) else nullcontext()
        with timer(WAITING_FOR_ROLLOUT), waiting:
            first.generated.result()
        if self._host is None and not first.graded.done():
            self._grade(first)
        with timer(WAITING_FOR_ROLLOUT), host_work():
            batch, metrics = first.graded.result()
        for name, seconds in first.timer.timings().items():
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
        # The policy after `step` updates does its work in the next step, here or in a run that goes
        # on: it would be of no use to a run that ends.
        if self._ahead:
            self._take_over(self._ahead[-1].timer)
        ahead = tuple(self._ahead) if self._settled() else ()
        self.saving_s = max(self.saving_s, time.perf_counter() - started)
        batches = [
            {
                "step": each.step,
                "begun": each.begun,
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
            each = Ahead(step=kept["step"], begun=kept["begun"])
            self._restore(each, kept, arrays)
            self._ahead.append(each)

    def close(self) -> None:
        """Begin nothing more. What runs is not waited for."""
        for executor in (self._host, self._worker):
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------- making a batch

    def _run(self, step: int, states: States, timer: Timer) -> None:
        """Do the line of the schedule for `step`, or have it done in the rollout's thread.

        The weights are copied to the rollout's devices before this returns: the next update takes
        the actor's memory. On one group the responses are there before this returns.
        """
        self._take_over(timer)
        config, phase = self.plan.config, self.plan.at(step)
        known = {each.step: each for each in self._ahead}
        line = work_of_step(
            step,
            {each.step: each.begun for each in self._ahead},
            staleness=config.max_staleness,
            part=config.partial_rollouts,
            longest=config.data.max_response_length,
        )
        for work in line:
            if work.batch not in known:
                each = known[work.batch] = Ahead(step=work.batch, begun=work.begun)
                self._ahead.append(each)
                self._open(each, timer)
        roles = {role for segment in phase.collecting for role in segment.roles}
        weights = {role: states[role] for role in roles & states.keys()}
        weights |= phase.program.follow(roles, states, timer, self._metrics)
        if config.partial_rollouts:
            together = [known[work.batch] for work in line]
            self._begin(
                together, partial(self._add_parts, together, line, step - 1, weights), timer
            )
            return
        for each in (known[work.batch] for work in line):
            if self._worker is not None and phase.program.is_spread:
                self._take_over(timer)
                self._send(each, self._first(each, timer), weights)
            else:
                self._begin([each], partial(self._generate, each, weights), timer)

    def _begin(self, batches: Sequence[Ahead], work: Callable[[Timer], None], timer: Timer) -> None:
        """Run `work`, now or in the rollout's thread."""
        if self._worker is None:
            work(timer)
        else:
            self._worker.submit(_guarded, batches, partial(work, batches[0].timer))

    def _open(self, each: Ahead, timer: Timer) -> None:
        """Draw the prompts of a batch."""
        self._draw(each, timer, each.begun)

    def _first(self, each: Ahead, timer: Timer) -> Round:
        """The round that is generated first."""
        return each.rounds[0]

    def _next(self, each: Ahead, one: Round, timer: Timer) -> Round | None:
        """The round after `one`, which was generated; None where the batch is whole."""
        self._completed(each)
        return None

    def _draw(self, each: Ahead, timer: Timer, version: int) -> Round:
        """The prompts of the next round of a batch, which `version` begins to answer."""
        rows = self.plan.config.data.train_batch_size * self.plan.config.rollout.n
        batch, context = self._prompts(each.step, timer, len(each.rounds) * rows)
        context.policy_version = version
        each.epoch = self.loader.epoch
        each.rounds.append(Round(context=context, batch=batch))
        if (stage := self.plan.at(each.step).parts) is not None:
            stage.begin(context, each.step, fetch_rows(batch.sample_ids, context.rows))
        return each.rounds[-1]

    def _generate(self, each: Ahead, weights: States, timer: Timer) -> None:
        """Generate the rounds of a batch."""
        phase, one = self.plan.at(each.step), self._first(each, timer)
        while one is not None:
            _, batch, metrics = phase.program.run(
                weights, one.batch, each.step, one.context, timer, phase.generating
            )
            one.take(batch, metrics)
            one = self._next(each, one, timer)

    def _add_parts(
        self,
        together: Sequence[Ahead],
        line: Sequence[Work],
        version: int,
        weights: States,
        timer: Timer,
    ) -> None:
        """Add a part to the responses of several batches, in one call."""
        first = self.plan.at(together[0].step)
        assert first.parts is not None
        parts = [
            Part(context=each.rounds[0].context, tokens=work.tokens)
            for each, work in zip(together, line, strict=True)
        ]
        with timer(first.parts.name):
            metrics = first.parts.advance(parts, version, weights)
        for each in together:
            phase, (one,) = self.plan.at(each.step), each.rounds
            _, batch, _ = phase.program.run(
                weights, one.batch, each.step, one.context, timer, phase.generating
            )
            one.take(batch, metrics if each is together[0] else {})
        for each, work in zip(together, line, strict=True):
            if work.ends:
                self._completed(each)

    def _send(self, each: Ahead, one: Round, weights: States) -> None:
        """Have a thread generate where the rollout lies; `_take_over` takes the responses."""
        assert self._worker is not None
        phase, timer = self.plan.at(each.step), Timer()
        segments = phase.generating
        there = batch_sharding(phase.program.mesh_of(segments[0]))
        names = sorted({name for segment in segments for name in segment.reads})
        reads = {name: transfer.moved(one.batch[name], there) for name in names}
        run = partial(phase.program.run, segments=segments, stay=True)
        batch = one.batch.replace(**reads)
        self._under_way = UnderWay(
            each=each,
            one=one,
            weights=weights,
            gigabytes=sum(x.nbytes for x in reads.values()) / 1e9,
            timer=timer,
            generated=self._worker.submit(run, weights, batch, each.step, one.context, timer),
        )

    def _take_over(self, timer: Timer) -> None:
        """Bring what is under way to the actor's devices, with all rounds after it.

        All processes call it.
        """
        while self._under_way is not None:
            way, self._under_way = self._under_way, None
            phase, one = self.plan.at(way.each.step), way.one
            here, names = batch_sharding(phase.mesh), phase.generated
            with timer(WAITING_FOR_ROLLOUT):
                _, batch, metrics = way.generated.result()
                writes = {name: transfer.moved(batch[name], here) for name in names}
                phase.program.share_times(way.timer)
            for name, seconds in way.timer.timings().items():
                way.each.timer.add(name, seconds)
            gigabytes = way.gigabytes + sum(x.nbytes for x in writes.values()) / 1e9
            one.take(one.batch.replace(**writes), {**metrics, MOVED: gigabytes})
            another = self._next(way.each, one, way.each.timer)
            if another is not None:
                self._send(way.each, another, way.weights)

    def _completed(self, each: Ahead) -> None:
        """Nothing is left to generate: the host grades the responses, now or in their step."""
        each.generated.set_result(None)
        if self._host is not None:
            self._host.submit(_guarded, [each], partial(self._grade, each))

    def _grade(self, each: Ahead) -> None:
        (only,) = each.rounds
        each.graded.set_result(self._graded(each, only))

    def _graded(self, each: Ahead, one: Round) -> Graded:
        """The samples of a round with what host stages write, and their metrics."""
        phase = self.plan.at(each.step)
        _, batch, metrics = phase.program.run(
            {}, one.batch, each.step, one.context, each.timer, phase.grading
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
        stage = self.plan.at(each.step).parts
        if stage is not None:
            stage.restore(one.context, fetch_rows(dict(fields), one.context.rows))
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


def _guarded(batches: Sequence[Ahead], work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:  # raised in the main thread, where the batch is taken
        for each in batches:
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

    def _open(self, each: Ahead, timer: Timer) -> None:
        """The first prompts are drawn once the batches before it have all of theirs."""

    def _first(self, each: Ahead, timer: Timer) -> Round:
        self._gather(each)
        return self._draw(each, timer, each.begun)

    def _next(self, each: Ahead, one: Round, timer: Timer) -> Round | None:
        self._add(each, one)
        assert each.groups is not None
        if each.groups.complete:
            self._close(each, each.groups)
            return None
        return self._draw(each, timer, each.begun)

    def _gather(self, each: Ahead) -> None:
        """Begin to gather the groups of a batch."""
        config, phase = self.plan.config, self.plan.at(each.step)
        each.loader = self.loader.get_state()
        each.groups = GroupFilter(
            config=config.rollout.filter_groups,
            num_groups=config.data.train_batch_size,
            group=config.rollout.n,
            column=phase.filter_column,
            # Where the main thread does it, no update takes the actor's devices meanwhile.
            sharding=batch_sharding(phase.mesh) if phase.program.is_spread else None,
        )

    def _add(self, each: Ahead, one: Round) -> None:
        one.batch, one.grading = self._graded(each, one)
        assert each.groups is not None
        each.groups.add(one.batch if each.groups.sharding is not None else fetch(one.batch))
        self._prioritise(each.step, one.batch)

    def _close(self, each: Ahead, groups: GroupFilter) -> None:
        batch = groups.batch()
        if groups.sharding is None:
            batch = place_held(batch, batch_sharding(self.plan.learner.mesh), self._rows)
        each.priorities = self._priorities(each.step)
        each.generated.set_result(None)
        each.graded.set_result((batch, {}))

    def _position(self) -> dict[str, Any]:
        return self._ahead[0].loader if self._ahead else self.loader.get_state()

    def _restore(self, each: Ahead, kept: Mapping[str, Any], arrays: Any) -> None:
        self._gather(each)
        assert each.groups is not None
        for old, fields in zip(kept["rounds"], arrays, strict=True):
            self._add(each, self._redraw(each, old, fields))
        self._close(each, each.groups)
