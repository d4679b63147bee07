"""Every stored step is predicted within the planner's limits."""

import pytest

from benchmarks.planned_steps import BEGIN, END, PAGE, compared_steps

STEP, PEAK = 0.20, 0.10  # largest errors


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_each_measured_step_and_peak_is_predicted(every):
    compared = list(compared_steps(every))
    assert len(compared) >= 60 // every
    for each in compared:
        assert abs(each.step_error) <= STEP, (each.row["id"], each.step_error)
        peak = each.peak_error
        assert peak is None or abs(peak) <= PEAK, (each.row["id"], peak)
    page = PAGE.read_text()
    table = page[page.index(BEGIN) : page.index(END)]
    for each in compared:
        row = next(line for line in table.splitlines() if f"| {each.row['id']} |" in line)
        assert f"| {each.planned.seconds:.2f} |" in row, "write the table again: --write"
