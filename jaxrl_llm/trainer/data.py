"""The plan and the data of a run."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
from jax.sharding import Mesh

from jaxrl_llm.checkpoint.identity import COLUMNS, HELD_OUT
from jaxrl_llm.config import Config, Custom, as_dict, is_offline
from jaxrl_llm.config.algorithms import ALGORITHMS
from jaxrl_llm.config.optimizers import KnownSchedule
from jaxrl_llm.data.overlap import say_overlap
from jaxrl_llm.data.priority import PriorityLoader
from jaxrl_llm.data.run_data import has_held_out, load_run_prompts, train_batches, train_sources
from jaxrl_llm.data.share import sampled_digest
from jaxrl_llm.evaluation.evaluate import (
    AnswerEvaluation,
    Evaluation,
    RecordEvaluation,
    Validator,
    open_validator,
)
from jaxrl_llm.learner.offline_losses import means, weighted_means
from jaxrl_llm.plan.conversing import Conversations, open_conversations
from jaxrl_llm.plan.dataflow import OFFLINE
from jaxrl_llm.plan.in_graph import open_token_turns
from jaxrl_llm.plan.models import warn_of_positions
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.planning import plan_run
from jaxrl_llm.plan.weights import check_stored
from jaxrl_llm.program.stored import Start, start_of
from jaxrl_llm.supervision.signals import host_work
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.batches import AnyLoader, OfflineRecords, load_offline_records
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.trainer.rewarding import RewardFunctions, open_reward
from jaxrl_llm.trainer.states import run_identity
from jaxrl_llm.trainer.turn_rewards import TurnRewards, with_environment
from jaxrl_llm.types import Prompt

NOT_IN_PROGRAMS = {"name", "run_dir", "compile_cache", "log", "alarms", "seed"}  # keys of a config
BUILT_IN = {one.kind for one in ALGORITHMS if one is not Custom}  # algorithms
RATES = ("learning_rate", "min_learning_rate_ratio", "weight_decay", "max_grad_norm")

OBSERVATIONS = "observations"  # folder of a run: what tools and environments answered


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run: where training goes on, and what is held out."""

    config: Config
    loader: AnyLoader  # loader of the training data
    num_rows: int  # rows of the training data
    validator: Validator | None  # answers held-out prompts; None where there are none to answer
    records: OfflineRecords | None  # None in online RL
    digests: dict[str, str]  # rows that a resume compares, and that may change
    turns: Conversations | None = None  # tools and environments; None without any

    @property
    def num_held_out(self) -> int:
        """Held-out rows: prompts that are answered, else records."""
        if self.validator is not None:
            return self.validator.num_prompts
        return 0 if self.records is None else len(self.records.held_out)

    @property
    def best_metric(self) -> str:
        """The metric of the best checkpoint: the config's, else answers, else the held-out loss."""
        given, records = self.config.checkpoint.best_metric, self.records
        by_loss = records is not None and records.held_out and self.validator is None
        return given or ("-eval_loss" if by_loss else "")

    def evaluations(self, plan: Plan, output: RunOutput) -> list[Evaluation]:
        """The measurements on held-out data, in order: a later one overrides names."""
        found: list[Evaluation] = []
        records = self.records
        if records is None:
            answers = self.validator
            if answers is not None:
                found.append(AnswerEvaluation(validator=answers, trace=output.validation))
            return found
        mesh, rows = plan.learner.mesh, records.rows
        if records.held_out:
            assert plan.held_out is not None
            # What pairs and single completions both measure is reported of the completions.
            if records.held_out_pairs and plan.held_out_pairs is not None:
                pairs = records.held_out_pair_batches()
                sums, divide = plan.held_out_pairs, weighted_means
                found.append(RecordEvaluation(sums, divide, pairs, mesh, rows, prefix="eval_"))
            divide, batches = partial(means, plan.record_algorithm), records.held_out_batches()
            found.append(
                RecordEvaluation(plan.held_out, divide, batches, mesh, rows, prefix="eval_")
            )
        if self.validator is not None:
            found.append(AnswerEvaluation(validator=self.validator))
        return found


def open_plan_and_data(
    config: Config,
    tokenizer: Tokenizer,
    meshes: Mapping[str, Mesh],
    run_dir: Path,
    stack: ExitStack,
    *,
    new: bool = False,
    begins: bool = False,
) -> tuple[Plan, RunData]:
    """Plan the run and open its data. `stack` closes what was opened.

    Every program is traced here, so that shapes and fields that do not fit are refused.
    Of a `new` run the files of weights are checked, before any data are read.
    Of a run that `begins` with its own steps, the first program is compiled, or all are read.
    """
    records, validator, prompts = None, None, []
    reward: RewardFunctions | TurnRewards | None = None
    turns = token_turns = None
    if not is_offline(config):
        token_turns = open_token_turns(config, tokenizer)
        if token_turns is None:
            turns = open_conversations(config, tokenizer, host_work, run_dir / OBSERVATIONS)
        reward = open_reward(config, tokenizer, stack)
    if turns is not None:
        stack.callback(turns.driver.close)
        reward = with_environment(config, reward)
    role_meshes = {role: mesh for role, mesh in meshes.items() if role != "actor"}
    plan = plan_run(
        config, tokenizer, meshes["actor"], reward, role_meshes=role_meshes, turns=turns
    )
    warn_of_positions(plan.sources[plan.learner.name], config.data.max_row_length)
    for name, role in plan.roles.items() if new else ():
        check_stored(role, plan.sources.get(name), config)
    if plan.vocabulary is OFFLINE:
        records = load_offline_records(config, plan, tokenizer, run_dir)
        plan = plan.with_records(records.sizes)
        loader, num_rows = records.loader(), len(records.train)
        stack.callback(loader.close)
        answers = config.validation.generate and plan.learner.spec.kind == "causal_lm"
    else:
        prompts = load_run_prompts(config, train_sources(config), tokenizer, run_dir)
        if reward is not None:
            reward.check(config, prompts)
        checks = turns.driver if turns is not None else token_turns
        if checks is not None and not config.data.streaming:
            checks.check(prompts)
        num_rows = len(prompts)
        samples = config.data.train_batch_size * config.rollout.n
        loader = train_batches(config, prompts, plan.at(1).program.host_rows(samples))
        if not isinstance(loader, PriorityLoader):
            stack.callback(loader.close)
        answers = True
    plan.trace(_start_of(config, plan, tokenizer) if begins else None)
    if answers and has_held_out(config):
        answering = turns or token_turns
        validator = open_validator(config, plan.learner, tokenizer, run_dir, stack, answering)
    whole = jax.process_count() == 1 and not config.data.streaming  # all rows are here
    data = RunData(
        config=config,
        loader=loader,
        validator=validator,
        records=records,
        num_rows=num_rows,
        digests=_compare_rows(prompts, records, validator) if whole else {},
        turns=turns,
    )
    return plan, data


def _compare_rows(
    prompts: Sequence[Prompt], records: OfflineRecords | None, validator: Validator | None
) -> dict[str, str]:
    """Digests of the row columns that a resume may change.

    It also says which held-out rows are trained on.
    """
    answered = [] if validator is None else validator.prompts
    if records is None:
        say_overlap(prompts, answered)
        columns = {COLUMNS: sampled_digest([prompt.columns for prompt in prompts])}
    else:
        say_overlap(records.train, records.held_out)
        columns = {}
    held_out = [*([] if records is None else records.held_out), *answered]
    return columns | {HELD_OUT: sampled_digest([(x.token_ids, x.answer) for x in held_out])}


def _start_of(config: Config, plan: Plan, tokenizer: Tokenizer) -> Start:
    """A key of the config and identity values that change programs."""
    given = {key: value for key, value in as_dict(config).items() if key not in NOT_IN_PROGRAMS}
    counts = [[len(x) for x in segment.arguments] for segment in plan.at(1).program.segments]
    return start_of(_without_arguments(given), counts, run_identity(plan, tokenizer))


def _without_arguments(value: Any) -> Any:
    """A part of a config whose numbers are only zero or not where they are arguments of programs.

    A key that stays without need costs the next start some seconds. One that goes wrongly has it
    refuse the programs that it reads.
    """
    if isinstance(value, list | tuple):
        return [_without_arguments(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    names: Sequence[str] = ()
    if value.get("schedule") in get_args(KnownSchedule):  # a function of yours gets the rate
        names = RATES
    elif value.get("kind") in BUILT_IN:
        numbers = {name for name, x in value.items() if isinstance(x, float)}
        names = sorted(numbers - {"kl_horizon"})
    return {
        name: value[name] == 0 if name in names else _without_arguments(value[name])
        for name in value
    }
