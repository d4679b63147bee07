"""Generation as a chain of programs: compiled ahead, with the bits of one program."""

import warnings
from contextlib import ExitStack
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny import EXPERTS, HYBRID, MODEL
from tiny_iteration import first_states, open_iteration, prompts, random_params, tiny_config

from jaxrl_llm import config as c
from jaxrl_llm.distributed.multihost import fetch, make_global
from jaxrl_llm.distributed.sharding import batch_sharding
from jaxrl_llm.evaluation import evaluate
from jaxrl_llm.evaluation.evaluate import open_validator
from jaxrl_llm.generation import sizes
from jaxrl_llm.learner.rows import ROUTES
from jaxrl_llm.observability.timing import Timer
from jaxrl_llm.plan.generating import Generate
from jaxrl_llm.program.chain import Chain
from jaxrl_llm.program.counting import count_compilations
from jaxrl_llm.program.program import Program
from jaxrl_llm.tokenizer import load_tokenizer

ONE_LAYER = {"num_hidden_layers": 1}
TAILS = (2, 1)
PIECES = len(TAILS) + 2  # the loop of all slots before them, and what is made of the last state


def responses_of_two_steps(hf: dict, chained: bool, monkeypatch) -> tuple:
    monkeypatch.setattr(sizes, "default_tails", lambda *_: TAILS)
    if not chained:
        monkeypatch.setattr(Generate, "num_pieces", 0)
    config = tiny_config(model_reward=False)
    config = replace(config, actor=replace(config.actor, hf_config=hf))
    # Generation merges projections and casts the weights: the norms alone are not new.
    iteration = open_iteration(replace(config, rollout=replace(config.rollout, dtype="bfloat16")))
    generation = iteration.program.segments[0]
    program = Program([generation], mesh=iteration.mesh, state_shardings={})
    assert isinstance(program._compiled[generation.name], Chain) == chained
    states = first_states(iteration)
    batch = make_global(prompts(config), batch_sharding(iteration.mesh))
    with count_compilations() as counter, warnings.catch_warnings():
        warnings.filterwarnings("error", "Some donated buffers were not usable")
        abstract = (iteration.abstract_states(), iteration.batch)
        program.trace(*abstract)
        program.compile_ahead(*abstract)
        program.wait_for_compilers()
        assert counter.programs("iteration") == (PIECES if chained else 1)
        found = [program.run(states, batch, step, None, Timer())[1:] for step in (1, 2)]
        assert counter.programs("iteration") == (PIECES if chained else 1), "compiled again"
    assert not any(x.is_deleted() for x in jax.tree.leaves(states))
    return fetch(found)


@pytest.mark.parametrize(
    "hf",
    [
        pytest.param(MODEL | ONE_LAYER, id="dense"),
        pytest.param(MODEL | EXPERTS | ONE_LAYER, id="experts", marks=pytest.mark.slow),
        pytest.param(MODEL | HYBRID, id="hybrid", marks=pytest.mark.slow),
    ],
)
def test_a_chain_computes_the_bits_of_one_program(hf, monkeypatch):
    chain = responses_of_two_steps(hf, True, monkeypatch)
    whole = responses_of_two_steps(hf, False, monkeypatch)
    (batch, metrics), _ = chain
    assert (batch[ROUTES] is not None) == ("num_experts" in hf)
    assert batch.mask.sum(axis=1).min() < batch.mask.sum(axis=1).max()
    assert metrics["rollout/decode_steps"] > 0
    for a, b in zip(*(jax.tree.leaves(x) for x in (chain, whole)), strict=True):
        np.testing.assert_array_equal(a, b)


def held_out_answers(config, chained: bool, monkeypatch) -> list:
    monkeypatch.setattr(sizes, "default_tails", lambda *_: TAILS)
    if not chained:  # the engine has its tails all the same
        monkeypatch.setattr(evaluate, "tails_of", lambda *_: ())
    role = open_iteration(config).roles["actor"]
    params = make_global(random_params(role.spec.params, 0), role.param_shardings)
    with ExitStack() as stack, count_compilations() as counter:
        validator = open_validator(config, role, load_tokenizer("char"), None, stack)
        found = validator.run(params, 0)
        assert counter.programs("answer") == (PIECES if chained else 1)
    return found.completions


@pytest.mark.nightly
def test_a_validation_is_a_chain_with_the_same_answers(monkeypatch):
    config = tiny_config(model_reward=False)
    data = replace(config.data, val_tasks=(c.ChainSum(size=4),), val_batch_size=4)
    model = MODEL | {"vocab_size": 128}  # of all that the tokenizer writes
    actor = replace(config.actor, hf_config=model)
    config = replace(config, data=data, actor=actor)
    chain, whole = (held_out_answers(config, chained, monkeypatch) for chained in (True, False))
    assert len(chain) == 4 and chain == whole
    assert all(np.isfinite(answer.logprobs).all() for answer in chain)
