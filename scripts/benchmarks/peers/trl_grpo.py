"""The peer of configs/grpo_smollm2_trl.py: TRL's GRPOTrainer, generating with transformers.

Reads the work as JSON from stdin (scripts/benchmarks/trl_work.py writes it) and prints a JSON
object a line: first the settings that the trainer ended up with, then one an iteration with its
mean reward and its seconds. scripts/compare_trl.py runs it. Nothing of jaxrl_llm is imported; the
reward function is loaded from its file. Stops when TRL sees other tokens than we do.

float32 weights under bfloat16 autocast. No gradient checkpointing unless asked for, no log, nothing
saved. TRL 1.16; pip install trl.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
except ImportError as missing:
    sys.exit(f"{missing}: pip install trl, or name a Python that has it with --peer_python")

VERSIONS = ("trl", "transformers", "accelerate", "torch")


def main() -> None:
    started = time.perf_counter()
    out = sys.stdout
    # Only our lines go to stdout, whatever the libraries print.
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        train(json.load(sys.stdin), folder, out, started)


def train(work: dict[str, Any], folder: str, out: Any, started: float) -> None:
    rewards = Rewards(work["reward"])
    on_gpu = torch.cuda.is_available()
    settings = GRPOConfig(
        output_dir=folder,
        use_cpu=not on_gpu,
        model_init_kwargs={"dtype": "float32"},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **work["settings"],
    )
    trainer = GRPOTrainer(
        model=work["model"],
        reward_funcs=rewards,
        args=settings,
        train_dataset=Dataset.from_list(work["rows"]),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
    )
    check_tokens(trainer, work)
    ready = time.perf_counter()
    head = {"peer": "trl", "setup_seconds": ready - started, "settings": effective(trainer)}
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    report(out, head | {"versions": versions})
    trainer.add_callback(Iterations(work["updates"], rewards, out, torch.cuda if on_gpu else None))
    trainer.train()
    if on_gpu:
        memory = torch.cuda.max_memory_allocated()
        report(out, {"peer": "trl", "memory_bytes": memory})


class Rewards:
    """The reward function of ours as TRL calls one; keeps the mean of each call."""

    __name__ = "reward"

    def __init__(self, reward: dict[str, Any]):
        spec = importlib.util.spec_from_file_location("reward", reward["file"])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._fn: Callable[..., Any] = getattr(module, reward["function"])
        self._settings = reward["settings"]
        self.means: list[float] = []

    def __call__(
        self, completions: list[Any], ground_truth: list[Any], **_: Any
    ) -> list[float | None]:
        scores = [
            self._score(answer if isinstance(answer, str) else answer[0]["content"], truth)
            for answer, truth in zip(completions, ground_truth, strict=True)
        ]
        self.means.append(sum(scores) / len(scores))
        return list(scores)

    def _score(self, answer: str, truth: Any) -> float:
        score = self._fn(answer, truth, **self._settings)
        return float(score["score"] if isinstance(score, dict) else score)


class Iterations(TrainerCallback):
    """Reports each iteration: all optimizer steps on one generation."""

    def __init__(self, updates: int, rewards: Rewards, out: Any, device: Any):
        self._updates, self._rewards, self._out, self._device = updates, rewards, out, device
        self._last = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates:
            return
        if self._device is not None:
            self._device.synchronize()
        now, step = time.perf_counter(), state.global_step // self._updates
        assert len(self._rewards.means) == step, "TRL generated more or less than once a step"
        record = {"step": step, "reward": self._rewards.means[-1], "seconds": now - self._last}
        report(self._out, {"peer": "trl"} | record)
        self._last = now


def check_tokens(trainer: Any, work: dict[str, Any]) -> None:
    """Stop unless TRL's chat template and stop tokens are ours."""
    if sorted(trainer.eos_token_ids) != work["stop_ids"]:
        sys.exit(f"TRL stops at the tokens {trainer.eos_token_ids}, we at {work['stop_ids']}")
    ids, *_ = trainer._tokenize_prompts([row["prompt"] for row in work["rows"]])
    for row, tokens in zip(work["rows"], ids, strict=True):
        if list(tokens) != row["token_ids"]:
            sys.exit(f"TRL reads {row['prompt']} as {list(tokens)}, we as {row['token_ids']}")


def effective(trainer: Any) -> dict[str, Any]:
    """Read the trainer's settings, from its parts where there are such."""
    args, sampling, model = trainer.args, trainer.generation_config, trainer.model
    names = """per_device_train_batch_size gradient_accumulation_steps steps_per_generation
        generation_batch_size num_iterations num_generations max_steps learning_rate
        adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm loss_type epsilon epsilon_high
        delta beta use_bias_correction_kl scale_rewards importance_sampling_level entropy_coef
        top_entropy_quantile mask_truncated_completions off_policy_mask_threshold disable_dropout
        shuffle_dataset use_vllm use_transformers_continuous_batching bf16 tf32
        gradient_checkpointing seed""".split()
    sampler = "do_sample temperature top_p top_k min_p max_new_tokens repetition_penalty".split()
    settings = {name: getattr(args, name) for name in names}
    settings |= {f"generation.{name}": getattr(sampling, name) for name in sampler}
    settings |= {name: getattr(args, name).value for name in ("optim", "lr_scheduler_type")}
    settings["attention"] = model.config._attn_implementation
    settings["weights"] = sorted({str(p.dtype) for p in model.parameters()})
    settings["reference"] = trainer.ref_model is not None
    return settings


def report(out: Any, record: dict[str, Any]) -> None:
    print(json.dumps(record), file=out, flush=True)


if __name__ == "__main__":
    main()
