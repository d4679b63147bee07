"""Offline training as the work of a run: records, steps, held-out evaluation."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import Config
from jaxrl_llm.data.loader import Loader, fingerprint
from jaxrl_llm.data.packing import OfflineRecord, collate_records
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.learner.offline_losses import means, weighted_means
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.observability.metrics import performance_metrics
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.evaluate import Validator, open_validator
from jaxrl_llm.trainer.guards import check_gradients
from jaxrl_llm.trainer.initialise import load_params
from jaxrl_llm.trainer.loop import Totals
from jaxrl_llm.trainer.offline import RecordValidator
from jaxrl_llm.trainer.offline_plan import HELD_OUT, TRAIN, plan_offline, reference_stage
from jaxrl_llm.trainer.online import stop_ids
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.trainer.program import States
from jaxrl_llm.trainer.roles import Role, params_of
from jaxrl_llm.trainer.run_data import (
    held_out_sources,
    load_held_out,
    load_records,
    train_sources,
)
from jaxrl_llm.trainer.states import derive_reference, role_seed, warm_up


class OfflineRun:
    """A `Work` of the loop: each step is one update on a batch of records."""

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: Tokenizer,
        mesh: Mesh,
        run_dir: Path,
        stack: ExitStack,
    ):
        """Plan the step and read the data. `stack` closes what was opened."""
        self._config, self._tokenizer, self._run_dir = config, tokenizer, run_dir
        self.iteration = plan_offline(config, tokenizer, mesh)
        self._collate_pairs = partial(
            collate_records,
            length=config.data.max_prompt_length + config.data.max_response_length,
            pad_id=tokenizer.pad_id,
        )
        mismatched = "mismatched" in self.iteration.reads_groups
        self._collate = partial(self._collate_pairs, mismatched=mismatched)
        kind = self.iteration.algorithm.records.name
        self._records = load_records(config, train_sources(config), kind, tokenizer, run_dir)
        self._held_out, are_pairs = load_held_out(config, kind, tokenizer, run_dir)
        if mismatched:
            _refuse_one_record("train", self._records, "2 records or more work")
            _refuse_one_record("val", self._held_out, "2 records or more work, or none")
        self._held_out_pairs: list[OfflineRecord] = []  # where `judge_pairs` has something to judge
        if are_pairs and self.iteration.algorithm.judge_pairs is not None:
            sources = held_out_sources(config)
            self._held_out_pairs = load_records(config, sources, "preferences", tokenizer, run_dir)
        self._validator: Validator | None = None
        if config.validation.generate and self.learner.spec.kind == "causal_lm":
            self._validator = open_validator(config, self.learner, tokenizer, run_dir, stack)
        self.batches: Loader[OfflineRecord, Any] = Loader(
            self._records,
            self._collate,
            batch_size=config.data.train_batch_size,
            seed=config.seed,
            shuffle=config.data.shuffle,
            num_workers=config.data.num_workers,
            prefetch=config.data.prefetch,
            unchanged=self._tables(),
        )
        stack.callback(self.batches.close)
        self.states: States = {}
        self._totals: Totals

    @property
    def learner(self) -> Role:
        return self.iteration.learner

    @property
    def frozen(self) -> list[str]:
        return [] if self.iteration.reference is None else ["reference"]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return stop_ids(self._config, self._tokenizer)

    @property
    def best_metric(self) -> str:
        """The config's, else the answers to held-out prompts, else the held-out loss."""
        given = self._config.checkpoint.best_metric
        return given or ("" if self._validator or not self._held_out else "-eval_loss")

    def abstract_states(self) -> States:
        return self.iteration.abstract_states(len(self._records), len(self._held_out))

    def first_states(self, output: RunOutput) -> States:
        """Weights loaded or drawn, warmed up; the reference is what they are then."""
        config, iteration, role = self._config, self.iteration, self.learner
        params = load_params(role, iteration.source, role_seed(config, role.name))
        if config.warmup is not None:
            params = warm_up(config, role, params, self._tokenizer, self._validator, output)
        if iteration.reference is None:
            return {role.name: role.state(params)}
        reference = derive_reference(iteration.reference, params)
        states: States = {role.name: role.state(params)}
        if not iteration.precomputed:
            return states | {"reference": reference}
        output.message("log-probs of the reference model, once")
        tables = {TRAIN: self._records, HELD_OUT: self._held_out}
        states["reference"] = {
            table: self._reference_table(reference, records)
            for table, records in tables.items()
            if records
        }
        return states

    def begin(self, states: States, output: RunOutput, totals: Totals) -> None:
        self.states, self._totals = states, totals

    def begins_program(self, step: int) -> bool:
        return step == 1

    def step(self, step: int) -> dict[str, float]:
        iteration, timer = self.iteration, Timer()
        started = time.perf_counter()
        host_batch = next(self.batches)
        batch: Any = make_global(host_batch, batch_sharding(self.learner.mesh))
        self.states, _, found = iteration.program.run(self.states, batch, step, None, timer)
        found = fetch(found)
        check_gradients(found, {self.learner.name: self.learner.spec.params}, step)
        metrics = {name: float(value) for name, value in found.items()}
        seconds = time.perf_counter() - started
        groups = [getattr(host_batch, name) for name in iteration.algorithm.records.groups]
        tokens = sum(int(rows.lengths.sum()) for rows in groups if rows is not None)
        answers = sum(int(rows.loss_mask.sum()) for rows in groups if rows is not None)
        self._totals.add(seconds, tokens, timer.timings())
        return metrics | performance_metrics(
            timer.timings() | {"step": seconds},
            num_prompt_tokens=tokens - answers,
            num_response_tokens=answers,
            num_devices=self.learner.mesh.size,
        )

    def validate(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._held_out:
            found = self._record_validator.run(self.states)
            if self._held_out_pairs:  # what both say, the completions say for themselves
                found = self._pair_validator.run(self.states) | found
            metrics |= {f"eval_{name}": value for name, value in found.items()}
        if self._validator is not None:
            params = params_of(self.states[self.learner.name])
            metrics |= self._validator.run(params, step).metrics
        return metrics

    @cached_property
    def _record_validator(self) -> RecordValidator:
        iteration = self.iteration
        return RecordValidator(
            iteration.held_out(),
            partial(means, iteration.algorithm),
            self._padded_batches(self._held_out, self._collate),
            self.learner.mesh,
        )

    @cached_property
    def _pair_validator(self) -> RecordValidator:
        batches = self._padded_batches(self._held_out_pairs, self._collate_pairs)
        return RecordValidator(
            self.iteration.held_out_pairs(), weighted_means, batches, self.learner.mesh
        )

    def _padded_batches(
        self, records: list[OfflineRecord], collate: Callable[..., Any]
    ) -> list[Any]:
        """All records in order, in batches of one size."""
        size = self._config.data.train_batch_size
        batches = []
        for start in range(0, len(records), size):
            part = records[start : start + size]
            # What is left may be one record, which has none beside it to be mismatched with.
            before = records[start - 1] if start and len(part) == 1 else None
            batches.append(collate(part, size=size, before=before))
        return batches

    def _tables(self) -> dict[str, Any]:
        """What tables of the reference's log-probs are of, beside the training data."""
        if not self.iteration.precomputed:
            return {}
        return {"held_out_crc32": fingerprint(self._held_out)}

    def _reference_table(self, params: Params, records: list[OfflineRecord]) -> Any:
        """The reference's log-prob of every completion, by the name of its field: [N] each."""
        iteration = self.iteration
        assert iteration.reference is not None
        stage = reference_stage(iteration.reference, iteration.algorithm, iteration.micro_batches)
        compute = jax.jit(lambda *rows: stage.fn(rows[0], jnp.int32(0), *rows[1:]).writes)
        sharding = batch_sharding(self.learner.mesh)
        found: dict[str, list[np.ndarray]] = {name: [] for name in stage.writes}
        for batch in self._padded_batches(records, self._collate):
            rows = make_global([getattr(batch, name) for name in stage.reads], sharding)
            for name, values in zip(stage.writes, fetch(compute(params, *rows)), strict=True):
                found[name].append(values)
        table = {name: np.concatenate(x)[: len(records)] for name, x in found.items()}
        return make_global(table, replicated(self.learner.mesh))


def _refuse_one_record(split: str, records: list[OfflineRecord], remedy: str) -> None:
    """Where a prompt is also given to the completion of another record, which one alone lacks."""
    if len(records) == 1:
        raise ValueError(
            f"config.data.{split}_files and {split}_tasks give one record, whose prompt no other "
            f"completion can be given to; {remedy}"
        )
