"""Look for damage in the checkpoints of a run: python scripts/verify.py RUN

The same as `jaxrl verify`; --help lists the flags.
"""

from jaxrl_llm.launch.main import run

if __name__ == "__main__":
    run("verify")
