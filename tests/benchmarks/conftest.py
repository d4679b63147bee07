"""Import the benchmarks from scripts/, as the commands do: the package does not hold them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
