"""The peer of whole GRPO steps: TRL's GRPOTrainer, adapters by PEFT, generating with transformers.

Reads the work as JSON from stdin and prints a JSON object a case; `scripts/benchmark.py rl_step
--baseline` runs it. Random bf16 weights of the shape, random prompts and rewards, no KL. Each step
generates all samples, at full length, and makes one optimizer step on them. Of a model without
adapters weights and moments are bf16. TRL 1.16; pip install trl peft.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import gc
import importlib.metadata
import json
import os
import random
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        PreTrainedTokenizerFast,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer
except ImportError as missing:
    sys.exit(f"{missing}: pip install trl peft, or name a Python that has them with --peer_python")

VERSIONS = ("trl", "peft", "transformers", "torch")
PAD, END = 0, 1  # tokens that are in no prompt


def main() -> None:
    work, out = json.load(sys.stdin), sys.stdout
    for case in work["cases"]:
        result: dict[str, Any] = {"peer": "trl", "case": case["case"]}
        # Only our lines go to stdout, whatever the libraries print.
        with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
            try:
                result |= measure(work, case, folder)
            except (RuntimeError, ValueError) as error:
                result["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        print(json.dumps(result), file=out, flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def measure(work: dict[str, Any], case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Seconds of each repeat after a first step, peak bytes and versions."""
    on_gpu = torch.cuda.is_available()
    hf_config = dict(work["hf_config"])
    config = AutoConfig.for_model(hf_config.pop("model_type"), **hf_config)
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    samples, micro = case["prompts"] * case["samples"], case["micro_batch"]
    settings = GRPOConfig(
        output_dir=folder,
        use_cpu=not on_gpu,
        bf16=True,
        max_steps=work["repeats"] + 1,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        num_generations=case["samples"],
        max_completion_length=case["response"],
        generation_kwargs={"min_new_tokens": case["response"]},
        learning_rate=work["learning_rate"],
        gradient_checkpointing=case["remat"],
        beta=0.0,
        temperature=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    steps = Steps(case["samples"] * case["prompts"] * case["response"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=steps.reward,
        args=settings,
        train_dataset=Dataset.from_list(prompts(case, config.vocab_size, work["repeats"] + 1)),
        processing_class=tokenizer(config.vocab_size),
        peft_config=LoraConfig(**case["lora"]) if case["lora"] else None,
        callbacks=[steps],
    )
    trainer.train()
    return {
        "seconds": steps.seconds[1:],
        "memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
    }


def tokenizer(vocab_size: int) -> Any:
    """One word a token: `t5` is token 5."""
    words = {f"t{number}": number for number in range(vocab_size)}
    plain = Tokenizer(models.WordLevel(words, unk_token=f"t{PAD}"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token=f"t{PAD}", eos_token=f"t{END}", padding_side="left"
    )


def prompts(case: dict[str, Any], vocab_size: int, steps: int) -> list[dict[str, str]]:
    """Random prompts of one length for all steps."""
    rng = random.Random(0)

    def words() -> str:
        return " ".join(f"t{rng.randrange(END + 1, vocab_size)}" for _ in range(case["prompt"]))

    return [{"prompt": words()} for _ in range(case["prompts"] * steps)]


class Steps(TrainerCallback):
    """Random rewards, and the seconds of each step."""

    def __init__(self, tokens: int) -> None:
        self.seconds: list[float] = []
        self._tokens, self._rng, self._last = tokens, random.Random(0), 0.0

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        generated = sum(map(len, completion_ids))
        if generated != self._tokens:
            raise ValueError(f"generated {generated} tokens, and {self._tokens} were asked for")
        return [float(self._rng.random() < 0.5) for _ in completion_ids]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


if __name__ == "__main__":
    main()
