"""Measure this machine before a run: python scripts/doctor.py [--folder=DIR] [--json=FILE]

The same as `jaxrl doctor`; --help lists the flags.
"""

from jaxrl_llm.launch.main import run

if __name__ == "__main__":
    run("doctor")
