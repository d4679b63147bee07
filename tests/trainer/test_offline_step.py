"""The offline step: sums over completions, accumulation, packing, records that do not count."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from further import further
from tiny_iteration import random_params

from jaxrl_llm import config as c
from jaxrl_llm.algorithms.build import build_offline
from jaxrl_llm.algorithms.offline import OfflineAlgorithm
from jaxrl_llm.data.collating import collate_records, offline_records
from jaxrl_llm.data.formats import LabelledExample, PreferencePair, TokenExample
from jaxrl_llm.learner.forward import ForwardSettings, row_logprobs
from jaxrl_llm.learner.micro_batches import Packed, Padded
from jaxrl_llm.learner.offline_losses import RecordLoss, means
from jaxrl_llm.learner.train_step import accumulate
from jaxrl_llm.models.base import model_spec
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.types import OFFLINE_FIELDS

MODEL = ModelConfig(
    family="llama",
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)
B, LENGTH = 8, 10
SETTINGS = ForwardSettings()
SPECS = {kind: model_spec(MODEL, kind) for kind in ("causal_lm", "scalar")}
PARAMS = {k: random_params(s.params, seed=1, scale=0.3) for k, s in SPECS.items()}
ALGORITHMS = {
    "sft": build_offline(c.SFT()),
    "reward_model": build_offline(c.PairwiseRewardModel(center=0.1)),
    "reward_regression": build_offline(c.RewardRegression()),
    "dpo": build_offline(c.DPO(sft_coef=0.3)),
    "ipo": build_offline(c.IPO()),
    "kto": build_offline(c.KTO(undesirable_weight=1.5)),
    "orpo": build_offline(c.ORPO()),
    "simpo": build_offline(c.SimPO()),
    "cpo": build_offline(c.CPO()),
}
LIKE_DPO = ("ipo", "simpo", "cpo")  # a mean over pairs; DPO has one over tokens on top
SINGLE = ("sft", "reward_regression", "kto")  # one row a record


def example(rng, prompt):
    """A row of a given prompt, of any length, with holes in what is to be learned."""
    answer = rng.integers(2, 24, rng.integers(1, LENGTH - len(prompt) + 1))
    mask = (rng.random(len(answer)) < 0.8) | (np.arange(len(answer)) == 0)
    return TokenExample(
        token_ids=(*prompt, *map(int, answer)), loss_mask=(*[0] * len(prompt), *map(int, mask))
    )


def items(kind, rng, num):
    for i in range(num):
        prompt = tuple(map(int, rng.integers(2, 24, rng.integers(1, 5))))
        if kind == "preferences":
            chosen, rejected = example(rng, prompt), example(rng, prompt)
            yield PreferencePair(chosen=chosen, rejected=rejected, margin=0.1 * i)
        elif kind == "examples":
            yield example(rng, prompt)
        else:
            yield LabelledExample(completion=example(rng, prompt), label=float(i % 3 == 0))


def make_batch(algorithm, *, num=B, size=B, seed=0, length=LENGTH):
    rng = np.random.default_rng(seed)
    kind = algorithm.records
    number = kind.numbers[0] if kind.numbers else ""
    records = offline_records(list(items(kind.name, rng, num)), number=number)
    mismatched = "mismatched" in kind.groups
    batch = collate_records(records, length=length, pad_id=0, mismatched=mismatched, size=size)
    given = {
        name: np.asarray(rng.normal(-12, 2, max(num, size)), np.float32)
        for name in algorithm.reads
        if name in OFFLINE_FIELDS and getattr(batch, name) is None
    }
    return jax.tree.map(jnp.asarray, batch.replace(**given))


@functools.cache
def program(algorithm, micro_batches):
    spec = SPECS[algorithm.model_kind]
    loss = RecordLoss(algorithm=algorithm, spec=spec, settings=SETTINGS)

    @jax.jit
    def run(params, batch):
        grads, metrics = accumulate(
            loss,
            params,
            loss.inputs(batch),
            cast_ahead=SETTINGS.cast_ahead,
            micro_batches=micro_batches,
        )
        return grads, means(algorithm, metrics)

    return run


def gradients(algorithm, batch, micro_batches):
    return program(algorithm, micro_batches)(PARAMS[algorithm.model_kind], batch)


@jax.jit
def norms(grads, expected):
    """Of the difference, and of what is expected."""
    difference = jax.tree.map(jnp.subtract, grads, expected)
    return optax.tree.norm(difference), optax.tree.norm(expected)


def assert_same(found, expected):
    (grads, metrics), (expected_grads, expected_metrics) = found, expected
    difference, norm = norms(grads, expected_grads)
    assert difference <= 3e-6 * norm
    assert norm > 1e-3
    for name in expected_metrics.keys() - {"micro_batches", "row_use"}:
        np.testing.assert_allclose(
            metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize(
    "name",
    further(
        [
            pytest.param(name, marks=[pytest.mark.slow] if name in LIKE_DPO else [])
            for name in ALGORITHMS
        ],
        2,
    ),
)
def test_accumulation_equals_the_whole_batch(name):
    """The micro-batches hold very different numbers of tokens."""
    algorithm = ALGORITHMS[name]
    batch = make_batch(algorithm)
    whole = gradients(algorithm, batch, Padded())
    parts = gradients(algorithm, batch, Padded(num=4))
    assert_same(parts, whole)
    assert (whole[1]["micro_batches"], parts[1]["micro_batches"]) == (1, 4)


@pytest.mark.parametrize("name", further(SINGLE))
def test_packed_rows_equal_padded_ones(name):
    algorithm = ALGORITHMS[name]
    batch = make_batch(algorithm)
    packed = gradients(algorithm, batch, Packed(row_tokens=24))
    assert_same(packed, gradients(algorithm, batch, Padded()))
    assert 1 < packed[1]["micro_batches"] < B


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward_model"])
def test_records_of_weight_zero_and_padding_change_nothing(name):
    algorithm = ALGORITHMS[name]
    small = make_batch(algorithm)
    whole = gradients(algorithm, small, Padded())
    filled = make_batch(algorithm, size=B + 3, length=LENGTH + 3)
    reads = [n for n in algorithm.reads if n.startswith(("reference_", "baseline"))]
    same = {n: jnp.concatenate([getattr(small, n), jnp.full(3, 7.0)]) for n in reads}
    assert_same(gradients(algorithm, filled.replace(**same), Padded()), whole)


@pytest.mark.parametrize("name", ["loss", "record_loss", "nll_loss", "grad_norm", "learning_rate"])
def test_a_metric_does_not_replace_the_loss(name):
    """A metric record_loss was learned in place of the loss."""

    def loss(chosen_logprobs, rejected_logprobs):
        return rejected_logprobs - chosen_logprobs, {name: chosen_logprobs}

    algorithm = OfflineAlgorithm(loss=loss)
    with pytest.raises(ValueError, match=f"'{name}', which the trainer writes itself; take anoth"):
        gradients(algorithm, make_batch(algorithm), Padded())


def test_permuted_pairs_give_the_same_step():
    algorithm = ALGORITHMS["dpo"]
    batch = make_batch(algorithm)
    order = np.random.default_rng(1).permutation(B)
    permuted = jax.tree.map(lambda x: x[order], batch)
    assert_same(gradients(algorithm, permuted, Padded()), gradients(algorithm, batch, Padded()))


def test_supervised_loss_is_the_mean_over_the_tokens_that_are_to_be_learned():
    algorithm = ALGORITHMS["sft"]
    batch = make_batch(algorithm)
    logprobs = jax.jit(partial(row_logprobs, spec=SPECS["causal_lm"], settings=SETTINGS))(
        PARAMS["causal_lm"], batch.completion.tokens
    )
    mask = np.asarray(batch.completion.loss_mask)
    expected = -(np.asarray(logprobs, np.float64) * mask).sum() / mask.sum()
    _, metrics = gradients(algorithm, batch, Padded())
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


def test_dpo_by_hand_from_the_log_probs_of_whole_rows():
    algorithm = build_offline(c.DPO(beta=0.2))
    batch = make_batch(algorithm)
    run = jax.jit(partial(row_logprobs, spec=SPECS["causal_lm"], settings=SETTINGS))

    def completion(rows):
        logprobs = np.asarray(run(PARAMS["causal_lm"], rows.tokens), np.float64)
        return (logprobs * np.asarray(rows.loss_mask)).sum(axis=1)

    chosen, rejected = completion(batch.chosen), completion(batch.rejected)
    ratios = (
        chosen - np.asarray(batch.reference_chosen_logprobs),
        rejected - np.asarray(batch.reference_rejected_logprobs),
    )
    _, metrics = gradients(algorithm, batch, Padded())
    expected = np.log1p(np.exp(-0.2 * (ratios[0] - ratios[1]))).mean()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["logps/chosen"], chosen.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rewards/rejected"], 0.2 * ratios[1].mean(), rtol=1e-4)
    accuracy = (ratios[0] > ratios[1]).mean()
    np.testing.assert_allclose(metrics["rewards/accuracies"], accuracy, rtol=1e-6)


def test_held_out_sums_over_batches_are_the_means_of_all_records():
    """Two batches, the second not full, judged as one of all records is."""
    algorithm = ALGORITHMS["orpo"]
    spec = SPECS["causal_lm"]
    loss = RecordLoss(algorithm=algorithm, spec=spec, settings=SETTINGS)

    @jax.jit
    def sums(params, batch):
        return Padded(num=2).sum(partial(loss.sums, params), loss.inputs(batch))

    whole = make_batch(algorithm, num=6, size=6)
    parts = [jax.tree.map(lambda x: x[:4], whole), jax.tree.map(lambda x: x[2:], whole)]
    parts[1] = parts[1].replace(weights=jnp.array([0.0, 0.0, 1.0, 1.0]))
    found = [sums(PARAMS["causal_lm"], part) for part in parts]
    total = means(algorithm, {name: found[0][name] + found[1][name] for name in found[0]})
    _, expected = gradients(algorithm, whole, Padded())
    for name, value in total.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)
    assert total.keys() == expected.keys() - {"micro_batches", "row_use"}
