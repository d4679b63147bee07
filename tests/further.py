"""Cases of one test, of which the first run in the plain suite and the others at night."""

from collections.abc import Iterable
from typing import Any

import pytest


def further(cases: Iterable[Any], first: int = 1) -> list[Any]:
    """The cases for `parametrize`: those after the `first` ones are marked `nightly`."""
    listed = list(cases)
    return listed[:first] + [_later(case) for case in listed[first:]]


def _later(case: Any) -> Any:
    if hasattr(case, "marks"):
        return case._replace(marks=[*case.marks, pytest.mark.nightly])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)
