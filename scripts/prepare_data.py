"""Fetch packaged data: python scripts/prepare_data.py movie_preferences --output=DIR

The same as `jaxrl prepare`; --help lists the flags.
"""

from jaxrl_llm.launch.commands import prepare, run

if __name__ == "__main__":
    run(prepare)
