"""Sinks and soft caps in decode attention: XLA and the interpreted kernel against float64."""

import numpy as np
import pytest
from compiled import compiled
from test_decode_attention import Case, assert_close, case_fields

from jaxrl_llm.kernels.decode_attention import prefix_decode_attention_reference

SINKS = dict(G=3, sinks=(0.5, 8.0, -30.0))


def test_sinks():
    """A slot that sees nothing gives 0, where its sink has all of the weight."""
    case = Case([0, 1, 0], [128, 70, 0], [1, 100, 0], window=90, **SINKS)
    assert_close(case.run(), case.answer())
    finite = Case(**{**case_fields(case), "garbage": 300.0})
    assert_close(finite.run("xla"), finite.answer())
    sinks = np.float32(case.sinks)
    reference = compiled(prefix_decode_attention_reference, case.inputs(), window=90, sinks=sinks)
    np.testing.assert_allclose(reference, case.answer(), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_sinks_of_splits_and_shared_prompts():
    case = Case([0, 1, 0], [128, 70, 128], [1, 0, 128], **SINKS)
    assert_close(case.run(num_splits=2), case.answer())
    assert_close(case.run(schedule=case.schedule(2)), case.answer())


@pytest.mark.parametrize("G", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_soft_cap(G):
    """Queries as columns, and as rows."""
    case, cap = Case([0, 1, 0], [128, 70, 0], [1, 100, 0], window=90, G=G), 0.7
    assert_close(case.run(softcap=cap), case.answer(cap))
    finite = Case(**{**case_fields(case), "garbage": 300.0})
    assert_close(finite.run("xla", softcap=cap), finite.answer(cap))
    reference = compiled(prefix_decode_attention_reference, case.inputs(), window=90, softcap=cap)
    np.testing.assert_allclose(reference, case.answer(cap), atol=1e-5, rtol=1e-4)
