"""How much of the devices' FLOPs the updates of an iteration use."""

from collections.abc import Collection, Mapping, Sequence

from jaxrl_llm.config import Config
from jaxrl_llm.models.flops import forward_flops, training_flops
from jaxrl_llm.trainer.dataflow import Segment
from jaxrl_llm.trainer.roles import Role


def segment_flops(
    segment: Segment,
    roles: Mapping[str, Role],
    config: Config,
    lengths: Sequence[int],
    *,
    waiting: Collection[str] = (),
) -> float:
    """Useful FLOPs of a segment: a pass of each stage's role, or its epochs of updates.

    `lengths` are the prompt and response tokens of every sample: a prompt counts once for each
    sample that answers it, as other trainers count it. A stage of no model counts nothing, nor does
    the update of a role that is `waiting` for a critic's warm-up.
    """
    total = 0.0
    for stage in segment.stages:
        role = roles.get(stage.role)
        if role is None:
            continue
        spec = role.spec
        if stage.updates and stage.role in waiting:
            continue
        if stage.updates:
            epochs = {"actor": config.actor, "critic": config.critic}[stage.role].ppo_epochs
            total += epochs * training_flops(spec.config, lengths, spec.kind)
        else:
            total += forward_flops(spec.config, lengths, spec.kind)
    return total


def mfu_metrics(
    segments: Sequence[Segment],
    timings: Mapping[str, float],
    *,
    roles: Mapping[str, Role],
    config: Config,
    lengths: Sequence[int],
    num_devices: int,
    peak: float | None,
    step: int,
) -> dict[str, float]:
    """perf/mfu/actor and perf/mfu/critic: FLOPs of the program that updates the role, over its
    seconds and the `peak` FLOPs a second of its devices.

    A program that also holds the passes before the update is counted with them. One that generates
    as well is left out, since decoding is bound by memory; so is everything where `peak` is None,
    and an actor whose critic is still warming up at `step`.
    """
    metrics: dict[str, float] = {}
    if peak is None:
        return metrics
    updates = [s.role for segment in segments for s in segment.stages if s.updates]
    warming = "critic" in updates and step <= config.critic.warmup_steps
    waiting = ("actor",) if warming else ()
    for segment in segments:
        updated = [s.role for s in segment.stages if s.updates and s.role in {*roles} - {*waiting}]
        generates = any("prompts" in s.reads and "responses" not in s.reads for s in segment.stages)
        if updated and not generates:
            flops = segment_flops(segment, roles, config, lengths, waiting=waiting)
            used = flops / (timings[segment.name] * num_devices * peak)
            metrics |= {f"perf/mfu/{role}": used for role in updated}
    return metrics
