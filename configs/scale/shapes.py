"""Sizes of published models, for runs that are planned before their weights are there."""

from typing import Any


def qwen2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """The config.json of a Qwen2.5 model."""
    return {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
    }


QWEN2_5_7B = qwen2(3584, 18_944, 28, 28, 4)
QWEN2_5_32B = qwen2(5120, 27_648, 64, 40, 8)
QWEN2_5_72B = qwen2(8192, 29_568, 80, 64, 8)
QWEN2_5_1_5B = qwen2(1536, 8960, 28, 12, 2) | {"vocab_size": 151_936, "tie_word_embeddings": True}
LLAMA_3_1_70B = qwen2(8192, 28_672, 80, 64, 8) | {"model_type": "llama", "vocab_size": 128_256}
