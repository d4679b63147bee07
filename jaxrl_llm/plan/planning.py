"""The plan of a run's own steps, whatever its algorithm."""

from collections.abc import Mapping

from jax.sharding import Mesh

from jaxrl_llm.config import Config, is_offline
from jaxrl_llm.plan.conversing import Conversations
from jaxrl_llm.plan.offline import plan_offline
from jaxrl_llm.plan.online import plan_online
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.plan.scores import HostReward
from jaxrl_llm.tokenizer import Tokenizer


def plan_run(
    config: Config,
    tokenizer: Tokenizer,
    mesh: Mesh,
    reward: HostReward | None = None,
    *,
    role_meshes: Mapping[str, Mesh] | None = None,
    turns: Conversations | None = None,
) -> Plan:
    """Phases and roles of `config`. Only online RL has a `reward`.

    Raises ValueError for a config that cannot work.
    """
    if is_offline(config):
        return plan_offline(config, tokenizer, mesh, role_meshes=role_meshes)
    return plan_online(config, tokenizer, mesh, reward, role_meshes=role_meshes, turns=turns)
