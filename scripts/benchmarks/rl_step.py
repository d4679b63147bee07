"""Whole iterations through the trainer's own program: random weights, random reward."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.harness import Case, CheckFailed, memory_bytes, most_mult_prob_error, require
from benchmarks.iteration import planned
from benchmarks.options import Options
from benchmarks.roofline import H200
from benchmarks.run_config import step_name
from jaxrl_llm.config import Config
from jaxrl_llm.distributed.layout import mesh_of
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.estimate.fitting import with_memory
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.trainer.clock import segment_flops
from jaxrl_llm.trainer.states import untrained_states
from jaxrl_llm.types import RolloutBatch


class RlStep(Case):
    """One iteration: generate, score, update, as a run does it."""

    benchmark = "rl_step"
    warm = True

    def __init__(self, shape: str, model: ModelConfig, workload: str, config: Config) -> None:
        config = with_memory(config)
        self.shape, self.model, self.config = shape, model, config
        self.name = step_name(workload, config)
        self.mesh = mesh_of(config.mesh, [model.num_kv_heads])
        self.plan = planned(config, self.mesh)
        (self.phase,) = self.plan.phases
        self.step, self.stages, self.tokens = 0, [], 0

    def lower(self) -> dict[str, jax.stages.Lowered]:
        # The run compiles them itself and finds these in the compile cache.
        program, states = self.phase.program, self.phase.abstract_states()
        batch = program.trace(states, self.phase.batch)
        return {
            f"{segment.name} {number}": lowered
            for segment in program.segments
            if not segment.is_host
            for number, lowered in enumerate(program.lower_each(segment, states, batch))
        }

    def prepare(self, programs: dict[str, jax.stages.Compiled]) -> None:
        self.program_bytes = max(memory_bytes(program) or 0 for program in programs.values())
        self.states = untrained_states(self.plan)

    def check(self) -> dict[str, float]:
        """Run the first step: finite gradients, and a sampler that agrees with the trainer."""
        start = time.perf_counter()
        metrics = fetch(self.run())
        self.first_seconds = time.perf_counter() - start
        for name, value in metrics.items():
            if "nonfinite" in name and np.any(value):
                raise CheckFailed(f"{name}: a gradient is not finite")
        error = float(metrics["token_mult_prob_error"])
        most = most_mult_prob_error(self.model, self.config.rollout.quantization)
        require("token_mult_prob_error", error, most)
        return {"token_mult_prob_error": error}

    def parts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The programs of one more step; host stages run between them."""
        self.step += 1
        program = self.phase.program
        batch = make_global(self._prompts(), batch_sharding(self.mesh))
        for segment in program.segments:

            def run(segment: Any = segment) -> Any:
                nonlocal batch
                states, self.states = self.states, {}
                self.states, batch, metrics = program.run(
                    states, batch, self.step, None, Timer(), [segment]
                )
                return self.states, batch, metrics

            if segment.is_host:
                run()
            else:
                yield segment.name, run

    def run(self) -> dict[str, Any]:
        self.step += 1
        timer = Timer()
        batch = make_global(self._prompts(), batch_sharding(self.mesh))
        states, self.states = self.states, {}
        program = self.phase.program
        self.states, batch, metrics = program.run(states, batch, self.step, None, timer)
        jax.block_until_ready((self.states, metrics))
        self.stages.append(timer.timings())
        self.lengths = batch.response_lengths
        return metrics

    def figures(self, seconds: float) -> dict[str, float]:
        data, devices = self.config.data, self.mesh.size
        responses = np.asarray(fetch(self.lengths))
        lengths = [data.max_prompt_length + int(n) for n in responses]
        timed = self.stages[1:]  # the first is the check's
        stages = {name: statistics.median(s[name] for s in timed) for name in timed[0]}
        flops = {
            segment.name: segment_flops(segment, self.phase.roles, self.phase.epochs, lengths)
            for segment in self.phase.program.segments
        }
        outside = seconds - sum(stages.values())
        figures = {
            "tokens/s/device": sum(lengths) / seconds / devices,
            "MFU of 790 TFLOP/s": sum(flops.values()) / seconds / devices / H200.peak,
            "s first step": self.first_seconds,
            "s outside of the stages": outside,
            "idle share": outside / seconds,
        }
        for name, spent in stages.items():
            figures[f"s {name}"] = spent
            if flops[name]:
                figures[f"MFU {name}"] = flops[name] / spent / devices / H200.peak
        stats = [device.memory_stats() for device in jax.local_devices()]
        peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
        if peaks:
            figures["GiB peak"] = max(peaks) / 2**30
        return figures

    def memory(self, programs: dict[str, jax.stages.Compiled]) -> int | None:
        return self.program_bytes

    def _prompts(self) -> RolloutBatch:
        data, n = self.config.data, self.config.rollout.n
        rng = np.random.default_rng(self.step)
        shape = (data.train_batch_size, data.max_prompt_length)
        tokens = rng.integers(0, self.model.vocab_size, shape).astype(np.int32)
        rows = data.train_batch_size * n
        fields: dict[str, Any] = {
            "prompts": tokens.repeat(n, axis=0),
            "prompt_lengths": np.full(rows, data.max_prompt_length, np.int32),
            "sample_ids": np.arange(rows, dtype=np.uint32),
            "group_ids": np.arange(data.train_batch_size, dtype=np.int32).repeat(n),
        }
        return RolloutBatch(**fields)


def rl_step_cases(options: Options) -> Sequence[Case]:
    """One case a shape and algorithm."""
    return [
        RlStep(shape, model, workload, options.config(shape, workload))
        for shape, model in options.shapes.items()
        for workload in options.workloads
    ]
