"""Generation as a chain of programs: compiled ahead, with the bits of one program."""

import warnings

import jax
import numpy as np
from tiny_iteration import first_states, open_iteration, run_step, tiny_config

from jaxrl_llm.distributed.multihost import fetch
from jaxrl_llm.generation import sizes
from jaxrl_llm.plan.chain import Chain
from jaxrl_llm.plan.generating import Generate
from jaxrl_llm.plan.guards import count_compilations

TAILS = (2, 1)
PIECES = len(TAILS) + 2  # the loop of all slots before them, and what is made of the last state


def after_two_steps(chained: bool, monkeypatch) -> tuple:
    monkeypatch.setattr(sizes, "default_tails", lambda *_: TAILS)
    if not chained:
        monkeypatch.setattr(Generate, "pieces", lambda self: None)
    iteration = open_iteration(tiny_config(model_reward=False))
    chains = [x for x in iteration.program._compiled.values() if isinstance(x, Chain)]
    assert len(chains) == chained
    states = first_states(iteration)
    with count_compilations() as counter, warnings.catch_warnings():
        warnings.filterwarnings("error", "Some donated buffers were not usable")
        iteration.compile_ahead()
        iteration.program.wait_for_compilers()
        assert counter.programs("iteration") == counter.count == 3 + chained * (PIECES - 1)
        for step in (1, 2):
            states, batch, metrics = run_step(iteration, states, step)
    assert counter.count == counter.programs("iteration"), "a call compiled a program again"
    return fetch((states, batch, metrics))


def test_a_chain_computes_the_bits_of_one_program(monkeypatch):
    chain = after_two_steps(True, monkeypatch)
    whole = after_two_steps(False, monkeypatch)
    assert chain[2]["rollout/decode_steps"] > 0
    for a, b in zip(*(jax.tree.leaves(x) for x in (chain, whole)), strict=True):
        np.testing.assert_array_equal(a, b)
