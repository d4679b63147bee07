"""Held-out accuracy of a model: python scripts/evaluate.py --model=PATH --config=configs/ppo.py

Answers and grades the config's validation data as the run's own validation does: its sampling, its
grader, its metric names. The model brings its own tokenizer.

Flags:
  --model=PATH           a Hugging Face directory, a checkpoint (RUN/checkpoints/global_step_N), or
                         a run's folder (its newest checkpoint)
  --config=FILE          whose data.val_files, data.val_tasks and validation are used
  --config.a.b=VALUE     override any key of it, e.g. --config.validation.n=4
  --output=FILE          also write the metrics as JSON
  --devices=N            split the CPU into N devices, to try a mesh on a laptop
"""

import json
from dataclasses import replace
from pathlib import Path

from jaxrl_llm.checkpoint.layout import find_model_path
from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch.runtime import fit_mesh, join_processes, prepare, run_script
from jaxrl_llm.overrides import load_config, read_arguments, require_flags


def main(argv: list[str]) -> None:
    """Check flags, path and config, then import jax, evaluate and print."""
    arguments = read_arguments(argv, {"model": str, "output": str, "devices": int})
    flags = arguments.flags
    require_flags({"config": arguments.config_path, **flags}, ("config", "model"))
    model = find_model_path(flags["model"])
    # The model stands in for the config's own, whose folder need not be here.
    own = (("actor.path", model.path), ("data.tokenizer", ""))
    config = load_config(arguments.config_path or "", (*own, *arguments.overrides))
    if not config.data.val_files and not config.data.val_tasks:
        raise ConfigError(
            "config.data has no validation data: set --config.data.val_files=[FILE] or "
            "--config.data.val_tasks=[chain_sum]"
        )
    output = Path(flags["output"]) if flags.get("output") else None
    if output is not None and output.is_dir():
        raise ConfigError(f"--output={output} is a folder; give a file such as {output}/eval.json")
    prepare(num_cpu_devices=flags.get("devices", 0))
    join_processes()
    config = replace(config, mesh=fit_mesh(config.mesh))
    from jaxrl_llm.distributed.multihost import is_main
    from jaxrl_llm.trainer.serving import evaluate, validation_report

    report = validation_report(config, flags["model"], evaluate(config))
    if not is_main():
        return
    for name, value in report["metrics"].items():
        print(f"{name}  {value:.4f}")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)
