"""Write a checkpoint as a Hugging Face directory.

python scripts/export_hf.py --checkpoint=RUN/checkpoints/global_step_N --output=OUT

`AutoModelForCausalLM.from_pretrained(OUT)` opens what it writes: config.json, safetensors, the
tokenizer with its chat template, generation_config.json, and a model card with the run's facts.

Flags:
  --checkpoint=PATH        a checkpoint, or a run's folder (its newest checkpoint)
  --output=DIR             the directory to write
  --role=actor             actor | critic | reward | reference | teacher; a critic and a reward
                           model are written as sequence classification with one label
  --dtype=...              float32 | bfloat16 | float16; as stored unless given
  --max_shard_bytes=...    split the weights into files of at most this size (5 GB)
"""

from pathlib import Path
from typing import Literal

from jaxrl_llm.checkpoint.layout import find_checkpoint
from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch.runtime import prepare, run_script
from jaxrl_llm.overrides import read_flags

FLAGS = {
    "checkpoint": str,
    "output": str,
    "role": Literal["actor", "critic", "reward", "reference", "teacher"],
    "dtype": Literal["float32", "bfloat16", "float16"],
    "max_shard_bytes": int,
}


def main(argv: list[str]) -> None:
    """Check the flags and the path, then import jax and export."""
    flags = read_flags(argv, FLAGS, required=("checkpoint", "output"))
    checkpoint = find_checkpoint(flags.pop("checkpoint"))
    output = Path(flags.pop("output"))
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output={output} is a file; give a directory to write")
    if flags.get("max_shard_bytes", 1) < 1:
        raise ConfigError(f"--max_shard_bytes={flags['max_shard_bytes']}: must be 1 or more")
    prepare(num_cpu_devices=1)  # an export only copies: host memory is larger than a device's
    from jaxrl_llm.trainer.serving import export_checkpoint

    print(f"wrote {export_checkpoint(checkpoint, output, **flags)}")


if __name__ == "__main__":
    run_script(main)
