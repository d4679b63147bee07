"""The tiny model of the tests. A test that needs other sizes changes only those."""

from dataclasses import replace
from typing import Any

from jaxrl_llm.models.base import ModelConfig

# As config.json of a Hugging Face directory gives it.
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def model_config(**changes: Any) -> ModelConfig:
    """The same model as our own record, with `changes`."""
    config = ModelConfig(
        family="qwen2",
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        attention_bias=True,
        tie_word_embeddings=True,
    )
    return replace(config, **changes)
