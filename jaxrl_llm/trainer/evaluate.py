"""Held-out evaluation: generate (greedy by default), grade, report under verl's names."""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import Config
from jaxrl_llm.distributed.mesh import num_replicas
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding, replicated
from jaxrl_llm.generation.engine import compiler_options, generate_on_mesh
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.learner.train_state import Params, cast
from jaxrl_llm.rewards.combine import RewardManager
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.guards import VALIDATION, memory_guard
from jaxrl_llm.trainer.online import stop_ids
from jaxrl_llm.trainer.roles import Role
from jaxrl_llm.trainer.run_data import held_out_sources, load_run_prompts
from jaxrl_llm.trainer.samples import completions_of, prompt_batch
from jaxrl_llm.types import Completion, Prompt

CORRECT = 0.999  # a grade from here on counts as right: partial credit is not accuracy
SEED_STREAM = 1  # validation draws from another stream than training


@dataclass(frozen=True, kw_only=True)
class Validation:
    """One evaluation: metrics, and each sample with its grade for the trace."""

    metrics: dict[str, float]
    prompts: list[Prompt]  # one a sample
    completions: list[Completion]
    grades: np.ndarray  # float32, one a sample

    @property
    def accuracy(self) -> float:
        """Share of samples that are right, over all sources."""
        return float((self.grades >= CORRECT).mean())


class Validator:
    """Generates answers to a fixed list of held-out prompts and grades them."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        role: Role,
        tokenizer: Tokenizer,
        grader: RewardManager,
        sampling: SamplingParams,
        n: int,
        batch_size: int,
        num_slots: int,
        cache_tokens: int,
        max_prompt_length: int,
        dtype: str,
        seed: int,
    ):
        self._prompts = list(prompts)
        self._tokenizer = tokenizer
        self._grader = grader
        self._stop_ids = sampling.stop_token_ids
        self._n = n
        self._batch_size = min(batch_size, _up_to(len(prompts), role.mesh.size))
        self._max_prompt_length = max_prompt_length
        self._mesh = role.mesh
        self._settings = {
            "sampling": sampling,
            "group": n,
            "num_slots": num_slots,
            "cache_tokens": cache_tokens,
            "pad_id": tokenizer.pad_id,
        }
        self._dtype, self._seed = dtype, seed
        self._answer = self._compile(role)

    def of(self, role: Role) -> "Validator":
        """The same evaluation of another model."""
        other = copy.copy(self)
        other._answer = self._compile(role)
        return other

    def _compile(self, role: Role) -> Callable[..., Any]:
        dtype, seed = self._dtype, self._seed

        def answer(params: Params, prompts: Any, lengths: Any, sample_ids: Any, step: Any) -> Any:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), SEED_STREAM), step)
            return generate_on_mesh(
                role.spec,
                cast(params, dtype),
                prompts,
                lengths,
                sample_ids,
                key,
                mesh=role.mesh,
                attention=role.forward.attention,
                **self._settings,
            )

        samples = self._batch_size * self._n // num_replicas(self._mesh)
        options = compiler_options(samples, self._settings["num_slots"])
        return jax.jit(answer, compiler_options=options)

    def run(self, params: Params, step: int) -> Validation:
        """Evaluate `params` (in the training layout) after `step` iterations."""
        device_step = make_global(jnp.int32(step), replicated(self._mesh))
        prompts: list[Prompt] = []
        completions: list[Completion] = []
        for start in range(0, len(self._prompts), self._batch_size):
            chunk = self._prompts[start : start + self._batch_size]
            batch = prompt_batch(
                chunk,
                n=self._n,
                max_prompt_length=self._max_prompt_length,
                pad_id=self._tokenizer.pad_id,
                num_prompts=self._batch_size,
            )
            sample_ids = batch.sample_ids + np.uint32(start * self._n)
            arrays = (batch.prompts, batch.prompt_lengths, sample_ids)
            rows = len(chunk) * self._n
            with memory_guard(VALIDATION):
                arguments = *make_global(arrays, batch_sharding(self._mesh)), device_step
                out = self._answer(params, *arguments)
                tokens, mask, logprobs = fetch((out.tokens, out.mask, out.logprobs))
            completions += completions_of(
                self._tokenizer, self._stop_ids, tokens[:rows], mask[:rows], logprobs[:rows]
            )
            prompts += [p for p in chunk for _ in range(self._n)]
        grades = self._grader.score(prompts, completions, step).scores
        return Validation(
            metrics=accuracy_metrics([p.data_source for p in prompts], grades, self._n),
            prompts=prompts,
            completions=completions,
            grades=grades,
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
        cache_tokens=config.rollout.cache_tokens,
        max_prompt_length=config.data.max_prompt_length,
        dtype=config.rollout.dtype or config.actor.dtype,
        seed=config.seed,
    )


def accuracy_metrics(sources: Sequence[str], grades: np.ndarray, n: int) -> dict[str, float]:
    """val-core/<source>/acc/mean@n, and best@n/mean when there are several samples a prompt."""
    right: dict[str, list[bool]] = defaultdict(list)
    for source, grade in zip(sources, grades, strict=True):
        right[source].append(bool(grade >= CORRECT))
    metrics = {}
    for source, values in right.items():
        groups = np.asarray(values).reshape(-1, n)
        metrics[f"val-core/{source}/acc/mean@{n}"] = float(groups.mean())
        if n > 1:
            metrics[f"val-core/{source}/acc/best@{n}/mean"] = float(groups.any(axis=1).mean())
    return metrics


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
