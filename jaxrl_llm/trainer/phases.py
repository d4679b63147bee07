"""An online run under one algorithm after the other: which iteration a step runs."""

from bisect import bisect_right
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from jaxrl_llm.config import Config
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.online import Iteration, plan_iteration
from jaxrl_llm.trainer.program import States
from jaxrl_llm.trainer.stages import KL_CONTROLLER, HostReward


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The planned iterations of a run, and the step (1-based) with which each begins."""

    iterations: tuple[Iteration, ...]
    first_steps: tuple[int, ...]

    def at(self, step: int) -> Iteration:
        """The iteration of `step`."""
        return self.iterations[bisect_right(self.first_steps, step) - 1]

    @property
    def whole(self) -> Iteration:
        """The last iteration with the roles of all: what the run keeps from start to end."""
        roles, sources = {}, {}
        for iteration in self.iterations:
            roles |= iteration.roles
            sources |= iteration.sources
        return replace(self.iterations[-1], roles=roles, sources=sources)

    def prepare(self, step: int, states: States) -> States:
        """The states that `step` begins with: the KL controller of a phase starts with it."""
        if len(self.iterations) == 1 or step not in self.first_steps:
            return states
        return states | {KL_CONTROLLER: self.at(step).controller_state()}


def plan_phases(
    config: Config, tokenizer: Tokenizer, mesh: Mesh, reward: HostReward | None
) -> Phases:
    """Every phase planned as a run of its own would be. Raises what `plan_iteration` raises."""
    algorithms = [phase.algorithm for phase in config.phases] + [config.algorithm]
    first_steps = [1]
    for phase in config.phases:
        first_steps.append(first_steps[-1] + phase.steps)
    # Steps count from the run's first: a critic warms up in the first phase that has one.
    iterations: list[Iteration] = []
    begins = None
    for algorithm, first in zip(algorithms, first_steps, strict=True):
        critic, warmup = config.critic, config.critic.warmup_steps
        if warmup:
            critic = replace(critic, warmup_steps=warmup + (begins or first) - 1)
        phase = replace(config, algorithm=algorithm, critic=critic)
        iterations.append(plan_iteration(phase, tokenizer, mesh, reward))
        if begins is None and "critic" in iterations[-1].roles:
            begins = first
    return Phases(iterations=tuple(iterations), first_steps=tuple(first_steps))
