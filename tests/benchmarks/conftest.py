"""Import the benchmarks from scripts/, as the commands do: the package does not hold them."""

import gc
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """Benchmarks collect garbage after each case. What other tests left is not gone through."""
    gc.freeze()
    yield
    gc.unfreeze()
