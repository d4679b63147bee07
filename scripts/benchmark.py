"""Measure speed: python scripts/benchmark.py generation|training|attention|rl_step|layout_switch

Random weights of a named shape; a correctness check first, then a warm-up, then the median of the
repeats. A JSON line a case goes to stdout, a table to stderr. See docs/performance.md.

Flags:
  --shape=NAME[,NAME]      tiny | qwen2.5-0.5b | -1.5b | -7b | -14b | -32b | llama-3.1-8b | -70b |
                           llama-3.2-1b | qwen3-4b | qwen3-30b-a3b | gpt-oss-20b, or the path of
                           a Hugging Face folder or config.json: its sizes, random weights
  --workload=NAME[,NAME]   generation: fixed, rl_mix, prefill, lengths
                           training: update, logprob, values, mix, lengths
                           attention: dense, packed, decode
                           rl_step: ppo, grpo, grpo_lora, grpo_lora_apart (docs/lora.md)
  --lengths=FILE           of generation and training: your own lengths in tokens, a line
                           "PROMPT,RESPONSE" a sample; with --groups=PxN, N lines share a prompt
  --batch=B[,B]            rows of generation (1,64), rows x tokens of training and attention
  --prompt=512  --response=512   tokens of a prompt and of a response
  --groups=128x8           prompts and samples of each: rl_mix, mix and rl_step
  --head_dim=N             of attention's heads, instead of the shape's
  --window=TOKENS          of attention's dense rows
  --cache=float8           the dtype of attention's decode caches; else bfloat16
  --repeats=3              timed runs
  --baseline               also measure the peer: cuDNN and XLA, torch, vLLM
  --peer_python=PATH       the Python that has the peer's packages; else this one
  --json=FILE              append the JSON lines to FILE as well
  --devices=N              split the CPU into N devices
  --compile_cache=FOLDER   keep compiled programs there, for the next time
  --profile=FOLDER         run each case once more under the profiler: its largest kernels, and the
                           trace in FOLDER; rl_step one trace a stage
  --compiler_option=NAME=VALUE   of XLA for the measured programs; may be repeated
  --config.KEY=VALUE       any key of a run's config, e.g. --config.actor.remat=full or
                           --config.mesh.fsdp=4
The exit code is 1 when a case failed.
"""

import contextlib
import tempfile

from benchmarks.options import read_options
from jaxrl_llm.launch.main import run
from jaxrl_llm.launch.runtime import cache_short_programs, enable_compile_cache, prepare


def main(argv: list[str]) -> int:
    """Check the flags, run the peers, and only then import jax and measure."""
    options = read_options(argv)
    from benchmarks.baseline import run_peers

    peers = run_peers(options) if options.baseline else []
    prepare(num_cpu_devices=options.devices)
    with contextlib.ExitStack() as stack:
        # rl_step needs one: its programs are compiled ahead, side by side, and found there.
        folder = options.compile_cache or stack.enter_context(tempfile.TemporaryDirectory())
        enable_compile_cache(str(folder))
        cache_short_programs()
        from benchmarks.command import run_command

        return run_command(options, peers)


if __name__ == "__main__":
    run(main)
