"""One line of a JSON lines file: what it takes, and what reads back."""

import json
import math

import numpy as np
import pytest

from jaxrl_llm.observability.jsonl import to_line


@pytest.mark.parametrize(
    ("other", "read"),
    # orjson takes the first only; Python's own json writes the other lines.
    [(0, 0), (2**70, 2**70), ("\ud800", "\ud800"), ({7: "seven"}, {"7": "seven"})],
)
def test_a_line_reads_back_what_was_written(other, read):
    values = np.random.default_rng(0).normal(size=200).astype(np.float32)
    values[3:6] = np.nan, np.inf, -np.inf
    entry = {"step": 1, "of": (1, None, True), "text": 'é "\n', "number": 0.1, "nan": math.nan}
    line = to_line(
        entry | {"values": values, "ids": np.arange(3), "one": values[0], "other": other}
    )
    assert line.endswith("\n") and line.count("\n") == 1
    found = json.loads(line)
    written = np.array([math.nan if x is None else x for x in found.pop("values")], np.float32)
    expected = np.where(np.isfinite(values), values, np.nan)
    np.testing.assert_array_equal(written, expected)
    assert np.float32(found.pop("one")) == values[0] and found.pop("ids") == [0, 1, 2]
    assert found.pop("other") == read
    assert found == {"step": 1, "of": [1, None, True], "text": 'é "\n', "number": 0.1, "nan": None}
