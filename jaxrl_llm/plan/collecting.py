"""Which stages the source of batches runs: dynamic sampling, generating ahead, partial rollouts."""

from collections.abc import Callable, Mapping, Sequence

from jax.sharding import Mesh

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.plan.continuing import ContinueResponses
from jaxrl_llm.plan.dataflow import HOST, Segment, Stage, plan
from jaxrl_llm.plan.program import Program
from jaxrl_llm.plan.scores import HostReward
from jaxrl_llm.plan.stages import Generate, GenerateGreedily
from jaxrl_llm.types import INPUT_FIELDS

SCORE = "score"  # by which groups are filtered where no part of the reward is named


def continuing_program(
    config: Config, planned: Sequence[Stage], make_program: Callable[..., Program]
) -> Program | None:
    """The program that goes on with responses that were cut; None without partial rollouts."""
    if not config.partial_rollouts:
        return None
    for stage in planned:
        if isinstance(stage, GenerateGreedily):
            raise ConfigError(
                f"config.partial_rollouts={config.partial_rollouts}: config.algorithm="
                f"{config.algorithm.label} also needs a whole greedy answer to each prompt, which "
                "is not cut; take another algorithm, or --config.partial_rollouts=0"
            )
    first = next(stage for stage in planned if isinstance(stage, Generate))
    assert first.parts is not None
    stage = ContinueResponses(
        model=first.model,
        how=first.how,
        compiler_options=first.compiler_options,
        parts=first.parts,
    )
    # Counted apart: it is compiled when a response is cut for the first time, in a later step.
    return make_program([Segment(stages=(stage,))], supervised=True)


def collected_stages(
    config: Config,
    planned: tuple[Stage, ...],
    reward: HostReward | None,
    own_meshes: Mapping[str, Mesh],
) -> tuple[tuple[Stage, ...], int | None]:
    """The stages that the source of batches runs, and the column that must vary.

    Dynamic sampling repeats those up to the reward. What is ahead is generation, and what the host
    makes of its results.
    """
    chosen = config.rollout.filter_groups
    if not chosen.enable:
        ahead = _ahead(planned) if config.max_staleness else ()
        _check_alone(config, ahead, own_meshes)
        return ahead, None
    names: Sequence[str] = () if reward is None else reward.names
    if chosen.metric != SCORE and chosen.metric not in names:
        raise ValueError(
            f"config.rollout.filter_groups.metric={chosen.metric}: groups can be filtered by "
            f"{', '.join((SCORE, *names))}"
        )
    column = None if chosen.metric == SCORE else names.index(chosen.metric)
    goals = ["scores" if column is None else "reward_parts"]
    if config.data.priority is not None:
        goals.append("scores")  # of every round, also where a part decides who is kept
    # A host stage needs the prompts of its round.
    goals += [name for stage in planned if stage.role == HOST for name in stage.writes]
    collected = plan([stage for stage in planned if not stage.updates], goals), column
    if config.max_staleness:
        _check_apart(config, collected[0], own_meshes)
        _check_alone(config, collected[0], own_meshes)
    return collected


def _ahead(planned: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Generation, and the stages of the host that need nothing else."""
    found = [stage for stage in planned if stage.generates]
    known = {*INPUT_FIELDS, *(name for stage in found for name in stage.writes)}
    for stage in planned:
        if stage.role == HOST and set(stage.reads) <= known:
            found.append(stage)
            known |= set(stage.writes)
    return tuple(found)


def _check_alone(config: Config, ahead: Sequence[Stage], own_meshes: Mapping[str, Mesh]) -> None:
    """ConfigError where devices that work ahead also have a role that does not.

    Two threads dispatch to them then. One device takes programs in any order; several that wait for
    each other must get them in the same one.
    """
    roles = {stage.role for stage in ahead} & own_meshes.keys()
    for role in sorted(roles):
        devices = set(own_meshes[role].devices.flat)
        for other in sorted(own_meshes.keys() - roles):
            if len(devices & set(own_meshes[other].devices.flat)) > 1:
                raise ConfigError(
                    f"config.max_staleness={config.max_staleness}: {role} works ahead on its "
                    f"devices, and config.placement.{other} has the same ones; give {other} "
                    f"others, for example --config.placement.{other}=actor"
                )


def _check_apart(
    config: Config, collected: Sequence[Stage], own_meshes: Mapping[str, Mesh]
) -> None:
    """ConfigError where a round of dynamic sampling, run ahead, needs devices that learn."""
    for stage in collected:
        if stage.role != HOST and stage.role not in own_meshes:
            raise ConfigError(
                f"config.max_staleness={config.max_staleness} with "
                f"config.rollout.filter_groups.enable: the stage {stage.name!r} decides which "
                "groups are kept, and runs on the devices that learn meanwhile; score with reward "
                "functions alone (--config.reward.model=null), or set --config.max_staleness=0"
            )
