"""GRPO that counts dots in drawn images, from random weights, on two CPU cores.

python scripts/train.py --config=configs/grpo_vision.py

An image encoder and a decoder of two layers each learn the format by a short supervised warm-up.
GRPO then takes them from less than 50 % of held-out images to over 90 %. docs/vision.md has the
curves. The encoder learns with the decoder.
"""

from dataclasses import replace

from jaxrl_llm import config as c
from jaxrl_llm.configs.grpo import get_config as grpo_config

DOTS = c.CountDots(space=20000)  # 48 x 48 pixels, 1 to 6 dots
MODEL = {
    "model_type": "smolvlm",
    "image_token_id": 100,
    "scale_factor": 2,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 104,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.06,
    },
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 48,
        "patch_size": 8,
    },
    "tie_word_embeddings": True,
}


def get_config() -> c.Config:
    """The run; every value can be overridden on the command line."""
    base = grpo_config()
    assert base.warmup is not None
    return replace(
        base,
        name="grpo_vision",
        total_steps=240,
        data=replace(
            base.data,
            train_tasks=(replace(DOTS, size=8000),),
            val_tasks=(replace(DOTS, size=256),),
            train_batch_size=32,
            max_prompt_length=16,
            max_response_length=2,
            max_images=1,
        ),
        actor=replace(
            base.actor,
            hf_config=MODEL,
            vision=c.VisionConfig(train="all"),
            ppo_mini_batch_size=32,
            micro_batch_tokens=264,  # the samples of a prompt share a row, and so its image
            optimizer=replace(base.actor.optimizer, learning_rate=5e-4),
        ),
        algorithm=c.GRPO(use_kl_loss=False),
        warmup=replace(base.warmup, steps=200, batch_size=64, eval_every=10, stop_at=0.42),
    )
