"""The trainer's own plan of an iteration, with nothing to load: no tokenizer, data or reward."""

from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import Config
from jaxrl_llm.tokenizer import CharTokenizer
from jaxrl_llm.trainer.dataflow import StageOutput
from jaxrl_llm.trainer.online import Iteration, plan_iteration


class Unstoppable(CharTokenizer):
    """Ends no response, so that random weights answer at full length."""

    stop_ids = ()


def random_reward(context: Any, step: int, responses: Any, mask: Any, logprobs: Any) -> StageOutput:
    """A reward on the host that costs nothing: 0 or 1 by chance."""
    scores = np.random.default_rng(step).integers(0, 2, len(responses))
    return StageOutput(writes=(scores.astype(np.float32),), metrics={})


def planned(config: Config, mesh: Mesh) -> Iteration:
    """The stages, roles and programs that a run of `config` would have."""
    return plan_iteration(config, Unstoppable(), mesh, random_reward)
