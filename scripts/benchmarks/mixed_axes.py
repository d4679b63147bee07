"""A small PPO run in float32, to compare mixes of mesh axes with one device.

python scripts/train.py --config=scripts/benchmarks/mixed_axes.py --config.run_dir=one
python scripts/train.py --config=scripts/benchmarks/mixed_axes.py --config.run_dir=two \\
  --config.mesh.fsdp=2 --config.mesh.tensor=2

Set JAX_DEFAULT_MATMUL_PRECISION=highest, and compare the lines of metrics.jsonl. Metrics that say
how the work was cut or how long it took differ. `--devices=4` splits a CPU into four devices.
docs/parallelism.md has the meshes that were compared, and the flags of the other kinds of runs.
"""

from pathlib import Path
from typing import Any

from jaxrl_llm import config as c

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


def digit_share(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """A reward that random weights get in part: the share of digits in the response."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def get_config() -> c.Config:
    """Three steps of rows of 1,024 tokens, with two updates each."""
    common: dict[str, Any] = {
        "optimizer": c.OptimizerConfig(learning_rate=1e-4),
        "scan_layers": True,
        "remat": "full",
        "micro_batch_tokens": 1024,
    }
    return c.Config(
        name="mixed_axes",
        total_steps=3,
        save_every=0,
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(c.ChainSum(num_terms=3, num_digits=1),),
            train_batch_size=32,
            max_prompt_length=6,
            max_response_length=64,
        ),
        actor=c.ActorConfig(hf_config=MODEL, ppo_mini_batch_size=16, **common),
        critic=c.CriticConfig(hf_config=MODEL, **common),
        rollout=c.RolloutConfig(n=4, num_slots=64),
        algorithm=c.PPO(use_kl_in_reward=True, kl_coef=0.01),
        reward=c.RewardConfig(functions=(c.Custom(path=f"{Path(__file__)}:digit_share"),)),
    )
