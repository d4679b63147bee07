"""The config of a run at a shape, for the trainer's own code. No jax."""

from collections.abc import Sequence

from jaxrl_llm.config import (
    GRPO,
    PPO,
    ActorConfig,
    ChainSum,
    Config,
    CriticConfig,
    DataConfig,
    ExactAnswer,
    LoraConfig,
    MeshConfig,
    RewardConfig,
    RolloutConfig,
    apply_override,
    check,
)
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import to_hf_config


def run_config(
    model: ModelConfig,
    *,
    algorithm: str,
    lengths: tuple[int, int],
    groups: tuple[int, int],
    devices: int,
    overrides: Sequence[tuple[str, str]],
) -> Config:
    """A checked config of `groups` (prompts, samples) with `lengths` (prompt, response tokens).

    bf16 computation over float32 master weights. Raises ConfigError for an override that no run
    takes.
    """
    (num_prompts, samples), (prompt, response) = groups, lengths
    # Never read: validation asks for them, the benchmark draws its own tokens and rewards.
    tasks = (ChainSum(),)
    lora = LoraConfig(rank=16, alpha=32, merge=not algorithm.endswith("apart"))
    config = Config(
        name="benchmark",
        total_steps=1000,
        mesh=MeshConfig(fsdp=max(devices, 1)),
        data=DataConfig(
            tokenizer="char",
            train_batch_size=num_prompts,
            max_prompt_length=prompt,
            max_response_length=response,
            train_tasks=tasks,
            val_tasks=tasks,
        ),
        actor=ActorConfig(
            hf_config=to_hf_config(model),
            dtype="bfloat16",
            ppo_mini_batch_size=num_prompts,
            lora=lora if "lora" in algorithm else LoraConfig(),
        ),
        critic=CriticConfig(dtype="bfloat16"),
        rollout=RolloutConfig(n=samples),
        algorithm=GRPO() if algorithm.startswith("grpo") else PPO(),
        reward=RewardConfig(functions=(ExactAnswer(),)),
        exact="off",
        fuse_stages=False,
    )
    for key, text in overrides:
        config = apply_override(config, key, text)
    check(config)
    return config


def step_name(workload: str, config: Config) -> str:
    """The case of a whole step: its workload and sizes, as in `grpo_128x8_512+512`."""
    data = config.data
    lengths = f"{data.max_prompt_length}+{data.max_response_length}"
    return f"{workload}_{data.train_batch_size}x{config.rollout.n}_{lengths}"
