"""The peer of generation: vLLM on the same prompts and response lengths, random weights.

Reads the work as JSON from stdin and prints a JSON object a case; scripts/benchmark.py generation
--baseline runs it. The prefill is in the time, and so are log-probs of the sampled tokens.
"""

# pyright: reportMissingImports=false

import importlib.metadata
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import numpy as np
    from vllm import LLM, SamplingParams
except ImportError as missing:
    sys.exit(f"{missing}: pip install vllm, or name a Python that has it with --peer_python")

MEMORY_SHARE = 0.88
MOST_SEQUENCES = 1024
FIRST_ID = 10  # below are special tokens


def main() -> None:
    work = json.load(sys.stdin)
    longest = max(case["prompt_length"] + max(case["limits"]) for case in work["cases"])
    with tempfile.TemporaryDirectory() as folder:
        config = work["hf_config"] | {"torch_dtype": "bfloat16"}
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            gpu_memory_utilization=MEMORY_SHARE,
            max_model_len=longest,
            max_num_seqs=MOST_SEQUENCES,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )
        for case in work["cases"]:
            result: dict[str, Any] = {"peer": "vllm", "case": case["case"]}
            try:
                result["seconds"] = measure(engine, case, work)
                result["versions"] = {"vllm": importlib.metadata.version("vllm")}
            except (RuntimeError, ValueError) as error:
                result["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(json.dumps(result), flush=True)


def measure(engine: Any, case: dict[str, Any], work: dict[str, Any]) -> list[float]:
    """Seconds of each repeat, after a warm-up; other prompts each time, so no cache helps."""
    rng = np.random.default_rng(0)
    vocab_size = work["hf_config"]["vocab_size"]
    seconds = []
    for _ in range(1 + work["repeats"]):
        shape = (case["prompts"], case["prompt_length"])
        prompts = rng.integers(FIRST_ID, vocab_size - 1000, shape).tolist()
        inputs = [{"prompt_token_ids": p} for p in prompts for _ in range(case["samples"])]
        sampling = [
            SamplingParams(
                temperature=1.0, max_tokens=limit, ignore_eos=True, detokenize=False, logprobs=0
            )
            for limit in case["limits"]
        ]
        start = time.perf_counter()
        answers = engine.generate(inputs, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        counts = tuple(len(answer.outputs[0].token_ids) for answer in answers)
        if counts != tuple(case["limits"]):
            raise RuntimeError("responses do not have the lengths that were asked for")
    return seconds[1:]


if __name__ == "__main__":
    main()
