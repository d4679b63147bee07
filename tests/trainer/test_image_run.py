"""GRPO of a tiny model that sees: the sampler is the trainer, and a resume has the same bits."""

import math
from dataclasses import replace

import pytest
from safetensors.numpy import load_file
from tiny_run import TinyRun, assert_same_bits, read_jsonl

from jaxrl_llm import config as c
from jaxrl_llm.checkpoint.huggingface import load_model_config
from jaxrl_llm.configs.grpo_vision import MODEL as SMOLVLM
from jaxrl_llm.configs.grpo_vision import get_config
from jaxrl_llm.evaluation.trained_model import export_checkpoint
from jaxrl_llm.models.config import QwenVision
from jaxrl_llm.trainer.loop import train

pytestmark = pytest.mark.nightly

# 48 x 48 pixels are nine tokens, in windows of four.
QWEN = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 100,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 104,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 8,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    },
    "tie_word_embeddings": True,
}


# Scores that differ within a group, so that every step moves the weights.
REWARD = """
def spelled(completions):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""


def config_of(folder, path: str = "", resume: str = "auto", train_vision: str = "all") -> c.Config:
    base = get_config()
    reward = folder.parent / "reward.py"
    reward.write_text(REWARD)
    return replace(
        base,
        name="qwen_vision",
        run_dir=str(folder / "run"),
        resume=resume,
        total_steps=2,
        save_every=1,
        warmup=None,
        data=replace(
            base.data,
            train_tasks=(c.CountDots(size=16),),
            val_tasks=(c.CountDots(size=4),),
            train_batch_size=2,
            max_image_tokens=9,
        ),
        actor=replace(
            base.actor,
            path=path,
            hf_config={} if path else QWEN,
            vision=c.VisionConfig(train=train_vision),
            ppo_mini_batch_size=2,
        ),
        reward=c.RewardConfig(functions=(c.Custom(path=f"{reward}:spelled"),)),
        checkpoint=replace(base.checkpoint, asynchronous=False, keep_latest=9),
    )


def test_a_run_with_images_resumes_exactly_and_opens_again(tmp_path):
    first = TinyRun(tmp_path / "first")
    last = train(config_of(first.folder)).checkpoint
    metrics = first.metrics()
    for step in (1, 2):
        assert metrics[step]["training/rollout_probs_diff_max"] < 1e-6
    again = TinyRun(tmp_path / "again")
    train(config_of(again.folder, resume=str(first.step_path(1))))
    assert_same_bits(again.weights(2), first.weights(2))

    model = export_checkpoint(last, tmp_path / "model")
    vision = load_model_config(model, images=True).vision
    assert isinstance(vision, QwenVision) and vision.window_size == 32
    # The folder is trained on, with its encoder frozen, and with adapters.
    frozen = TinyRun(tmp_path / "frozen")
    config = config_of(frozen.folder, path=str(model), train_vision="none")
    train(config)
    before, after = frozen.weights(0), frozen.weights(2)
    moved = {name for name in before if (before[name] != after[name]).any()}
    of_actor = {name for name in moved if name.startswith("actor")}
    assert of_actor and not [name for name in of_actor if "vision" in name]
    adapted = TinyRun(tmp_path / "adapted")
    lora = c.LoraConfig(rank=2, alpha=4.0)
    config = replace(config, run_dir=str(adapted.run_dir), actor=replace(config.actor, lora=lora))
    last = train(config).checkpoint
    assert adapted.metrics()[2]["training/rollout_probs_diff_max"] < 1e-6
    merged = export_checkpoint(last, tmp_path / "merged")
    old, new = (load_file(path / "model.safetensors") for path in (model, merged))
    changed = {name for name in old if (old[name] != new[name]).any()}
    assert old.keys() == new.keys() and changed
    assert all("language_model.layers" in name and "_proj" in name for name in changed)


# The reward of prompts whose text begins with an even number: equal for all answers.
SOME_VARY = """
def varied(completions, prompts):
    even = [int(text.split(">")[-1].split("=")[0]) % 2 == 0 for text in prompts]
    return [0.0 if e else sum(map(ord, text)) % 7 / 7 for e, text in zip(even, completions)]
"""


@pytest.mark.parametrize("waits", ["filtered", "ahead"])
def test_batches_that_wait_keep_their_images(tmp_path, waits):
    """The sampler read the images before the batch waited, and the trainer reads them after."""
    first, again = TinyRun(tmp_path / "first"), TinyRun(tmp_path / "again")
    config = config_of(first.folder)
    (tmp_path / "varied.py").write_text(SOME_VARY)
    slow = replace(config.actor.optimizer, learning_rate=1e-6)  # an older policy is nearly the same
    config = replace(config, actor=replace(config.actor, optimizer=slow))
    if waits == "ahead":
        config = replace(config, max_staleness=1)
    else:
        groups = c.FilterGroupsConfig(enable=True)
        config = replace(
            config,
            rollout=replace(config.rollout, filter_groups=groups),
            reward=c.RewardConfig(functions=(c.Custom(path=f"{tmp_path}/varied.py:varied"),)),
        )
    train(config)
    metrics = first.metrics()
    for step in (1, 2):
        assert metrics[step]["training/rollout_probs_diff_max"] < 1e-4
    if waits == "filtered":
        rounds = sum(metrics[step]["train/num_gen_batches"] for step in (1, 2))
        assert rounds > 2 and metrics[1]["frac_reward_zero_std"] > 0
    resume = str(first.step_path(1))
    train(replace(config, run_dir=str(again.run_dir), resume=resume))
    assert_same_bits(again.weights(2), first.weights(2))


@pytest.mark.parametrize(
    ("model", "sampler"), [(QWEN, "strict"), (SMOLVLM, "strict"), (QWEN, "float8")]
)
def test_other_samplers_see_the_same_images(tmp_path, model, sampler):
    """Strict log-probs are the trainer's bit for bit. In float8 only the decoder is rounded."""
    first = TinyRun(tmp_path / "first")
    config = replace(config_of(first.folder), total_steps=1)
    config = replace(config, actor=replace(config.actor, hf_config=model))
    if sampler == "strict":
        config = replace(config, exact="strict")
    else:
        config = replace(config, rollout=replace(config.rollout, quantization="float8"))
    train(config)
    most = first.metrics()[1]["training/rollout_probs_diff_max"]
    assert most == 0 if sampler == "strict" else 0 < most < 0.05


def test_a_model_learns_what_it_sees(tmp_path):
    """Counts one or two dots from random weights. A blind model has a loss of ln 2 on the answer.

    The end follows for certain, and the loss is the mean over both tokens.
    """
    (tmp_path / "run").mkdir()
    config = config_of(tmp_path / "run")
    rope = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 3, 3]}
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    wider = QWEN | {
        "text_config": QWEN["text_config"]
        | sizes
        | {"num_key_value_heads": 4, "initializer_range": 0.06, "rope_parameters": rope},
        "vision_config": QWEN["vision_config"] | sizes | {"num_heads": 4, "out_hidden_size": 64},
    }
    config = replace(
        config,
        total_steps=120,
        save_every=0,
        algorithm=c.SFT(),
        rollout=c.RolloutConfig(),
        reward=c.RewardConfig(),
        data=replace(
            config.data,
            train_tasks=(c.CountDots(most=2, size=4000, space=8000),),
            val_tasks=(),
            train_batch_size=32,
        ),
        actor=replace(
            config.actor,
            hf_config=wider,
            ppo_mini_batch_size=32,
            optimizer=c.OptimizerConfig(learning_rate=1e-3),
        ),
    )
    train(config)
    rows = read_jsonl(tmp_path / "run" / "run" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[60] > math.log(2) / 2
    assert sum(losses[-5:]) / 5 < 0.75 * math.log(2) / 2
