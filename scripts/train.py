"""Train a model: python scripts/train.py --config=configs/ppo.py [--config.key=value ...]

The same as `jaxrl train`; --help lists the flags.
"""

from jaxrl_llm.launch.main import run

if __name__ == "__main__":
    run("train")
