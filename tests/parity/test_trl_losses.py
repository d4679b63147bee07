"""Ours against TRL's loss code on the same random numbers: DPO, KTO, ORPO, CPO, rewards, SFT,
distillation; values and gradients.

The trainers' methods run on a stand-in for the trainer and for the model, which returns the random
numbers that a forward pass would; so what is compared is every line between those and the loss.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trl_side import REASON, torch, trainer

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.build import build_offline
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.imitation import forward_kl_top_k, reverse_kl, teacher_advantage
from jaxrl_llm.algorithms.kl import kl_k2
from jaxrl_llm.algorithms.preference_losses import bradley_terry, rating_error

pytestmark = pytest.mark.torch

B, T, VOCABULARY = 6, 9, 11
PROMPT = 3
NAMES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
LOGPS = ("logps/chosen", "logps/rejected")


def completion_mask(rng, rows):
    """1 on the completions, of 1 to T - PROMPT tokens, behind a prompt."""
    lengths = rng.integers(1, T - PROMPT + 1, rows)
    position = np.arange(T)
    return ((position >= PROMPT) & (position < PROMPT + lengths[:, None])).astype(np.int64)


def log_probs(rng, mask):
    """Random log-probs of the predicted tokens, 0 where the mask is."""
    return (-np.abs(rng.normal(1.0, 0.7, mask[:, 1:].shape)) * mask[:, 1:]).astype(np.float32)


class FakeModel:
    """Returns the statistics that TRL's fused head gives, with the log-probs that it was given."""

    def __init__(self, *log_probs):
        self.queue = [torch.tensor(x, requires_grad=i == 0) for i, x in enumerate(log_probs)]
        self.first = self.queue[0]

    def __call__(self, **kwargs):
        x = self.queue.pop(0)
        return SimpleNamespace(
            log_probs=x,
            entropy=torch.zeros_like(x),
            mean_logits=torch.zeros_like(x),
            is_top1=torch.zeros_like(x, dtype=torch.bool),
        )


def our_loss(algorithm, fields):
    """Loss, metrics as means, and the gradient in the policy's log-probs."""
    policy = [n for n in algorithm.update_reads if n.endswith("logprobs") and "reference" not in n]
    fields = {name: jnp.asarray(np.asarray(x), jnp.float32) for name, x in fields.items()}
    if algorithm.baseline is not None:
        args = [fields[name] for name in field_names(algorithm.baseline)]
        fields["baseline"] = algorithm.baseline(*args)

    def total(moving):
        known = fields | moving
        values, metrics = algorithm.loss(*(known[n] for n in field_names(algorithm.loss)))
        out = values.mean()
        if algorithm.token_loss is not None:
            args = [known[n] for n in field_names(algorithm.token_loss)]
            sums, counts = algorithm.token_loss(*args)
            out += algorithm.token_loss_coef * sums.sum() / counts.sum()
        return out, metrics

    moving = {name: fields[name] for name in policy}
    (loss, metrics), grads = jax.value_and_grad(total, has_aux=True)(moving)
    means = {}
    for name, value in metrics.items():
        value, weight = value if isinstance(value, tuple) else (value, jnp.ones_like(value))
        means[name] = float((value * weight).sum() / weight.sum())
    return float(loss), means, {name: np.asarray(x) for name, x in grads.items()}


def pair_fields(rng):
    """TRL's inputs, its fake models' log-probs, and our fields of the same pairs."""
    mask = completion_mask(rng, 2 * B)
    policy, reference = log_probs(rng, mask), log_probs(rng, mask)
    lengths = mask.sum(axis=1)
    fields = {}
    for i, name in enumerate(("chosen", "rejected")):
        rows = slice(i * B, (i + 1) * B)
        fields[f"{name}_logprobs"] = policy[rows].sum(axis=1)
        fields[f"reference_{name}_logprobs"] = reference[rows].sum(axis=1)
        fields[f"{name}_lengths"] = lengths[rows]
    inputs = {
        "input_ids": torch.ones(2 * B, T, dtype=torch.long),
        "attention_mask": torch.ones(2 * B, T, dtype=torch.long),
        "completion_mask": torch.tensor(mask),
    }
    return inputs, policy, reference, fields


DPO = {
    "sigmoid": (build_offline(c.DPO(beta=0.3)), {}),
    "hinge": (build_offline(c.DPO(beta=0.3, form="hinge")), {}),
    "ipo": (build_offline(c.IPO(beta=0.3)), {}),
    "robust": (
        build_offline(c.DPO(beta=0.3, form="robust", label_smoothing=0.2)),
        {"label_smoothing": 0.2},
    ),
    "sigmoid_norm": (build_offline(c.DPO(beta=0.3, form="sigmoid_norm")), {}),
}


@pytest.mark.parametrize("form", DPO)
def test_dpo(form):
    from trl.trainer.dpo_trainer import DPOTrainer

    algorithm, settings = DPO[form]
    inputs, policy, reference, fields = pair_fields(np.random.default_rng(0))
    model, reference_model = FakeModel(policy), FakeModel(reference)
    theirs = trainer(
        ld_alpha=None,
        precompute_ref_logps=False,
        ref_model=reference_model,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        f_divergence_type="reverse_kl",
        loss_types=[form],
        loss_weights=[1.0],
        beta=0.3,
        label_smoothing=0.0,
        use_weighting=False,
    )
    theirs.model.gradient_checkpointing_disable = lambda: None
    theirs.model.is_gradient_checkpointing = False
    for name, value in settings.items():
        setattr(theirs, name, value)
    loss = DPOTrainer._compute_loss(theirs, model, inputs, False)
    loss.backward()
    ours, metrics, grads = our_loss(algorithm, fields)
    np.testing.assert_allclose(ours, loss.item(), rtol=1e-5)
    for name in (*NAMES, *LOGPS):
        recorded = theirs._metrics["train"][name][0]
        np.testing.assert_allclose(metrics[name], recorded, rtol=1e-5, atol=1e-6, err_msg=name)
    # The gradient in every token's log-prob is that in the completion's sum.
    by_row = np.concatenate([grads["chosen_logprobs"], grads["rejected_logprobs"]])
    mask = inputs["completion_mask"].numpy()[:, 1:]
    expected = model.first.grad.numpy()
    np.testing.assert_allclose(by_row[:, None] * mask, expected * mask, rtol=1e-5, atol=1e-7)


def test_label_smoothing_of_the_sigmoid_is_ours():
    """TRL 1.16 reads label_smoothing in robust and exo_pair only; its sigmoid has none. Ours is
    conservative DPO: a mixture of the loss and the loss with the label turned round."""
    _, _, _, fields = pair_fields(np.random.default_rng(0))
    flipped = {
        name.replace("chosen", "?").replace("rejected", "chosen").replace("?", "rejected"): x
        for name, x in fields.items()
    }
    plain, turned = (our_loss(build_offline(c.DPO(beta=0.3)), x)[0] for x in (fields, flipped))
    smoothed, _, _ = our_loss(build_offline(c.DPO(beta=0.3, label_smoothing=0.1)), fields)
    np.testing.assert_allclose(smoothed, 0.9 * plain + 0.1 * turned, rtol=1e-5)


@pytest.mark.parametrize("shift", [-0.4, 0.4])
def test_kto(shift):
    """With a KL estimate above 0, and with one that is clamped to 0."""
    from trl.trainer.kto_trainer import KTOTrainer

    rng = np.random.default_rng(1)
    mask, kl_mask = completion_mask(rng, B), completion_mask(rng, B)
    policy, reference = log_probs(rng, mask), log_probs(rng, mask)
    kl_policy = log_probs(rng, kl_mask)
    kl_reference = (kl_policy - shift * kl_mask[:, 1:]).astype(np.float32)
    labels = np.array([True, False, True, True, False, False])
    model, reference_model = FakeModel(policy), FakeModel(reference)
    theirs = trainer(
        calculate_KL=True,
        precompute_ref_logps=False,
        ref_model=reference_model,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.7,
    )
    theirs.model.gradient_checkpointing_disable = lambda: None
    theirs.model.is_gradient_checkpointing = False
    mismatched = {id(model): kl_policy, id(reference_model): kl_reference}
    theirs._compute_kl_logps = lambda which, batch: torch.tensor(mismatched[id(which)].sum(axis=1))
    inputs = {
        "input_ids": torch.ones(B, T, dtype=torch.long),
        "attention_mask": torch.ones(B, T, dtype=torch.long),
        "completion_mask": torch.tensor(mask),
        "label": torch.tensor(labels),
    }
    loss = KTOTrainer._compute_loss(theirs, model, inputs, False)
    loss.backward()
    fields = {
        "completion_logprobs": policy.sum(axis=1),
        "reference_completion_logprobs": reference.sum(axis=1),
        "mismatched_logprobs": kl_policy.sum(axis=1),
        "reference_mismatched_logprobs": kl_reference.sum(axis=1),
        "labels": labels,
        "weights": np.ones(B),
    }
    algorithm = build_offline(c.KTO(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7))
    ours, metrics, grads = our_loss(algorithm, fields)
    np.testing.assert_allclose(ours, loss.item(), rtol=1e-5)
    for name in ("rewards/chosen", "rewards/rejected", *LOGPS, "kl"):
        recorded = theirs._metrics["train"][name][0]
        np.testing.assert_allclose(metrics[name], recorded, rtol=1e-5, atol=1e-6, err_msg=name)
    assert (metrics["kl"] > 0) == (shift > 0)
    by_token = grads["completion_logprobs"][:, None] * mask[:, 1:]
    expected = model.first.grad.numpy() * mask[:, 1:]
    np.testing.assert_allclose(by_token, expected, rtol=1e-5, atol=1e-7)


def language_model(rng):
    """Logits of whole rows, chosen first, and our sums over the same rows as a function of them."""
    mask = completion_mask(rng, 2 * B)
    row = (np.arange(T) < (PROMPT + mask.sum(axis=1))[:, None]).astype(np.int64)
    tokens = rng.integers(0, VOCABULARY, (2 * B, T))
    logits = rng.normal(0.0, 1.5, (2 * B, T, VOCABULARY)).astype(np.float32)

    def fields_of(logits):
        normalised = jax.nn.log_softmax(logits[:, :-1], axis=-1)
        taken = jnp.take_along_axis(normalised, tokens[:, 1:, None], axis=-1)[..., 0]
        fields = {}
        for i, name in enumerate(("chosen", "rejected")):
            rows = slice(i * B, (i + 1) * B)
            fields[f"{name}_logprobs"] = (taken * mask[:, 1:])[rows].sum(axis=1)
            fields[f"{name}_lengths"] = mask[rows].sum(axis=1)
            fields[f"{name}_row_logprobs"] = (taken * row[:, 1:])[rows].sum(axis=1)
            fields[f"{name}_row_lengths"] = row[rows, 1:].sum(axis=1)
        return fields

    labels = np.where(mask == 1, tokens, -100)
    batch = {
        "concatenated_input_ids": torch.tensor(tokens),
        "concatenated_attention_mask": torch.tensor(row),
        "concatenated_labels": torch.tensor(labels),
    }
    return torch.tensor(logits, requires_grad=True), batch, fields_of


def their_loss_without_a_reference(cls, logits, batch, **settings):
    """Loss and metrics of TRL's ORPO and CPO trainers, which share a shape."""
    theirs = trainer(
        is_encoder_decoder=False, padding_value=0, pad_token_id=0, label_smoothing=0.0, **settings
    )
    theirs.concatenated_inputs = lambda *args, **kwargs: batch
    for name in ("get_batch_logps", "odds_ratio_loss", "cpo_loss", "concatenated_forward"):
        if hasattr(cls, name):
            method = cls.__dict__[name]
            bound = method.__func__ if isinstance(method, staticmethod) else method.__get__(theirs)
            setattr(theirs, name, bound)

    def model(*args, **kwargs):
        return SimpleNamespace(logits=logits)

    chosen = {"chosen_labels": batch["concatenated_labels"][:B]}
    return cls.get_batch_loss_metrics(theirs, model, chosen)


def assert_same_without_a_reference(theirs, algorithm, logits, fields_of):
    """Loss, metrics, and the gradient in every logit."""
    loss, recorded = theirs
    loss.backward()
    ours = jnp.asarray(logits.detach().numpy())
    value, metrics, by_field = our_loss(algorithm, fields_of(ours))
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    for name in (*NAMES, *LOGPS):
        expected = float(recorded[name])
        np.testing.assert_allclose(metrics[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    moving, pull_back = jax.vjp(lambda x: {n: fields_of(x)[n] for n in by_field}, ours)
    assert moving.keys() == by_field.keys()
    (gradient,) = pull_back({name: jnp.asarray(x) for name, x in by_field.items()})
    np.testing.assert_allclose(gradient, logits.grad.numpy(), rtol=1e-5, atol=1e-7)
    return metrics, recorded


def test_orpo():
    orpo_trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer", reason=REASON)
    logits, batch, fields_of = language_model(np.random.default_rng(2))
    theirs = their_loss_without_a_reference(orpo_trainer.ORPOTrainer, logits, batch, beta=0.4)
    metrics, recorded = assert_same_without_a_reference(
        theirs, build_offline(c.ORPO(beta=0.4)), logits, fields_of
    )
    for name in ("log_odds_ratio", "log_odds_chosen"):
        np.testing.assert_allclose(metrics[name], float(recorded[name]), rtol=1e-5)


CPO = {
    "sigmoid": (build_offline(c.CPO(beta=0.4, cpo_alpha=0.7)), {"cpo_alpha": 0.7}),
    "hinge": (build_offline(c.CPO(beta=0.4, form="hinge")), {"cpo_alpha": 1.0}),
    "ipo": (build_offline(c.CPO(beta=0.4, form="ipo")), {"cpo_alpha": 1.0}),
    "simpo": (build_offline(c.SimPO(beta=2.0, gamma=1.0)), {"cpo_alpha": 0.0, "beta": 2.0}),
}


@pytest.mark.parametrize("form", CPO)
def test_cpo_and_simpo(form):
    """SimPO is a form of TRL's CPO trainer; its defaults there (beta 0.1, gamma 0.5) differ from
    the paper's (2.0 to 2.5, and around 1), which are ours."""
    cpo_trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer", reason=REASON)
    algorithm, settings = CPO[form]
    settings = {"beta": 0.4, "loss_type": form, "alpha": 0.0, "simpo_gamma": 1.0} | settings
    logits, batch, fields_of = language_model(np.random.default_rng(3))
    theirs = their_loss_without_a_reference(cpo_trainer.CPOTrainer, logits, batch, **settings)
    assert_same_without_a_reference(theirs, algorithm, logits, fields_of)


@pytest.mark.parametrize("center", [None, 0.05])
@pytest.mark.parametrize("margins", [None, [0.0, 0.5, 0.2, 1.0, 0.0, 0.3]])
def test_reward_model(center, margins):
    from trl.trainer.reward_trainer import RewardTrainer

    rng = np.random.default_rng(4)
    scores = rng.normal(0, 2, 2 * B).astype(np.float32)
    inputs = {"attention_mask": torch.ones(2 * B, T)}
    if margins is not None:
        inputs["margin"] = torch.tensor(margins)
    theirs = trainer(args=SimpleNamespace(center_rewards_coefficient=center))

    moving = torch.tensor(scores, requires_grad=True)

    def model(**kwargs):
        return SimpleNamespace(logits=moving[:, None])

    loss = RewardTrainer.compute_loss(theirs, model, inputs)
    loss.backward()

    def ours(scores):
        values, metrics = bradley_terry(
            scores[:B], scores[B:], jnp.asarray(margins or [0.0] * B), center=center or 0.0
        )
        return values.mean(), metrics

    (value, metrics), gradient = jax.value_and_grad(ours, has_aux=True)(jnp.asarray(scores))
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, moving.grad.numpy(), rtol=1e-5, atol=1e-7)
    for name in ("accuracy", "margin", "mean_reward"):
        recorded = theirs._metrics["train"][name][0]
        np.testing.assert_allclose(metrics[name].mean(), recorded, rtol=1e-5, err_msg=name)


def test_rating_regression():
    """TRL has no trainer for ratings: torch's mean squared error."""
    rng = np.random.default_rng(5)
    scores, ratings = rng.normal(0, 2, (2, B)).astype(np.float32)
    moving = torch.tensor(scores, requires_grad=True)
    loss = torch.nn.functional.mse_loss(moving, torch.tensor(ratings))
    loss.backward()
    value, gradient = jax.value_and_grad(lambda x: rating_error(x, jnp.asarray(ratings))[0].mean())(
        jnp.asarray(scores)
    )
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, moving.grad.numpy(), rtol=1e-5, atol=1e-7)


def test_supervised_fine_tuning():
    """Completion-only: every token of the completions weighs alike, tokens of prompts nothing."""
    from trl.trainer.sft_trainer import SFTTrainer

    rng = np.random.default_rng(6)
    mask = completion_mask(rng, B)
    policy = log_probs(rng, mask)
    model = FakeModel(policy)
    theirs = trainer(
        compute_loss_func=None,
        label_smoother=None,
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
    )
    theirs.accelerator.parallelism_config = None

    def with_labels(**kwargs):
        outputs = model(**kwargs)
        outputs.label_mask = torch.tensor(mask[:, 1:])
        return outputs

    inputs = {"attention_mask": torch.ones(B, T, dtype=torch.long), "labels": torch.tensor(mask)}
    loss = SFTTrainer.compute_loss(theirs, with_labels, inputs)
    loss.backward()
    fields = {"completion_logprobs": policy.sum(axis=1), "completion_lengths": mask.sum(axis=1)}

    def ours(sums):
        sums, counts = build_offline(c.SFT()).token_loss(
            sums, jnp.asarray(fields["completion_lengths"])
        )
        return sums.sum() / counts.sum()

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(fields["completion_logprobs"]))
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    expected = model.first.grad.numpy() * mask[:, 1:]
    by_token = np.asarray(gradient)[:, None] * mask[:, 1:]
    np.testing.assert_allclose(by_token, expected, rtol=1e-5, atol=1e-7)


def gkd_case(beta):
    """Student's and teacher's logits, the mask, GKD's loss and its gradient in the student's."""
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer", reason=REASON)
    rng = np.random.default_rng(7)
    student, teacher = rng.normal(0, 1.5, (2, B, T, VOCABULARY)).astype(np.float32)
    mask = completion_mask(rng, B)
    moving = torch.tensor(student, requires_grad=True)
    labels = torch.tensor(np.where(mask == 1, 0, -100))
    loss = gkd.GKDTrainer.generalized_jsd_loss(moving, torch.tensor(teacher), labels, beta=beta)
    loss.backward()
    return student, teacher, mask, loss.item(), moving.grad.numpy()


def test_forward_kl_of_all_tokens_is_the_distillation_loss_of_gkd():
    student, teacher, mask, loss, expected = gkd_case(beta=0)

    def ours(logits):
        both = (jax.nn.log_softmax(x, axis=-1) for x in (logits, jnp.asarray(teacher)))
        values, metrics = forward_kl_top_k(*both, jnp.asarray(mask))
        return values.sum() / mask.sum(), metrics

    (value, metrics), gradient = jax.value_and_grad(ours, has_aux=True)(jnp.asarray(student))
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(metrics["distillation/teacher_mass"], mask, atol=1e-5)


def test_reverse_kl_by_sample_has_the_gradient_of_gkds_reverse_kl_in_expectation():
    """Over all tokens, each by its probability: -A log pi, and k2 as a loss, are GKD's beta 1."""
    student, teacher, mask, loss, expected = gkd_case(beta=1)
    start = jax.nn.log_softmax(jnp.asarray(student), axis=-1)
    reference = jax.nn.log_softmax(jnp.asarray(teacher), axis=-1)
    weights = jnp.exp(start) * mask[..., None] / mask.sum()
    everywhere = jnp.ones(VOCABULARY)

    def by_advantage(logits):
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        rows = (x.reshape(-1, VOCABULARY) for x in (start, reference))
        advantage, _ = teacher_advantage(*rows, jnp.tile(everywhere, (B * T, 1)))
        return -(weights * advantage.reshape(start.shape) * logprobs).sum()

    def by_k2(logits):
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        rows = (x.reshape(-1, VOCABULARY) for x in (logprobs, reference))
        values, _ = reverse_kl(*rows, jnp.tile(everywhere, (B * T, 1)), estimator=kl_k2)
        return (weights * values.reshape(start.shape)).sum()

    for loss_fn in (by_advantage, by_k2):
        gradient = jax.grad(loss_fn)(jnp.asarray(student))
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    _, metrics = reverse_kl(
        *(x.reshape(-1, VOCABULARY) for x in (start, reference)),
        jnp.tile(everywhere, (B * T, 1)),
        estimator=kl_k2,
    )
    k1 = metrics["distillation/reverse_kl"].reshape(start.shape)
    np.testing.assert_allclose((weights * k1).sum(), loss, rtol=1e-5)
