"""verl's published GSM8K run of PPO on Qwen2.5-0.5B-Instruct, which reached 56.7 % on the test set.

python scripts/train.py --config=configs/ppo_qwen2_5_0_5b_gsm8k.py

Source: the table of verl's docs/algo/baseline.md and the log that it names,
`gsm8k/Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log` of github.com/eric-haibin-lin/verl-data
(December 2024, one GPU). Every value that matters to learning is the one printed at its start;
micro-batch sizes are ours. 7,473 problems are 29 whole batches, so 15 epochs are 435 steps.

Needs a hub (or --config.actor.path=HF_DIR) and the data set as verl's
`examples/data_preprocess/gsm8k.py` writes it: ~/data/gsm8k/train.parquet and test.parquet. The
files of `jaxrl prepare data gsm8k --output=data/gsm8k` do as well:
--config.data.train_files=[data/gsm8k/train.jsonl] --config.data.val_files=[data/gsm8k/test.jsonl]
--config.data.prompt_style=chat
"""

from pathlib import Path

from jaxrl_llm import config as c

DATA = Path("~/data/gsm8k").expanduser()
STRICT = c.GSM8K(method="strict")
EPOCHS, BATCHES_AN_EPOCH = 15, 29


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    return c.Config(
        name="ppo_qwen2_5_0_5b_gsm8k",
        total_steps=EPOCHS * BATCHES_AN_EPOCH,
        save_every=100,
        data=c.DataConfig(
            train_files=(str(DATA / "train.parquet"),),
            val_files=(str(DATA / "test.parquet"),),
            train_batch_size=256,
            max_prompt_length=1024,
            max_response_length=512,
        ),
        actor=c.ActorConfig(
            path="Qwen/Qwen2.5-0.5B-Instruct",
            dtype="bfloat16",
            ppo_mini_batch_size=64,
            micro_batch_size=16,
            optimizer=c.OptimizerConfig(learning_rate=1e-6),
        ),
        critic=c.CriticConfig(
            dtype="bfloat16",
            micro_batch_size=16,
            optimizer=c.OptimizerConfig(learning_rate=1e-5),
        ),
        rollout=c.RolloutConfig(n=1),
        algorithm=c.PPO(use_kl_in_reward=True, kl_coef=0.001, entropy_coef=0.001),
        reward=c.RewardConfig(functions=(STRICT,)),
        validation=c.ValidationConfig(every=10, grader=STRICT),
    )
