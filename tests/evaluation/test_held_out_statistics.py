"""pass@k against counting, intervals against the normal distribution."""

import itertools

import numpy as np
import pytest

from jaxrl_llm.evaluation.held_out_statistics import interval_metrics, pass_at_k


@pytest.mark.parametrize(
    ("right", "n", "k"), [(0, 4, 2), (1, 4, 2), (3, 5, 3), (4, 8, 4), (2, 2, 1)]
)
def test_pass_at_k_counts_the_draws_with_a_right_sample(right, n, k):
    samples = [True] * right + [False] * (n - right)
    draws = [any(draw) for draw in itertools.combinations(samples, k)]
    assert pass_at_k(right, n, k) == pytest.approx(np.mean(draws))


def test_the_names_and_means_of_each_source():
    sources = ["a"] * 8 + ["b"] * 8
    right = np.array([1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], bool)
    found = interval_metrics(sources, right, 8)
    assert found["val-aux/a/acc/pass@2"] == pytest.approx(1 / 4)
    assert found["val-aux/a/acc/pass@4"] == pytest.approx(1 / 2)
    assert found["val-aux/b/acc/pass@2"] == 1.0
    ends = {
        f"{name}/{end}"
        for name in ("mean@8", "pass@2", "pass@4", "best@8")
        for end in ("low", "high")
    }
    names = ends | {"pass@2", "pass@4"}
    assert found.keys() == {f"val-aux/{source}/acc/{name}" for source in "ab" for name in names}
    assert interval_metrics(["a"] * 3, np.ones(3, bool), 1).keys() == {
        "val-aux/a/acc/mean@1/low",
        "val-aux/a/acc/mean@1/high",
    }


def test_an_interval_is_that_of_the_mean():
    """Of 2,000 prompts with one sample each, half right: 0.5 ± 1.96 standard errors."""
    right = np.arange(2000) % 2 == 0
    found = interval_metrics(["a"] * 2000, right, 1)
    error = 1.96 * 0.5 / np.sqrt(2000)
    assert found["val-aux/a/acc/mean@1/low"] == pytest.approx(0.5 - error, abs=0.003)
    assert found["val-aux/a/acc/mean@1/high"] == pytest.approx(0.5 + error, abs=0.003)


def test_samples_of_a_prompt_stay_together():
    """Ten samples of a prompt that agree say no more than one: the interval is not narrower."""
    right = np.repeat(np.arange(50) % 2 == 0, 10)
    found = interval_metrics(["a"] * 500, right, 10)
    width = found["val-aux/a/acc/mean@10/high"] - found["val-aux/a/acc/mean@10/low"]
    assert width == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(50), rel=0.15)
