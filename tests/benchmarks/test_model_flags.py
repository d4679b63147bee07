"""The table of docs/my-model.md: the flags fit, and the figures are the planner's."""

import re

import pytest

from benchmarks.model_flags import (
    BEGIN,
    CONFIGS,
    END,
    FLAGS,
    MODELS,
    PAGE,
    flags_of,
    plan,
)
from jaxrl_llm.estimate.rates import GB

CELL = re.compile(r"([A-Z]): (\d+) GB, ([\d.]+) s")
NEAR = 0.1  # the page has a date, and the planner may be corrected after it
QUICK = "qwen2.5-0.5b"


@pytest.mark.parametrize(
    "shape", [s if s == QUICK else pytest.param(s, marks=pytest.mark.slow) for s in MODELS]
)
def test_the_flags_of_the_page_fit_with_the_memory_and_time_that_it_says(shape):
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    rows = [row for row in rows if row and row[0] == MODELS[shape]]
    assert [row[1] for row in rows] == ["1", "8"]
    for _, devices, *cells in rows:
        for name, cell in zip(CONFIGS, cells, strict=True):
            match = CELL.fullmatch(cell)
            assert match is not None, cell
            letter, memory, seconds = match.groups()
            planned = plan(shape, name, int(devices), flags_of(letter, name, int(devices)))
            assert planned.fits, (name, devices, letter)
            assert planned.peak / GB == pytest.approx(float(memory), rel=NEAR, abs=1)
            assert planned.seconds == pytest.approx(float(seconds), rel=NEAR, abs=0.1)


def test_the_page_explains_each_letter_and_config():
    text = PAGE.read_text()
    for letter, flags in FLAGS.items():
        assert f"\n| {letter} | " in text, letter
        for flag in flags:
            assert f"--config.{flag}" in text, flag
    for name in CONFIGS.values():
        assert f"| `{name}` |" in text
