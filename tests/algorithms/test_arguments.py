"""Numbers of an algorithm as arguments of a program: what constants compute, in every algorithm."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.build import build_algorithm
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.arguments import is_zero, numbers_of, seed_of, with_numbers
from jaxrl_llm.config import ALGORITHMS, Custom

B, R, K = 4, 5, 3
# Settings that are on, so that their numbers are there.
ON = {
    "entropy_coef": 0.013,
    "use_kl_in_reward": True,
    "use_kl_loss": True,
    "off_policy_mask": 0.3,
    "rollout_is": "token",
    "rollout_rs": "token_k2",
    "rollout_rs_threshold": 0.7,
    "label_smoothing": 0.1,
    "sft_coef": 0.2,
    "center": 0.01,
    "beta": 0.3,
    "threshold": 0.1,
    "gamma": 0.9,
    "lam": 0.8,
}
CONSTANT = {"kl_horizon"}  # compared with the number of samples when a step is traced
# Numbers that other settings turn off.
UNUSED = {
    *("kl_target", "kl_coef", "kl_loss_coef"),  # a fixed coefficient, or no term
    "rollout_is_threshold",
}


def settings_of(kind):
    names = {entry.name for entry in fields(kind)}
    chosen = {name: value for name, value in ON.items() if name in names}
    if kind in (c.GPG, c.GDPO):
        chosen["use_kl_in_reward"] = False
    if kind is c.RejectionSampling:
        chosen["use_kl_loss"] = False
    return kind(**chosen)


def values(names):
    """Random fields of 4 samples or records."""
    rng = np.random.default_rng(0)
    shapes = {
        "group_ids": jnp.array([0, 0, 1, 1]),
        "turn_ids": jnp.tile(jnp.array([0, 0, 1, 1, 2]), (B, 1)),
        "state_keys": jnp.tile(jnp.array([5, 5, 6, 6, 7]), (B, 1)),
        "mask": jnp.ones((B, R)),
        "labels": jnp.array([1.0, 0.0, 1.0, 0.0]),
        "reward_parts": jnp.array(rng.normal(size=(B, 2)), jnp.float32),
    }
    for name in ("top_logprobs", "teacher_top_logprobs"):
        shapes[name] = jnp.array(rng.normal(size=(B, R, K)) - 3, jnp.float32)
    one = {"scores", "greedy_scores", "weights", "baseline", "margins", "ratings"}

    def draw(name):
        if name in shapes:
            return shapes[name]
        of_records = name in one or name.endswith(("_scores", "_lengths"))
        of_records |= any(x in name for x in ("chosen", "rejected", "completion", "mismatched"))
        drawn = rng.normal(size=(B,) if of_records else (B, R))
        drawn = np.abs(drawn) + 1 if name.endswith("_lengths") else drawn
        return jnp.array(-np.abs(drawn) if name.endswith("logprobs") else drawn, jnp.float32)

    return {name: draw(name) for name in names}


def computed(algorithm):
    """Everything that the functions of an algorithm compute, and its coefficients."""
    online = ("advantage", "policy_loss", "value_loss", "importance", "rejection", "kl_loss")
    offline = ("loss", "token_loss", "baseline", "judge_pairs")
    results = {}
    for name in online if isinstance(algorithm, Algorithm) else offline:
        fn = getattr(algorithm, name)
        if fn is not None:
            given = values(field_names(fn))
            results[name] = fn(*(given[field] for field in field_names(fn)))
    for name in ("entropy_coef", "kl_loss_coef", "token_loss_coef"):
        results[name] = jnp.float32(getattr(algorithm, name, 0.0))
    return results


@pytest.mark.parametrize("kind", [x for x in ALGORITHMS if x is not Custom], ids=lambda x: x.kind)
def test_arguments_compute_what_constants_do(kind):
    settings = settings_of(kind)
    algorithm = build_algorithm(settings)
    constants = jax.jit(lambda: computed(algorithm))()
    numbers = numbers_of(algorithm)
    program = jax.jit(lambda given: computed(with_numbers(algorithm, given)))
    arguments = program(numbers)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), constants, arguments
    )
    # Every number of the settings is among the arguments.
    found = {float(x) for x in numbers}
    for entry in fields(kind):
        value = getattr(settings, entry.name)
        if isinstance(value, float) and value and entry.name not in CONSTANT | UNUSED:
            wanted = {np.float32(value), np.float32(np.log1p(value)), np.float32(-value)}
            assert {float(x) for x in wanted} & found, (entry.name, value)
    # Other numbers need no other program.
    moved = program([x * np.float32(50) for x in numbers])
    assert program._cache_size() == 1
    same = jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), arguments, moved)
    assert not numbers or not all(jax.tree.leaves(same))


def test_a_zero_is_a_constant_and_a_seed_is_none():
    assert is_zero(0.0) and not is_zero(jnp.float32(0)) and not is_zero(0.5)
    kept = with_numbers((0.0, True, "x", 3, 0.5), [jnp.float32(2)])
    assert kept[:4] == (0.0, True, "x", 3)
    for number in (0, 7, 2**31 - 1, 2**31 + 5, 2**33 + 5):
        of_array = jax.jit(jax.random.key)(seed_of(number))
        expected = jax.random.key_data(jax.random.key(number))
        np.testing.assert_array_equal(jax.random.key_data(of_array), expected)


def test_an_argument_takes_the_dtype_of_what_it_multiplies():
    narrow = jnp.ones(2, jnp.bfloat16)
    scaled = jax.eval_shape(lambda x: with_numbers(0.3, [x]) * narrow, jnp.float32(0.3))
    assert scaled.dtype == jnp.bfloat16
