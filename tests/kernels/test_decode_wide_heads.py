"""Decode attention with heads of 256, whose queries are columns: the interpreted kernel."""

import pytest
from test_decode_attention import Case, assert_close

WIDE = dict(G=2, H=256)


def test_slots_of_wide_heads():
    """The last one sees nothing. Splits of a schedule without shared prompts."""
    case = Case([0, 1, 0], [70, 64, 0], [1, 70, 0], **WIDE)
    assert_close(case.run(schedule=case.schedule(slots_per_prompt=1)), case.answer())


@pytest.mark.slow
def test_a_window_and_a_soft_cap():
    case = Case([0, 1], [128, 70], [1, 100], window=90, K=2, **WIDE)
    assert_close(case.run(softcap=0.7), case.answer(0.7))


def test_what_needs_queries_as_rows_is_refused():
    with pytest.raises(ValueError, match="takes 16; use 'xla'"):
        Case([0], [4], [4], G=17, H=256).run()
    case = Case([0, 0], [4, 4], [4, 4], **WIDE)
    with pytest.raises(ValueError, match="slots_per_prompt=1"):
        case.run(schedule=case.schedule(slots_per_prompt=2))
