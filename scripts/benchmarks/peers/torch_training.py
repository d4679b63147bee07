"""The peer of training: a Hugging Face model in torch, eager and with torch.compile.

Reads the work as JSON from stdin and prints a JSON object a case; scripts/benchmark.py training
--baseline runs it. bf16 parameters and moments, fused AdamW, scaled-dot-product attention. The loss
is the policy gradient of the tokens after the prompt, over whole logits, as trainers in torch do.
Uneven rows are padded to the longest.
"""

# pyright: reportMissingImports=false

import gc
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from typing import Any

try:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as missing:
    sys.exit(f"{missing}: pip install torch transformers, or name a Python with --peer_python")

WARMUP = 2


def main() -> None:
    work = json.load(sys.stdin)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    # Compiling takes longer on a CPU than the rest of a test.
    ways = (False, True) if device == "cuda" else (False,)
    for case in work["cases"]:
        for compiled in ways:
            peer = "torch_compile" if compiled else "torch_eager"
            result = {"peer": peer, "case": case["case"]}
            try:
                result |= measure(work, case, compiled, device)
            except (RuntimeError, ValueError) as error:
                result["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(json.dumps(result), flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            torch.compiler.reset()


def measure(work: dict[str, Any], case: dict[str, Any], compiled: bool, device: str) -> Any:
    """Seconds of each repeat, peak bytes and versions."""
    hf_config = dict(work["hf_config"])
    config = AutoConfig.for_model(hf_config.pop("model_type"), **hf_config)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    update = case["kind"] == "update"
    model.train(update)
    if work["remat"] and update:
        settings = {"use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    step = make_step(model, torch.compile(model) if compiled else model, work, case, device)
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(WARMUP):
        step()
    seconds = []
    for _ in range(work["repeats"]):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - start)
    result: dict[str, Any] = {"seconds": seconds}
    if device == "cuda":
        result["memory_bytes"] = torch.cuda.max_memory_allocated()
    names = ("torch", "transformers")
    return result | {"versions": {name: importlib.metadata.version(name) for name in names}}


def make_step(
    model: Any, forward: Any, work: dict[str, Any], case: dict[str, Any], device: str
) -> Callable[[], Any]:
    """An update, or a pass that gives log-probs, on random full or padded rows."""
    lengths = torch.tensor(case["lengths"], device=device)
    rows, longest, prompt = len(case["lengths"]), max(case["lengths"]), case["prompt_length"]
    vocab_size = work["hf_config"]["vocab_size"]
    tokens = torch.randint(0, vocab_size, (rows, longest), device=device)
    # Position t predicts token t + 1: the response, up to each row's length.
    position = torch.arange(1, longest, device=device)
    mask = (position >= prompt) & (position < lengths[:, None])
    weights = torch.randn(rows, longest - 1, device=device) * mask

    def logprobs() -> Any:
        logits = forward(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(-1)

    if case["kind"] != "update":

        def score() -> Any:
            with torch.no_grad():
                return logprobs()

        return score
    fused = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=work["learning_rate"], fused=fused)

    def update() -> Any:
        loss = -(logprobs() * weights).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return update


if __name__ == "__main__":
    main()
