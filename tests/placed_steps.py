"""Some tiny steps of PPO with roles on several processes, for tests/distributed.

python -m jaxrl_llm.launch.local --processes=2 -- tests/placed_steps.py FOLDER '{"critic": 1}' 3
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_llm.launch.runtime import join_processes, prepare


class Spans:
    """When each stage began and ended on this machine: [name, begin, end]."""

    def __init__(self, clock: Any) -> None:
        self.found: list[tuple[str, float, float]] = []
        self._clock = clock
        self._began: dict[str, float] = {}

    def watch(self, running: Any) -> None:
        """What `Timer` calls whenever a clock starts or stops."""
        now = self._clock()
        for name in set(running) - self._began.keys():
            self._began[name] = now
        for name in self._began.keys() - set(running):
            self.found.append((name, self._began.pop(name), now))


def small_config(placement: dict[str, Any]) -> Any:
    """PPO with a critic, a reference and a Python reward, in programs that compile fast."""
    from tiny_iteration import tiny_config

    config = tiny_config(model_reward=False, algorithm={"use_kl_loss": True})
    model = {**config.actor.hf_config, "num_hidden_layers": 1}
    return replace(
        config,
        placement=placement,
        actor=replace(config.actor, hf_config=model, ppo_epochs=1),
        critic=replace(config.critic, ppo_epochs=1),
    )


def main(folder: str, placement: str, number: str) -> None:
    """Write what each process found of `number` steps to FOLDER/<process>.json."""
    prepare()
    join_processes()
    import jax
    from tiny_iteration import first_states, open_iteration, prompts

    from jaxrl_llm.distributed.multihost import fetch, make_global
    from jaxrl_llm.distributed.sharding import batch_sharding
    from jaxrl_llm.observability.timing import Timer
    from jaxrl_llm.plan.models import open_meshes
    from jaxrl_llm.tokenizer import load_tokenizer

    config = small_config(json.loads(placement))
    meshes = open_meshes(config, load_tokenizer("char"))
    iteration = open_iteration(config, meshes.pop("actor"), role_meshes=meshes)
    states, steps = first_states(iteration), []
    for step in range(1, int(number) + 1):
        batch = make_global(prompts(config), batch_sharding(iteration.mesh))
        spans = Spans(time.time)
        timer = Timer(watch=spans.watch)
        states, batch, metrics = iteration.program.run(states, batch, step, None, timer)
        found = {name: float(x) for name, x in fetch(metrics).items() if x.ndim == 0}
        steps.append({"metrics": found, "spans": spans.found, "timings": timer.timings()})
    leaves = {name: jax.tree.leaves(state) for name, state in states.items()}
    held = sorted(name for name, x in leaves.items() if any(a.addressable_shards for a in x))
    content = {"steps": steps, "held": held}
    Path(folder, f"{jax.process_index()}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
