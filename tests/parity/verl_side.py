"""verl 0.9.1's core algorithms, imported or, where they are not installed, the tests skipped."""

from types import SimpleNamespace

import numpy as np
import pytest

REASON = (
    "verl is not installed: pip install -e '.[parity]' -c constraints.txt && "
    "pip install --no-deps verl==0.9.1 (its own pins of transformers contradict ours)"
)

pytest.importorskip("torch", reason=REASON)
core = pytest.importorskip("verl.trainer.ppo.core_algos", reason=REASON)
correction = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason=REASON)
algorithm = pytest.importorskip("verl.trainer.config.algorithm", reason=REASON)
actor = pytest.importorskip("verl.workers.config.actor", reason=REASON)

verl = SimpleNamespace(
    **vars(core)
    | vars(correction)
    | {
        "AlgoConfig": algorithm.AlgoConfig,
        "ActorConfig": actor.ActorConfig,
        "PolicyLossConfig": actor.PolicyLossConfig,
    }
)


def agrees(found, expected, tolerance: float = 1e-5) -> None:
    """Ours (jax) and verl's (torch) within 1e-5, absolute or of the size."""
    expected = np.asarray(expected.detach() if hasattr(expected, "detach") else expected)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=tolerance, atol=tolerance)
