"""Rules of sizes: what the mesh, the batches and the models must divide."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.placement import ACTOR, ROLLOUT, devices_of_roles, mesh_of_role
from jaxrl_llm.config.rules import Faults
from jaxrl_llm.config.schema import (
    REPLICA_AXES,
    Config,
    MeshConfig,
    ModelSettings,
    SupervisedConfig,
    is_offline,
)
from jaxrl_llm.typed_records.bounds import MOST
from jaxrl_llm.typed_records.tree import every, value_at

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


def role_at(c: Config, key: str) -> str:
    """The role of the model, or of the training of one, at `key`; the actor's of the warm-up."""
    first, _, below = key.partition(".")
    return c.models[int(below)].name if first == "models" else {"warmup": ACTOR}.get(first, first)


def _replicas(c: Config, mesh: MeshConfig) -> str:
    """The words for the replicas of a mesh, which is the config's or that of a role apart."""
    of = "the mesh" if mesh == c.mesh else "config.placement"
    split = [f"{axis} {mesh.sizes[axis]}" for axis in REPLICA_AXES if mesh.sizes[axis] > 1]
    return f"the {mesh.num_replicas} replicas of {of} ({' × '.join(split)})"


# ------------------------------------------------------------------------- placement and phases


def counts(c: Config) -> Faults:
    """Devices are so many as there can be, and products of keys fit into int32."""
    data = c.data
    if c.mesh.num_devices > MOST_DEVICES:
        number = c.mesh.num_devices
        yield f"<mesh>: its axes have {number} devices in all, and at most {MOST_DEVICES} work"
    parts = 1 if is_offline(c) else -(-data.train_batch_size // c.actor.ppo_mini_batch_size)
    for key, times, above in (
        ("data.train_batch_size", c.rollout.n, "<rollout.n> it is above"),
        ("data.val_batch_size", c.validation.n, "<validation.n> it is above"),
        ("total_steps", parts * c.actor.ppo_epochs, "<actor.ppo_epochs>, more than"),
        ("total_steps", parts * c.critic.ppo_epochs, "<critic.ppo_epochs>, more than"),
    ):
        if value_at(c, key) * times > MOST:
            steps = key == "total_steps"
            of = f"{parts} mini-batches and {above}" if steps else above
            what = "optimizer steps" if steps else "samples"
            yield f"<{key}>: with {of} {MOST} {what}; {max(MOST // times, 1)} works"
    if data.max_row_length > MOST:
        why = f"with <data.max_prompt_length> a row has more than {MOST} tokens; 1024 is usual"
        yield f"<data.max_response_length>: {why}"


def placement(c: Config) -> Faults:
    """Roles on devices of their own get whole shares of the samples."""
    for role, devices in devices_of_roles(c).items():
        for key in ("data.train_batch_size", "actor.ppo_mini_batch_size"):
            number, samples = len(devices), value_at(c, key) * c.rollout.n
            if role != ACTOR and samples % number:
                fits = max(d for d in range(1, number) if samples % d == 0)
                yield (
                    f"<placement.{role}>: it has {number} devices, which do not divide the "
                    f"{samples} samples of <{key}> with <rollout.n>; {fits} devices work"
                )


def phases_of_mesh(c: Config) -> Faults:
    """Groups of devices of a phase are neighbours on the mesh, and their replicas get samples."""
    mesh, of_rollout = c.mesh, mesh_of_role(c, ROLLOUT)
    meshes = {"mesh.generation": of_rollout, "mesh.passes": mesh}
    meshes |= {key: mesh_of_role(c, role_at(c, key)) for key, _ in every(c, ModelSettings)}
    for key, of_role in meshes.items():
        size = value_at(c, f"{key}.tensor")
        if size and size not in (fitting := _group_sizes(of_role)):
            yield (
                f"<{key}.tensor>: so many neighbouring devices do not fit into the mesh of "
                f"{of_role.num_devices} devices; {closest(fitting, size)} works, 0 takes "
                f"config.mesh.tensor={of_role.tensor}"
            )
    prompts, n, devices = c.data.train_batch_size, c.rollout.n, of_rollout.num_devices
    replicas = devices // (mesh.generation.tensor or of_rollout.tensor)
    if prompts * n % replicas and not is_offline(c):
        yield (
            f"<data.train_batch_size>: generation has {replicas} replicas on {devices} devices, "
            f"which do not divide the {prompts * n} samples of an iteration; "
            f"config.data.train_batch_size={closest_batch(prompts, n, replicas)} works"
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
    replicas, split = c.mesh.num_replicas, _replicas(c, c.mesh)
    prompts, n, mini = c.data.train_batch_size, c.rollout.n, c.actor.ppo_mini_batch_size
    if is_offline(c):
        yield from _whole("data.train_batch_size", prompts, replicas, split)
        yield from _passes(c, "actor", c.actor, prompts, replicas)
        return
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
    keys = ["actor.micro_batch_tokens"]
    if not is_offline(c):
        keys += ["critic.micro_batch_tokens", "rollout.cache_tokens"]
        if c.partial_rollouts >= response:
            yield (
                "<partial_rollouts>: no response is longer than <data.max_response_length>, so "
                f"none would be cut; {response // 2} works, 0 is off"
            )
    for key in keys:
        what, most = ("response", response) if "cache" in key else ("sample", sample)
        if 0 < value_at(c, key) < most:
            why = f"a {what} may have {most} tokens and is never cut"
            yield f"<{key}>: {why}; {most} works, 0 sets no limit"


def trainings(c: Config) -> Faults:
    """Sizes of supervised trainings, and what their accuracy is measured on."""
    data = c.data
    has_data = data.val_files or data.val_tasks or data.val_rows or data.dataset_class
    answers = not is_offline(c) or c.validation.generate
    for key, training in every(c, SupervisedConfig):
        mesh, size = mesh_of_role(c, role_at(c, key)), training.batch_size
        yield from _whole(f"{key}.batch_size", size, mesh.num_replicas, _replicas(c, mesh))
        yield from _passes(c, key, training, size, mesh.num_replicas)
        if training.stop_at and not (has_data and answers):
            needs = [] if has_data else ["--config.data.val_files=[FILE]"]
            needs += [] if answers else ["--config.validation.generate=true"]
            without = ", or --config.warmup=null without a warm-up" if key == "warmup" else ""
            yield (
                f"<{key}.stop_at>: nothing measures that accuracy; set {' and '.join(needs)}, or "
                f"--config.{key}.stop_at=0{without}"
            )


def _whole(key: str, size: int, replicas: int, split: str) -> Faults:
    if size % replicas:
        above = size + -size % replicas
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
            f"{replicas} replicas holds; {closest(divisors(each), micro)} works"
        )
    each = micro or samples // c.mesh.num_replicas
    if each % parts and not tokens:
        yield (
            f"<mesh.pipeline_micro_batches>: must divide the {each} samples of a device and pass "
            f"of config.{key}; {closest(divisors(each), parts)} works"
        )


# ------------------------------------------------------------------------- sizes of models

_BY_HEADS = ("num_attention_heads", "intermediate_size", "vocab_size", "moe_intermediate_size")
_STORED = ("hidden_size", "q_lora_rank", "kv_lora_rank")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def splits(c: Config, key: str, model: ModelSettings) -> Faults:
    """The mesh must divide the model's sizes, as far as they are given."""
    mesh, sizes = mesh_of_role(c, role_at(c, key)), _hf_config(model)
    sizes = {name: size for name, size in sizes.items() if isinstance(size, int)}
    yield from _layers(mesh, key, sizes)
    shards = mesh.pipeline * mesh.fsdp * mesh.expert * mesh.sequence
    for axis, parts, names in (
        ("mesh.tensor", mesh.tensor, _BY_HEADS),
        ("mesh.generation.tensor", mesh.generation.tensor, _BY_HEADS),
        ("mesh.passes.tensor", mesh.passes.tensor, _BY_HEADS),
        (f"{key}.tensor", model.tensor, _BY_HEADS),
        ("mesh.fsdp", shards, _STORED),
        ("mesh.expert", mesh.expert, _EXPERTS),
    ):
        given = {name: sizes[name] for name in names if sizes.get(name, 0) > 0}
        for name, size in given.items():
            if size % (parts or 1) == 0:
                continue
            fits = max(d for d in range(1, parts) if not any(s % d for s in given.values()))
            of_model = f"{name}={size} of the model config.{key}"
            if axis == "mesh.fsdp" and mesh != c.mesh:
                role = f"<placement.{role_at(c, key)}>"
                yield f"{role}: its {parts} devices do not divide {of_model}; {fits} devices work"
            elif axis == "mesh.fsdp" and parts != mesh.fsdp:
                yield (
                    f"<mesh>: pipeline × fsdp × expert × sequence = {parts} splits the weights and "
                    f"does not divide {of_model}; sizes whose product is {fits} work"
                )
            else:
                yield f"<{axis}>: does not divide {of_model}; config.{axis}={fits} works"


def _layers(mesh: MeshConfig, key: str, sizes: Mapping[str, int]) -> Faults:
    """The stages of a pipeline must share a model's layers evenly, but for leading dense ones."""
    leading = sizes.get("first_k_dense_replace", 0)
    layers = sizes.get("num_hidden_layers", 0) - leading
    groups = mesh.pipeline * mesh.pipeline_rounds
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
