"""scripts/train.py with two devices in process 0 and one in each of the others."""

import os
import runpy
from pathlib import Path

if __name__ == "__main__":
    first = os.environ["JAXRL_PROCESS_ID"] == "0"
    os.environ["JAX_NUM_CPU_DEVICES"] = "2" if first else "1"
    train = Path(__file__).parents[1] / "scripts" / "train.py"
    runpy.run_path(str(train), run_name="__main__")
