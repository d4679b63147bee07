"""Held-out evaluation: generate (greedy by default), grade, report under verl's names.

Each process grades the samples that it owns. One grade a sample is gathered.
"""

import copy
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.agents.driver import Sample
from jaxrl_llm.agents.setup import gives_rewards
from jaxrl_llm.agents.statistics import metrics as turn_metrics
from jaxrl_llm.agents.statistics import records
from jaxrl_llm.agents.trajectory import Trajectory
from jaxrl_llm.arguments import seed_of
from jaxrl_llm.config import Config, Custom, ExactAnswer, Grader
from jaxrl_llm.data.collating import prompt_batch
from jaxrl_llm.data.run_data import columns_by_source, held_out_sources, load_run_prompts
from jaxrl_llm.data.share import own_indices
from jaxrl_llm.distributed.multihost import (
    HostRows,
    compile_together,
    fetch,
    fetch_rows,
    gather_objects,
    host_rows,
    make_global,
    place_held,
)
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.distributed.transfer import call, takes_part
from jaxrl_llm.evaluation.held_out_statistics import interval_metrics
from jaxrl_llm.generation.completions import completions_of
from jaxrl_llm.generation.engine import (
    GenerationLoops,
    compiler_options,
    generate_on_mesh,
)
from jaxrl_llm.generation.memory import GB, Replica, fitted
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.sizes import tails_of
from jaxrl_llm.images import images_of
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.models.media import Images
from jaxrl_llm.plan.conversing import (
    PROMPTS,
    Conversations,
    completions_of_turns,
    environment_failures,
    traced,
    turn_columns,
    validation_samples,
    with_turns,
)
from jaxrl_llm.plan.in_graph import NUMBERS, RECORDED, TokenTurns, trajectories_of
from jaxrl_llm.plan.models import stops_of
from jaxrl_llm.plan.offline_stages import HeldOut, HeldOutPairs, program_of
from jaxrl_llm.plan.roles import Role, sampling_model
from jaxrl_llm.program.ahead import Compilers
from jaxrl_llm.program.chain import Chain, job_of
from jaxrl_llm.program.guards import memory_guard
from jaxrl_llm.program.moves import Moves
from jaxrl_llm.program.segment import MORE_DEVICES
from jaxrl_llm.program.stage import States
from jaxrl_llm.rewards.by_source import Grades, SourceGraders
from jaxrl_llm.rewards.graders import worker_limits
from jaxrl_llm.rewards.manager import RewardManager, refuse_unreadable
from jaxrl_llm.supervision.signals import host_work
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.types import IMAGE_FIELDS, Completion, OfflineBatch, Prompt

CORRECT = 0.999  # a grade from here on counts as right: partial credit is not accuracy
NEEDS_LESS_MEMORY = (
    "smaller config.rollout.cache_tokens or num_slots, or config.data.val_batch_size",
    MORE_DEVICES,
)
NUM_DRAWS = 1000  # draws of a prompt's samples, to estimate maj@n
SEED_STREAM = 1  # validation draws from another stream than training


@dataclass(frozen=True, kw_only=True)
class Validation:
    """One evaluation: metrics of all samples, and the samples that this process owns."""

    metrics: dict[str, float]
    accuracy: float  # share of samples that are right, over all sources
    num_samples: dict[str, int]  # by source

    indices: list[int]  # numbers of this process's samples among all
    prompts: list[Prompt]  # one a sample
    completions: list[Completion]
    grades: np.ndarray  # float32, one a sample
    preds: list[Any]  # what the grader read in each sample; None where it does not say
    failures: dict[int, list[str]]  # by place in these lists: why a sample could not be graded
    extras: list[dict[str, Any]] | None = None  # the trace's, of answers of several turns


class Validator:
    """Generates answers to a fixed list of held-out prompts and grades them."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        role: Role,
        tokenizer: Tokenizer,
        grader: SourceGraders,
        settings: GenerationSettings,
        batch_size: int,
        max_prompt_length: int,
        dtype: str,
        seed: int,
        memory: float = 0.0,
        turns: Conversations | TokenTurns | None = None,
        environment: Literal["none", "added", "alone"] = "none",
    ):
        """`turns` answers where the run has tools or environments.

        The reward of an `environment` is added to the grade, or stands alone. A source with a
        grader of its own has the grade of that.
        """
        self._turns, self._environment = turns, environment
        self.num_prompts = len(prompts)
        self._tokenizer = tokenizer
        self._grader = grader
        self._stops = settings.sampling.stops
        self._n = settings.group
        self._batch_size = min(batch_size, _up_to(len(prompts), role.mesh.size))
        self._max_prompt_length = max_prompt_length
        self._mesh = role.mesh
        in_graph = isinstance(turns, TokenTurns)
        self._settings = turns.settings(settings) if in_graph else settings
        self._dtype, self._seed, self._memory = dtype, seed, memory
        self._sharding = batch_sharding(role.mesh)
        self._rows = host_rows(self._sharding, self._batch_size * self._n, self._n)
        groups = np.unique(self._rows.held // self._n).tolist()
        starts = range(0, len(prompts), self._batch_size)
        # The prompts whose rows this process holds, by group; one entry a batch.
        self._prompts = [
            {i: prompts[start + i] for i in groups if start + i < len(prompts)} for start in starts
        ]
        self.role = role
        self._compilers = Compilers()
        self._answer, self._compiled = self._compile(role), False

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts that this process holds samples of; all of them with one process."""
        return [prompt for batch in self._prompts for prompt in batch.values()]

    def of(self, role: Role) -> "Validator":
        """The same evaluation of another model."""
        if role is self.role:
            return self
        other = copy.copy(self)
        other.role = role
        other._answer, other._compiled = self._compile(role), False
        return other

    def _compile(self, role: Role) -> Callable[..., Any]:
        samples = self._batch_size * self._n // role.generation.num_replicas
        replica = Replica(
            config=role.spec.config,
            dtype=self._dtype,
            tensor=role.generation.size("mlp"),
            samples=samples,
            width=self._max_prompt_length,
        )
        settings = replace(self._settings, attention=role.forward.attention)
        settings = fitted(settings, replica, self._memory)
        answering = _Answering(role=role, dtype=self._dtype, settings=settings)
        options = compiler_options(samples, settings.num_slots)
        tails = len(tails_of(settings, samples))
        whole = settings.turns is not None  # turns have no pieces
        if tails and role.mesh.size == 1 and jax.process_count() == 1 and not whole:
            return Chain(
                answering.answer,
                answering.pieces,
                tails,
                num_arguments=8,
                place=replicated(self._mesh),
                out_shardings=self._sharding,
                compiler_options=options,
                compilers=self._compilers,
            )
        return jax.jit(answering.answer, out_shardings=self._sharding, compiler_options=options)

    def run(self, params: Params, step: int) -> Validation:
        """Evaluate `params` (in the training layout) after `step` iterations."""
        numbers = make_global((seed_of(self._seed), np.int32(step)), replicated(self._mesh))
        indices: list[int] = []
        prompts: list[Prompt] = []
        completions: list[Completion] = []
        trajectories: list[Trajectory] = []
        for number, chunk in enumerate(self._prompts):
            first = number * self._batch_size * self._n  # sample of the batch, among all
            batch = prompt_batch(
                chunk,
                self._rows.held,
                n=self._n,
                max_prompt_length=self._max_prompt_length,
                pad_id=self._tokenizer.pad_id,
                first_sample=first,
                images=images_of(self._tokenizer),
            )
            seen = [x for name in IMAGE_FIELDS if (x := getattr(batch, name)) is not None]
            seen = Images(*seen) if seen else None
            arrays = (batch.prompts, batch.prompt_lengths, batch.sample_ids, None, seen)
            if isinstance(self._turns, Conversations):
                numbers = [first + row for row in self._rows.owned.tolist()]
                kept = [i for i in numbers if i < self.num_prompts * self._n]
                asked = [chunk[(i - first) // self._n] for i in kept]
                trajectories += self._converse(params, step, asked, kept)
                indices, prompts = indices + kept, prompts + asked
                continue
            begun: dict[str, np.ndarray] = {}
            if self._turns is not None:
                held = self._samples(chunk, self._rows.held, first)
                begun = self._turns.begin(held)
                arrays = (*(begun[name] for name in PROMPTS), batch.sample_ids, begun[NUMBERS])
            with memory_guard("validation", NEEDS_LESS_MEMORY):
                own = place_held(arrays, self._sharding, self._rows)
                arguments = (*own[:3], *numbers, *own[3:])
                if not self._compiled:
                    part = takes_part(self._mesh)
                    compile_together(self._answer, (params, *arguments), "validation", part)
                    if isinstance(self._answer, Chain):
                        self._compilers.begin([job_of(self._answer, (params, *arguments))])
                        self._compilers.wait_for_all()
                    self._compiled = True
                out = call(self._answer, (params, *arguments), self._mesh)
                tokens, lengths, logprobs, *turns = fetch_rows(out, self._rows)
            if self._turns is not None:
                samples = self._samples(chunk, self._rows.owned, first)
                owned = np.isin(self._rows.held, self._rows.owned)
                answers = (*(begun[name][owned] for name in PROMPTS), tokens, lengths, logprobs)
                fields = dict(zip(RECORDED, (*answers, *turns), strict=True))
                there = [i for i, sample in enumerate(samples) if sample is not None]
                asked = [sample for sample in samples if sample is not None]
                fields = {name: x[there] for name, x in fields.items()}
                trajectories += trajectories_of(self._tokenizer, asked, fields)
                indices += [sample.sample for sample in asked]
                prompts += [sample.prompt for sample in asked]
                continue
            texts = completions_of(self._tokenizer, self._stops, tokens, lengths, logprobs)
            for row, completion in zip(self._rows.owned.tolist(), texts, strict=True):
                if first + row < self.num_prompts * self._n:  # the others only fill the batch
                    indices.append(first + row)
                    prompts.append(chunk[row // self._n])
                    completions.append(completion)
        if self._turns is not None:
            completions = completions_of_turns(trajectories)
        with host_work():
            graded = self._graded(prompts, completions, trajectories, step)
        sources, grades, answers, failed = self._all_grades(indices, prompts, graded)
        return Validation(
            metrics=accuracy_metrics(sources, grades, self._n, answers)
            | interval_metrics(sources, grades >= CORRECT, self._n)
            | failure_metrics(sources, failed)
            | self._turn_metrics(trajectories),
            accuracy=float((grades >= CORRECT).mean()),
            num_samples={name: sources.count(name) for name in dict.fromkeys(sources)},
            indices=indices,
            prompts=prompts,
            completions=completions,
            grades=graded.scores,
            preds=[_answer(extras) for extras in graded.extras],
            failures=graded.reasons(),
            extras=None if self._turns is None else [traced(each) for each in trajectories],
        )

    def _samples(
        self, chunk: Mapping[int, Prompt], rows: np.ndarray, first: int
    ) -> list[Sample | None]:
        """Requests for rows of a batch; None for one that only fills it."""
        return [
            Sample(
                prompt=chunk[row // self._n],
                step=-1,
                sample=first + row,
                group=(first + row) // self._n,
            )
            if row // self._n in chunk
            else None
            for row in rows.tolist()
        ]

    def _turn_metrics(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """Turns of an answer, over all processes."""
        if self._turns is None:
            return {}
        everyone = gather_objects(records(trajectories), "turns")
        measured = turn_metrics([sample for own in everyone for sample in own])
        named = {name: x for name, x in measured.items() if name.startswith("num_turns/")}
        return {f"val-aux/{name}": value for name, value in named.items()}

    def _converse(
        self, params: Params, step: int, prompts: list[Prompt], numbers: list[int]
    ) -> list[Trajectory]:
        """Answers of several turns."""
        assert isinstance(self._turns, Conversations)
        key = jax.random.fold_in(jax.random.key(self._seed), SEED_STREAM)
        samples = validation_samples(
            prompts,
            numbers,
            n=self._n,
            seed_key=np.asarray(jax.random.key_data(jax.random.fold_in(key, step))),
        )
        settings = replace(self._settings, attention=self.role.forward.attention)
        return self._turns.run(self.role, params, samples, settings, self._dtype)[0]

    def _graded(
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        trajectories: list[Trajectory],
        step: int,
    ) -> Grades:
        """The grades of graders and of the environment. A sample that failed has 0."""
        if self._turns is None:
            return self._grader.score(prompts, completions, step)
        prompts = with_turns(prompts, trajectories)
        named = [prompt.data_source in self._grader.by_source for prompt in prompts]
        rows = [
            i
            for i, trajectory in enumerate(trajectories)
            if not trajectory.failed and (named[i] or self._environment != "alone")
        ]
        own = self._grader.score([prompts[i] for i in rows], [completions[i] for i in rows], step)
        scores = np.zeros(len(prompts), np.float32)
        scores[rows] = own.scores
        extras: list[dict[str, Any]] = [{} for _ in prompts]
        for i, extra in zip(rows, own.extras, strict=True):
            extras[i] = extra
        for i, trajectory in enumerate(trajectories):
            if self._environment != "none" and not named[i] and not trajectory.failed:
                scores[i] += trajectory.reward or 0.0
        failures = [replace(failure, index=rows[failure.index]) for failure in own.failures]
        failures += environment_failures(prompts, trajectories)
        return Grades(scores=scores, extras=extras, failures=failures)

    def _all_grades(
        self, indices: list[int], prompts: list[Prompt], graded: Grades
    ) -> tuple[list[str], np.ndarray, list[Any], list[bool]]:
        """Source, grade, answer and whether grading failed, of every sample of all processes."""
        sources = [prompt.data_source for prompt in prompts]
        answers = [_answer(extras) for extras in graded.extras]
        without = graded.reasons()
        failed = [i in without for i in range(len(prompts))]
        if jax.process_count() == 1:
            return sources, graded.scores, answers, failed
        texts = [None if answer is None or self._n == 1 else str(answer) for answer in answers]
        own = zip(indices, sources, graded.scores.tolist(), texts, failed, strict=True)
        everyone = gather_objects(list(own), "grades")
        samples = sorted((sample for one in everyone for sample in one), key=lambda s: s[0])
        _, sources, grades, answers, failed = (
            list(column) for column in zip(*samples, strict=True)
        )
        return sources, np.array(grades, np.float32), answers, failed


@dataclass(frozen=True, kw_only=True)
class _Answering:
    """The program that answers a batch of prompts, and its pieces: see `program/chain.py`."""

    role: Role
    dtype: str
    settings: GenerationSettings

    def answer(
        self,
        params: Params,
        prompts: Any,
        lengths: Any,
        sample_ids: Any,
        seed: Any,
        step: Any,
        numbers: Any = None,
        images: Any = None,
    ) -> tuple[jax.Array, ...]:
        """Tokens [N, R], their number [N] and log-probs [N, R]; with turns, as in RECORDED."""
        spec, sampled = sampling_model(self.role.spec, params, self.dtype)
        out = generate_on_mesh(
            spec,
            sampled,
            prompts,
            lengths,
            sample_ids,
            _key(seed, step),
            self.settings,
            layout=self.role.generation,
            stored=self.role.layout,
            numbers_NK=numbers,
            images=images,
        )
        answers = out.tokens, out.lengths, out.logprobs
        if out.turns is None:
            return answers
        return (*answers, out.turns.turn_ids, out.turns.rewards, out.turns.stop_reasons)

    def pieces(
        self,
        params: Params,
        prompts: Any,
        lengths: Any,
        sample_ids: Any,
        seed: Any,
        step: Any,
        numbers: Any,
        images: Any,
    ) -> GenerationLoops:
        return GenerationLoops(
            model=lambda trained: sampling_model(self.role.spec, trained, self.dtype),
            trained=params,
            prompts_NP=prompts,
            lengths_N=lengths,
            sample_ids_N=sample_ids,
            seed_key=_key(seed, step),
            settings=self.settings,
            images=images,
            output=lambda out: (out.tokens, out.lengths, out.logprobs),
        )


def _key(seed: Any, step: Any) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), SEED_STREAM), step)


def open_validator(
    config: Config,
    actor: Role,
    tokenizer: Tokenizer,
    run_dir: Path | None,
    stack: ExitStack,
    turns: Conversations | TokenTurns | None = None,
) -> Validator:
    """Held-out prompts, their grader, and the program that answers them.

    `turns` answers in a run with tools or environments.

    Raises ValueError for graders that do not fit the rows.
    """
    validation, stops = config.validation, stops_of(config, tokenizer)
    grader = open_graders(config, stack)
    prompts = load_run_prompts(config, held_out_sources(config), tokenizer, run_dir)
    environment: Literal["none", "added", "alone"] = "none"
    if gives_rewards(config) and validation.grader is None:
        environment = "added" if config.reward.functions else "alone"
    columns: Mapping[str, Sequence[str]] = columns_by_source(prompts)
    if turns is not None:
        columns = {source: [*names, *turn_columns()] for source, names in columns.items()}
    own = [prompts[index] for index in own_indices(prompts)]
    if environment == "alone":
        columns = {source: names for source, names in columns.items() if source in grader.by_source}
        own = [prompt for prompt in own if prompt.data_source in grader.by_source]
    grader.check(columns, config.data.columns)
    refuse_unreadable(gather_objects(grader.unreadable(own), "right answers"), "held-out")
    return Validator(
        prompts,
        role=actor,
        tokenizer=tokenizer,
        grader=grader,
        settings=GenerationSettings(
            sampling=SamplingParams(
                max_new_tokens=config.data.max_response_length,
                temperature=validation.temperature,
                top_p=validation.top_p,
                stop_token_ids=stops.token_ids,
                stop_strings=stops.strings,
            ),
            group=validation.n,
            num_slots=config.rollout.num_slots,
            cache_tokens=config.rollout.cache_tokens,
            pad_id=tokenizer.pad_id,
        ),
        batch_size=config.data.val_batch_size,
        max_prompt_length=config.data.max_prompt_length,
        dtype=config.rollout.dtype or config.actor.dtype,
        seed=config.seed,
        memory=validation.memory_gb * GB,
        turns=turns,
        environment=environment,
    )


def open_graders(config: Config, stack: ExitStack) -> SourceGraders:
    """The graders of held-out answers; `stack` closes them."""
    rewards, validation = config.reward, config.validation

    def grader(
        functions: Sequence[Grader | Custom], weights: Sequence[float] = ()
    ) -> RewardManager:
        manager = RewardManager(
            functions,
            weights=weights or None,
            max_retries=rewards.max_retries,
            timeout=rewards.timeout_s,
            num_workers=rewards.num_workers,
            total_steps=config.total_steps,
            limits=worker_limits(rewards),
        )
        return stack.enter_context(manager)

    by_source = {one.source: grader([one.grader]) for one in validation.graders}
    if graded_as_trained(config):
        default = grader(rewards.functions, rewards.weights)
    else:
        default = grader([validation.grader or ExactAnswer()])
    return SourceGraders(default=default, by_source=by_source)


def graded_as_trained(config: Config) -> bool:
    """True where the reward functions of the run also grade held-out answers."""
    return config.validation.grader is None and bool(config.reward.functions)


def accuracy_metrics(
    sources: Sequence[str], grades: np.ndarray, n: int, answers: Sequence[Any] = ()
) -> dict[str, float]:
    """Metrics of each data source under `val-core/<source>/`, over `n` samples a prompt.

    `acc/mean@n` is the share of right samples, `reward/mean@n` the mean grade. With several
    samples a prompt there are also `acc/best@n/mean` and `acc/maj@n/mean`.

    maj@n is verl's: the grade of the answer that most samples of a prompt give, averaged over
    draws of n samples with replacement. `answers` has what the grader read in each sample, which it
    returns as `pred`; a prompt with a sample without an answer is left out.
    """
    rows: dict[str, list[int]] = defaultdict(list)
    for i, source in enumerate(sources):
        rows[source].append(i)
    right = grades >= CORRECT
    metrics = {}
    for source, chosen in rows.items():
        groups = right[chosen].reshape(-1, n)
        metrics[f"val-core/{source}/acc/mean@{n}"] = float(groups.mean())
        mean = float(grades[chosen].astype(np.float64).mean())
        metrics[f"val-core/{source}/reward/mean@{n}"] = mean
        if n == 1:
            continue
        metrics[f"val-core/{source}/acc/best@{n}/mean"] = float(groups.any(axis=1).mean())
        voted = [
            _majority([answers[i] for i in prompt], right[prompt])
            for prompt in np.reshape(chosen, (-1, n))
            if answers and all(answers[i] is not None for i in prompt)
        ]
        if voted:
            metrics[f"val-core/{source}/acc/maj@{n}/mean"] = float(np.mean(voted))
    return metrics


def failure_metrics(sources: Sequence[str], failed: Sequence[bool]) -> dict[str, float]:
    """`val-aux/<source>/failures`: samples without a grade, which count as wrong."""
    counts = dict.fromkeys(sources, 0.0)
    for source, without in zip(sources, failed, strict=True):
        counts[source] += without
    return {f"val-aux/{source}/failures": count for source, count in counts.items()}


def _majority(answers: Sequence[Any], right: np.ndarray) -> float:
    """Mean over draws of whether the answer that is most frequent in a draw is right.

    As in verl: 1000 draws of the seed 42; of equally frequent answers, the first one drawn counts.
    """
    draws = np.random.RandomState(42).choice(len(answers), (NUM_DRAWS, len(answers)), replace=True)
    return float(np.mean([right[_most_frequent(draw, answers)] for draw in draws.tolist()]))


def _most_frequent(draw: Sequence[int], answers: Sequence[Any]) -> int:
    """The first sample in a draw that gives the most frequent answer of the draw."""
    ((answer, _),) = Counter(str(answers[i]) for i in draw).most_common(1)
    return next(i for i in draw if str(answers[i]) == answer)


def _answer(extras: dict[str, Any]) -> Any:
    """The answer that a grader read in a sample: `pred`, or `<function>/pred`."""
    answers = [value for name, value in extras.items() if name.rpartition("/")[2] == "pred"]
    return answers[0] if answers else None


# ------------------------------------------------------------------------- of a training


class Evaluation(ABC):
    """Something that is measured on held-out data while a training goes on."""

    @abstractmethod
    def run(self, states: States, step: int) -> dict[str, float]:
        """Metrics of `states` after `step` steps. Every process must call it."""


@dataclass(frozen=True, kw_only=True)
class AnswerEvaluation(Evaluation):
    """Answers to held-out prompts: all metrics of them, or their accuracy under one name."""

    validator: Validator
    accuracy_name: str = ""  # empty reports all metrics
    trace: Callable[[int, Validation], None] | None = None  # takes the answers after a step

    def run(self, states: States, step: int) -> dict[str, float]:
        result = self.validator.run(self.validator.role.params_in(states), step)
        if self.trace is not None:
            self.trace(step, result)
        return {self.accuracy_name: result.accuracy} if self.accuracy_name else result.metrics


class RecordEvaluation(Evaluation):
    """Losses and metrics over held-out records, by a program that sums each batch of them."""

    def __init__(
        self,
        sums: HeldOut | HeldOutPairs,
        means: Callable[[dict[str, Any]], dict[str, Any]],
        batches: Iterable[OfflineBatch],
        mesh: Mesh,
        rows: HostRows,
        *,
        prefix: str,
    ):
        """`sums` is compiled; `means` divides its results, added up over the batches.

        `batches` have the `rows` of this process, of every batch.
        `prefix` begins the names of the metrics.
        """
        self._means = means

        def with_numbers(numbers: Any, states: States, batch: OfflineBatch) -> dict[str, Any]:
            return sums.with_arguments(numbers)(states, batch)

        self._sums = jax.jit(with_numbers, out_shardings=replicated(mesh))
        # Stages of a model on other devices, each as a program there.
        stages = sums.elsewhere if isinstance(sums, HeldOut) else ()
        self._elsewhere = [(stage, program_of(stage)) for stage in stages]
        self._numbers = make_global(sums.arguments, replicated(mesh))
        self._batches, self._rows = list(batches), rows
        self._mesh, self._sharding = mesh, batch_sharding(mesh)
        self._prefix = prefix

    def run(self, states: States, step: int) -> dict[str, float]:
        """Means over all held-out records."""
        total: dict[str, Any] = {}
        for batch in self._batches:
            placed = place_held(batch, self._sharding, self._rows)
            own = dict(states)
            for stage, program in self._elsewhere:
                there, moves = stage.model.mesh, Moves()
                fields = moves.to(there, {name: placed[name] for name in stage.reads})
                writes = call(program, (own.pop(stage.role), fields), there)
                placed = placed.replace(**moves.to(self._mesh, writes))
            arguments = self._numbers, own, placed
            sums = fetch(call(self._sums, arguments, self._mesh))
            total = {name: total.get(name, 0.0) + np.float64(x) for name, x in sums.items()}
        return {f"{self._prefix}{name}": float(x) for name, x in self._means(total).items()}


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
