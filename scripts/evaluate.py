"""Held-out accuracy of a model: python scripts/evaluate.py --model=PATH --config=configs/ppo.py

The same as `jaxrl evaluate`; --help lists the flags.
"""

from jaxrl_llm.launch.main import run

if __name__ == "__main__":
    run("evaluate")
