"""Tests that run programs in the sandbox are skipped where this machine has none."""

import pytest

from jaxrl_llm.rewards.code import prepare


def unavailable() -> str:
    try:
        prepare()
    except ValueError as error:
        return str(error)
    return ""


REASON = unavailable()
needs_sandbox = pytest.mark.skipif(bool(REASON), reason=REASON or "has namespaces")
