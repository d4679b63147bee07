"""A run of a 0.5B model with random weights, to time placements on two GPUs.

python scripts/train.py --config=scripts/benchmarks/placed_run.py --config.placement.rollout=1

`--config.algorithm=ppo` takes PPO with a critic of the same shape instead of GRPO.
"""

from jaxrl_llm import config as c
from jaxrl_llm.models.families import to_hf_config
from jaxrl_llm.models.shapes import SHAPES

PROMPTS = 64


def get_config() -> c.Config:
    """The run: 64 prompts of 8 samples, responses of 512 tokens, one update a step."""
    optimizer = c.OptimizerConfig(learning_rate=1e-6)
    model = {
        "hf_config": to_hf_config(SHAPES["qwen2.5-0.5b"]),
        "optimizer": optimizer,
        "dtype": "bfloat16",
        "scan_layers": True,
        "remat": "projections",
        "micro_batch_tokens": 9216,
    }
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
        algorithm=c.GRPO(use_kl_loss=False),
        reward=c.RewardConfig(functions=(c.ExactAnswer(extract="whole"),)),
    )
