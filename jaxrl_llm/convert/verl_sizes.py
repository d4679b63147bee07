"""verl's sizes and meshes in ours: what takes several of its keys."""

from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.convert.rules import Source, largest_divisor

ACTOR, CRITIC, ROLLOUT = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout"
FSDP = {ACTOR: "fsdp_config", CRITIC: "fsdp"}


def updates_a_step(source: Source, epochs: int) -> int:
    """Optimizer steps of an iteration: verl's schedule counts iterations, ours these."""
    prompts, mini = (
        source.count("data.train_batch_size"),
        source.count(f"{ACTOR}.ppo_mini_batch_size"),
    )
    return max(1, prompts // mini) * epochs


def set_steps(source: Source, values: dict[str, Any], notes: list[str]) -> None:
    """`total_steps` from verl's number, or from epochs and rows."""
    steps = source.get("trainer.total_training_steps")
    batch, epochs = source.count("data.train_batch_size"), source.whole("trainer.total_epochs")
    if steps is not None:
        values["total_steps"] = source.whole("trainer.total_training_steps")
    elif source.rows:
        values["total_steps"] = max(1, source.rows // batch) * epochs
    else:
        notes.append(
            f"total_steps: the number of rows is not known, so it has its default. {epochs} epochs "
            f"are {epochs} × (rows // {batch}) steps; --rows=N computes them"
        )


def set_schedules(source: Source, values: dict[str, Any], notes: list[str]) -> None:
    """Warm-ups in optimizer steps."""
    epochs = source.whole(f"{ACTOR}.ppo_epochs")
    for theirs, ours, own_epochs in (
        (ACTOR, "actor", epochs),
        (CRITIC, "critic", source.whole("critic.ppo_epochs") or epochs),
    ):
        steps = source.whole(f"{theirs}.optim.lr_warmup_steps")
        ratio = source.number(f"{theirs}.optim.lr_warmup_steps_ratio")
        if steps <= 0 and ratio:
            if "total_steps" not in values:
                notes.append(
                    f"{ours}.optimizer.warmup_steps: {ratio:g} of a number of steps that is not "
                    "known; --rows=N computes it"
                )
                continue
            steps = int(ratio * values["total_steps"])
        if steps > 0:
            values[f"{ours}.optimizer.warmup_steps"] = steps * updates_a_step(source, own_epochs)


def set_mesh(source: Source, values: dict[str, Any]) -> None:
    """FSDP, Ulysses and Megatron sizes as axes of one mesh.

    Raises: ConfigError where they do not divide the devices.
    """
    megatron = f"{ACTOR}.megatron."
    tensor = source.count(f"{megatron}tensor_model_parallel_size")
    pipeline = source.count(f"{megatron}pipeline_model_parallel_size")
    sequence = source.count(
        f"{ACTOR}.ulysses_sequence_parallel_size",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        f"{megatron}context_parallel_size",
    )
    replicas, rest = divmod(source.devices, tensor * pipeline * sequence)
    if rest or not replicas:
        raise ConfigError(
            f"{source.devices} devices (trainer.nnodes × trainer.n_gpus_per_node) are no multiple "
            f"of tensor {tensor} × pipeline {pipeline} × sequence {sequence}"
        )
    size = source.whole(f"{ACTOR}.fsdp_config.fsdp_size")
    shards = size // sequence if 0 < size < source.devices else replicas
    if shards < 1 or replicas % shards:
        raise ConfigError(f"{ACTOR}.fsdp_config.fsdp_size={size}: no divisor of {source.devices}")
    values |= {
        "mesh.data": replicas // shards,
        "mesh.fsdp": shards,
        "mesh.sequence": sequence,
        "mesh.tensor": tensor,
        "mesh.pipeline": pipeline,
    }
    rounds = source.whole(f"{megatron}virtual_pipeline_model_parallel_size")
    if pipeline > 1 and rounds > 1:
        values["mesh.pipeline_rounds"] = rounds
    generation = source.count(f"{ROLLOUT}.tensor_model_parallel_size")
    if generation != tensor:
        values["mesh.generation.tensor"] = generation


def set_passes(source: Source, values: dict[str, Any], notes: list[str]) -> None:
    """The samples or tokens of a forward and backward pass."""
    replicas = values["mesh.data"] * values["mesh.fsdp"] * values["mesh.pipeline"]
    samples = source.count(f"{ACTOR}.ppo_mini_batch_size") * source.count(f"{ROLLOUT}.n")
    longest = source.whole("data.max_prompt_length") + source.whole("data.max_response_length")
    for theirs, ours in ((ACTOR, "actor"), (CRITIC, "critic")):
        if ours == "critic" and not has_critic(source):
            continue
        if _is_dynamic(source, theirs):
            tokens = source.whole(f"{theirs}.ppo_max_token_len_per_gpu") * values["mesh.sequence"]
            if tokens < longest:
                notes.append(
                    f"{ours}.micro_batch_tokens: a row of ours holds a whole sample, so {tokens} "
                    f"became {longest}"
                )
            values[f"{ours}.micro_batch_tokens"] = max(tokens, longest)
            continue
        asked = source.whole(
            f"{theirs}.ppo_micro_batch_size_per_gpu", f"{theirs}.ppo_micro_batch_size"
        )
        held = samples // replicas
        fits = largest_divisor(held, asked) if asked and held else 0
        if fits != asked:
            notes.append(
                f"{ours}.micro_batch_size: {asked} does not divide the {held} samples of a device "
                f"and mini-batch, so it became {fits}"
            )
        values[f"{ours}.micro_batch_size"] = fits


def _is_dynamic(source: Source, theirs: str) -> bool:
    return bool(source.get(f"{theirs}.use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz"))


def has_critic(source: Source) -> bool:
    """True if verl makes a critic for the run."""
    return source.get("algorithm.adv_estimator") == "gae"
