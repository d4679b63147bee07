"""What a start says of its settings, and the warnings for values of tiny models."""

from dataclasses import replace

import pytest

from jaxrl_llm import config as c
from jaxrl_llm.trainer.shown_settings import settings_line, warnings_of

SIZE = 500_000_000
PATHS = [name for name in c.packaged_configs() if c.open_config(name).actor.path]
PRETRAINED = [name for name in c.packaged_configs() if name.endswith("_pretrained")]


def with_model(name: str, **changes) -> c.Config:
    config = c.open_config(name)
    config = replace(config, actor=replace(config.actor, path="MODEL", hf_config={}))
    return c.apply_overrides(config, changes)


def keys_warned_of(config: c.Config, *, on_cpu: bool = True) -> list[str]:
    """The key of each warning."""
    lines = warnings_of(config, SIZE, on_cpu=on_cpu)
    assert all(line.startswith("warning: config.") and "\n" not in line for line in lines)
    return [line.removeprefix("warning: config.").split()[0].split("=")[0] for line in lines]


RATE, LENGTH = "actor.optimizer.learning_rate", "data.max_response_length"


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("grpo", [RATE, LENGTH, "warmup", "reward.functions.0"]),
        ("ppo", [RATE, LENGTH, "warmup", "reward.functions.0"]),
        ("grpo_lora", [RATE, LENGTH, "warmup", "reward.functions.0"]),
        ("sft", [RATE]),
        ("dpo", [RATE, "warmup"]),
        ("reward_model", [RATE]),
    ],
)
def test_values_of_a_tiny_model_are_warned_of_with_a_pretrained_one(name, keys):
    config = with_model(name)
    assert keys_warned_of(config) == keys
    assert "actor.dtype" in keys_warned_of(config, on_cpu=False)
    assert warnings_of(config, 1_000_000, on_cpu=True) == []  # a tiny model with a path
    assert warnings_of(c.open_config(name), SIZE, on_cpu=True) == []  # random weights


@pytest.mark.parametrize("name", [*PRETRAINED, *PATHS])
def test_configs_of_pretrained_models_have_no_warning(name):
    assert len(PRETRAINED) == 5
    assert keys_warned_of(with_model(name), on_cpu=False) == []


def test_the_warned_value_is_followed_by_one_without_a_warning():
    (line,) = warnings_of(with_model("sft"), SIZE, on_cpu=True)
    key, _, value = line.rpartition(" --config.")[2].partition("=")
    assert keys_warned_of(with_model("sft", **{key: value})) == []


def test_adapters_with_the_rate_of_all_weights_are_warned_of():
    lora = {"actor.lora.rank": 32}
    assert keys_warned_of(with_model("grpo_pretrained", **lora)) == [RATE]
    assert keys_warned_of(with_model("grpo_pretrained", **lora, **{RATE: 2e-5})) == []


def test_the_rate_of_another_optimizer_is_its_own():
    muon = with_model("grpo_pretrained", **{"actor.optimizer.name": "muon", RATE: 0.02})
    assert keys_warned_of(muon) == []
    assert settings_line(muon).startswith("learning rate 0.02 constant after 10 steps; muon; ")


def test_long_rows_in_one_forward_pass_are_warned_of():
    rows = {"actor.micro_batch_tokens": 0}
    assert keys_warned_of(with_model("grpo_pretrained", **rows)) == ["actor.micro_batch_tokens"]
    few = {**rows, "actor.ppo_mini_batch_size": 8}  # 8 x 8 rows of 2,048 tokens
    assert keys_warned_of(with_model("grpo_pretrained", **few)) == []


def test_the_line_has_rate_batch_lengths_and_dtype():
    assert settings_line(c.open_config("grpo_pretrained")) == (
        "learning rate 1e-06 constant after 10 steps; all weights; 64 prompts x 8 a step, "
        "32 prompts an update; up to 1,024 + 1,024 tokens; bfloat16"
    )
    assert settings_line(with_model("sft_pretrained", **{"actor.lora.rank": 8})) == (
        "learning rate 1e-05 cosine after 20 steps; LoRA of rank 8; 64 rows a step; "
        "up to 1,024 + 1,024 tokens; bfloat16"
    )
