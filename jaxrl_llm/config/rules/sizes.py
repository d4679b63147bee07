"""Rules of sizes: what the mesh and the batches must divide.

Sizes of a model that a mesh does not divide are refused where the model is placed.
"""

import math
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
from jaxrl_llm.typed_records.tree import every, value_at


def role_at(c: Config, key: str) -> str:
    """The role of the model or the training at `key`; the warm-up trains the actor."""
    first, _, below = key.partition(".")
    return c.models[int(below)].name if first == "models" else {"warmup": ACTOR}.get(first, first)


def _replicas(c: Config, mesh: MeshConfig) -> str:
    """The words for the replicas of the config's mesh, or of a role on devices of its own."""
    name = "the mesh" if mesh == c.mesh else "config.placement"
    split = [f"{axis} {mesh.sizes[axis]}" for axis in REPLICA_AXES if mesh.sizes[axis] > 1]
    return f"the {mesh.num_replicas} replicas of {name} ({' × '.join(split)})"


# ------------------------------------------------------------------------- placement and phases


def placement(c: Config) -> Faults:
    """Roles on devices of their own get whole shares of the samples."""
    for role, devices in devices_of_roles(c).items():
        keys, n, rest = ("data.train_batch_size",), 1, ""
        if not is_offline(c):
            keys, n, rest = (*keys, "actor.ppo_mini_batch_size"), c.rollout.n, " with <rollout.n>"
        for key in keys:
            number, samples = len(devices), value_at(c, key) * n
            if role != ACTOR and samples % number:
                yield (
                    f"<placement.{role}>: it has {number} devices, which do not divide the "
                    f"{samples} samples of <{key}>{rest}"
                )


def phases_of_mesh(c: Config) -> Faults:
    """Groups of devices of a phase are neighbours on the mesh, and their replicas get samples."""
    mesh, generation = c.mesh, mesh_of_role(c, ROLLOUT)
    meshes = {"mesh.generation": generation, "mesh.passes": mesh}
    meshes |= {key: mesh_of_role(c, role_at(c, key)) for key, _ in every(c, ModelSettings)}
    for key, role_mesh in meshes.items():
        size = value_at(c, f"{key}.tensor")
        if size and not _fits(role_mesh, size):
            yield (
                f"<{key}.tensor>: so many neighbouring devices do not fit into the mesh of "
                f"{role_mesh.num_devices} devices; 0 takes config.mesh.tensor={role_mesh.tensor}"
            )
    samples, devices = c.data.train_batch_size * c.rollout.n, generation.num_devices
    replicas = devices // (mesh.generation.tensor or generation.tensor)
    if samples % replicas and not is_offline(c):
        yield (
            f"<data.train_batch_size>: generation has {replicas} replicas on {devices} devices, "
            f"which do not divide the {samples} samples of an iteration; {_prompts(c, replicas)}"
        )


def _fits(mesh: MeshConfig, size: int) -> bool:
    """True if groups of `size` devices are neighbours on the mesh, counted from `tensor` on."""
    inner = mesh.tensor
    if inner % size == 0:
        return True
    for axis in list(reversed(mesh.sizes))[1:]:
        if size % inner == 0 and mesh.sizes[axis] % (size // inner) == 0:
            return True
        inner *= mesh.sizes[axis]
    return False


def _prompts(c: Config, replicas: int) -> str:
    """The numbers of prompts whose samples the replicas divide."""
    return f"multiples of {replicas // math.gcd(c.rollout.n, replicas)} work"


# ------------------------------------------------------------------------- batches


def batches(c: Config) -> Faults:
    """Replicas, mini-batches and passes divide the samples, or the offline records."""
    replicas, split = c.mesh.num_replicas, _replicas(c, c.mesh)
    prompts, n, mini = c.data.train_batch_size, c.rollout.n, c.actor.ppo_mini_batch_size
    if is_offline(c):
        yield from _whole("data.train_batch_size", prompts, replicas, split)
        yield from _passes(c, "actor", c.actor, prompts, replicas)
        apart = mesh_of_role(c, "reference").num_replicas
        if apart != replicas:
            yield from _passes(c, "actor", c.actor, prompts, apart)
        return
    if prompts % mini:
        yield "<actor.ppo_mini_batch_size>: must divide <data.train_batch_size>"
    for key, number in (("data.train_batch_size", prompts), ("actor.ppo_mini_batch_size", mini)):
        if number * n % replicas:
            yield (
                f"<{key}>: with <rollout.n> that is {number * n} samples, which {split} do not "
                f"divide; {_prompts(c, replicas)}"
            )
    for role, sizes in (("actor", c.actor), ("critic", c.critic)):
        own = mesh_of_role(c, role).replicas_with(sizes.tensor)
        yield from _passes(c, role, sizes, mini * n, own, "mini-batch")


def lengths(c: Config) -> Faults:
    """A row or a cache has room for the longest response or sample, and a part is shorter."""
    response, sample = c.data.max_response_length, c.data.max_row_length
    keys = ["actor.micro_batch_tokens"]
    if not is_offline(c):
        keys += ["critic.micro_batch_tokens", "rollout.cache_tokens"]
        if c.partial_rollouts >= response:
            yield (
                "<partial_rollouts>: no response is longer than <data.max_response_length>, so "
                "none would be cut; 0 is off"
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
        yield f"<{key}>: {split} do not divide it; multiples of {replicas} work"


def _passes(
    c: Config, key: str, sizes: Any, samples: int, replicas: int, what: str = "batch"
) -> Faults:
    """The samples of a device are split into passes, by their number or their tokens."""
    micro, tokens = sizes.micro_batch_size, getattr(sizes, "micro_batch_tokens", 0)
    each, parts = samples // replicas, c.mesh.pipeline_micro_batches
    if micro and each % micro:
        yield (
            f"<{key}.micro_batch_size>: must divide the {each} samples of a {what} that each of "
            f"{replicas} replicas holds"
        )
    each = micro or samples // c.mesh.num_replicas
    if each % parts and not tokens:
        yield (
            f"<mesh.pipeline_micro_batches>: must divide the {each} samples of a device and pass "
            f"of config.{key}"
        )
