"""DPO on human preferences between sentences of movie reviews, from random weights, on two cores.

python scripts/prepare_movies.py --output=movie_preferences
python scripts/train.py --config=configs/dpo_movies.py

The first command takes pairs from the package index (Hutto and Gilbert 2014), with a tokenizer of
2048 tokens: 18,010 for training and 1,998 held-out ones, of other sentences. A model of half a
million parameters begins at random weights, which are also its reference. So its implicit reward
(Rafailov et al. 2023, https://arxiv.org/abs/2305.18290) is all that it learns. The same data under
another algorithm: --config.algorithm=simpo (ipo, orpo, cpo, kto; kto takes the pairs apart), then
its own settings (orpo: --config.algorithm.beta=10).
"""

from jaxrl_llm import config as c

MODEL = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    return c.Config(
        name="dpo_movies",
        total_steps=300,
        save_every=150,
        data=c.DataConfig(
            tokenizer="movie_preferences/tokenizer",
            train_files=("movie_preferences/train.jsonl",),
            val_files=("movie_preferences/test.jsonl",),
            train_batch_size=64,
            max_prompt_length=12,
            max_response_length=52,
            truncation="right",  # one sentence in eight is longer
        ),
        actor=c.ActorConfig(
            hf_config=MODEL,
            optimizer=c.OptimizerConfig(learning_rate=1e-3, schedule="linear", warmup_steps=20),
        ),
        algorithm=c.DPO(beta=0.1),
        validation=c.ValidationConfig(every=150),
    )
