"""Memory and time of a whole step, on one group of devices or with roles on their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxrl_llm.config import Config
from jaxrl_llm.config.placement import ACTOR, ROLLOUT, mesh_of_role
from jaxrl_llm.distributed.placement import numbers_of_roles
from jaxrl_llm.estimate.devices import Devices
from jaxrl_llm.estimate.memory import kept, temporary, with_room
from jaxrl_llm.estimate.packing import stored_parameters
from jaxrl_llm.estimate.seconds import StageTime, stage_time
from jaxrl_llm.estimate.work import BYTES, Job, Work

OTHER_STAGES = 0.01  # seconds of the stages without a model: reward on the host, advantages
# Seconds of a response token on its host: metrics, trace and samples of a step. 0.6 s for 512 x 512
# tokens in a run on one H100, 2026-11-25, when the trace had no thread of its own yet.
HOST_TOKEN = 2.3e-6


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory and time of a step of `work` on `devices`. Bytes are per device."""

    work: Work
    generating: Work  # the same with the slots and cache tokens that fit
    devices: Devices  # devices of the actor, and of each role that is not in `apart`
    apart: Mapping[str, Devices] = field(default_factory=dict)  # devices by role
    kept: dict[str, float]  # bytes by role
    temporaries: dict[str, float]  # bytes by stage
    stages: tuple[StageTime, ...]
    placement: Mapping[str, str] = field(default_factory=dict)  # as in the config
    host: float = 0.0  # seconds of Python between two steps
    moving: float = 0.0  # seconds in which weights go to a rollout on devices of its own

    @property
    def count(self) -> int:
        """Devices of all groups."""
        numbers = {number for group in self._groups for number in group.numbers}
        return len(numbers) or self.devices.count

    @property
    def hosts(self) -> int:
        """Hosts of all groups."""
        return -(-self.count // self.devices.per_host) if self.apart else self.devices.hosts

    @property
    def groups(self) -> dict[str, Devices]:
        """The devices of the actor, and of each role that does not share them."""
        return {ACTOR: self.devices, **self.apart}

    @cached_property
    def _groups(self) -> tuple[Devices, ...]:
        return tuple(dict.fromkeys((self.devices, *self.apart.values())))

    @cached_property
    def peak(self) -> float:
        """The most bytes that a device of any group needs."""
        return max(self._peak_of(group) for group in self._groups)

    def _peak_of(self, group: Devices) -> float:
        held = sum(size for role, size in self.kept.items() if self.devices_of(role).meets(group))
        used = [
            self.temporaries[job.stage]
            for job in self.work.jobs
            if self.devices_of(owner(job, self.apart)).meets(group)
        ]
        return held + max(used, default=0.0)

    def devices_of(self, role: str) -> Devices:
        """The devices that keep a role."""
        return self.apart.get(role, self.devices)

    @property
    def fits(self) -> bool:
        return self.peak <= self.devices.rates.capacity

    @property
    def generates_ahead(self) -> bool:
        """True if samples are generated while the step learns, on devices of their own."""
        return ROLLOUT in self.apart and self.work.config.max_staleness > 0

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step. Stages of groups without a common device may run at the same time.

        Passes wait for the samples and updates for all passes. Samples of an older policy are
        generated while the step learns.
        """
        ahead = self.generates_ahead
        free: dict[Devices, float] = {}
        ended = {"generate": 0.0, "pass": 0.0, "update": 0.0}
        generating = self.moving
        for job, time in zip(self.work.jobs, self.stages, strict=True):
            if job.does == "generate" and ahead:
                generating += time.seconds
                continue
            group = self.devices_of(owner(job, self.apart))
            ready = {"generate": self.moving, "pass": ended["generate"]}.get(
                job.does, max(ended["generate"], ended["pass"])
            )
            begin = max([ready, *(at for other, at in free.items() if other.meets(group))])
            end = begin + time.seconds
            free[group] = end
            ended[job.does] = max(ended[job.does], end)
        learning = max(ended.values())
        return (max(learning, generating) if ahead else learning) + OTHER_STAGES + self.host

    @property
    def tokens_per_second(self) -> float:
        """Prompt and response tokens a second and device; a prompt counts for each sample."""
        return self.work.samples.tokens / self.seconds / self.count


def owner(job: Job, apart: Mapping[str, Devices]) -> str:
    """The role whose devices run a stage."""
    return ROLLOUT if job.does == "generate" and ROLLOUT in apart else job.role


def estimate(work: Work, devices: Devices, apart: Mapping[str, Devices] | None = None) -> Estimate:
    """Compute everything without compiling."""
    apart = apart or {}
    held = {name: kept(model, apart.get(name, devices)) for name, model in work.models.items()}
    moving = 0.0
    if ROLLOUT in apart:
        held[ROLLOUT], moving = _rollout(work, devices, apart[ROLLOUT])
    full = work
    if any(job.does == "generate" for job in work.jobs):
        own = apart.get(ROLLOUT, devices)
        there = sum(size for role, size in held.items() if apart.get(role, devices).meets(own))
        if ROLLOUT in apart and work.config.max_staleness:  # passes of others run meanwhile
            others = (job for job in work.jobs if job.does != "generate")
            used = [
                temporary(j, work, own) for j in others if apart.get(j.role, devices).meets(own)
            ]
            there += max(used, default=0.0)
        full = with_room(work, own, there, in_place=ROLLOUT in apart)
    return Estimate(
        work=work,
        generating=full,
        devices=devices,
        apart=apart,
        kept=held,
        temporaries={job.stage: _temporary(job, full, devices, apart) for job in work.jobs},
        stages=tuple(
            stage_time(job, full, apart.get(owner(job, apart), devices), in_place(job, apart))
            for job in work.jobs
        ),
        host=HOST_TOKEN * float(work.samples.responses.sum()) / devices.hosts,
        moving=moving,
    )


def in_place(job: Job, apart: Mapping[str, Devices]) -> bool:
    """True if generation finds its weights in place."""
    return job.does == "generate" and ROLLOUT in apart


def _temporary(job: Job, work: Work, devices: Devices, apart: Mapping[str, Devices]) -> float:
    return temporary(job, work, apart.get(owner(job, apart), devices), in_place(job, apart))


def _rollout(work: Work, devices: Devices, own: Devices) -> tuple[float, float]:
    """Bytes that the rollout keeps on a device, and the seconds in which they come each step."""
    model = work.actor
    dtype = work.config.rollout.dtype or model.settings.dtype
    size = moved = stored_parameters(model) * BYTES[dtype] / own.tensor("generate")
    if model.adapters:  # the base, and a merged copy
        size, moved = 2 * size, float(model.adapters * BYTES["float32"])
    size, moved = size + model.encoder * BYTES[dtype], moved + model.encoder_learns * BYTES[dtype]
    same_host = devices.count + own.count <= devices.per_host
    return size, moved / (own.rates.link if same_host else own.rates.network)


def placed(work: Work, config: Config, devices: Devices) -> Estimate:
    """The estimate with the placement of `config`; `devices` has all roles together."""
    if not config.placement:
        return estimate(work, devices)
    nodes = range(devices.hosts)
    numbers = numbers_of_roles(
        config, [range(n * devices.per_host, (n + 1) * devices.per_host) for n in nodes]
    )

    def group(role: str) -> Devices:
        own = numbers[role]
        return replace(
            devices,
            mesh=mesh_of_role(config, role),
            hosts=len({number // devices.per_host for number in own}),
            numbers=tuple(own),
            host_devices=devices.per_host,
        )

    apart = {role: group(role) for role in numbers if role != ACTOR}
    return replace(estimate(work, group(ACTOR), apart), placement=config.placement)
