"""Online RL as the work of a run: rewards, prompts, iterations, validation."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import Config
from jaxrl_llm.data.loader import PromptLoader
from jaxrl_llm.data.priority import PriorityLoader
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.reshard import switch_bytes, time_switch
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.models.flops import peak_flops
from jaxrl_llm.observability.metrics import performance_metrics
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.rewards.combine import RewardManager
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.dynamic_sampling import GroupFilter
from jaxrl_llm.trainer.evaluate import open_validator
from jaxrl_llm.trainer.guards import check_gradients
from jaxrl_llm.trainer.loop import Totals
from jaxrl_llm.trainer.online import stop_ids
from jaxrl_llm.trainer.output import RunOutput
from jaxrl_llm.trainer.phases import plan_phases
from jaxrl_llm.trainer.program import States
from jaxrl_llm.trainer.rewarding import RewardFunctions, StepContext
from jaxrl_llm.trainer.roles import Role, params_of
from jaxrl_llm.trainer.run_data import load_run_prompts, train_batches, train_sources
from jaxrl_llm.trainer.samples import prompt_batch
from jaxrl_llm.trainer.states import first_states, frozen_roles
from jaxrl_llm.trainer.utilisation import mfu_metrics
from jaxrl_llm.types import Prompt, RolloutBatch


class OnlineRun:
    """A `Work` of the loop: each step is one planned iteration of RL."""

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: Tokenizer,
        mesh: Mesh,
        run_dir: Path,
        stack: ExitStack,
    ):
        """Plan the iteration and read the data. `stack` closes what was opened."""
        self._config = config
        self._tokenizer = tokenizer
        reward = open_reward(config, tokenizer, stack)
        self._phases = plan_phases(config, tokenizer, mesh, reward)
        self.iteration = self._phases.whole
        self._validator = open_validator(config, self.learner, tokenizer, run_dir, stack)
        prompts = load_run_prompts(config, train_sources(config), tokenizer, run_dir)
        self.batches = train_batches(config, prompts)
        if isinstance(self.batches, PromptLoader):
            stack.callback(self.batches.close)
        self.states: States = {}
        self._output: RunOutput
        self._totals: Totals

    @property
    def learner(self) -> Role:
        return self.iteration.roles["actor"]

    @property
    def frozen(self) -> list[str]:
        return frozen_roles(self.iteration)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.iteration.sampling.stop_token_ids

    @property
    def best_metric(self) -> str:
        return self._config.checkpoint.best_metric

    def abstract_states(self) -> States:
        return self.iteration.abstract_states()

    def first_states(self, output: RunOutput) -> States:
        return first_states(self.iteration, self._tokenizer, self._validator, output)

    def begin(self, states: States, output: RunOutput, totals: Totals) -> None:
        self.states, self._output, self._totals = states, output, totals

    def begins_program(self, step: int) -> bool:
        return step in self._phases.first_steps

    def step(self, step: int) -> dict[str, float]:
        timer = Timer()
        self.states = self._phases.prepare(step, self.states)
        started = time.perf_counter()
        batch, found = self._iterate(step, timer)
        trees = {name: role.spec.params for name, role in self.iteration.roles.items()}
        check_gradients(found, trees, step)
        metrics = {name: float(value) for name, value in found.items()}
        seconds = time.perf_counter() - started
        metrics |= self._measure(batch, timer, seconds, step)
        if isinstance(self.batches, PriorityLoader):
            metrics |= self.batches.metrics(step)
        totals, reward = self._totals, metrics["critic/score/mean"]
        totals.first_reward = reward if totals.first_reward is None else totals.first_reward
        totals.last_reward = reward
        return metrics

    def _iterate(self, step: int, timer: Timer) -> tuple[RolloutBatch, dict[str, Any]]:
        """One iteration: its batch, and its metrics on the host."""
        if self._config.rollout.filter_groups.enable:
            return self._iterate_filtered(step, timer)
        batch, context = self._next_batch(step)
        program = self._phases.at(step).program
        self.states, batch, found = program.run(self.states, batch, step, context, timer)
        self._output.rollout(step, context, batch)
        self._note_scores(step, batch.scores)
        return batch, fetch(found)

    def _iterate_filtered(self, step: int, timer: Timer) -> tuple[RolloutBatch, dict[str, Any]]:
        """`_iterate` on groups that vary: the rollout runs until there are enough of them.

        What a round measures is averaged over the rounds; the rest is of the batch learned from.
        """
        config, iteration = self._config, self._phases.at(step)
        groups = GroupFilter(
            config=config.rollout.filter_groups,
            num_groups=config.data.train_batch_size,
            group=config.rollout.n,
            column=iteration.filter_column,
        )
        rounds: list[dict[str, Any]] = []
        while not groups.complete:
            batch, context = self._next_batch(step, groups.rounds)
            _, batch, found = iteration.program.run(
                self.states, batch, step, context, timer, iteration.collecting
            )
            collected = fetch(batch)
            groups.add(collected)
            self._note_scores(step, collected.scores)
            rounds.append(fetch(found))
            self._output.rollout(step, context, batch)
        batch: Any = make_global(groups.batch(), batch_sharding(iteration.mesh))
        self.states, batch, found = iteration.program.run(
            self.states, batch, step, None, timer, iteration.learning
        )
        every = {name for round_metrics in rounds for name in round_metrics}
        means = {name: np.mean([r[name] for r in rounds if name in r]) for name in sorted(every)}
        return batch, means | fetch(found) | groups.metrics()

    def _next_batch(self, step: int, rounds: int = 0) -> tuple[RolloutBatch, StepContext]:
        """The next prompts, after `rounds` other batches of the same step."""
        config = self._config
        prompts = self._next_prompts(step)
        first = rounds * config.data.train_batch_size * config.rollout.n
        host_batch = prompt_batch(
            prompts,
            n=config.rollout.n,
            max_prompt_length=config.data.max_prompt_length,
            pad_id=self._tokenizer.pad_id,
            first_sample=first,
        )
        context = StepContext(prompts=prompts, n=config.rollout.n, first_sample=first)
        return make_global(host_batch, batch_sharding(self.iteration.mesh)), context

    def _next_prompts(self, step: int) -> list[Prompt]:
        batches = self.batches
        return batches.draw(step) if isinstance(batches, PriorityLoader) else next(batches)

    def _note_scores(self, step: int, scores: Any) -> None:
        """Where prompts are drawn by priority, it goes by all scores, also of groups not kept."""
        if isinstance(self.batches, PriorityLoader):
            self.batches.update(step, fetch(scores))

    def validate(self, step: int) -> dict[str, float]:
        found = self._validator.run(params_of(self.states["actor"]), step)
        self._output.validation(step, found)
        return found.metrics

    def _measure(
        self, batch: RolloutBatch, timer: Timer, seconds: float, step: int
    ) -> dict[str, float]:
        """Times, throughput and memory of the step."""
        lengths, mask = fetch((batch.prompt_lengths, batch.mask))
        prompt_tokens, response_tokens = int(lengths.sum()), int(mask.sum())
        self._totals.add(seconds, prompt_tokens + response_tokens, timer.timings())
        metrics = performance_metrics(
            timer.timings() | {"step": seconds},
            num_prompt_tokens=prompt_tokens,
            num_response_tokens=response_tokens,
            num_devices=self.iteration.mesh.size,
        )
        metrics |= mfu_metrics(
            self._phases.at(step).program.segments,
            timer.timings(),
            roles=self.iteration.roles,
            config=self._phases.at(step).config,
            step=step,
            lengths=(lengths + mask.sum(axis=1)).astype(int).tolist(),
            num_devices=self.iteration.mesh.size,
            peak=peak_flops(self.iteration.mesh.devices.flat[0].device_kind),
        )
        if self.iteration.mesh.shape["fsdp"] > 1 and step == 1:
            metrics |= self.layout_switch_metrics()
        return metrics

    def layout_switch_metrics(self) -> dict[str, float]:
        """Seconds and bytes of the actor's switch from the training to the generation layout."""
        role = self.learner
        params = params_of(self.states["actor"])
        return {
            "timing_s/layout_switch": time_switch(params, role.use_shardings),
            "perf/layout_switch_gb": switch_bytes(
                role.spec.params, role.param_shardings, role.use_shardings
            )
            / 1e9,
        }


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
