"""Single keys of verl: rules that change a value, and answers that many keys share."""

from pathlib import Path
from typing import Any

from jaxrl_llm.convert.rules import (
    Answer,
    NoCounterpart,
    NotNeeded,
    Ours,
    Rule,
    Source,
    epochs,
    many,
    only,
)
from jaxrl_llm.convert.values import value_of
from jaxrl_llm.convert.verl_sizes import ACTOR, has_critic

MODEL = "actor_rollout_ref.model"

PASSES = NotNeeded("passes without gradient take the actor's sizes")
LAYOUT = NotNeeded("weights are split by the mesh and stay on the devices")
ENGINE = NotNeeded("one engine generates inside the training program")
KERNELS = NotNeeded("XLA compiles and fuses; logits are computed in blocks")
PROCESSES = NotNeeded("no Ray actors: one program a host")
PROFILER = NotNeeded("`profile.steps` is the switch; one trace has all")
MOE = only(
    1,
    "1 is no split of experts",
    "set `mesh.expert`, an axis of its own: divide `mesh.data` or `mesh.fsdp` by it",
)
IMAGES = NoCounterpart(
    "images have the column images or image here, with data.max_images (docs/vision.md)"
)
FOREIGN = NoCounterpart("verl's checkpoints are not read; merge one to a folder for `actor.path`")
TOOLS = NoCounterpart("name functions: `rollout.tools=[my_file.py:my_tool]` (docs/agents.md)")
TURNS = NoCounterpart("write an environment: `rollout.environment` (docs/agents.md)")
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def of_turns(rule: Rule) -> Rule:
    """A setting of turns and tools, which verl reads where they are enabled."""

    def checked(value: Any, source: Source) -> Answer:
        if not source.get(f"{MULTI_TURN}.enable"):
            return NotNeeded("many turns are off")
        if isinstance(rule, str):
            return Ours({rule: value})
        return rule(value, source) if callable(rule) else rule

    return checked


def most_turns(value: Any, source: Source) -> Answer:
    """Most turns of the model; null is no limit."""
    return Ours({"rollout.max_turns": int(value or 0)})


def agent_loop(value: Any, source: Source) -> Answer:
    """The loop of turns by name."""
    if value in ("single_turn_agent", "tool_agent"):
        return NotNeeded("`rollout.tools` and `rollout.environment` make an agent run")
    return TURNS


def files_at(key: str) -> Rule:
    """A list of files, or one."""

    def rule(value: Any, source: Source) -> Answer:
        return Ours({key: [str(Path(str(file)).expanduser()) for file in many(value)]})

    return rule


def every(key: str) -> Rule:
    """Steps between two events; verl's -1 is never."""
    return lambda value, source: Ours({key: max(int(value), 0)})


def critic_only(rule: Rule) -> Rule:
    """A key of the critic, which only GAE has."""

    def checked(value: Any, source: Source) -> Answer:
        if not has_critic(source):
            return NotNeeded("the estimator needs no critic")
        if isinstance(rule, str):
            return Ours({rule: value})
        return rule(value, source) if callable(rule) else rule

    return checked


# ------------------------------------------------------------------------- single keys


def column(ours: str) -> Rule:
    """A column of the data, whose name may differ from ours."""

    def rule(value: Any, source: Source) -> Answer:
        if value == ours:
            return Ours(note="the same name here")
        return Ours({f"data.columns.{ours}": value})

    return rule


def total_epochs(value: Any, source: Source) -> Answer:
    """Passes through the data."""
    return epochs(source, source.get("trainer.total_training_steps") is not None)


def samples_cut(value: Any, source: Source) -> Answer:
    """A number of rows to take; -1 is all."""
    if value in (-1, None):
        return NotNeeded("-1 takes all rows")
    return NoCounterpart("write a file with so many rows")


def custom_class(value: Any, source: Source) -> Answer:
    """A data set class of verl."""
    if not value:
        return NotNeeded("none is the default")
    return NoCounterpart("write a class that yields rows: `data.dataset_class` (docs/data.md)")


def optimizer_kind(role: str) -> Rule:
    """The optimizer by name."""

    def rule(value: Any, source: Source) -> Answer:
        name = str(value).lower()
        if name in ("adamw", "adam"):
            return NotNeeded("AdamW is the default")
        if name in ("lion", "adafactor"):
            return Ours({f"{role}.optimizer.name": name})
        return NoCounterpart(f"{role}.optimizer.name=my_file.py:optimizer takes one of yours")

    return rule


def min_learning_rate(role: str, theirs: str) -> Rule:
    """The lowest rate as a share of the highest."""

    def rule(value: Any, source: Source) -> Answer:
        rate = source.number(f"{theirs}.optim.lr") or 1e-6
        return Ours({f"{role}.optimizer.min_learning_rate_ratio": min(value / rate, 1.0)})

    return rule


def betas(role: str) -> Rule:
    """AdamW's two decays."""

    def rule(value: Any, source: Source) -> Answer:
        betas = value_of(value) if isinstance(value, str) else value
        return Ours({f"{role}.optimizer.b1": betas[0], f"{role}.optimizer.b2": betas[1]})

    return rule


def dtype_at(key: str) -> Rule:
    """A type of computation, by any of its names."""
    names = {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}

    def rule(value: Any, source: Source) -> Answer:
        dtype = names.get(str(value), str(value))
        if dtype in ("bfloat16", "float32"):
            return Ours({key: dtype})
        return NoCounterpart(f"{key} is float32 or bfloat16")

    return rule


def offload(role: str) -> Rule:
    """Keep the optimizer's state in CPU memory."""
    return lambda value, source: Ours({f"{role}.optimizer.offload": bool(value)})


def recompute(value: Any, source: Source) -> Answer:
    """Megatron's activation checkpointing."""
    return Ours({"actor.remat": "full"} if value == "full" else {"actor.remat": "projections"})


def learning_dtype(value: Any, source: Source) -> Answer:
    """The type of stored weights, which is float32 here."""
    if str(value) in ("fp32", "float32", "bf16", "bfloat16"):
        return NotNeeded("weights that learn are float32")
    return NoCounterpart("weights that learn are float32")


def adapter_targets(value: Any, source: Source) -> Answer:
    """Modules that get adapters."""
    return Ours({"actor.lora.targets": list(many(value))})


def adapter_rank(value: Any, source: Source) -> Answer:
    """The rank, unless an adapter's folder says it."""
    if source.get(f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.adapter_path"):
        return NotNeeded("the adapter's folder says its rank")
    return Ours({"actor.lora.rank": value})


def val_top_k(value: Any, source: Source) -> Answer:
    """Top-k sampling of validation, which is missing here."""
    if value in (-1, 0, None):
        return NotNeeded("it is off")
    return NoCounterpart("validation has temperature and top_p: set `validation.top_p`")


def generated_length(key: str) -> Rule:
    """A length of the engine, which must equal the data's."""

    def rule(value: Any, source: Source) -> Answer:
        if value == source.get(key):
            return NotNeeded(f"the same as {key}")
        return NoCounterpart(f"{key} is the only length: set it")

    return rule


def quantization(value: Any, source: Source) -> Answer:
    """The quantization of generation."""
    if value is None:
        return NotNeeded("null is the default")
    if str(value) in ("fp8", "float8"):
        return Ours({"rollout.quantization": "float8"})
    return NoCounterpart("`rollout.quantization` is none or float8")


def aggregation(value: Any, source: Source) -> Answer:
    """The aggregation of a loss that does not fix it itself."""
    loss = source.get(f"{ACTOR}.policy_loss.loss_mode")
    if loss in ("gspo", "sapo", "geo_mean"):
        return NotNeeded(f"{loss} is a mean over responses, in verl too")
    return Ours({"algorithm.loss_aggregation": value})


def filter_metric(value: Any, source: Source) -> Answer:
    """The metric that must vary in a group."""
    return Ours({"rollout.filter_groups.metric": "score"}, "the score of a sample")


def filter_rounds(value: Any, source: Source) -> Answer:
    """Rounds of dynamic sampling; 0 has no limit in verl."""
    if not value:
        return NotNeeded("without a limit there; 10 rounds here")
    return Ours({"rollout.filter_groups.max_num_gen_batches": value})


def threshold(key: str) -> Rule:
    """One threshold, or several as a text."""
    return lambda value, source: Ours({key: _joined(value)})


def _joined(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def clip(end: str) -> Rule:
    """An end of the clip, which bounds a divergence in DPPO."""

    def rule(value: Any, source: Source) -> Answer:
        loss = str(source.get(f"{ACTOR}.policy_loss.loss_mode"))
        name = "divergence" if loss.startswith("dppo") else "clip"
        return Ours({f"algorithm.{name}_{end}": value})

    return rule


def learns_without_ratio(source: Source) -> bool:
    """True if rollout correction replaces the loss by REINFORCE's."""
    folder = "algorithm.rollout_correction."
    loss = source.get(f"{folder}loss_type")
    return bool(source.get(f"{folder}bypass_mode")) and loss == "reinforce"


def correction_loss(value: Any, source: Source) -> Answer:
    """The loss under rollout correction."""
    if learns_without_ratio(source):
        return Ours(part_of="algorithm", note="log-probs times weights times advantages")
    return NotNeeded("the ratio of the clipped loss is the correction")


def importance(key: str) -> Rule:
    """A setting of importance weights, which a clipped loss does not take in bypass mode."""

    def rule(value: Any, source: Source) -> Answer:
        bypass = source.get("algorithm.rollout_correction.bypass_mode")
        if bypass and not learns_without_ratio(source):
            return NotNeeded("verl computes it for metrics alone, with bypass_mode")
        return Ours({key: _joined(value)})

    return rule


def resume(value: Any, source: Source) -> Answer:
    """The start of a run."""
    if value == "resume_path":
        return FOREIGN
    return Ours({"resume": "never" if value == "disable" else "auto"})


def critic_warmup(value: Any, source: Source) -> Answer:
    """Iterations of the critic alone."""
    return Ours({"critic.warmup_steps": max(int(value) - 1, 0)}, "verl counts one more")


def manager(value: Any, source: Source) -> Answer:
    """verl's reward manager."""
    if value in ("naive", "dapo", "prime"):
        return NotNeeded("reward.functions is a list; workers run them")
    return NoCounterpart("write a reward with TRL's signature, which gets the whole batch")


def critic_path(value: Any, source: Source) -> Answer:
    """The critic's weights; empty is the actor's."""
    if value == source.get(f"{MODEL}.path"):
        return Ours({}, "critic.path is empty: it starts from the actor's weights")
    return Ours({"critic.path": str(Path(str(value)).expanduser())})


def critic_mini_batch(value: Any, source: Source) -> Answer:
    """The critic's mini-batch, which is the actor's here."""
    if value == source.get(f"{ACTOR}.ppo_mini_batch_size"):
        return NotNeeded("the critic takes the actor's")
    return NoCounterpart("the critic takes actor.ppo_mini_batch_size")
