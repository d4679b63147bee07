"""Estimators of turns in a run: a stage writes the turns, and without one the plan says so."""

from dataclasses import replace

import numpy as np
import pytest
from further import further
from test_online_algorithms import KINDS, config_of
from tiny_iteration import first_states, open_iteration, run_step

from jaxrl_llm.algorithms.build import ESTIMATORS
from jaxrl_llm.config import Custom, Pair

TURNS = """
from dataclasses import dataclass

import jax.numpy as jnp

from jaxrl_llm.program.stage import Stage, StageOutput


@dataclass(frozen=True, kw_only=True, eq=False)
class Turns(Stage):
    name = "turns"
    writes = ("turn_ids", "state_keys")

    def __call__(self, state, step, *, responses, mask):
        turns = jnp.broadcast_to(jnp.arange(mask.shape[1]) // 2, mask.shape)
        return StageOutput({"turn_ids": jnp.where(mask > 0, turns, -1), "state_keys": responses})


def turns() -> Stage:
    return Turns()
"""
NAMES = ("turn_gae", "turn_baseline", "discounted_turns", "mt_grpo", "gigpo")


@pytest.mark.parametrize("name", further(NAMES))
def test_turns_of_a_stage_get_their_credit(tmp_path, name):
    (tmp_path / "own.py").write_text(TURNS)
    stage = Custom(path=f"{tmp_path}/own.py:turns")
    config = replace(config_of(ESTIMATORS[name].kind), stages=(stage,))
    iteration = open_iteration(config)
    states, batch, _ = run_step(iteration, first_states(iteration), 1)
    advantages, mask = np.asarray(batch.advantages), np.asarray(batch.mask)
    assert np.isfinite(advantages).all() and advantages.std() > 0
    pairs = mask[:, 1] > 0  # the first two tokens are a turn
    np.testing.assert_array_equal(advantages[pairs, 0], advantages[pairs, 1])
    assert not advantages[mask == 0].any()
    assert int(states["actor"].step) == 2


@pytest.mark.parametrize("name", NAMES)
def test_responses_without_turns_are_refused_by_the_fields_name(name):
    for algorithm in (KINDS[ESTIMATORS[name].kind](), Pair(adv_estimator=name)):
        config = replace(config_of("rloo"), algorithm=algorithm)
        with pytest.raises(ValueError, match="reads '(turn_ids|state_keys)', which no stage"):
            open_iteration(config)
