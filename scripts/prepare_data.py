"""Fetch packaged data: python scripts/prepare_data.py movie_preferences --output=DIR

The same as `jaxrl prepare`; --help lists the flags.
"""

from jaxrl_llm.launch.main import run

if __name__ == "__main__":
    run("prepare")
