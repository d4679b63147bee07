"""What a start says of its settings: a line of them, and warnings for values of tiny models."""

from collections.abc import Iterator

from jaxrl_llm.config import (
    SFT,
    Config,
    ExactAnswer,
    PairwiseRewardModel,
    RewardRegression,
    is_offline,
)
from jaxrl_llm.plan.plan import Plan
from jaxrl_llm.typed_records.tree import as_text

PRETRAINED = 20e6  # parameters from which a model with a path is no tiny one of the examples
USUAL_RATE, SUPERVISED_RATE = 1e-6, 1e-5  # usual rates for all weights of a pretrained model
ADAPTER_FACTOR = 20.0  # a usual rate of adapters, relative to the rate of all weights
TOO_HIGH, TOO_LOW = 100.0, 0.1  # relative to the usual rate
SHORT = 16  # response tokens
WHOLE = 200_000  # tokens of a mini-batch that is one forward pass


def settings_line(config: Config) -> str:
    """Learning rate, batch, lengths and dtype in words."""
    actor, data = config.actor, config.data
    optimizer, lora = actor.optimizer, actor.lora
    what = "LoRA" if lora.path or not lora.rank else f"LoRA of rank {lora.rank}"
    warmup = f" after {optimizer.warmup_steps} steps" if optimizer.warmup_steps else ""
    batch = f"{data.train_batch_size:,} rows a step"
    if not is_offline(config):
        batch = f"{data.train_batch_size:,} prompts x {config.rollout.n} a step"
        batch += f", {actor.ppo_mini_batch_size:,} prompts an update"
    return "; ".join(
        [
            f"learning rate {optimizer.learning_rate:g} {as_text(optimizer.schedule)}{warmup}",
            *([] if optimizer.name == "adamw" else [as_text(optimizer.name)]),
            what if lora.enabled else "all weights",
            batch,
            f"up to {data.max_prompt_length:,} + {data.max_response_length:,} tokens",
            f"{actor.dtype}",
        ]
    )


def warnings_of_run(plan: Plan) -> list[str]:
    """The warnings for the model and the devices of a run."""
    on_cpu = plan.learner.mesh.devices.flat[0].platform == "cpu"
    return warnings_of(plan.config, plan.learner.spec.num_params, on_cpu=on_cpu)


def warnings_of(config: Config, num_params: int, *, on_cpu: bool) -> list[str]:
    """A line for each value of a tiny model that meets a pretrained one of `num_params`."""
    if not config.actor.path or num_params < PRETRAINED:
        return []
    return [f"warning: config.{text}" for text in _unusual(config, on_cpu=on_cpu)]


def _unusual(config: Config, *, on_cpu: bool) -> Iterator[str]:
    actor, data, online = config.actor, config.data, not is_offline(config)
    supervised = isinstance(config.algorithm, SFT | PairwiseRewardModel | RewardRegression)
    usual = SUPERVISED_RATE if supervised else USUAL_RATE
    weights = "all weights"
    if actor.lora.enabled:
        usual, weights = usual * ADAPTER_FACTOR, "adapters"
    rate, key = actor.optimizer.learning_rate, "actor.optimizer.learning_rate"
    unusual = rate >= TOO_HIGH * usual or (actor.lora.enabled and rate <= TOO_LOW * usual)
    if unusual and actor.optimizer.name == "adamw":  # others have rates of their own
        word = "high" if rate > usual else "low"
        yield (
            f"{key}={rate:g} is very {word} for {weights} of a pretrained model; "
            f"{usual:g} is usual: --config.{key}={usual:g}"
        )
    if online and data.max_response_length < SHORT:
        yield (
            f"data.max_response_length={data.max_response_length} cuts every longer response; "
            "set --config.data.max_response_length=1024"
        )
    if actor.dtype == "float32" and not on_cpu:
        yield "actor.dtype=float32 is slow on a GPU; set --config.actor.dtype=bfloat16"
    rows = actor.ppo_mini_batch_size * config.rollout.n if online else data.train_batch_size
    tokens = rows * data.max_row_length // config.mesh.num_replicas
    if tokens > WHOLE and not (actor.micro_batch_size or actor.micro_batch_tokens):
        yield (
            f"actor.micro_batch_tokens=0 computes up to {tokens:,} tokens in one forward pass; set "
            "--config.actor.micro_batch_tokens=8192, or micro_batch_size for pairs"
        )
    if config.warmup is not None:
        rate = config.warmup.optimizer.learning_rate
        yield (
            f"warmup trains {config.warmup.steps} supervised steps at a rate of {rate:g} first; "
            "--config.warmup=null leaves them out"
        )
    for i, function in enumerate(config.reward.functions):
        if isinstance(function, ExactAnswer) and function.extract == "whole":
            yield (
                f"reward.functions.{i} compares the whole completion with the ground truth; set "
                "--config.reward.functions=[exact_answer] for its last number"
            )
