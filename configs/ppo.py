"""PPO with a critic on sums of three digits, from random weights, on two CPU cores.

python scripts/train.py --config=configs/ppo.py

A model of one million parameters learns the format by a short supervised warm-up. PPO (Schulman et
al. 2017, https://arxiv.org/abs/1707.06347) then takes it from about 47 % to over 90 % of held-out
problems. It has GAE, a KL penalty against the warmed-up model, and the exact answer as reward.
"""

from jaxrl_llm import config as c

CHAIN_SUM = c.ChainSum(num_terms=3, num_digits=1)
MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,  # at this width 0.02 starves the layers, and RL is slow to move them
}
# A critic of its own, an eighth of the actor: what it must tell is simpler than the answer.
CRITIC = MODEL | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    return c.Config(
        name="ppo",
        total_steps=200,
        save_every=50,
        data=c.DataConfig(
            tokenizer="char",
            train_tasks=(CHAIN_SUM,),
            val_tasks=(CHAIN_SUM,),
            train_batch_size=128,
            max_prompt_length=6,
            max_response_length=4,
        ),
        actor=c.ActorConfig(
            hf_config=MODEL,
            ppo_mini_batch_size=64,
            optimizer=c.OptimizerConfig(
                learning_rate=2e-4, schedule="linear", warmup_steps=10, b2=0.95
            ),
        ),
        critic=c.CriticConfig(hf_config=CRITIC, optimizer=c.OptimizerConfig(learning_rate=1e-3)),
        rollout=c.RolloutConfig(n=4),
        algorithm=c.PPO(lam=0.95, use_kl_in_reward=True, kl_coef=0.01),
        reward=c.RewardConfig(functions=(c.ExactAnswer(extract="whole"),)),
        validation=c.ValidationConfig(every=20, grader=c.ExactAnswer()),
        warmup=c.SupervisedConfig(
            steps=300,
            batch_size=256,
            eval_every=10,
            stop_at=0.42,
            optimizer=c.OptimizerConfig(learning_rate=1e-3, schedule="cosine"),
        ),
    )
