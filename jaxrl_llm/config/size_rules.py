"""Rules of sizes: what the mesh, the batches and the models must divide. See rules.py."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.bounds import MOST
from jaxrl_llm.config.messages import Faults
from jaxrl_llm.config.placement import ACTOR, ROLLOUT, devices_of_roles, mesh_of_role
from jaxrl_llm.config.schema import Config, MeshConfig, ModelSettings, SupervisedConfig, is_offline
from jaxrl_llm.config.tree import every

MOST_DEVICES = 2**20


def divisors(number: int) -> list[int]:
    """In ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def closest(choices: Sequence[int], value: int) -> int:
    """The choice nearest to `value`, and the larger one of two."""
    return min(choices, key=lambda choice: (abs(choice - value), -choice))


def closest_batch(prompts: int, n: int, replicas: int) -> int:
    """The number of prompts nearest to `prompts` whose samples, n each, the replicas divide."""
    step = replicas // math.gcd(n, replicas)
    below = prompts // step * step
    fitting = [size for size in (below, below + step) if 0 < size <= MOST]
    return closest(fitting, prompts)


def mesh_at(c: Config, key: str) -> MeshConfig:
    """The mesh of the model, or of the training of a model, at `key`."""
    return mesh_of_role(c, role_at(c, key))


def role_at(c: Config, key: str) -> str:
    """The role of the model, or of the training of one, at `key`; the actor's of the warm-up."""
    first, _, below = key.partition(".")
    return c.models[int(below)].name if first == "models" else {"warmup": ACTOR}.get(first, first)


def _replicas(c: Config) -> str:
    mesh = c.mesh
    stages = f" × pipeline {mesh.pipeline}" if mesh.pipeline > 1 else ""
    stages += f" × expert {mesh.expert}" if mesh.expert > 1 else ""
    sizes = f"data {mesh.data}{stages} × fsdp {mesh.fsdp}"
    return f"the {mesh.num_replicas} replicas of the mesh ({sizes})"


# ------------------------------------------------------------------------- placement and phases


def counts(c: Config) -> Faults:
    """Products of keys that are counted one by one, or in int32."""
    if c.mesh.num_devices > MOST_DEVICES:
        yield (
            f"<mesh>: its axes have {c.mesh.num_devices} devices in all, and at most "
            f"{MOST_DEVICES:,} work; config.mesh.fsdp=8 uses those of one node"
        )
    for key, prompts, n in (
        ("data.train_batch_size", c.data.train_batch_size, c.rollout.n),
        ("data.val_batch_size", c.data.val_batch_size, c.validation.n),
    ):
        if prompts * n > MOST:
            of = "validation.n" if "val" in key else "rollout.n"
            yield f"<{key}>: with <{of}> it is above {MOST} samples; {max(MOST // n, 1)} works"
    parts = 1 if is_offline(c) else -(-c.data.train_batch_size // c.actor.ppo_mini_batch_size)
    for key, epochs in (("actor", c.actor.ppo_epochs), ("critic", c.critic.ppo_epochs)):
        if c.total_steps * parts * epochs > MOST:
            yield (
                f"<total_steps>: with {parts} mini-batches and <{key}.ppo_epochs>, more than "
                f"{MOST} optimizer steps; {max(MOST // (parts * epochs), 1)} works"
            )
    if c.data.max_row_length > MOST:
        yield (
            "<data.max_response_length>: with <data.max_prompt_length> a row has more than "
            f"{MOST} tokens; 1024 is usual"
        )


def placement(c: Config) -> Faults:
    """Roles on devices of their own get whole shares of the samples."""
    found = devices_of_roles(c)
    batches = {
        "data.train_batch_size": c.data.train_batch_size,
        "actor.ppo_mini_batch_size": c.actor.ppo_mini_batch_size,
    }
    for role, devices in found.items():
        for key, prompts in batches.items():
            samples = prompts * c.rollout.n
            if role != ACTOR and samples % len(devices):
                fitting = [d for d in range(1, len(devices)) if samples % d == 0]
                yield (
                    f"<placement.{role}>: it has {len(devices)} devices, which do not divide the "
                    f"{samples} samples of <{key}> with <rollout.n>; {fitting[-1]} devices work"
                )


def phases_of_mesh(c: Config) -> Faults:
    """Groups of devices of a phase are neighbours on the mesh, and their replicas get samples."""
    mesh, of_rollout = c.mesh, mesh_of_role(c, ROLLOUT)
    sizes = {
        "mesh.generation": (of_rollout, mesh.generation.tensor),
        "mesh.passes": (mesh, mesh.passes.tensor),
        **{key: (mesh_at(c, key), model.tensor) for key, model in every(c, ModelSettings)},
    }
    for key, (of_role, size) in sizes.items():
        if size and size not in (fitting := _group_sizes(of_role)):
            yield (
                f"<{key}.tensor>: so many neighbouring devices do not fit into the mesh of "
                f"{of_role.num_devices} devices; {closest(fitting, size)} works, 0 takes "
                f"config.mesh.tensor={of_role.tensor}"
            )
    prompts, n, devices = c.data.train_batch_size, c.rollout.n, of_rollout.num_devices
    replicas = devices // (mesh.generation.tensor or of_rollout.tensor)
    if prompts * n % replicas and not is_offline(c):
        tensor = [d for d in _group_sizes(of_rollout) if prompts * n % (devices // d) == 0]
        other = f", or config.mesh.generation.tensor={tensor[0]}" if tensor else ""
        yield (
            f"<data.train_batch_size>: generation has {replicas} replicas (all {devices} devices "
            "in groups of config.mesh.generation.tensor or config.mesh.tensor), which do not "
            f"divide the {prompts * n} samples of an iteration; "
            f"config.data.train_batch_size={closest_batch(prompts, n, replicas)} works{other}"
        )


def _group_sizes(mesh: MeshConfig) -> list[int]:
    """The tensor sizes that a phase may have: groups of neighbours, counted from `tensor` on."""
    fitting, inner = set(divisors(mesh.tensor)), mesh.tensor
    for axis in list(reversed(mesh.sizes))[1:]:
        fitting |= {inner * d for d in divisors(mesh.sizes[axis])}
        inner *= mesh.sizes[axis]
    return sorted(fitting)


# ------------------------------------------------------------------------- batches


def batches(c: Config) -> Faults:
    """Prompts × samples, or offline records, on the replicas, in mini-batches and passes."""
    if is_offline(c):
        size, replicas = c.data.train_batch_size, c.mesh.num_replicas
        yield from _whole("data.train_batch_size", size, replicas, _replicas(c))
        yield from _passes(c, "actor", c.actor, size, replicas)
        return
    replicas, split = c.mesh.num_replicas, _replicas(c)
    prompts, n, mini = c.data.train_batch_size, c.rollout.n, c.actor.ppo_mini_batch_size
    if prompts * n % replicas:
        yield (
            f"<data.train_batch_size>: with <rollout.n> that is {prompts * n} samples, which "
            f"{split} do not divide; {closest_batch(prompts, n, replicas)} works"
        )
    if prompts % mini or mini * n % replicas:
        why = f"with <rollout.n> that is {mini * n} samples, which {split} do not divide"
        if prompts % mini:
            why = "must divide <data.train_batch_size>"
        fitting = [d for d in divisors(prompts) if d * n % replicas == 0]
        yield f"<actor.ppo_mini_batch_size>: {why}; {closest(fitting, mini)} works"
    for role, sizes in (("actor", c.actor), ("critic", c.critic)):
        own = mesh_of_role(c, role).replicas_with(sizes.tensor)
        yield from _passes(c, role, sizes, mini * n, own, "mini-batch")


def lengths(c: Config) -> Faults:
    """What takes tokens has room for the longest response or sample, and a part is shorter."""
    response, sample = c.data.max_response_length, c.data.max_row_length
    rooms = {"actor.micro_batch_tokens": (c.actor.micro_batch_tokens, "sample", sample)}
    if not is_offline(c):
        rooms |= {
            "critic.micro_batch_tokens": (c.critic.micro_batch_tokens, "sample", sample),
            "rollout.cache_tokens": (c.rollout.cache_tokens, "response", response),
        }
        if c.partial_rollouts >= response:
            yield (
                "<partial_rollouts>: no response is longer than <data.max_response_length>, so "
                f"none would be cut; {response // 2} works, 0 is off"
            )
    for key, (tokens, what, longest) in rooms.items():
        if 0 < tokens < longest:
            yield (
                f"<{key}>: a {what} may have {longest} tokens and is never cut; {longest} works, 0 "
                "sets no limit"
            )


def trainings(c: Config) -> Faults:
    """Sizes of supervised trainings, and what their accuracy is measured on."""
    data = c.data
    has_data = bool(data.val_files or data.val_tasks or data.val_rows or data.dataset_class)
    answers = not is_offline(c) or c.validation.generate
    for key, training in every(c, SupervisedConfig):
        mesh, size = mesh_at(c, key), training.batch_size
        replicas = mesh.num_replicas
        apart = f"the {replicas} devices of its model in config.placement"
        split = _replicas(c) if mesh == c.mesh else apart
        yield from _whole(f"{key}.batch_size", size, replicas, split)
        yield from _passes(c, key, training, size, replicas)
        if training.stop_at and not (has_data and answers):
            files = () if has_data else ("--config.data.val_files=[FILE]",)
            generate = () if answers else ("--config.validation.generate=true",)
            yield (
                f"<{key}.stop_at>: nothing measures that accuracy; set "
                f"{' and '.join(files + generate)}, or --config.{key}.stop_at=0"
            )


def _whole(key: str, size: int, replicas: int, split: str) -> Faults:
    if size % replicas:
        above = -(-size // replicas) * replicas
        works = above if above <= MOST else above - replicas
        yield f"<{key}>: {split} do not divide it; {works} works"


def _passes(
    c: Config, key: str, sizes: Any, samples: int, replicas: int, what: str = "batch"
) -> Faults:
    """The samples of a device are split into passes, by their number or their tokens."""
    micro, tokens = sizes.micro_batch_size, getattr(sizes, "micro_batch_tokens", 0)
    each, parts = samples // replicas, c.mesh.pipeline_micro_batches
    if micro and each % micro:
        yield (
            f"<{key}.micro_batch_size>: must divide the {each} samples of a {what} that each of "
            f"{replicas} replicas holds; {closest(divisors(each), micro)} works, 0 takes all at "
            "once"
        )
    each = micro or samples // c.mesh.num_replicas
    if each % parts and not tokens:
        yield (
            f"<mesh.pipeline_micro_batches>: must divide the {each} samples of a device and pass "
            f"of config.{key}; {closest(divisors(each), parts)} works, or another "
            f"config.{key}.micro_batch_size"
        )


# ------------------------------------------------------------------------- sizes of models

_BY_HEADS = ("num_attention_heads", "intermediate_size", "vocab_size", "moe_intermediate_size")
_STORED = ("hidden_size", "q_lora_rank", "kv_lora_rank")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def splits(c: Config, key: str, model: ModelSettings) -> Faults:
    """The mesh must divide the model's sizes, as far as they are given."""
    mesh = mesh_at(c, key)
    sizes = _hf_config(model)
    layers, leading = (sizes.get(n, 0) for n in ("num_hidden_layers", "first_k_dense_replace"))
    if isinstance(layers, int) and isinstance(leading, int):
        yield from _layers(mesh, key, layers, leading)
    axes = {
        "mesh.tensor": (mesh.tensor, _BY_HEADS),
        "mesh.generation.tensor": (mesh.generation.tensor or 1, _BY_HEADS),
        "mesh.passes.tensor": (mesh.passes.tensor or 1, _BY_HEADS),
        f"{key}.tensor": (model.tensor or 1, _BY_HEADS),
        "mesh.fsdp": (mesh.pipeline * mesh.fsdp * mesh.expert * mesh.sequence, _STORED),
        "mesh.expert": (mesh.expert, _EXPERTS),
    }
    for axis, (parts, names) in axes.items():
        known = {name: sizes[name] for name in names if isinstance(sizes.get(name), int)}
        given = {name: size for name, size in known.items() if size > 0}
        for name, size in given.items():
            if size % parts == 0:
                continue
            fits = [d for d in range(1, parts) if not any(s % d for s in given.values())][-1]
            of_model = f"{name}={size} of the model config.{key}"
            if axis == "mesh.fsdp" and mesh != c.mesh:
                yield (
                    f"<placement.{role_at(c, key)}>: its {parts} devices do not divide {of_model}; "
                    f"{fits} devices work"
                )
            elif axis == "mesh.fsdp" and parts != mesh.fsdp:
                yield (
                    f"<mesh>: pipeline × fsdp × expert × sequence = {parts} splits the weights and "
                    f"does not divide {of_model}; sizes whose product is {fits} work, with "
                    "config.mesh.data for other devices"
                )
            else:
                yield f"<{axis}>: does not divide {of_model}; config.{axis}={fits} works"


def _layers(mesh: MeshConfig, key: str, layers: int, leading: int) -> Faults:
    """The stages of a pipeline must share a model's layers evenly, but for leading dense ones."""
    groups, layers = mesh.pipeline * mesh.pipeline_rounds, layers - leading
    counted = "num_hidden_layers - first_k_dense_replace" if leading else "num_hidden_layers"
    if mesh.pipeline > 1 and layers > 0 and layers % groups:
        what, other, rounds = "pipeline_rounds", mesh.pipeline, ""
        if layers % mesh.pipeline:
            rounds = " and pipeline_rounds=1" if mesh.pipeline_rounds > 1 else ""
            what, other = "pipeline", 1
        fits = [d for d in divisors(layers) if layers % (d * other) == 0]
        yield (
            f"<mesh.pipeline>: with pipeline_rounds={mesh.pipeline_rounds}, {groups} groups do not "
            f"divide {counted}={layers} of the model config.{key}; "
            f"config.mesh.{what}={closest(fits, getattr(mesh, what))}{rounds} works"
        )


def _hf_config(model: ModelSettings) -> dict[str, Any]:
    """The sizes of a model, as far as they are known; launch/described_models.py reads them all."""
    file = Path(model.path) / "config.json"
    if not model.path:
        return model.hf_config
    if not file.is_file() or (file.parent / "checkpoints").is_dir():
        return {}  # one of our checkpoints or runs
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
