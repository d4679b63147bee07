"""Answer a prompt: python scripts/generate.py --model=HF_DIR_OR_CHECKPOINT --prompt="..."

Flags:
  --model=PATH            a Hugging Face directory, a checkpoint (RUN/checkpoints/global_step_N), or
                          a run's folder (its newest checkpoint)
  --prompt=TEXT           the prompt
  --temperature=1.0       0 is greedy
  --max_new_tokens=256    most tokens of an answer
  --top_p=1.0  --top_k=0  nucleus and top-k sampling, off by default
  --chat=auto             whether the prompt is a user's message: auto (where the model has a chat
                          template) | true | false
  --dtype=float32         of computation: float32 | bfloat16
  --n=1  --seed=0         number of answers; the same seed gives the same ones
"""

import sys
from typing import Literal

from jaxrl_llm.checkpoint.layout import find_model_path
from jaxrl_llm.config import ConfigError
from jaxrl_llm.launch.runtime import prepare, run_script
from jaxrl_llm.overrides import read_flags

FLAGS = {
    "model": str,
    "prompt": str,
    "temperature": float,
    "max_new_tokens": int,
    "top_p": float,
    "top_k": int,
    "chat": Literal["auto", "true", "false"],
    "dtype": Literal["float32", "bfloat16"],
    "n": int,
    "seed": int,
}


def main(argv: list[str]) -> None:
    """Check the flags and the path, then import jax, load the model and print its answers."""
    flags = read_flags(argv, FLAGS, required=("model", "prompt"))
    model_path = find_model_path(flags["model"])
    max_new_tokens, n = flags.get("max_new_tokens", 256), flags.get("n", 1)
    for name, value in (("max_new_tokens", max_new_tokens), ("n", n)):
        if value < 1:
            raise ConfigError(f"--{name}={value}: must be 1 or more")
    prepare()
    from jaxrl_llm.generation.sampler import SamplingParams
    from jaxrl_llm.trainer.serving import complete, open_model, read_prompt

    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=flags.get("temperature", 1.0),
        top_p=flags.get("top_p", 1.0),
        top_k=flags.get("top_k", 0),
    )
    model = open_model(model_path, dtype=flags.get("dtype", "float32"))
    chat = {"auto": None, "true": True, "false": False}[flags.get("chat", "auto")]
    prompt = read_prompt(flags["prompt"], model.tokenizer, chat=chat)
    for completion in complete(model, prompt, sampling, n=n, seed=flags.get("seed", 0)):
        print(completion.text)
        if not completion.finished:
            print(f"(cut after {len(completion.tokens)} tokens)", file=sys.stderr)


if __name__ == "__main__":
    run_script(main)
