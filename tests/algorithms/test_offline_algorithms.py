"""Losses on fixed data: by hand, against float64 numpy and its finite differences, and refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finite_differences import numeric_gradient

from jaxrl_llm import config as c
from jaxrl_llm.algorithms import preference_losses as losses
from jaxrl_llm.algorithms.build import build_offline
from jaxrl_llm.algorithms.fields import field_names
from jaxrl_llm.algorithms.offline import OfflineAlgorithm

# Two pairs. Log-ratios to the reference: chosen 1, -2; rejected -1, 0. Means over tokens: 0.5, -0.5
# and -0.25, 0.
PAIRS = {
    "chosen_logprobs": [-4.0, -6.0],
    "rejected_logprobs": [-8.0, -3.0],
    "reference_chosen_logprobs": [-5.0, -4.0],
    "reference_rejected_logprobs": [-7.0, -3.0],
    "chosen_lengths": [2.0, 4.0],
    "rejected_lengths": [4.0, 3.0],
}
LABELLED = {
    "completion_logprobs": [-4.0, -6.0, -3.0],
    "reference_completion_logprobs": [-5.0, -4.0, -4.0],
    "labels": [1.0, 0.0, 0.0],
    "baseline": [0.5, 0.5, 0.5],
}


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-np.asarray(x, np.float64)))


def nls(x):
    return np.logaddexp(0.0, -np.asarray(x, np.float64))  # -log sigmoid


def log_odds(p):
    return p - np.log1p(-np.exp(p))


def ratios(f):
    return (
        f["chosen_logprobs"] - f["reference_chosen_logprobs"],
        f["rejected_logprobs"] - f["reference_rejected_logprobs"],
    )


def gap(f):
    chosen, rejected = ratios(f)
    return chosen - rejected


def mean_gap(f):
    chosen, rejected = ratios(f)
    return chosen / f["chosen_lengths"] - rejected / f["rejected_lengths"]


def means(f):
    return (
        f["chosen_logprobs"] / f["chosen_lengths"],
        f["rejected_logprobs"] / f["rejected_lengths"],
    )


def kto_by_hand(f):
    ratio = f["completion_logprobs"] - f["reference_completion_logprobs"] - f["baseline"]
    good, bad = 2.0 * (1 - sigmoid(0.5 * ratio)), 3.0 * (1 - sigmoid(-0.5 * ratio))
    return np.where(f["labels"] > 0, good, bad)


def robust_by_hand(f):
    return (0.8 * nls(0.5 * gap(f)) - 0.2 * nls(-0.5 * gap(f))) / 0.6


# Each loss with the same in float64 numpy, and its value on the two pairs worked out by hand.
CASES = {
    "dpo": (
        partial(losses.dpo, beta=0.5),
        lambda f: nls(0.5 * gap(f)),
        [np.log1p(np.exp(-1.0)), np.log1p(np.exp(1.0))],  # gaps 2 and -2
    ),
    "dpo smoothed": (
        partial(losses.dpo, beta=0.5, label_smoothing=0.2),
        lambda f: 0.8 * nls(0.5 * gap(f)) + 0.2 * nls(-0.5 * gap(f)),
        [0.8 * 0.313262 + 0.2 * 1.313262, 0.8 * 1.313262 + 0.2 * 0.313262],
    ),
    "dpo robust": (
        partial(losses.dpo, beta=0.5, form="robust", label_smoothing=0.2),
        robust_by_hand,
        [(0.8 * 0.313262 - 0.2 * 1.313262) / 0.6, (0.8 * 1.313262 - 0.2 * 0.313262) / 0.6],
    ),
    "dpo hinge": (
        partial(losses.dpo, beta=0.25, form="hinge"),
        lambda f: np.maximum(0.0, 1 - 0.25 * gap(f)),
        [0.5, 1.5],
    ),
    "ipo": (
        partial(losses.dpo_normalised, beta=0.25, form="ipo"),
        lambda f: (mean_gap(f) - 2.0) ** 2,  # 1 / (2 beta)
        [(0.75 - 2) ** 2, (-0.5 - 2) ** 2],
    ),
    "dpo normalised": (
        partial(losses.dpo_normalised, beta=2.0, form="sigmoid_norm"),
        lambda f: nls(2.0 * mean_gap(f)),
        [np.log1p(np.exp(-1.5)), np.log1p(np.exp(1.0))],
    ),
    "orpo": (
        partial(losses.orpo, beta=0.5),
        lambda f: 0.5 * nls(log_odds(means(f)[0]) - log_odds(means(f)[1])),
        # both pairs' means: -2 and -2; -1.5 and -1, whose odds are .2872 and .5820
        [0.5 * np.log(2.0), 0.5 * np.log(1 + 0.5819767 / 0.2872236)],
    ),
    "cpo": (
        partial(losses.cpo, beta=0.25),
        lambda f: nls(0.25 * (f["chosen_logprobs"] - f["rejected_logprobs"])),
        [np.log1p(np.exp(-1.0)), np.log1p(np.exp(0.75))],
    ),
    "cpo hinge": (
        partial(losses.cpo, beta=0.2, form="hinge"),
        lambda f: np.maximum(0.0, 1 - 0.2 * (f["chosen_logprobs"] - f["rejected_logprobs"])),
        [0.2, 1.6],
    ),
    "cpo ipo": (
        partial(losses.cpo_normalised, beta=0.25, form="ipo"),
        lambda f: (means(f)[0] - means(f)[1] - 2.0) ** 2,
        [4.0, 6.25],
    ),
    "simpo": (
        partial(losses.cpo_normalised, beta=2.0, gamma=1.0),
        lambda f: nls(2.0 * (means(f)[0] - means(f)[1]) - 1.0),
        [np.log1p(np.exp(1.0)), np.log1p(np.exp(2.0))],
    ),
}
LABELLED_CASES = {
    "kto": (
        partial(losses.kto, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0),
        kto_by_hand,
        # ratios less the baseline: 0.5, -2.5, 0.5
        [2 * (1 - sigmoid(0.25)), 3 * (1 - sigmoid(1.25)), 3 * (1 - sigmoid(-0.25))],
    ),
}
ALL = [(case, PAIRS) for case in CASES.values()]
ALL += [(case, LABELLED) for case in LABELLED_CASES.values()]
NAMES = [*CASES, *LABELLED_CASES]


def call(fn, fields):
    return fn(*(jnp.asarray(fields[name], jnp.float32) for name in field_names(fn)))


@pytest.mark.parametrize(("case", "fields"), ALL, ids=NAMES)
def test_value_by_hand(case, fields):
    fn, reference, expected = case
    loss, metrics = call(fn, fields)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    as_numpy = {name: np.array(x) for name, x in fields.items()}
    np.testing.assert_allclose(loss, reference(as_numpy), rtol=2e-5)
    for name, value in metrics.items():
        parts = value if isinstance(value, tuple) else (value,)
        assert all(part.shape == loss.shape for part in parts), name


@pytest.mark.parametrize(("case", "fields"), ALL, ids=NAMES)
def test_gradient_against_finite_differences(case, fields):
    fn, reference, _ = case
    moving = [n for n in field_names(fn) if n.endswith("logprobs") and "reference" not in n]
    rng = np.random.default_rng(0)
    size = 7
    fields = {name: np.resize(x, size).astype(np.float64) for name, x in fields.items()}
    for name in moving:
        fields[name] = fields[name] + rng.normal(0, 0.3, size) - 0.5
    point = np.stack([fields[name] for name in moving])

    def numpy_loss(x):
        return reference(fields | dict(zip(moving, x, strict=True))).sum()

    def loss(x):
        known = fields | dict(zip(moving, x, strict=True))
        return call(fn, known)[0].sum()

    found = jax.grad(loss)(jnp.asarray(point, jnp.float32))
    np.testing.assert_allclose(found, numeric_gradient(numpy_loss, point), rtol=1e-4, atol=1e-5)
    assert np.abs(found).max() > 1e-2


@pytest.mark.parametrize(("case", "fields"), ALL, ids=NAMES)
def test_extreme_log_probs_stay_finite(case, fields):
    """A completion of probability 1, and one that is all but impossible."""
    fn = case[0]
    moving = [n for n in field_names(fn) if n.endswith("logprobs") and "reference" not in n]
    size = len(fields["labels"]) if "labels" in fields else 2
    extreme = fields | {name: np.resize([0.0, -3e4], size) for name in moving}

    def loss(x):
        return call(fn, extreme | {moving[0]: x})[0].sum()

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(extreme[moving[0]], jnp.float32))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_metrics_of_a_pair_are_trls():
    _, metrics = call(CASES["dpo"][0], PAIRS)
    expected = {
        "rewards/chosen": [0.5, -1.0],
        "rewards/rejected": [-0.5, 0.0],
        "rewards/accuracies": [1.0, 0.0],
        "rewards/margins": [1.0, -1.0],
        "logps/chosen": [-4.0, -6.0],
        "logps/rejected": [-8.0, -3.0],
        "logps/accuracies": [1.0, 0.0],
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, atol=1e-6, err_msg=name)


def test_the_kl_of_kto_is_a_clamped_mean_without_gradient():
    policy, reference = jnp.array([-1.0, -2.0, 99.0]), jnp.array([-2.0, -2.5, 0.0])
    weights = jnp.array([1.0, 1.0, 0.0])
    np.testing.assert_allclose(losses.mismatched_kl(policy, reference, weights), [0.75] * 3)
    np.testing.assert_allclose(losses.mismatched_kl(reference, policy, weights), [0.0] * 3)
    gradient = jax.grad(lambda x: losses.mismatched_kl(x, reference, weights).sum())(policy)
    np.testing.assert_array_equal(gradient, 0.0)


def test_ratings_by_hand():
    loss, metrics = losses.rating_error(jnp.array([1.0, 0.5]), jnp.array([0.0, 1.0]))
    np.testing.assert_allclose(loss, [1.0, 0.25])
    np.testing.assert_allclose(metrics["absolute_error"], [1.0, 0.5])


# ------------------------------------------------------------------------- what is read


def test_an_algorithm_says_what_it_reads():
    dpo = build_offline(c.DPO(sft_coef=0.2))
    assert dpo.records.name == "preferences" and dpo.model_kind == "causal_lm"
    assert set(dpo.reads) == {*PAIRS} - {"rejected_lengths"}
    assert build_offline(c.KTO()).records.name == "unpaired"
    # No gradient passes there.
    assert "mismatched_logprobs" not in build_offline(c.KTO()).update_reads
    assert build_offline(c.SFT()).records.name == "examples"
    assert build_offline(c.RewardRegression()).records.name == "ratings"
    assert build_offline(c.PairwiseRewardModel()).model_kind == "scalar"
    for settings in (c.ORPO(), c.SimPO(), c.CPO(), c.SFT()):
        reads = build_offline(settings).reads
        assert not [name for name in reads if name.startswith("reference")]


def judge_of_scores(chosen_scores):
    return {}


def of_labels_alone(completion_logprobs, labels):
    return completion_logprobs


def misspelt(chosen_logprob, rejected_logprobs):
    return chosen_logprob


def of_two_kinds(chosen_logprobs, labels):
    return chosen_logprobs


def of_two_models(chosen_logprobs, rejected_scores):
    return chosen_logprobs


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: OfflineAlgorithm(loss=misspelt), "did you mean 'chosen_logprobs'"),
        (lambda: OfflineAlgorithm(loss=of_two_kinds), "no kind of record has all of the fields"),
        (lambda: OfflineAlgorithm(loss=of_two_models), "scores and log-probs"),
        (lambda: OfflineAlgorithm(), "needs a loss"),
        (lambda: OfflineAlgorithm(loss=losses.kto), "give both, or leave both out"),
        (
            lambda: OfflineAlgorithm(loss=losses.dpo, judge_pairs=losses.judged_pairs),
            "judge_pairs with a loss on preferences.*leave it out",
        ),
        (
            lambda: OfflineAlgorithm(loss=of_labels_alone, judge_pairs=judge_of_scores),
            "asks for 'chosen_scores'; it is given chosen_logprobs",
        ),
        (
            lambda: OfflineAlgorithm(loss=of_labels_alone, judge_pairs=losses.judged_pairs),
            "no loss of this run reads a reference",
        ),
        (lambda: build_offline(c.DPO(beta=0.0)), "beta\n.*greater than 0"),
        (lambda: build_offline(c.DPO(label_smoothing=0.5)), "label_smoothing\n.*less than 0.5"),
        (
            lambda: build_offline(c.DPO(form="ipo", label_smoothing=0.1)),
            "form=ipo has no smoothing",
        ),
        (
            lambda: build_offline(c.KTO(desirable_weight=-1.0)),
            "desirable_weight\n.*greater than or equal to 0",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(build, message):
    with pytest.raises(ValueError, match=message):
        build()
