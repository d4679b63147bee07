"""The real programs of a config, compiled for devices that this machine need not have."""

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxrl_llm.config import Config
from jaxrl_llm.config.placement import on_one_group
from jaxrl_llm.config.schema import AXES
from jaxrl_llm.distributed.communication import (
    DECODE_STEPS,
    MICRO_BATCHES,
    PREFILLS,
    Row,
    collectives,
    table,
)
from jaxrl_llm.distributed.device_groups import MeshAxes
from jaxrl_llm.distributed.layout import mesh_of
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.estimate import Estimate
from jaxrl_llm.estimate.memory import slots_of
from jaxrl_llm.estimate.packing import rows_of
from jaxrl_llm.estimate.seconds import StageTime
from jaxrl_llm.estimate.topology import COMPILER_OPTIONS, compile_devices
from jaxrl_llm.estimate.traffic import GATHERED, LATENCY, Traffic
from jaxrl_llm.estimate.work import Work
from jaxrl_llm.kernels.hopper import compiling_for_hopper
from jaxrl_llm.plan.models import find_tokenizer
from jaxrl_llm.plan.planning import plan_run
from jaxrl_llm.plan.scores import planned_reward


@dataclass(frozen=True, kw_only=True)
class CompiledStage:
    """The compiler's numbers for one program. Bytes are per device."""

    name: str
    arguments: float
    temporaries: float  # bytes beyond the arguments, results included
    rows: tuple[Row, ...]  # its collectives
    seconds: float  # time to compile


class RealPrograms:
    """A run planned on `devices`: abstract states, and the programs of a step."""

    def __init__(self, config: Config, devices: tuple[Any, ...], kv_heads: tuple[int, ...]) -> None:
        config = replace(config, fuse_stages=False)
        self._devices = devices
        with self._target():
            self._plan(config, devices, kv_heads)

    def _target(self) -> AbstractContextManager[None]:
        """The kernels of the devices, which may be of another kind than here."""
        here = self._devices[0] in jax.devices()
        return nullcontext() if here else compiling_for_hopper()

    def _plan(self, config: Config, devices: tuple[Any, ...], kv_heads: tuple[int, ...]) -> None:
        tensor_sizes = (config.actor.tensor, config.critic.tensor)
        self.mesh = mesh_of(config.mesh, sorted(kv_heads), tensor_sizes, devices)
        tokenizer = find_tokenizer(config.data.tokenizer, config.actor)
        phase = plan_run(config, tokenizer, self.mesh, planned_reward(config)).phases[-1]
        self.states: dict[str, Any] = phase.abstract_states()
        self.program, self._batch = phase.program, phase.batch

    @property
    def stages(self) -> list[str]:
        """The names of the programs on devices, in their order."""
        return [segment.name for segment in self.program.segments if not segment.is_host]

    def resident(self) -> dict[str, int]:
        """Bytes on a device of what each role keeps: weights, and optimizer state if it learns."""
        return {role: sum(_shard_bytes(state)) for role, state in self.states.items()}

    def lower(self, stage: str) -> jax.stages.Lowered:
        """The program of `stage`."""
        segment = next(s for s in self.program.segments if s.name == stage)
        with self._target():
            batch = self.program.trace(self.states, self._batch)
            return self.program.lower(segment, self.states, batch)

    def compile(self, stage: str, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
        """The program of `stage`, compiled."""
        return self.lower(stage).compile(compiler_options=dict(options) if options else None)

    def stage(self, stage: str, options: Mapping[str, Any] | None = None) -> CompiledStage:
        """The compiler's numbers for the program of `stage`."""
        start = time.monotonic()
        compiled = self.compile(stage, options)
        memory = compiled.memory_analysis()
        text = compiled.as_text()
        assert text is not None and memory is not None
        shape = self.mesh.shape
        axes = MeshAxes(names=tuple(map(str, shape)), sizes=tuple(shape.values()))
        return CompiledStage(
            name=stage,
            arguments=memory.argument_size_in_bytes,
            temporaries=memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes,
            rows=tuple(table(collectives(text, axes, [stage]))) if self.mesh.size > 1 else (),
            seconds=time.monotonic() - start,
        )


def compile_work(work: Work, devices: Devices, hardware: str) -> tuple[RealPrograms, list[str]]:
    """The programs of `work` for `hardware`; "cpu" takes the CPU devices of this process."""
    config = on_one_group(work.config, devices.mesh)
    heads = tuple({model.config.num_kv_heads for model in work.models.values()})
    compiled_for = (
        tuple(jax.devices()[: devices.count])
        if hardware == "cpu"
        else compile_devices(devices.count, hardware)
    )
    programs = RealPrograms(config, compiled_for, heads)
    model_stages = {job.stage for job in work.jobs}
    return programs, [name for name in programs.stages if name in model_stages]


def compiler_options(hardware: str) -> dict[str, Any] | None:
    return None if hardware == "cpu" else dict(COMPILER_OPTIONS)


def loop_counts(work: Work, devices: Devices, stage: str) -> dict[str, float]:
    """The iterations of each loop of a stage in a step."""
    job = next(job for job in work.jobs if job.stage == stage)
    samples = work.samples.share(devices.replicas(job.does))
    if job.does == "generate":
        waves = math.ceil(samples.count / slots_of(work, samples))
        return {DECODE_STEPS: float(samples.responses.max() * waves), PREFILLS: float(waves)}
    part = samples.mini_batch(job.mini_batches)
    rows = rows_of(work.models[job.role], part, share_prompts=work.share_prompts)
    return {MICRO_BATCHES: float(rows.micro_batches * job.mini_batches * job.epochs)}


def with_compiled(
    planned: Estimate, resident: Mapping[str, int], stages: Sequence[CompiledStage]
) -> Estimate:
    """`planned` with memory and traffic as the compiler has them."""
    by_name = {stage.name: stage for stage in stages}
    return replace(
        planned,
        kept={role: float(size) for role, size in resident.items() if size},
        temporaries=planned.temporaries | {s.name: s.temporaries for s in stages},
        stages=tuple(
            _with_traffic(time, by_name[time.stage], planned) if time.stage in by_name else time
            for time in planned.stages
        ),
    )


def _with_traffic(time: StageTime, stage: CompiledStage, planned: Estimate) -> StageTime:
    """The time of a stage with the collectives of its program."""
    counts = loop_counts(planned.generating, planned.devices, stage.name)
    received: dict[str, float] = {}
    latency = 0.0
    for row in stage.rows:
        totals = row.totals(counts)
        axes = [axis for axis in AXES if axis in re.split(r"[.+\d]+", row.axis)]
        name = "+".join(axes or AXES)  # a group that no product of axes gives counts for all
        if row.kind in ("all-gather", "reduce-scatter") and "tensor" not in axes:
            name += GATHERED
        received[name] = received.get(name, 0.0) + totals.bytes
        if DECODE_STEPS in {loop for part in row.parts for loop in part.loops}:
            latency += totals.count * LATENCY
    traffic = Traffic(received=received, latency=latency)
    return replace(time, traffic=traffic, exchange=traffic.seconds(planned.devices))


def _shard_bytes(state: Any) -> Iterator[int]:
    for leaf in jax.tree.leaves(state):
        yield math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
