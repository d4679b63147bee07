"""Ours against verl 0.9.1: advantage estimators, KL and aggregation on the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verl_side import agrees, verl

from jaxrl_llm.algorithms import advantages, group_advantages
from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, aggregation, global_counts
from jaxrl_llm.algorithms.kl import AdaptiveKL, kl_penalty
from jaxrl_llm.algorithms.value_losses import clipped_value_loss

torch = pytest.importorskip("torch", reason="pip install -e '.[parity]'")
pytestmark = pytest.mark.torch

ROWS, LENGTH = 12, 7
GROUPS = np.array([3, 1, 3, 1, 8, 3, 1, 3, 1, 2, 2, 2], np.int32)  # 8 has one sample
CONFIG = verl.AlgoConfig()


def fields(seed, holes=False):
    """A batch as verl has it: everything outside of the mask is 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH + 1, ROWS)
    mask = np.arange(LENGTH) < lengths[:, None]
    if holes:
        mask[:, 1:-1] &= rng.random((ROWS, LENGTH - 2)) < 0.7
    scores = rng.choice([0.0, 0.5, 1.0], ROWS) + 0.01 * rng.normal(size=ROWS)
    last = np.array([np.flatnonzero(row)[-1] for row in mask])
    rewards = np.where(mask, -0.05 * rng.random((ROWS, LENGTH)), 0.0)
    rewards[np.arange(ROWS), last] += scores
    found = {
        "rewards": rewards,
        "mask": mask,
        "values": np.where(mask, rng.normal(size=(ROWS, LENGTH)), 0.0),
        "old_logprobs": np.where(mask, -rng.exponential(size=(ROWS, LENGTH)), 0.0),
        "sum_pi_squared": np.where(mask, rng.uniform(size=(ROWS, LENGTH)), 0.0),
        "importance_weights": np.where(mask, rng.uniform(0.5, 2, size=(ROWS, LENGTH)), 0.0),
        "greedy_scores": rng.normal(size=ROWS),
    }
    return {name: x.astype(np.float32) for name, x in found.items()} | {"group_ids": GROUPS}


def both(ours, names, theirs, seed=0, holes=False, others=True, **settings):
    """Our (advantages, returns) and verl's, of one batch; `others` False leaves group 8 out."""
    batch = fields(seed, holes)
    if not others:
        batch = {name: x[GROUPS != 8] for name, x in batch.items()}
    t = {name: torch.tensor(x) for name, x in batch.items()}
    found = ours(*(jnp.array(batch[name]) for name in names), **settings)
    return found, theirs(t, batch["group_ids"]), batch["mask"]


OUTCOME = ("rewards", "mask", "group_ids")


def outcome(fn, **more):
    """verl's estimators of (rewards, mask, index); they change the rewards' sums in place."""
    return lambda t, index: fn(
        token_level_rewards=t["rewards"].clone(), response_mask=t["mask"], index=index, **more
    )


CASES = {
    "grpo": (group_advantages.grpo, {}, verl.compute_grpo_outcome_advantage, {}),
    "dr_grpo": (
        group_advantages.grpo,
        {"norm_adv_by_std": False},
        verl.compute_grpo_outcome_advantage,
        {"norm_adv_by_std_in_grpo": False},
    ),
    "rloo": (group_advantages.rloo, {}, verl.compute_rloo_outcome_advantage, {}),
    "reinforce_plus_plus_baseline": (
        group_advantages.reinforce_plus_plus_baseline,
        {},
        verl.compute_reinforce_plus_plus_baseline_outcome_advantage,
        {},
    ),
    "opo": (group_advantages.opo, {}, verl.compute_opo_outcome_advantage, {}),
    "gpg": (
        group_advantages.gpg,
        {"f_norm": 2.0},
        verl.compute_gpg_outcome_advantage,
        {"f_norm": 2.0},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_estimators_over_groups(name, seed):
    ours, settings, theirs, more = CASES[name]
    found, expected, _ = both(ours, OUTCOME, outcome(theirs, **more), seed=seed, **settings)
    agrees(found[0], expected[0])
    agrees(found[1], expected[1])


@pytest.mark.parametrize("by_std", [True, False])
def test_pass_at_k(by_std):
    """Without the group of one, which verl refuses."""
    config = verl.AlgoConfig(norm_adv_by_std_in_grpo=by_std)
    found, expected, _ = both(
        group_advantages.grpo_passk,
        OUTCOME,
        outcome(verl.compute_grpo_passk_outcome_advantage, config=config),
        others=False,
        norm_adv_by_std=by_std,
    )
    agrees(found[0], expected[0])


def test_gdpo():
    """verl puts each part on the last token; ours reads it as [B, K]."""
    batch = fields(0)
    rng = np.random.default_rng(1)
    parts = rng.normal(size=(ROWS, 2)).astype(np.float32) * np.float32([1.0, 50.0])
    found, _ = group_advantages.gdpo(
        jnp.array(parts), jnp.array(batch["mask"]), jnp.array(GROUPS), reward_weights=(1.0, 0.25)
    )
    config = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.25]}
    mask = torch.tensor(batch["mask"])
    expected, _ = verl.compute_gdpo_outcome_advantage(
        token_level_rewards=torch.tensor(batch["rewards"]),
        response_mask=mask,
        index=GROUPS,
        config=config,
        non_tensor_batch={"a": parts[:, 0], "b": parts[:, 1]},
        batch={"prompts": mask[:, :0], "attention_mask": mask.long()},
    )
    agrees(found, expected)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.9)])
def test_gae(holes, gamma, lam):
    found, expected, mask = both(
        advantages.gae,
        ("rewards", "values", "mask"),
        lambda t, _: verl.compute_gae_advantage_return(
            t["rewards"], t["values"], t["mask"], gamma, lam
        ),
        holes=holes,
        gamma=gamma,
        lam=lam,
    )
    agrees(found[0] * mask, expected[0] * torch.tensor(mask))
    # On purpose: outside of the mask ours are 0, verl's carry what came after.
    agrees(found[1], expected[1] * torch.tensor(mask))


@pytest.mark.parametrize("holes", [False, True])
def test_reinforce_plus_plus(holes):
    found, expected, _ = both(
        advantages.reinforce_plus_plus,
        ("rewards", "mask"),
        lambda t, _: verl.compute_reinforce_plus_plus_outcome_advantage(
            t["rewards"], t["mask"], config=verl.AlgoConfig(gamma=0.95)
        ),
        holes=holes,
        gamma=0.95,
    )
    agrees(found[0], expected[0])
    agrees(found[1], expected[1])


def test_remax():
    found, expected, mask = both(
        advantages.remax,
        ("rewards", "greedy_scores", "mask"),
        lambda t, _: verl.compute_remax_outcome_advantage(
            t["rewards"], t["greedy_scores"], t["mask"]
        ),
    )
    agrees(found[0], expected[0])
    agrees(found[1], expected[1] * torch.tensor(mask))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
def test_optimal_token_baseline(seed, tail, weighted):
    names = ("rewards", "mask", "group_ids", "old_logprobs", "sum_pi_squared")
    ours = group_advantages.optimal_token_baseline
    if weighted:
        ours, names = (
            group_advantages.corrected_optimal_token_baseline,
            (*names, "importance_weights"),
        )
    found, expected, mask = both(
        ours,
        names,
        lambda t, index: verl.compute_optimal_token_baseline_advantage(
            t["rewards"],
            t["mask"],
            index,
            t["old_logprobs"],
            t["sum_pi_squared"],
            rollout_is_weights=t["importance_weights"] if weighted else None,
            handle_zero_tail=tail,
        ),
        seed=seed,
        handle_zero_tail=tail,
    )
    agrees(found[0], expected[0])
    agrees(found[1], expected[1] * torch.tensor(mask))


# ------------------------------------------------------------------------- aggregation, KL, value


@pytest.mark.parametrize("name", sorted(AGGREGATIONS.keys() - {"prompt-mean"}))  # not in verl
@pytest.mark.parametrize("parts", [1, 3])
def test_aggregation(name, parts):
    """In parts too: verl's with the counts of the whole batch, as its trainer passes them."""
    batch = fields(0)
    x = np.random.default_rng(2).normal(size=(ROWS, LENGTH)).astype(np.float32)
    mask = batch["mask"].copy()
    mask[4] = 0.0
    scale = 5 if name.endswith("norm") else None
    tokens, sequences = global_counts(jnp.array(mask))
    fn = aggregation(name, scale=scale)
    found = expected = 0.0
    for rows in np.split(np.arange(ROWS), parts):
        found += fn(
            jnp.array(x[rows]),
            jnp.array(mask[rows]),
            global_tokens=tokens,
            global_sequences=sequences,
        )
        expected += verl.agg_loss(
            torch.tensor(x[rows]),
            torch.tensor(mask[rows]),
            name,
            batch_num_tokens=int(tokens),
            global_batch_size=int(sequences),
            loss_scale_factor=scale,
        )
    agrees(found, expected)


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("name", ["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"])
def test_kl_and_its_gradient(name, plus):
    rng = np.random.default_rng(0)
    x, reference = -rng.exponential(size=(2, 4, 5)).astype(np.float32)
    reference[0, 0] = x[0, 0] + 3.0  # past the clamp of k3
    name += plus
    t = torch.tensor(x, requires_grad=True)
    expected = verl.kl_penalty(t, torch.tensor(reference), name)
    expected.sum().backward()
    found, pull = jax.vjp(lambda x: kl_penalty(name)(x, jnp.array(reference)), jnp.array(x))
    agrees(found, expected)
    agrees(pull(jnp.ones_like(found))[0], t.grad)


def test_adaptive_kl():
    theirs = verl.AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=1000)
    ours = AdaptiveKL(0.2, horizon=1000.0, target=0.1)
    state = ours.init()
    for kl in (0.3, 0.11, 0.02, 0.0):
        state = ours.update(state, jnp.float32(kl), 64)
        theirs.update(current_kl=kl, n_steps=64)
        agrees(state, torch.tensor(theirs.value))


def test_value_loss():
    batch = fields(0)
    rng = np.random.default_rng(3)
    new, values, returns = rng.normal(size=(3, ROWS, LENGTH)).astype(np.float32)
    loss, metrics = clipped_value_loss(
        *map(jnp.array, (new, values, returns, batch["mask"])), cliprange=0.5
    )
    expected, clipfrac = verl.compute_value_loss(
        *map(torch.tensor, (new, returns, values, batch["mask"])), cliprange_value=0.5
    )
    tokens = batch["mask"].sum()
    agrees((loss * batch["mask"]).sum() / tokens, expected)
    agrees(metrics["critic/vf_clipfrac"].sum() / tokens, clipfrac)
