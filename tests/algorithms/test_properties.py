"""What every algorithm has in common, by the list of settings: a new one is covered too.

Online, the whole chain of pure functions runs on one random batch: KL in the reward, advantages,
importance weights, rejection, and the aggregated losses with their gradients.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.aggregation import (
    AGGREGATIONS,
    global_counts,
    prompt_weights,
    reads_prompts,
)
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.build import build_algorithm
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS, masked_kl
from jaxrl_llm.algorithms.offline import OfflineAlgorithm
from jaxrl_llm.config.thresholds import RULES

ROWS, LENGTH, CANDIDATES = 8, 5, 3
WIDTH = LENGTH + 3  # columns of a batch: the last ones are padding
LENGTHS = np.array([5, 3, 0, 1, 4, 5, 2, 3])
GROUPS = np.array([7, 2, 7, 5, 2, 7, 2, 2])  # not side by side, and one sample alone
MOVING = ("logprobs", "new_values", "top_logprobs")  # what has a gradient
# Settings under which a property can be asked for at all.
SETTINGS = {
    # The draw depends on the position in the batch: with so large a share nothing is left to it.
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1},
    "kl_cov": {"kl_cov_ratio": 0.3},
}


def made(cls, **settings) -> Any:
    """The algorithm of a record of settings; what has no default is 0.5."""
    required = {name: 0.5 for name in ("beta",) if cls is c.DRO}
    return build_algorithm(cls(**required | settings))


def makers(base) -> dict[str, Any]:
    """What makes each algorithm of a kind, by name."""
    kinds = [cls for cls in c.ALGORITHMS if issubclass(cls, base)]
    return {cls.kind: partial(made, cls, **SETTINGS.get(cls.kind, {})) for cls in kinds}


ONLINE = makers(c.Online)
OFFLINE = makers(c.Offline)
CASES = dict(ONLINE)
OF_KL = []
for kind in dict.fromkeys(KL_ESTIMATORS.values()):
    name = next(name for name, fn in KL_ESTIMATORS.items() if fn is kind)
    for end in ("", "+"):
        in_loss = {"use_kl_loss": True, "kl_loss_type": name + end, "kl_loss_coef": 0.3}
        CASES[f"kl loss {name}{end}"] = partial(made, c.RLOO, **in_loss)
        OF_KL.append(f"kl loss {name}{end}")
    in_reward = {"use_kl_in_reward": True, "kl_reward_type": name, "kl_coef": 0.3}
    CASES[f"kl reward {name}"] = partial(made, c.PPO, **in_reward)
    OF_KL.append(f"kl reward {name}")
for name in AGGREGATIONS:
    CASES[name] = partial(made, c.PPO, loss_aggregation=name)
for level in ("token", "sequence"):
    CASES[f"{level} weights"] = partial(
        made, c.RLOO, rollout_is=level, rollout_is_batch_normalize=True
    )
CASES["off-policy mask"] = partial(made, c.RLOO, off_policy_mask=0.05)
CASES["rejection in the update"] = partial(
    made, c.RLOO, bypass_mode=True, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.05
)
CASES["distillation by a loss"] = partial(made, c.Distillation, kl_type="k3+")
CASES["all rules of rejection"] = partial(
    made, c.RLOO, rollout_rs=",".join(RULES), rollout_rs_threshold=3.0
)

# An estimator is a function of a token: three of them run where a batch grows by a sample.
GROWN = [pytest.param(name, marks=pytest.mark.slow if name in OF_KL[3:] else ()) for name in CASES]


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Every field that a function of an algorithm may read."""
    rng = np.random.default_rng(seed)
    tokens = (ROWS, WIDTH)
    old = -rng.exponential(size=tokens)
    fields = {
        "mask": np.arange(WIDTH) < LENGTHS[:, None],
        "group_ids": GROUPS,
        "scores": rng.normal(size=ROWS),
        "greedy_scores": rng.normal(size=ROWS),
        "reward_parts": rng.normal(size=(ROWS, 2)),
        "rewards": rng.normal(size=tokens),
        "values": rng.normal(size=tokens),
        "new_values": rng.normal(size=tokens),
        "old_logprobs": old,
        "entropy": rng.uniform(size=tokens),
        "sum_pi_squared": rng.uniform(size=tokens),
        "top_logprobs": -1 - rng.exponential(size=(*tokens, CANDIDATES)),
        "teacher_top_logprobs": -1 - rng.exponential(size=(*tokens, CANDIDATES)),
        "turn_ids": np.tile(np.arange(WIDTH) // 2, (ROWS, 1)),
        "state_keys": np.tile(np.arange(WIDTH) // 2 % 2, (ROWS, 1)),
    }
    for name in ("logprobs", "rollout_logprobs", "reference_logprobs", "teacher_logprobs"):
        fields[name] = np.minimum(old + 0.3 * rng.normal(size=tokens), -0.01)
    kinds = dict.fromkeys(("group_ids", "turn_ids", "state_keys"), np.int32)
    return {name: np.asarray(x, kinds.get(name, np.float32)) for name, x in fields.items()}


@dataclass
class Outcome:
    """What an algorithm makes of a batch."""

    of_tokens: dict[str, np.ndarray]  # advantages, returns, and the gradient in each moving field
    loss: float


def outcome(algorithm: Algorithm, fields: dict[str, np.ndarray]) -> Outcome:
    """What one program makes of a batch."""
    loss, of_tokens = program_of(algorithm)(fields)
    return Outcome({name: np.asarray(x) for name, x in of_tokens.items()}, float(loss))


@cache
def program_of(algorithm: Algorithm) -> Any:
    return jax.jit(partial(chain, algorithm))


def chain(algorithm: Algorithm, fields: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
    """The chain of an iteration, as the stages and the learner's losses join it."""
    known = dict(fields)

    def read(fn, **settings):
        return fn(*(known[name] for name in field_names(fn)), **settings)

    if algorithm.kl_reward is not None:
        known["rewards"], _ = read(algorithm.kl_reward, coef=jnp.float32(0.3))
    if algorithm.importance is not None:
        known["importance_weights"], _ = read(algorithm.importance)
    known["advantages"], known["returns"] = read(algorithm.advantage)
    policy_mask = known["mask"]
    if algorithm.rejection is not None:
        policy_mask, _ = read(algorithm.rejection)

    def total(moving):
        known.update(moving)
        loss = _aggregated(algorithm, algorithm.policy_loss, known | {"mask": policy_mask})
        if algorithm.value_loss is not None:
            loss += _aggregated(algorithm, algorithm.value_loss, known)
        if algorithm.kl_loss is not None:
            kl = masked_kl(algorithm.kl_loss, known, policy_mask)
            loss += algorithm.kl_loss_coef * _aggregate(
                algorithm, kl, policy_mask, known["group_ids"]
            )
        return loss

    moving = {name: known[name] for name in MOVING}
    loss, gradients = jax.value_and_grad(total)(moving)
    of_tokens = {f"gradient of {name}": x for name, x in gradients.items()}
    return loss, of_tokens | {name: known[name] for name in ("advantages", "returns")}


def _aggregated(algorithm, fn, known):
    values = fn(*(known[name] for name in field_names(fn)))
    values = values[0] if isinstance(values, tuple) else values
    return _aggregate(algorithm, values, known["mask"], known["group_ids"])


def _aggregate(algorithm, values, mask, group_ids):
    tokens, sequences = global_counts(mask)
    counts = {"global_tokens": tokens, "global_sequences": sequences}
    if reads_prompts(algorithm.aggregate):
        counts["prompt_weights"] = prompt_weights(mask, group_ids)
    return algorithm.aggregate(values, mask, **counts)


def assert_same(found: Outcome, expected: Outcome, order=slice(None), scale: float = 1.0) -> None:
    np.testing.assert_allclose(found.loss, scale * expected.loss, rtol=2e-5, atol=2e-6)
    for name, x in expected.of_tokens.items():
        np.testing.assert_allclose(
            found.of_tokens[name], scale * x[order], rtol=2e-5, atol=3e-6, err_msg=name
        )


@pytest.fixture(scope="module", params=CASES)
def judged(request) -> tuple[str, Algorithm, Outcome]:
    """A case by name, and what it makes of the batch."""
    algorithm = CASES[request.param]()
    return request.param, algorithm, outcome(algorithm, batch())


def with_padding(fields, fill) -> dict[str, np.ndarray]:
    """`fields` with `fill` in place of what lies outside of the mask."""
    keep = fields["mask"] > 0
    out = dict(fields)
    for name, x in fields.items():
        if name != "mask" and x.shape[:2] == keep.shape and x.ndim > 1:
            at = keep if x.ndim == 2 else keep[..., None]
            out[name] = np.where(at, x, x.dtype.type(99 if x.dtype == np.int32 else fill))
    return out


def test_the_lists_are_not_empty():
    assert len(ONLINE) >= 25 and len(OFFLINE) >= 9
    assert {"ppo", "grpo", "dro", "rejection_sampling", "distillation_top_k"} <= ONLINE.keys()


def test_what_is_not_in_the_mask_is_not_read(judged):
    _, algorithm, base = judged
    assert_same(outcome(algorithm, with_padding(batch(), np.nan)), base)
    outside = batch()["mask"] == 0
    for name, x in base.of_tokens.items():
        assert np.isfinite(x).all() and not x[outside].any(), name
    assert base.of_tokens["gradient of logprobs"].any() or (
        base.of_tokens["gradient of top_logprobs"].any()
    )


def test_observed_tokens_between_sampled_ones_change_nothing(judged):
    """The padding moves between the tokens, elsewhere in each row, and holds any numbers."""
    name, algorithm, base = judged
    if name == "optimal_token_baseline":
        pytest.skip("it compares equal positions, so its docstring asks for one turn")
    rng = np.random.default_rng(1)
    places = np.stack([np.sort(rng.permutation(WIDTH)[:LENGTH]) for _ in range(ROWS)])
    rows = np.arange(ROWS)[:, None]
    spread = {}
    for key, x in batch().items():
        if x.shape[:2] != (ROWS, WIDTH):
            spread[key] = x
            continue
        fill = 0 if key == "mask" else 99 if x.dtype == np.int32 else np.nan
        spread[key] = np.full_like(x, fill)
        spread[key][rows, places] = x[:, :LENGTH]
    found = outcome(algorithm, spread)
    for key, x in found.of_tokens.items():
        found.of_tokens[key] = np.zeros_like(x)
        found.of_tokens[key][:, :LENGTH] = x[rows, places]
    assert_same(found, base)


def test_the_order_of_the_samples_says_nothing(judged):
    _, algorithm, base = judged
    order = np.array([3, 6, 0, 7, 5, 2, 1, 4])
    moved = {name: x[order] for name, x in batch().items()}
    assert_same(outcome(algorithm, moved), base, order)


@pytest.mark.parametrize("judged", GROWN, indirect=True)
def test_a_sample_without_a_token_and_the_width_change_nothing(judged):
    """The sample is alone in its group, whatever reward it got. No columns of padding are left."""
    name, algorithm, base = judged
    grown = {
        key: np.concatenate([x, x[:1] * 0 + (99 if key == "group_ids" else 0.5)]).astype(x.dtype)
        for key, x in batch().items()
    }
    grown = {key: x[:, :LENGTH] if x.shape[1:2] == (WIDTH,) else x for key, x in grown.items()}
    grown["mask"][-1] = 0
    found = outcome(algorithm, grown)
    for x in found.of_tokens.values():
        assert not x[-1].any()
    found.of_tokens = {key: x[:-1] for key, x in found.of_tokens.items()}
    expected = {key: x[:, :LENGTH] for key, x in base.of_tokens.items()}
    loss = base.loss
    if name in ("dr_grpo", "seq-mean-token-sum-norm"):  # this mean divides by the width
        loss *= WIDTH / LENGTH
        expected |= {
            key: x * WIDTH / LENGTH for key, x in expected.items() if key.startswith("gradient")
        }
    # GPG counts samples, not those with tokens, as verl does.
    scale = (ROWS + 1) / ROWS if name == "gpg" else 1.0
    assert_same(found, Outcome(expected, loss), scale=scale)


def test_a_batch_without_tokens_is_zero(judged):
    _, algorithm, _ = judged
    found = outcome(algorithm, batch() | {"mask": np.zeros((ROWS, WIDTH), np.float32)})
    assert found.loss == 0.0
    for name, x in found.of_tokens.items():
        np.testing.assert_array_equal(x, 0.0, err_msg=name)


def test_groups_of_one_and_groups_that_do_not_vary_are_finite(judged):
    _, algorithm, _ = judged
    alone = batch() | {"group_ids": np.arange(ROWS, dtype=np.int32)}
    equal = batch()
    last = np.eye(WIDTH, dtype=np.float32)[np.maximum(LENGTHS - 1, 0)]
    equal |= {"rewards": 0.7 * last, "scores": np.full(ROWS, 0.7, np.float32)}
    equal |= {"reward_parts": np.full((ROWS, 2), 0.7, np.float32)}
    for fields in (alone, equal):
        found = outcome(algorithm, fields)
        assert np.isfinite(found.loss)
        for name, x in found.of_tokens.items():
            assert np.isfinite(x).all(), name


# ------------------------------------------------------------------------- offline


def records(algorithm: OfflineAlgorithm, size: int = 6) -> dict[str, np.ndarray]:
    """Fields of random records; the log-probs are sums over their lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, size).astype(np.float32)
    fields = {}
    for name in algorithm.reads:
        if name.endswith("lengths"):
            fields[name] = lengths
        elif name.endswith("logprobs"):
            fields[name] = (-lengths * rng.uniform(0.2, 2.0, size)).astype(np.float32)
        elif name == "labels":
            fields[name] = np.asarray(np.arange(size) % 2, np.float32)
        else:
            fields[name] = np.abs(rng.normal(size=size)).astype(np.float32)
    return fields


def offline_outcome(name: str, fields) -> tuple[np.ndarray, dict[str, Any]]:
    """Loss of every record, its likelihood term included, and the gradients of the total."""
    values, gradients = offline_program(name)(fields)
    return np.asarray(values), {key: np.asarray(x) for key, x in gradients.items()}


@cache
def offline_program(name: str) -> Any:
    """`offline_outcome` of an algorithm, one program of all tests."""
    algorithm = OFFLINE[name]()

    @jax.jit
    def run(fields):
        known = dict(fields)

        def read(fn):
            return fn(*(known[name] for name in field_names(fn)))

        if algorithm.baseline is not None:
            known["baseline"] = read(algorithm.baseline)

        def total(moving):
            known.update(moving)
            values = jnp.zeros(len(next(iter(fields.values()))))
            if algorithm.loss is not None:
                values += read(algorithm.loss)[0]
            if algorithm.token_loss is not None:
                values += algorithm.token_loss_coef * read(algorithm.token_loss)[0]
            return values.sum(), values

        names = [n for n in algorithm.update_reads if n.endswith(("logprobs", "scores"))]
        moving = {name: known[name] for name in names if not name.startswith("reference")}
        (_, values), gradients = jax.value_and_grad(total, has_aux=True)(moving)
        return values, gradients

    return run


@pytest.mark.parametrize("name", OFFLINE)
def test_the_order_of_the_records_says_nothing(name):
    fields, order = records(OFFLINE[name]()), np.array([4, 1, 5, 0, 3, 2])
    values, gradients = offline_outcome(name, fields)
    moved = offline_outcome(name, {key: x[order] for key, x in fields.items()})
    np.testing.assert_allclose(moved[0], values[order], rtol=1e-5)
    for key, x in gradients.items():
        np.testing.assert_allclose(moved[1][key], x[order], rtol=1e-5, atol=1e-7, err_msg=key)
        assert np.abs(x).max() > 1e-3


@pytest.mark.parametrize("name", OFFLINE)
def test_a_completion_without_a_token_is_finite_and_alone(name):
    """Truncated to nothing: its log-probs are sums over no token."""
    fields = records(OFFLINE[name]())
    values, gradients = offline_outcome(name, fields)
    ends = ("logprobs", "lengths")
    empty = {
        k: np.where(np.arange(6) == 2, 0, x) if k.endswith(ends) else x for k, x in fields.items()
    }
    kept = np.arange(6) != 2
    if "weights" in fields:  # the estimate of a KL is a mean over all records
        empty["weights"] = fields["weights"] = np.where(kept, 1.0, 0.0).astype(np.float32)
        values, gradients = offline_outcome(name, fields)
    found = offline_outcome(name, empty)
    np.testing.assert_allclose(found[0][kept], values[kept], rtol=1e-5)
    assert np.isfinite(found[0]).all()
    for key, x in gradients.items():
        np.testing.assert_allclose(found[1][key][kept], x[kept], rtol=1e-5, err_msg=key)
        assert np.isfinite(found[1][key]).all()
