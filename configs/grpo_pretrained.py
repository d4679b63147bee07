"""GRPO on a pretrained model of 0.5B to 8B and your own problems, on one GPU or more.

python scripts/train.py --config=configs/grpo_pretrained.py --config.actor.path=MODEL
  --config.data.train_files=[problems.jsonl]

Values are the usual ones for an instruct model: bfloat16, a learning rate of 1e-6, eight samples of
a prompt (Shao et al. 2024, https://arxiv.org/abs/2402.03300), and no KL penalty, so no reference
model is loaded. A text prompt becomes a user's message. The reward compares the last number of a
completion with the row's ground_truth; another one is --config.reward.functions=[math_answer].
LoRA: --config.actor.lora.rank=32 --config.actor.optimizer.learning_rate=2e-5.
docs/my-model.md has the flags for six models on one and on eight GPUs.
"""

from jaxrl_llm import config as c

# Half of the rows of a step make an optimizer step. The longest row fits four times into a pass.
POLICY = c.ActorConfig(
    dtype="bfloat16",
    remat="projections",
    micro_batch_tokens=8192,
    ppo_mini_batch_size=32,
    optimizer=c.OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
)
DATA = c.DataConfig(
    prompt_style="chat",
    train_batch_size=64,
    max_prompt_length=1024,
    max_response_length=1024,
)


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    return c.Config(
        name="grpo_pretrained",
        total_steps=200,
        save_every=50,
        data=DATA,
        actor=POLICY,
        rollout=c.RolloutConfig(n=8),
        algorithm=c.GRPO(use_kl_loss=False),
        reward=c.RewardConfig(functions=(c.ExactAnswer(),)),
    )
