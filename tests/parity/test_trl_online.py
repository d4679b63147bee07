"""Ours against TRL's GRPO and RLOO code: advantages from rewards, losses from log-probs.

As in test_trl_losses.py their methods run on a stand-in for the trainer; what it generates, scores
and computes with a model is given.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trl_side import REASON, torch, trainer

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.aggregation import global_counts
from jaxrl_llm.algorithms.build import build_online
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.group_advantages import GROUP_STD_EPS
from jaxrl_llm.algorithms.kl import masked_kl

grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason=REASON)
rloo = pytest.importorskip("trl.trainer.rloo_trainer", reason=REASON)

pytestmark = pytest.mark.torch

GROUPS, N, LENGTH = 4, 3, 6
B = GROUPS * N
TRL_STD_EPS = 1e-4


def case(seed=0):
    """Rewards with a group that does not vary, lengths of at least 1, log-probs that moved far."""
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=B)
    rewards[N : 2 * N] = 0.7
    old = -rng.exponential(size=(B, LENGTH))
    lengths = rng.integers(1, LENGTH + 1, B)
    lengths[0] = LENGTH
    fields = {
        "old_logprobs": old,
        "logprobs": np.minimum(old + 0.4 * rng.normal(size=old.shape), -0.01),
        "reference_logprobs": np.minimum(old + 0.4 * rng.normal(size=old.shape), -0.01),
        "mask": np.arange(LENGTH) < lengths[:, None],
    }
    fields["reference_logprobs"][0, 0] = fields["logprobs"][0, 0] + 4  # where verl clamps k3
    fields = {name: x.astype(np.float32) for name, x in fields.items()}
    last = np.eye(LENGTH)[lengths - 1]
    fields["rewards"] = (rewards[:, None] * last).astype(np.float32)
    fields["rollout_logprobs"] = np.float32(np.minimum(old + 0.3 * rng.normal(size=old.shape), 0))
    return fields | {"group_ids": np.arange(GROUPS, dtype=np.int32).repeat(N)}


# ------------------------------------------------------------------------- advantages


def scored(fields, monkeypatch, module, **settings):
    """A trainer that has generated the samples of `fields` and got their rewards and log-probs."""
    for name in ("gather", "gather_object"):
        monkeypatch.setattr(module, name, lambda x: x, raising=False)
    theirs = trainer(
        num_generations=N,
        reward_weights=torch.ones(1),
        reward_func_names=["only"],
        mask_truncated_completions=False,
        pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        ref_model="reference",
        args=SimpleNamespace(
            per_device_train_batch_size=B,
            gradient_checkpointing_kwargs=None,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
        ),
        _logs={"prompt": [], "completion": [], "advantages": [], "rewards": {"only": []}},
        _pending_extra_logs={},
        _pending_metrics={},
        **settings,
    )
    theirs.accelerator.process_index = 0
    theirs.accelerator.reduce = lambda x, reduction: x
    theirs.model.is_gradient_checkpointing = False
    theirs.model.gradient_checkpointing_disable = lambda: None
    rewards = torch.tensor(fields["rewards"].sum(axis=1))[:, None]
    theirs._calculate_rewards = lambda *args: rewards

    def logps(model, *args, **kwargs):
        name = "reference_logprobs" if model == "reference" else "old_logprobs"
        return torch.tensor(fields[name]), None, None

    theirs._get_per_token_logps_and_entropies = logps
    return theirs


def samples(fields):
    """(prompts, completions) in tokens; only their lengths are looked at."""
    return [[1, 2]] * B, [[3] * int(length) for length in fields["mask"].sum(axis=1)]


def advantages_of(algorithm, fields):
    known = {name: jnp.asarray(x) for name, x in fields.items()}
    if algorithm.kl_reward is not None:
        known["scores"] = known["rewards"].sum(axis=1)
        read = (known[n] for n in field_names(algorithm.kl_reward))
        known["rewards"], _ = algorithm.kl_reward(*read, coef=algorithm.kl_controller.init())
    advantages, _ = algorithm.advantage(*(known[n] for n in field_names(algorithm.advantage)))
    return np.asarray(advantages)


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_rloo_advantages(beta, monkeypatch):
    """With the KL in the reward too, k1 summed over the tokens."""
    fields = case()
    theirs = scored(
        fields, monkeypatch, rloo, beta=beta, reward_clip_range=None, normalize_advantages=False
    )
    theirs._generate = lambda prompts: (*samples(fields), ["x"] * B)
    out = rloo.RLOOTrainer._generate_and_score_completions(theirs, [{"prompt": "x"}] * B)
    ours = advantages_of(build_online(c.RLOO(use_kl_in_reward=beta > 0, kl_coef=beta)), fields)
    expected = out["advantages"].numpy()[:, None] * fields["mask"]
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    constant = theirs._metrics["train"]["frac_reward_zero_std"]
    assert constant == [0.25 if beta == 0 else 0.0]  # what differs is the KL


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_grpo_advantages(scale_rewards, monkeypatch):
    """TRL adds 1e-4 to a group's deviation and we, as verl does, 1e-6: the same up to that."""
    fields = case()
    theirs = scored(
        fields,
        monkeypatch,
        grpo,
        beta=0.0,
        environment_factories=None,
        environments=None,
        tools=None,
        use_vllm=False,
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards=scale_rewards,
        num_iterations=1,
    )
    generated = (*samples(fields), None, ["x"] * B, None, {}, None, None)
    theirs._generate = lambda prompts: generated
    out = grpo.GRPOTrainer._generate_and_score_completions(theirs, [{"prompt": "x"}] * B)
    by_std = scale_rewards != "none"
    std_of = scale_rewards if by_std else "group"
    ours = advantages_of(build_online(c.GRPO(norm_adv_by_std=by_std, std_of=std_of)), fields)
    if by_std:
        totals = fields["rewards"].sum(axis=1).reshape(GROUPS, N)
        std = totals.std(axis=1, ddof=1).repeat(N) if std_of == "group" else totals.std(ddof=1)
        ours = ours * np.reshape((std + GROUP_STD_EPS) / (std + TRL_STD_EPS), (-1, 1))
    expected = out["advantages"].numpy()[:, None] * fields["mask"]
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    # TRL counts groups by their own std, except where the batch has one.
    constant = 0.0 if scale_rewards == "batch" else 0.25
    assert theirs._metrics["train"]["frac_reward_zero_std"] == [constant]


# ------------------------------------------------------------------------- losses

# TRL's loss_type and settings, and ours. Its two-sided clip is off (delta None), which ours, the
# dual clip, is not: 1e9 is no bound. Its epsilon_high of CISPO is the bound itself, ours over 1.
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 1e9}
EPSILON = {"epsilon_low": 0.2, "epsilon_high": 0.3}
MEAN = {"loss_aggregation": "seq-mean-token-mean"}
NO_KL = {"use_kl_loss": False}
GRPO = {
    "grpo": (build_online(c.GRPO(**CLIP, **MEAN, **NO_KL)), EPSILON),
    "grpo with its KL": (
        build_online(c.GRPO(**CLIP, **MEAN, kl_loss_coef=0.1, kl_loss_type="k3_unclamped")),
        EPSILON | {"beta": 0.1},
    ),
    # DeepSeek-V3.2's two stabilisers.
    "off-policy mask": (
        build_online(c.GRPO(**CLIP, **MEAN, **NO_KL, off_policy_mask=0.05)),
        EPSILON | {"off_policy_mask_threshold": 0.05},
    ),
    "unbiased KL": (
        build_online(
            c.GRPO(
                **CLIP,
                **MEAN,
                kl_loss_coef=0.1,
                kl_loss_type="k3_unclamped",
                kl_loss_unbiased=True,
            )
        ),
        EPSILON | {"beta": 0.1, "use_bias_correction_kl": True},
    ),
    "bnpo": (build_online(c.GRPO(**CLIP, **NO_KL)), EPSILON),
    "dapo": (build_online(c.DAPO(**CLIP)), EPSILON),
    "dr_grpo": (build_online(c.DrGRPO(**CLIP, loss_scale=9)), EPSILON),
    "cispo": (build_online(c.CISPO(clip_high=0.3)), {"epsilon_high": 1.3}),
    "sapo": (build_online(c.SAPO(tau_neg=1.3)), {"sapo_temperature_neg": 1.3}),
    "gspo": (
        build_online(c.GSPO(clip_low=0.05, clip_high=0.1)),
        {"epsilon_low": 0.05, "epsilon_high": 0.1, "importance_sampling_level": "sequence"},
    ),
}
LOSS_TYPE = dict.fromkeys(("grpo with its KL", "gspo", "off-policy mask", "unbiased KL"), "grpo")


def our_loss(algorithm, fields):
    """Loss, its gradient in the log-probs, and the means of the metrics."""
    known = {name: jnp.asarray(x) for name, x in fields.items()}
    tokens, sequences = global_counts(known["mask"])
    aggregate = partial(
        algorithm.aggregate,
        mask=known["mask"],
        global_tokens=tokens,
        global_sequences=sequences,
    )

    def total(x):
        moved = known | {"logprobs": x}
        values, metrics = algorithm.policy_loss(
            *(moved[name] for name in field_names(algorithm.policy_loss))
        )
        loss = aggregate(values)
        if algorithm.kl_loss is not None:
            kl = masked_kl(algorithm.kl_loss, moved, known["mask"])
            loss += algorithm.kl_loss_coef * aggregate(kl)
        return loss, metrics

    (loss, metrics), gradient = jax.value_and_grad(total, has_aux=True)(known["logprobs"])
    means = {name: float((x * known["mask"]).sum() / tokens) for name, x in metrics.items()}
    return float(loss), np.asarray(gradient), means


def their_loss(cls, fields, **settings):
    """The same of TRL's, and what it recorded. Advantages are one a sample there."""
    logprobs = torch.tensor(fields["logprobs"], requires_grad=True)
    own = {"loss_type": settings.pop("loss_type", "grpo"), "beta": settings.pop("beta", 0.0)}
    arguments = {
        "delta": None,
        "use_bias_correction_kl": settings.pop("use_bias_correction_kl", False),
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": settings.pop("sapo_temperature_neg", 1.05),
        "steps_per_generation": 1,
    }
    own |= {"importance_sampling_level": settings.pop("importance_sampling_level", "token")}
    theirs = trainer(
        args=SimpleNamespace(**arguments),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=settings.pop("off_policy_mask_threshold", None),
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=9,
        _entropy_bonus_enabled=False,
        **(own | settings),
    )
    theirs.get_off_policy_mask = getattr(cls, "get_off_policy_mask", None)
    theirs.accelerator.num_processes = 1
    theirs.accelerator.reduce = lambda x, reduction: x
    theirs._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        logprobs,
        torch.zeros_like(logprobs),
        None,
    )
    mask = torch.tensor(fields["mask"]).long()
    old = torch.tensor(fields["old_logprobs"])
    inputs = {
        "prompt_ids": torch.ones(B, 2, dtype=torch.long),
        "prompt_mask": torch.ones(B, 2, dtype=torch.long),
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": torch.tensor(fields["advantages"][:, 0]),
        "old_per_token_logps": old,
        "sampling_per_token_logps": torch.tensor(fields["rollout_logprobs"]),
        "old_logps": (old * mask).sum(1),
        "ref_per_token_logps": torch.tensor(fields["reference_logprobs"]),
        "num_items_in_batch": mask.sum(),
    }
    loss = cls._compute_loss(theirs, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad.numpy(), theirs._metrics["train"]


def with_advantages(fields):
    """One advantage a sample, as TRL has it, also where a response ends."""
    of_samples = np.random.default_rng(1).normal(size=(B, 1)).astype(np.float32)
    return fields | {"advantages": of_samples.repeat(LENGTH, axis=1)}


@pytest.mark.parametrize("name", GRPO)
def test_grpo_losses(name):
    fields = with_advantages(case())
    algorithm, settings = GRPO[name]
    settings = {"epsilon_low": 0.2} | settings
    if name == "off-policy mask":  # more of the samples that the policy left get a bad advantage
        fields["advantages"] = -fields["advantages"]
    expected, gradient, recorded = their_loss(
        grpo.GRPOTrainer, fields, loss_type=LOSS_TYPE.get(name, name), **settings
    )
    loss, found, means = our_loss(algorithm, fields)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, gradient * fields["mask"], rtol=1e-5, atol=1e-6)
    assert np.abs(gradient).max() > 1e-2
    if name == "off-policy mask":
        assert 0 < means["actor/off_policy_masked"] < 1
    if name in ("grpo", "bnpo", "dapo", "dr_grpo"):
        clipped = recorded["clip_ratio/region_mean"][0]
        np.testing.assert_allclose(means["actor/pg_clipfrac"], clipped, rtol=1e-5)
        assert clipped > 0


def test_the_dual_clip_is_ours():
    """verl has it always; TRL's `delta` bounds the ratio whatever the sign of the advantage."""
    fields = with_advantages(case())
    fields["logprobs"] = np.minimum(fields["old_logprobs"] + 1.5, -0.01)
    far = np.exp(fields["logprobs"] - fields["old_logprobs"]) > 3.0
    assert (far & (fields["advantages"] < 0) & (fields["mask"] > 0)).any()
    theirs, _, _ = their_loss(grpo.GRPOTrainer, fields, loss_type="dapo", **EPSILON)
    bounded, _, means = our_loss(build_online(c.DAPO(**(CLIP | {"clip_c": 3.0}))), fields)
    free, _, _ = our_loss(build_online(c.DAPO(**CLIP)), fields)
    np.testing.assert_allclose(free, theirs, rtol=1e-5)
    assert bounded < theirs and means["actor/pg_clipfrac_lower"] > 0


def test_the_gradient_of_rloo_on_its_own_samples():
    """TRL's ratio belongs to a whole response, exp of the sum of its log-ratios, and so does its
    clip; ours, as verl's, is a token's. On the policy's own samples, before the first update, both
    have the gradient of REINFORCE: A times that for a response's log-prob, a mean
    over responses.
    """
    fields = with_advantages(case())
    fields["logprobs"] = fields["old_logprobs"]
    expected, gradient, _ = their_loss(rloo.RLOOTrainer, fields, **EPSILON)
    algorithm = build_online(c.RLOO(**CLIP, loss_aggregation="seq-mean-token-sum"))
    loss, found, _ = our_loss(algorithm, fields)
    np.testing.assert_allclose(found, gradient * fields["mask"], rtol=1e-5, atol=1e-7)
    assert np.abs(gradient).max() > 1e-2
    # The values are not comparable: theirs counts a response once, ours each of its tokens.
    of_samples = fields["advantages"][:, 0]
    np.testing.assert_allclose(expected, -of_samples.mean(), rtol=1e-5)
    lengths = fields["mask"].sum(axis=1)
    np.testing.assert_allclose(loss, -(of_samples * lengths).mean(), rtol=1e-5)


def test_rloo_off_policy_clips_a_response_where_we_clip_a_token():
    """Of responses with one token the two are the same, the clip included."""
    fields = with_advantages(case())
    fields["mask"] = (np.arange(LENGTH) < np.ones((B, 1))).astype(np.float32)
    expected, gradient, recorded = their_loss(rloo.RLOOTrainer, fields, **EPSILON)
    algorithm = build_online(c.RLOO(**CLIP, loss_aggregation="seq-mean-token-sum"))
    loss, found, means = our_loss(algorithm, fields)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(found, gradient * fields["mask"], rtol=1e-5, atol=1e-6)
    clipped = recorded["clip_ratio/region_mean"][0]
    np.testing.assert_allclose(means["actor/pg_clipfrac"], clipped, rtol=1e-5)
    assert clipped > 0
