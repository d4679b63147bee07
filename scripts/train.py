"""Train a model: python scripts/train.py --config=configs/ppo.py [--config.key=value ...]

Flags:
  --config=FILE          a file with get_config()
  --config.a.b=VALUE     override any key of it, e.g. --config.total_steps=10
  --devices=N            split the CPU into N devices, to try a mesh on a laptop

Starting again with the same --config.run_dir goes on from its last checkpoint.
"""

from jaxrl_llm.launch.runtime import run_script, start
from jaxrl_llm.overrides import config_from_arguments


def main(argv: list[str]) -> int:
    """Read the config, check it, and only then import jax and train."""
    config, flags = config_from_arguments(argv, flags={"devices": int})
    config = start(config, num_cpu_devices=flags.get("devices", 0))
    from jaxrl_llm.trainer.report import print_summary
    from jaxrl_llm.trainer.run import train

    summary = train(config)
    print_summary(summary, config)
    return 130 if summary.interrupted else 0


if __name__ == "__main__":
    run_script(main)
