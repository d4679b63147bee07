"""The frozen weights below a run's adapters: its checkpoints name them, and it reads them again."""

from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.plan.dataflow import States
from jaxrl_llm.plan.weights import Record, base_record, read_base
from jaxrl_llm.trainer.progress import Plan
from jaxrl_llm.trainer.states import seed_of_base


def bases_record(plan: Plan, states: States) -> dict[str, Record]:
    """A record of each base that is read again. Every process calls it."""
    return {
        name: base_record(plan.bases[name], source, _seed(plan, name), states[name])
        for name, source in plan.reloaded.items()
    }


def read_bases(plan: Plan, saved: dict[str, Any]) -> States:
    """The bases of a run that goes on. Raises: ConfigError where one is not what it was."""
    if saved.keys() != plan.reloaded.keys():
        raise ConfigError(
            f"the checkpoint names the frozen weights {sorted(saved) or 'of its own folder'}, and "
            f"this config {sorted(plan.reloaded) or 'those after a warm-up'}; give the warm-up and "
            "the adapters that the run began with"
        )
    return {
        name: read_base(plan.bases[name], saved[name], source)
        for name, source in plan.reloaded.items()
    }


def _seed(plan: Plan, name: str) -> int:
    return seed_of_base(plan.config, name, plan.learner.name)
