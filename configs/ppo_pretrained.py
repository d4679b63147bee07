"""PPO with a critic on a pretrained model of 0.5B to 8B and your own problems, on one GPU or more.

python scripts/train.py --config=configs/ppo_pretrained.py --config.actor.path=MODEL
  --config.data.train_files=[problems.jsonl]

Rates, batches and the KL penalty come from verl's published GSM8K run, which is
`ppo_qwen2_5_0_5b_gsm8k.py`: one sample of each of 256 prompts, and four optimizer steps. The critic
begins as a copy of the policy. Reward and prompts are as in `grpo_pretrained.py`. LoRA for both:
--config.actor.lora.rank=32 --config.critic.lora.rank=32, with higher learning rates:
--config.actor.optimizer.learning_rate=2e-5 --config.critic.optimizer.learning_rate=2e-4.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo_pretrained import DATA, POLICY


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    return c.Config(
        name="ppo_pretrained",
        total_steps=200,
        save_every=50,
        data=replace(DATA, train_batch_size=256),
        actor=replace(POLICY, ppo_mini_batch_size=64),
        critic=c.CriticConfig(
            dtype=POLICY.dtype,
            remat=POLICY.remat,
            micro_batch_tokens=POLICY.micro_batch_tokens,
            optimizer=c.OptimizerConfig(learning_rate=1e-5, warmup_steps=10),
        ),
        algorithm=c.PPO(use_kl_in_reward=True, kl_coef=0.001),
        reward=c.RewardConfig(functions=(c.ExactAnswer(),)),
    )
