"""GRPO and TRL's GRPOTrainer on the same prompts: reward curves and times of several seeds.

python scripts/compare_trl.py --config=configs/grpo_smollm2_trl.py --seeds=[1,2,3] --output=c.jsonl

Each run is a process of its own, ours and TRL's in turn. Settings come from the config; what TRL
cannot do alike is refused. Records are appended to the output as they come; then a table of all
that the file holds goes to stdout. The exit code is 1 when a run failed.

Flags:
  --config=FILE            a GRPO config with an actor.path, and --config.a.b=VALUE as in train.py
  --output=FILE            the records, JSON lines; begun by an earlier call or not
  --seeds=[1,2,3]          seeds of the prompts' order and the samplers; [] only prints the table
  --sides=[ours,trl]       sides to run
  --peer_python=PATH       the Python that has TRL; else this one
  --work_folder=FOLDER     run directories and logs; else runs/compare_trl
  --time_limit_s=1800      time limit of one run
  --window=10              last steps whose rewards the table averages
"""

from pathlib import Path

from jaxrl_llm.launch.command_line import Parser, read_config
from jaxrl_llm.launch.main import run
from jaxrl_llm.launch.runtime import prepare


def main(argv: list[str]) -> int:
    """Run what was asked for, one process at a time, and print the table."""
    parser = Parser(__doc__ or "", takes_config=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", default="[1,2,3]")
    parser.add_argument("--sides", default="[ours,trl]")
    parser.add_argument("--peer_python")
    parser.add_argument("--work_folder", type=Path, default=Path("runs/compare_trl"))
    parser.add_argument("--time_limit_s", type=float, default=1800.0)
    parser.add_argument("--window", type=int, default=10)
    config, flags = read_config(argv, parser)
    prepare(num_cpu_devices=1)  # the accelerator is for the processes that are started
    from benchmarks.against_trl import Comparison, table

    comparison = Comparison(
        config,
        output=flags.output,
        work_folder=flags.work_folder,
        peer_python=flags.peer_python,
        time_limit_s=flags.time_limit_s,
    )
    failed = comparison.run([int(seed) for seed in _list(flags.seeds)], _list(flags.sides))
    print("\n".join(table(flags.output, flags.window)))
    return 1 if failed else 0


def _list(text: str) -> list[str]:
    """The entries of `[a,b]`."""
    return [entry.strip() for entry in text.strip("[]").split(",") if entry.strip()]


if __name__ == "__main__":
    run(main)
