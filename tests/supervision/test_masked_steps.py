"""Steps in which nothing is learned end the run, also with a reward model."""

import pytest

from jaxrl_llm.supervision.masked_steps import MaskedSteps, named_steps


def test_only_steps_in_a_row_without_any_sample_end_the_run() -> None:
    watch = MaskedSteps(most=2)
    for step, masked in enumerate([1.0, 0.99, 1.0, 0.0, 1.0], 1):
        watch.measured(step, None, {"reward/masked_frac": masked})
    with pytest.raises(ValueError, match="every sample of steps 5 to 6 was masked"):
        watch.measured(6, None, {"reward/masked_frac": 1.0})


def test_a_run_that_masks_nothing_goes_on() -> None:
    watch = MaskedSteps(most=1)
    assert watch.measured(1, None, {"critic/score/mean": 0.0}) == {}


def test_steps_are_named_by_the_first_and_the_last() -> None:
    """Dynamic sampling grades several times in one step."""
    assert named_steps([5, 5, 5]) == "step 5" and named_steps([5, 6, 7]) == "steps 5 to 7"
