"""A run of a 0.5B model with random weights, to time placements on two GPUs.

python scripts/train.py --config=scripts/benchmarks/placed_run.py --config.placement.rollout=1

`ALGORITHM=ppo` in the environment takes PPO with a critic of the same shape instead of GRPO.
"""

import os

from jaxrl_llm import config as c

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
PROMPTS = 64


def get_config() -> c.Config:
    """The run: 64 prompts of 8 samples, responses of 512 tokens, one update a step."""
    optimizer = c.OptimizerConfig(learning_rate=1e-6)
    model = {
        "hf_config": MODEL,
        "optimizer": optimizer,
        "dtype": "bfloat16",
        "scan_layers": True,
        "remat": "projections",
        "micro_batch_tokens": 9216,
    }
    ppo = os.environ.get("ALGORITHM") == "ppo"
    return c.Config(
        name="placed",
        total_steps=8,
        save_every=0,
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(c.ChainSum(num_terms=3, num_digits=1),),
            train_batch_size=PROMPTS,
            max_prompt_length=6,
            max_response_length=512,
        ),
        actor=c.ActorConfig(ppo_mini_batch_size=PROMPTS, **model),
        critic=c.CriticConfig(**model),
        rollout=c.RolloutConfig(n=8, num_slots=512),
        algorithm=c.PPO() if ppo else c.GRPO(use_kl_loss=False),
        reward=c.RewardConfig(functions=(c.ExactAnswer(extract="whole"),)),
    )
