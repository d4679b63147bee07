"""Samples that are left out: every estimator gives what it gives without them."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.build import BUILDERS, build_online
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.sample_masks import without_left_out

GROUPS, N, TOKENS, PARTS = 4, 5, 6, 2
# One left out, two, none, and all but two, among them the first and the last of a group.
LEFT_OUT = np.array([[1, 0, 0, 0, 0], [0, 1, 0, 0, 1], [0] * 5, [1, 1, 0, 1, 0]], bool).reshape(-1)


REQUIRED: dict[Any, dict[str, Any]] = {
    c.DRO: {"beta": 0.1},
    c.Pair: {"adv_estimator": "grpo", "loss_mode": "vanilla"},
}


ONLINE = {
    cls.__name__: cls(**REQUIRED.get(cls, {})) for cls in BUILDERS if issubclass(cls, c.Online)
}
ONLINE |= {f"GRPO by the std of the {x}": c.GRPO(std_of=x) for x in ("batch", "advantages")}


@pytest.fixture(scope="module", params=ONLINE)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    """An algorithm of each online kind."""
    return build_online(ONLINE[request.param])


def fields_of(num_samples: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, TOKENS + 1, num_samples)
    mask = (np.arange(TOKENS) < lengths[:, None]).astype(np.float32)

    def tokens() -> np.ndarray:
        return draw.normal(size=(num_samples, TOKENS)).astype(np.float32) * mask

    scores = draw.choice([0.0, 1.0, 0.5, 2.0], num_samples).astype(np.float32)
    return {
        "mask": mask,
        "group_ids": np.arange(num_samples, dtype=np.int32) // N,
        "rewards": np.where(np.arange(TOKENS) == lengths[:, None] - 1, scores[:, None], 0.0),
        "scores": scores,
        "reward_parts": draw.normal(size=(num_samples, PARTS)).astype(np.float32),
        "greedy_scores": draw.normal(size=num_samples).astype(np.float32).repeat(1),
        "values": tokens(),
        "old_logprobs": -np.abs(tokens()),
        "rollout_logprobs": -np.abs(tokens()),
        "reference_logprobs": -np.abs(tokens()),
        "teacher_logprobs": -np.abs(tokens()),
        "sum_pi_squared": np.abs(tokens()),
        "importance_weights": 1.0 + 0.1 * np.abs(tokens()),
        "turn_ids": np.tile(np.arange(TOKENS, dtype=np.int32) // 2, (num_samples, 1)),
        "state_keys": draw.integers(0, 2, (num_samples, TOKENS)).astype(np.int32),
        "teacher_top_logprobs": -np.abs(draw.normal(size=(num_samples, TOKENS, 3))),
    }


def advantages(algorithm: Algorithm, fields: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    names = field_names(algorithm.advantage)
    return jax.device_get(
        program_of(algorithm)({name: jnp.asarray(fields[name]) for name in names})
    )


@cache
def program_of(algorithm: Algorithm) -> Any:
    names = field_names(algorithm.advantage)
    return jax.jit(lambda given: algorithm.advantage(*(given[name] for name in names)))


def seen(fields: dict[str, Any], left_out: np.ndarray, algorithm: Algorithm) -> dict[str, Any]:
    compares = "group_ids" in field_names(algorithm.advantage)
    return without_left_out(
        {name: jnp.asarray(x) for name, x in fields.items()},
        jnp.asarray(~left_out, jnp.float32),
        compares=compares,
    )


def test_an_estimator_gives_what_it_gives_without_them(algorithm: Algorithm) -> None:
    fields = fields_of(GROUPS * N)
    changed = fields | {name: np.array(fields[name]) for name in ("rewards", "reward_parts")}
    for name in ("rewards", "reward_parts"):  # what a failed sample has there says nothing
        changed[name][LEFT_OUT] = 1e6
    with_mask = advantages(algorithm, seen(changed, LEFT_OUT, algorithm))
    alone = advantages(algorithm, {name: x[~LEFT_OUT] for name, x in fields.items()})
    for masked, expected in zip(with_mask, alone, strict=True):
        np.testing.assert_allclose(masked[~LEFT_OUT], expected, rtol=2e-5, atol=2e-6)
        assert not masked[LEFT_OUT].any()


def test_without_such_samples_no_bit_changes(algorithm: Algorithm) -> None:
    fields = fields_of(GROUPS * N)
    none = np.zeros(GROUPS * N, bool)
    for masked, plain in zip(
        advantages(algorithm, seen(fields, none, algorithm)),
        advantages(algorithm, fields),
        strict=True,
    ):
        np.testing.assert_array_equal(masked, plain)


def test_the_last_of_a_group_has_no_advantage(algorithm: Algorithm) -> None:
    """There is nothing that it could be compared with. A group of one in the config is another."""
    if "group_ids" not in field_names(algorithm.advantage):
        pytest.skip("it compares nothing")
    left_out = np.ones(GROUPS * N, bool)
    left_out[[1, 7, 8]] = False  # one of the first group, two of the second
    found, _ = advantages(algorithm, seen(fields_of(GROUPS * N), left_out, algorithm))
    assert np.isfinite(found).all()
    assert not found[left_out].any() and not found[1].any()
