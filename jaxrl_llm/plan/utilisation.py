"""How much of the devices' FLOPs the updates of an iteration use."""

from collections.abc import Mapping, Sequence

from jaxrl_llm.distributed.multihost import sum_over_processes
from jaxrl_llm.models.flops import forward_flops, training_flops
from jaxrl_llm.plan.dataflow import Segment
from jaxrl_llm.plan.roles import Role


def segment_flops(
    segment: Segment,
    roles: Mapping[str, Role],
    epochs: Mapping[str, int],
    lengths: Sequence[int],
    *,
    step: int | None = None,
) -> float:
    """Useful FLOPs of a segment: one pass of each stage's role, or its epochs of updates.

    `lengths` are the prompt and response tokens of every sample. A prompt counts once for each
    sample that answers it, as other trainers count it. A stage without a model counts nothing, nor
    does an update that has not begun at `step`.
    """
    total = 0.0
    for stage in segment.stages:
        role = roles.get(stage.role)
        if role is None:
            continue
        spec = role.spec
        if not stage.updates:
            total += forward_flops(spec.config, lengths, spec.kind)
        elif step is None or step >= stage.first_step:
            adapters = spec.lora is not None
            one = training_flops(spec.config, lengths, spec.kind, adapters=adapters)
            total += epochs[stage.role] * one
    return total


def mfu_metrics(
    segments: Sequence[Segment],
    timings: Mapping[str, float],
    *,
    roles: Mapping[str, Role],
    epochs: Mapping[str, int],
    lengths: Sequence[int],
    peak: float | None,
    step: int,
) -> dict[str, float]:
    """perf/mfu/actor and perf/mfu/critic: model FLOPs utilisation of the programs that update.

    The FLOPs of a program are divided by its seconds and by the `peak` FLOPs a second of its
    devices. Passes before the update that are in the same program count. A program that generates
    is left out, because decoding is bound by memory. So is an update that has not begun at `step`,
    and everything where `peak` is None. `lengths` are those of this process's samples, and every
    process must call this.
    """
    metrics: dict[str, float] = {}
    if peak is None:
        return metrics
    for segment in segments:
        if segment.generates:
            continue
        updated = [s.role for s in segment.stages if s.updates and step >= s.first_step]
        updated = [name for name in updated if name in roles]
        if updated:
            own = segment_flops(segment, roles, epochs, lengths, step=step)
            flops = sum_over_processes(own, "flops")
            used = flops / (timings[segment.name] * roles[updated[0]].mesh.size * peak)
            metrics |= {f"perf/mfu/{name}": used for name in updated}
    return metrics
