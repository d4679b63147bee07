"""Memory and time of a step before there are GPUs: python scripts/plan.py --config=configs/ppo.py

The same as `jaxrl plan`; --help lists the flags.
"""

from jaxrl_llm.launch.main import run

if __name__ == "__main__":
    run("plan")
