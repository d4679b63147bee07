"""The frozen weights below adapters: a checkpoint names them, and a run reads them again."""

from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoint import digests
from jaxrl_llm.config import ConfigError
from jaxrl_llm.plan.dataflow import States
from jaxrl_llm.plan.models import ModelSource, load_params
from jaxrl_llm.trainer.progress import Plan
from jaxrl_llm.trainer.states import seed_of_base

BASES = "bases"  # entry of the loop state

Record = dict[str, Any]  # in JSON's types


def bases_record(plan: Plan, states: States) -> dict[str, Record]:
    """Where the frozen weights came from, and the digest of each array. Every process calls it."""
    found = digests.array_digests({name: states[name] for name in plan.reloaded})
    return {
        name: {"path": _place(source, plan, name), "arrays": found[name]}
        for name, source in plan.reloaded.items()
    }


def read_bases(plan: Plan, saved: dict[str, Record]) -> States:
    """The frozen weights that a checkpoint's adapters belong to.

    Raises: ConfigError when they are no longer what they were; it names where they came from then
        and now, and a parameter.
    """
    states: States = {}
    for name, source in plan.reloaded.items():
        seed = seed_of_base(plan.config, name, plan.learner.name)
        states[name] = load_params(plan.bases[name], source, seed)
        now = digests.array_digests({name: states[name]})[name]
        then = saved[name]["arrays"]
        wrong = [path for path in {**then, **now} if then.get(path) != now.get(path)]
        if wrong:
            raise ConfigError(
                f"the frozen weights {name!r} of this run are not those that its adapters were "
                f"trained on: {_place(source, plan, name)} now, {saved[name]['path']} then, and "
                f"{digests.listed(wrong)} differ. Put the weights back"
            )
    return states


def _place(source: ModelSource, plan: Plan, name: str) -> str:
    where: Path | None = source.checkpoint or source.directory
    if where is not None:
        return str(where)
    return f"drawn from seed {seed_of_base(plan.config, name, plan.learner.name)}"
