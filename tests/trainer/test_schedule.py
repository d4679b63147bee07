"""The table of the schedule: which policy generates which batch, also after a resume."""

import pytest

from jaxrl_llm.trainer.schedule import work_of_step

LONGEST = 10


def table(staleness, *, part=0, first=1, last=5, begun=()):
    """Lines of the schedule. `3+4` is batch 3 with 4 tokens a response; `3` goes to its end."""
    known, lines = dict(begun), []
    for step in range(first, last + 1):
        line = work_of_step(step, known, staleness=staleness, part=part, longest=LONGEST)
        known |= {work.batch: work.begun for work in line}
        del known[step]
        words = [f"{w.batch}" if w.ends else f"{w.batch}+{w.tokens}" for w in line]
        lines.append(f"step {step} policy {step - 1}: {' '.join(words)}")
    return lines


@pytest.mark.parametrize(
    ("staleness", "part", "expected"),
    [
        (0, 0, ["1", "2", "3", "4", "5"]),
        (1, 0, ["1 2", "3", "4", "5", "6"]),
        (2, 0, ["1 2 3", "4", "5", "6", "7"]),
        (1, 4, ["1 2+4", "2 3+4", "3 4+4", "4 5+4", "5 6+4"]),
        (2, 4, ["1 2+4 3+4", "2 3+4 4+4", "3 4+4 5+4", "4 5+4 6+4", "5 6+4 7+4"]),
        # Two parts are a whole response, so the batch of a step is there before it begins.
        (2, 5, ["1 2+5 3+5", "2 3 4+5", "4 5+5", "5 6+5", "6 7+5"]),
    ],
)
def test_the_table(staleness, part, expected):
    lines = [f"step {i} policy {i - 1}: {words}" for i, words in enumerate(expected, start=1)]
    assert table(staleness, part=part) == lines


@pytest.mark.parametrize("part", [0, 4])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_resume_goes_on_with_the_same_table(staleness, part):
    """A checkpoint after step 3 has the batches that were begun."""
    whole = table(staleness, part=part, last=6)
    begun = {batch: max(0, batch - 1 - staleness) for batch in range(4, 4 + staleness)}
    assert table(staleness, part=part, first=4, last=6, begun=begun) == whole[3:]


def test_a_resume_without_batches_begins_all_of_them_under_its_policy():
    assert table(2, part=4, first=4) == [
        "step 4 policy 3: 4 5+4 6+4",
        "step 5 policy 4: 5 6+4 7+4",
    ]
    line = work_of_step(4, {}, staleness=2, part=4, longest=LONGEST)
    assert [work.begun for work in line] == [3, 3, 3]
    assert table(1, first=4) == ["step 4 policy 3: 4 5", "step 5 policy 4: 6"]


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("part", [0, 3])
def test_every_batch_is_whole_at_its_step_and_never_older_than_allowed(staleness, part):
    tokens, known, ended = {}, {}, set()
    for step in range(1, 12):
        for work in work_of_step(step, known, staleness=staleness, part=part, longest=LONGEST):
            known[work.batch] = work.begun
            tokens[work.batch] = tokens.get(work.batch, 0) + work.tokens
            ended |= {work.batch} if work.ends else set()
            assert work.batch - 1 - work.begun <= staleness
        assert step in ended and tokens[step] == LONGEST
        del known[step]
