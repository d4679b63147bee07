"""GRPO beside TRL's GRPOTrainer on the same prompts: reward curves and times of several seeds.

python scripts/compare_trl.py --config=configs/grpo_smollm2.py --seeds=[1,2,3] --output=curves.jsonl

Each run is a process of its own, ours and TRL's in turn. Settings come from the config; what TRL
cannot do alike is refused. Records are appended to the output as they come; then two tables of all
that the file holds go to stdout. The exit code is 1 when a run failed.

Flags:
  --config=FILE            a GRPO config with an actor.path, and --config.a.b=VALUE as in train.py
  --output=FILE            the records, JSON lines; begun by an earlier call or not
  --seeds=[1,2,3]          of the prompts' order and the samplers; [] only prints the tables
  --sides=[ours,trl]       which to run
  --peer_python=PATH       the Python that has TRL; else this one
  --work_folder=FOLDER     run directories and logs; else runs/compare_trl
  --time_limit_s=1800      of one run
  --window=10              steps that a row of the table of rewards averages
"""

from pathlib import Path

from jaxrl_llm.launch.runtime import prepare, run_script
from jaxrl_llm.overrides import config_from_arguments, require_flags

FLAGS = {
    "output": str,
    "seeds": tuple[int, ...],
    "sides": tuple[str, ...],
    "peer_python": str,
    "work_folder": str,
    "time_limit_s": float,
    "window": int,
}


def main(argv: list[str]) -> int:
    """Run what was asked for, one process at a time, and print the tables."""
    config, flags = config_from_arguments(argv, FLAGS)
    require_flags(flags, ["output"])
    prepare(num_cpu_devices=1)  # the accelerator is for the processes that are started
    from jaxrl_llm.benchmarks.compare_trl import Comparison
    from jaxrl_llm.benchmarks.learning_curves import SIDES, read_curves, reward_table, time_table

    output = Path(flags["output"])
    comparison = Comparison(
        config,
        output=output,
        work_folder=Path(flags.get("work_folder", "runs/compare_trl")),
        peer_python=flags.get("peer_python"),
        time_limit_s=flags.get("time_limit_s", 1800.0),
    )
    failed = comparison.run(flags.get("seeds", (1, 2, 3)), flags.get("sides", SIDES))
    curves = read_curves(output)
    print("\n".join(reward_table(curves, flags.get("window", 10))) + "\n")
    print("\n".join(time_table(curves)))
    return 1 if failed else 0


if __name__ == "__main__":
    run_script(main)
