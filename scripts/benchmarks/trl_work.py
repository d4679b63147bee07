"""A GRPO run of ours as work for TRL's GRPOTrainer: same prompts in the same order, same settings.

A setting that TRL cannot follow is refused, never ignored. These differences remain:

- TRL adds 1e-4 to a group's standard deviation, we add 1e-6; the smallest that a right-or-wrong
  reward of eight samples can have is 0.35.
- Both compute in bfloat16 over float32 weights, TRL by torch's autocast, which leaves what it adds
  up between layers in float32 as well. Our reference model is stored in bfloat16, TRL's in float32.
- transformers gives the embedding of the padding token no gradient from where it is read
  (`padding_idx`). A model that pads with a token that it also reads is trained without that part.
- The random numbers of the samplers.
"""

import inspect
from pathlib import Path
from typing import Any

from jaxrl_llm.config import GRPO, Config, ConfigError
from jaxrl_llm.data.loader import PromptLoader
from jaxrl_llm.data.run_data import load_run_prompts, train_batches, train_sources
from jaxrl_llm.plan.models import find_tokenizer
from jaxrl_llm.references import load
from jaxrl_llm.rewards.graders import path_and_settings
from jaxrl_llm.tokenizer import Tokenizer

REWARD_FIELDS = ("solution_str", "ground_truth")

# The only value of each key that both trainers interpret alike. TRL shuffles the samples of an
# iteration into mini-batches, its warm-up begins at a rate of 0, and its weight decay spares norms
# and biases.
ALIKE: dict[str, Any] = {
    "algorithm.entropy_coef": 0.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.rollout_is": None,
    "algorithm.rollout_rs": None,
    "algorithm.bypass_mode": False,
    "algorithm.loss_scale": None,
    "actor.param_dtype": "float32",
    "actor.shuffle": True,
    "actor.optimizer.schedule": "constant",
    "actor.optimizer.warmup_steps": 0,
    "actor.optimizer.weight_decay": 0.0,
    "actor.optimizer.moment_dtype": "float32",
    "rollout.stop_token_ids": (),
    "rollout.quantization": "none",
    "rollout.filter_groups.enable": False,
    "reward.model": None,
    "reward.weights": (),
    "phases": (),
    "teacher": None,
    "warmup": None,
}
LOSS_TYPES = {
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
    "token-mean": "bnpo",
}


def trl_work(config: Config) -> dict[str, Any]:
    """Make what peers/trl_grpo.py reads: `trl_setup`, the stop tokens, every prompt in order.

    Raises what `trl_setup` raises.
    """
    setup = trl_setup(config)
    tokenizer = find_tokenizer(config.data.tokenizer, config.actor)
    return setup | {"stop_ids": sorted(tokenizer.stop_ids), "rows": _rows(config, tokenizer)}


def trl_setup(config: Config) -> dict[str, Any]:
    """The model, the reward function, GRPOConfig's arguments, and optimizer steps an iteration.

    Raises ConfigError for a config that TRL cannot run alike, naming the key and what works.
    """
    algorithm = _check_alike(config)
    return {
        "model": config.actor.path,
        "updates": _updates(config),
        "reward": _reward(config),
        "settings": _settings(config, algorithm),
    }


def _check_alike(config: Config) -> GRPO:
    """The algorithm's settings. ConfigError for what TRL cannot run alike."""
    if type(config.algorithm) is not GRPO:
        raise ConfigError(
            f"config.algorithm={config.algorithm.label}: TRL's GRPOTrainer has no such run; grpo "
            "works"
        )
    for key, wanted in ALIKE.items():
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        if value != wanted:
            raise ConfigError(
                f"config.{key}={value}: TRL's GRPOTrainer has no such run; {wanted!r} works"
            )
    settings = config.algorithm
    if settings.use_kl_loss and settings.kl_loss_type != "k3_unclamped":
        raise ConfigError(
            f"config.algorithm.kl_loss_type={settings.kl_loss_type}: TRL's KL is "
            "k3_unclamped; without one, use_kl_loss=false"
        )
    if not config.actor.path:
        raise ConfigError("config.actor.path is empty: TRL loads a Hugging Face directory")
    if config.mesh.num_devices != 1:
        raise ConfigError("config.mesh has several devices: the comparison is of one; drop it")
    return settings


def _settings(config: Config, algorithm: GRPO) -> dict[str, Any]:
    """Every argument of GRPOConfig that the result depends on, defaults included."""
    actor, rollout, optimizer = config.actor, config.rollout, config.actor.optimizer
    samples = config.data.train_batch_size * rollout.n
    mini_batch = actor.ppo_mini_batch_size * rollout.n
    micro_batch = actor.micro_batch_size or mini_batch
    loss = algorithm.loss_aggregation
    if loss not in LOSS_TYPES or (loss == "token-mean" and micro_batch != mini_batch):
        raise ConfigError(
            f"config.algorithm.loss_aggregation={loss}: TRL has it for no gradient "
            "accumulation, or not at all; seq-mean-token-mean works"
        )
    return {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": mini_batch // micro_batch,
        "steps_per_generation": samples // micro_batch,
        "num_iterations": actor.ppo_epochs,
        "num_generations": rollout.n,
        "max_steps": config.total_steps * _updates(config),
        "max_completion_length": config.data.max_response_length,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p or None,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": optimizer.b1,
        "adam_beta2": optimizer.b2,
        "adam_epsilon": optimizer.eps,
        "weight_decay": 0.0,
        "max_grad_norm": optimizer.max_grad_norm,
        "loss_type": LOSS_TYPES[loss],
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "delta": algorithm.clip_c,  # a bound on the ratio: it bites where the advantage is < 0
        "beta": algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        "use_bias_correction_kl": False,  # no ratio on the KL
        "scale_rewards": "group" if algorithm.norm_adv_by_std else "none",
        "shuffle_dataset": False,
        "bf16": actor.dtype == "bfloat16",
        "gradient_checkpointing": actor.remat != "none",
        "seed": config.seed,
    }


def _updates(config: Config) -> int:
    """Optimizer steps an iteration."""
    mini_batches = config.data.train_batch_size // config.actor.ppo_mini_batch_size
    return mini_batches * config.actor.ppo_epochs


def _reward(config: Config) -> dict[str, Any]:
    """The reward function by its file, which TRL's Python can load without this package."""
    if len(config.reward.functions) != 1:
        raise ConfigError("config.reward.functions: the comparison takes one function; name one")
    path, settings = path_and_settings(config.reward.functions[0])
    function = load(path)
    parameters = inspect.signature(function).parameters.values()
    asked = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    if asked != REWARD_FIELDS:
        raise ConfigError(
            f"config.reward.functions: {path} asks for ({', '.join(asked)}); the comparison gives "
            f"({', '.join(REWARD_FIELDS)})"
        )
    return {
        "file": str(Path(inspect.getfile(function)).resolve()),
        "function": function.__name__,
        "settings": settings,
    }


def _rows(config: Config, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The prompts of every iteration, one after the other, as our loader gives them."""
    prompts = load_run_prompts(config, train_sources(config), tokenizer, None)
    batches = train_batches(config, prompts)
    if not isinstance(batches, PromptLoader):
        raise ConfigError(
            "the order of the prompts depends on their scores, so TRL cannot be given the same: "
            "drop config.data.priority"
        )
    rows = []
    for _ in range(config.total_steps):
        for prompt in next(batches):
            rows.append(
                {
                    "prompt": prompt.text if prompt.messages is None else list(prompt.messages),
                    "token_ids": list(prompt.token_ids),
                    "ground_truth": prompt.ground_truth,
                }
            )
    batches.close()
    return rows
