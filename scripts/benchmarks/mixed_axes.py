"""Small runs on mixes of mesh axes against the same run on one device.

python scripts/benchmarks/mixed_axes.py FOLDER
python scripts/benchmarks/mixed_axes.py FOLDER --cpu=4 --only=lora --steps=1

Every run takes the same steps from the same seed, in float32. The table has the largest relative
difference of a metric, of all steps. What says how the work was cut is left out. Four GPUs and
some 60 cores take three minutes; `--cpu=4` splits a CPU into four devices.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxrl_llm import config as c  # noqa: E402

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
HYBRID = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 8,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rms_norm_eps": 1e-3,
}
# Of each kind of run: the meshes of four devices, as overrides without "config.mesh.".
MESHES = {
    "ppo": (
        "fsdp=2 tensor=2",
        "pipeline=2 tensor=2",
        "fsdp=2 sequence=2",
        "data=2 pipeline=2",
        "sequence=2 tensor=2",
        "fsdp=4 generation.tensor=2",
    ),
    "lora": ("pipeline=2 fsdp=2", "fsdp=4", "pipeline=2 tensor=2", "sequence=4"),
    "lora over float8": ("pipeline=2 fsdp=2", "fsdp=2 tensor=2"),
    "experts": (
        "expert=4",
        "fsdp=2 expert=2",
        "pipeline=2 expert=2",
        "expert=2 sequence=2",
        "expert=2 tensor=2",
    ),
    "experts, lora over float8": ("expert=4", "pipeline=2 expert=2", "expert=2 tensor=2"),
    "hybrid": (
        "pipeline=2 fsdp=2",
        "fsdp=2 sequence=2",
        "pipeline=2 sequence=2",
        "pipeline=2 tensor=2",
        "fsdp=4",
    ),
}
# Metrics that say how a step's work was cut, or how long it took, or that are rounding alone.
# Those of routers are means over passes, and each mesh cuts other passes.
OF_LAYOUT = (
    "perf/",
    "timing",
    "rollout/",
    "rollout_corr/",
    "training/rollout_probs",
    "actor/router_",
)
ENDS = ("micro_batches", "row_use", "attention_balance", "pipeline_bubble")
SMALLEST = 1e-2  # what a difference is divided by at least
PRECISE = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def digit_share(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """A reward that random weights get in part: the share of digits in the response."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def config_of(kind: str, steps: int) -> c.Config:
    """The run of a kind on one device: rows of 1,024 tokens, two updates a step."""
    adapted: dict[str, Any] = {}
    if "lora" in kind:
        adapted["lora"] = c.LoraConfig(rank=8, alpha=16, merge="float8" not in kind)
    if "float8" in kind:
        adapted["base_dtype"] = "float8"
    model = MODEL | (EXPERTS if "experts" in kind else HYBRID if kind == "hybrid" else {})
    common: dict[str, Any] = {
        "optimizer": c.OptimizerConfig(learning_rate=1e-4),
        "scan_layers": True,
        "remat": "full",
        "micro_batch_tokens": 1024,
    }
    return c.Config(
        name="mixed_axes",
        total_steps=steps,
        save_every=0,
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(c.ChainSum(num_terms=3, num_digits=1),),
            train_batch_size=32,
            max_prompt_length=6,
            max_response_length=64,
        ),
        actor=c.ActorConfig(hf_config=model, ppo_mini_batch_size=16, **common, **adapted),
        critic=c.CriticConfig(hf_config=MODEL, **common),
        rollout=c.RolloutConfig(n=4, num_slots=64),
        algorithm=c.PPO(use_kl_in_reward=True, kl_coef=0.01) if kind == "ppo" else c.GRPO(),
        reward=c.RewardConfig(functions=(c.Custom(path=f"{Path(__file__)}:digit_share"),)),
    )


def train(folder: Path, kind: str, mesh: str, options: argparse.Namespace) -> Path:
    """The folder of a finished run on this mesh; an empty one is a single device."""
    file = folder / f"{kind}.json"
    file.write_text(c.to_json(config_of(kind, options.steps)))
    run = folder / f"{kind} {mesh or 'one'}".replace(" ", "_").replace(",", "")
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), f"--config={file}"]
    command += [f"--config.mesh.{size}" for size in mesh.split()]
    environment = os.environ | PRECISE | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if options.cpu:
        command.append(f"--devices={options.cpu if mesh else 1}")
    elif not mesh:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    with Path(f"{run}.log").open("w") as log:
        subprocess.run(
            [*command, f"--config.run_dir={run}"], env=environment, stdout=log, stderr=log
        )
    return run


def metrics(run: Path) -> list[dict[str, float]]:
    """The metrics of each step; none of a run that failed."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["training/global_step"] > 0]


def differences(found: Path, expected: Path) -> Iterator[tuple[float, str]]:
    """The relative difference of each metric and step, and the metric's name; infinite for NaN."""
    for one, other in zip(metrics(found), metrics(expected), strict=True):
        for name, value in other.items():
            if isinstance(value, int | float) and not name.startswith(OF_LAYOUT):
                if not name.endswith(ENDS):
                    gap = abs(one[name] - value) / max(abs(value), SMALLEST)
                    yield gap if math.isfinite(gap) else math.inf, name


def main() -> None:
    """Run all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a new folder for the runs")
    parser.add_argument("--cpu", type=int, default=0, help="split the CPU into so many devices")
    parser.add_argument("--only", default="", help="one kind: " + "; ".join(MESHES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=8, help="runs at a time")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True)
    kinds = [options.only] if options.only else list(MESHES)
    pairs = [(kind, mesh) for kind in kinds for mesh in ("", *MESHES[kind])]
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = list(pool.map(lambda pair: train(folder, pair[0], pair[1], options), pairs))
    finished = dict(zip(pairs, runs, strict=True))
    print("| run | mesh | largest difference | metric |\n|---|---|---|---|")
    failed = False
    for kind, mesh in (pair for pair in pairs if pair[1]):
        try:
            worst, name = max(differences(finished[kind, mesh], finished[kind, ""]))
        except (ValueError, KeyError) as error:
            failed, worst, name = True, float("nan"), f"failed: {error}"
        print(f"| {kind} | `{mesh.replace(' ', '` `')}` | {worst:.1e} | `{name}` |")
    sys.exit(failed)


if __name__ == "__main__":
    main()
