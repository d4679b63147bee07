"""Rules that span fields of a config, checked without jax in milliseconds.

Bounds of one field stand on the field. Every message names the key and a value that works.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config.algorithms import Offline
from jaxrl_llm.config.given import Given
from jaxrl_llm.config.lora_rules import check_lora
from jaxrl_llm.config.order_rules import check_order
from jaxrl_llm.config.placement import ACTOR, EXAMPLE, ROLLOUT, devices_of_roles, mesh_of_role
from jaxrl_llm.config.records import ConfigError, Custom
from jaxrl_llm.config.reward_rules import check_rewards, check_times, graders
from jaxrl_llm.config.schema import (
    AUTO,
    Config,
    MeshConfig,
    ModelSettings,
    SupervisedConfig,
)
from jaxrl_llm.config.times import end_time
from jaxrl_llm.config.trackers import check_trackers
from jaxrl_llm.data_files import check_files
from jaxrl_llm.references import check_path, is_hub_name, nearest_file

__all__ = ["check", "is_offline"]


def check(config: Config) -> None:
    """Raise ConfigError for the first thing in `config` that cannot work."""
    _check_pipeline(config)
    _check_placement(config)
    if is_offline(config):
        _check_offline_batches(config)
    else:
        _check_batches(config)
        check_rewards(config)
    _check_phases_of_mesh(config)
    _check_trainings(config)
    _check_teacher(config)
    _check_phases(config)
    _check_profile(config)
    _check_strict(config)
    _check_data(config)
    check_order(config, offline=is_offline(config))
    check_times(config)
    _check_functions(config)
    for key, model in _models(config):
        _check_learning_weights(config, key, model)
        _check_path(key, model)
        _check_attention(config, key, model)
        _check_layers(config, key, model)
        _check_split(config, key, model)
    check_trackers(config.log.trackers)
    for key, learner in (("actor", config.actor), ("critic", config.critic)):
        check_lora(config, key, learner)
    if config.checkpoint.save_by:
        end_time(config.checkpoint.save_by, started=0.0)
    if config.resume not in ("auto", "never") and not Path(config.resume).exists():
        raise ConfigError(
            f"config.resume={config.resume}: expected auto, never, or the folder of a checkpoint"
            f"{nearest_file(Path(config.resume))}"
        )


def is_offline(config: Config) -> bool:
    """Whether the run learns from fixed records."""
    return _is_offline(config.algorithm)


def _is_offline(algorithm: Any) -> bool:
    return isinstance(algorithm, Offline) or (isinstance(algorithm, Custom) and algorithm.offline)


# ------------------------------------------------------------------------- sizes


def _replicas(config: Config) -> str:
    mesh = config.mesh
    stages = f" × pipeline {mesh.pipeline}" if mesh.pipeline > 1 else ""
    stages += f" × expert {mesh.expert}" if mesh.expert > 1 else ""
    return (
        f"the {mesh.num_replicas} replicas of the mesh (data {mesh.data}{stages} × fsdp "
        f"{mesh.fsdp})"
    )


def _check_placement(config: Config) -> None:
    """Roles on devices of their own get whole shares of the samples."""
    found = devices_of_roles(config)
    if is_offline(config) and config.placement not in ({}, AUTO):
        raise ConfigError(
            "config.placement: offline training has one group of devices; leave it out, or take "
            f"an online algorithm, for example --config.algorithm=ppo {EXAMPLE}"
        )
    _check_staleness(config, ROLLOUT in found or config.placement == AUTO)
    n = config.rollout.n
    batches = {
        "data.train_batch_size": config.data.train_batch_size,
        "actor.ppo_mini_batch_size": config.actor.ppo_mini_batch_size,
    }
    for role, devices in found.items():
        for key, prompts in batches.items():
            if role != ACTOR and prompts * n % len(devices):
                fitting = [d for d in range(1, len(devices)) if prompts * n % d == 0]
                raise ConfigError(
                    f"config.placement.{role} has {len(devices)} devices, which do not divide the "
                    f"{prompts * n} samples of config.{key}={prompts} with config.rollout.n={n}; "
                    f"{fitting[-1]} devices work"
                )


def _check_staleness(config: Config, apart: bool) -> None:
    """What can be generated ahead, and in parts."""
    key = f"config.max_staleness={config.max_staleness}"
    _check_partial_rollouts(config)
    if not config.max_staleness:
        return
    if is_offline(config):
        raise ConfigError(
            f"{key}: offline training generates nothing ahead; set --config.max_staleness=0"
        )
    if config.rollout.filter_groups.enable and not apart:
        raise ConfigError(
            f"{key}: with config.rollout.filter_groups.enable, each round of generation waits for "
            "the rewards of the one before, so on one group of devices nothing would overlap; "
            "give generation devices of its own, for example --config.placement.rollout=4-7, or "
            "set --config.max_staleness=0"
        )


def _check_partial_rollouts(config: Config) -> None:
    """Responses can be cut only where a later policy can go on with them."""
    key = f"config.partial_rollouts={config.partial_rollouts}"
    if not config.partial_rollouts:
        return
    if not config.max_staleness:
        raise ConfigError(
            f"{key}: a response goes on under a newer policy only where batches are generated "
            "ahead; --config.max_staleness=1 works"
        )
    longest = config.data.max_response_length
    if config.partial_rollouts >= longest:
        raise ConfigError(
            f"{key}: no response is longer than config.data.max_response_length={longest}, so "
            f"none would be cut; {max(longest // 2, 1)} works, 0 is off"
        )
    if config.rollout.filter_groups.enable:
        raise ConfigError(
            f"{key}: with config.rollout.filter_groups.enable, a round of generation ends before "
            "its groups can be compared; set --config.partial_rollouts=0"
        )


def _check_phases_of_mesh(config: Config) -> None:
    """Groups of devices of a phase are neighbours on the mesh, and their replicas get samples."""
    mesh, of_rollout = config.mesh, mesh_of_role(config, ROLLOUT)
    sizes = {
        "mesh.generation": (of_rollout, mesh.generation.tensor),
        "mesh.passes": (mesh, mesh.passes.tensor),
        **{key: (_mesh(config, key), model.tensor) for key, model in _models(config)},
    }
    for name, (of_role, size) in sizes.items():
        if size and size not in (fitting := _group_sizes(of_role)):
            raise ConfigError(
                f"config.{name}.tensor={size}: so many neighbouring devices do not fit into "
                f"the mesh of {of_role.num_devices} devices; {_closest(fitting, size)} works, 0 "
                f"takes config.mesh.tensor={of_role.tensor}"
            )
    if is_offline(config):
        return
    samples = config.data.train_batch_size * config.rollout.n
    devices = of_rollout.num_devices
    replicas = devices // (mesh.generation.tensor or of_rollout.tensor)
    if samples % replicas:
        fitting = [d for d in _group_sizes(of_rollout) if samples % (devices // d) == 0]
        sizes_of_batch = range(1, 2 * samples + replicas)
        better = [p for p in sizes_of_batch if p * config.rollout.n % replicas == 0]
        remedy = f"config.data.train_batch_size={_closest(better, config.data.train_batch_size)}"
        if fitting:
            remedy += f" works, or config.mesh.generation.tensor={fitting[0]}"
        raise ConfigError(
            f"generation has {replicas} replicas (all {devices} devices in groups of "
            f"config.mesh.generation.tensor or config.mesh.tensor), which do not divide the "
            f"{samples} samples of an iteration; {remedy}"
        )


def _group_sizes(mesh: MeshConfig) -> list[int]:
    """The tensor sizes that a phase may have: groups of neighbours, counted from `tensor` on."""
    fitting = {d for d in range(1, mesh.tensor + 1) if mesh.tensor % d == 0}
    inner = 1
    for axis in reversed(mesh.sizes):
        size = mesh.sizes[axis]
        fitting |= {inner * d for d in range(1, size + 1) if size % d == 0 and axis != "tensor"}
        inner *= size
    return sorted(fitting)


def _check_batches(config: Config) -> None:
    """Sizes of an online run: prompts × samples on the replicas, in mini-batches and passes."""
    replicas, split = config.mesh.num_replicas, _replicas(config)
    prompts, n = config.data.train_batch_size, config.rollout.n
    mini = config.actor.ppo_mini_batch_size
    if (prompts * n) % replicas:
        fitting = [p for p in range(1, 2 * prompts + replicas) if p * n % replicas == 0]
        better = _closest(fitting, prompts)
        raise ConfigError(
            f"config.data.train_batch_size={prompts}: with config.rollout.n={n} that is "
            f"{prompts * n} samples, which {split} do not divide; {better} works"
        )
    if prompts % mini or (mini * n) % replicas:
        fitting = [d for d in range(1, prompts + 1) if prompts % d == 0 and d * n % replicas == 0]
        why = f"must divide config.data.train_batch_size={prompts}"
        if prompts % mini == 0:
            why = (
                f"with config.rollout.n={n} that is {mini * n} samples, which {split} do not divide"
            )
        raise ConfigError(
            f"config.actor.ppo_mini_batch_size={mini}: {why}; {_closest(fitting, mini)} works"
        )
    for role, sizes in (("actor", config.actor), ("critic", config.critic)):
        own = mesh_of_role(config, role).replicas_with(sizes.tensor)
        _check_micro(role, sizes.micro_batch_size, mini * n, own, "mini-batch")
        _check_packing(config, role, sizes)
        _check_pipelined(config, role, sizes, mini * n)
    cache, longest = config.rollout.cache_tokens, config.data.max_response_length
    if 0 < cache < longest:
        raise ConfigError(
            f"config.rollout.cache_tokens={cache}: one response may have "
            f"config.data.max_response_length={longest} tokens; give at least that, or 0 for room "
            "for every slot"
        )
    if config.rollout.filter_groups.enable and n == 1:
        raise ConfigError(
            "config.rollout.filter_groups.enable=true: a group of config.rollout.n=1 sample never "
            "varies; config.rollout.n=8 is usual"
        )


def _check_offline_batches(config: Config) -> None:
    """Sizes of an offline run: a batch of records on the replicas, in passes."""
    _check_batch("data.train_batch_size", config.data.train_batch_size, config)
    size, replicas = config.data.train_batch_size, config.mesh.num_replicas
    _check_micro("actor", config.actor.micro_batch_size, size, replicas, "batch")
    _check_packing(config, "actor", config.actor)
    _check_pipelined(config, "actor", config.actor, size)


def _check_trainings(config: Config) -> None:
    """Sizes of supervised trainings, and what their accuracy is measured on."""
    for key, training in _trainings(config):
        mesh = config.mesh if key == "warmup" else _mesh(config, key.removesuffix(".training"))
        micro, size = training.micro_batch_size, training.batch_size
        if mesh != config.mesh and size % mesh.num_replicas:
            up = -(-size // mesh.num_replicas) * mesh.num_replicas
            raise ConfigError(
                f"config.{key}.batch_size={size}: the {mesh.num_replicas} devices of its model in "
                f"config.placement do not divide it; {up} works"
            )
        if mesh == config.mesh:
            _check_batch(f"{key}.batch_size", size, config)
        _check_micro(key, micro, size, mesh.num_replicas, "batch")
        _check_pipelined(config, key, training, size)
        data = config.data
        has_data = bool(data.val_files or data.val_tasks or data.val_rows or data.dataset_class)
        answers = not is_offline(config) or config.validation.generate
        if training.stop_at and not (has_data and answers):
            raise ConfigError(
                f"config.{key}.stop_at={training.stop_at}: nothing measures that accuracy; set "
                + ("" if has_data else "--config.data.val_files=[FILE], or ")
                + ("" if answers else "--config.validation.generate=true, or ")
                + f"--config.{key}.stop_at=0"
            )


def _check_batch(key: str, size: int, config: Config) -> None:
    replicas = config.mesh.num_replicas
    if size % replicas:
        up = -(-size // replicas) * replicas
        raise ConfigError(f"config.{key}={size}: {_replicas(config)} do not divide it; {up} works")


def _check_micro(key: str, micro: int, samples: int, replicas: int, what: str) -> None:
    each = samples // replicas
    if micro and each % micro:
        better = _closest([d for d in range(1, each + 1) if each % d == 0], micro)
        raise ConfigError(
            f"config.{key}.micro_batch_size={micro}: must divide the {each} samples of a {what} "
            f"that each of {replicas} replicas holds; {better} works, 0 takes all at once"
        )


def _check_packing(config: Config, role: str, sizes: Any) -> None:
    tokens = sizes.micro_batch_tokens
    longest = config.data.max_row_length
    if tokens and sizes.micro_batch_size:
        raise ConfigError(
            f"config.{role}.micro_batch_tokens={tokens} and config.{role}.micro_batch_size="
            f"{sizes.micro_batch_size}: a pass is sized by tokens or by samples; set one of them "
            "to 0"
        )
    if tokens and tokens < longest:
        raise ConfigError(
            f"config.{role}.micro_batch_tokens={tokens}: a sample may have {longest} tokens "
            f"(max_prompt_length + max_response_length) and is never cut; {longest} or more works"
        )


def _check_pipelined(config: Config, key: str, sizes: Any, samples: int) -> None:
    """The micro-batches of a pipeline must divide the samples of a pass, unless they are packed."""
    parts = config.mesh.pipeline_micro_batches
    each = sizes.micro_batch_size or samples // config.mesh.num_replicas
    if each % parts and not getattr(sizes, "micro_batch_tokens", 0):
        better = _closest([d for d in range(1, each + 1) if each % d == 0], parts)
        raise ConfigError(
            f"config.mesh.pipeline_micro_batches={parts}: must divide the {each} samples of a "
            f"device and pass of config.{key}; {better} works, or another "
            f"config.{key}.micro_batch_size"
        )


def _check_pipeline(config: Config) -> None:
    mesh = config.mesh
    for name in ("pipeline_rounds", "pipeline_micro_batches"):
        if getattr(mesh, name) > 1 and mesh.pipeline == 1:
            raise ConfigError(
                f"config.mesh.{name}={getattr(mesh, name)}: config.mesh.pipeline=1 is no pipeline; "
                f"config.mesh.{name}=1 works, or more stages: --config.mesh.pipeline=2"
            )


def _closest(choices: Sequence[int], value: int) -> int:
    return min(choices, key=lambda choice: (abs(choice - value), -choice))


# ------------------------------------------------------------------------- models


def _check_learning_weights(config: Config, key: str, model: ModelSettings) -> None:
    own = {f"{key}.optimizer", f"{key}.training.optimizer"} & {
        "actor.optimizer",
        "critic.optimizer",
        *(f"{name}.optimizer" for name, _ in _trainings(config)),
    }
    if own and model.param_dtype != "float32":
        raise ConfigError(
            f"config.{key}.param_dtype={model.param_dtype}: most updates are smaller than half a "
            "bfloat16 step and would be lost, so weights that learn are float32; "
            f"config.{key}.dtype=bfloat16 computes in it, and "
            f"config.{own.pop()}.moment_dtype=bfloat16 or .offload=true saves memory"
        )


def _check_path(key: str, model: ModelSettings) -> None:
    if model.path and not Path(model.path).is_dir() and not is_hub_name(model.path):
        raise ConfigError(
            f"config.{key}.path={model.path}: no such folder{nearest_file(Path(model.path))}\n"
            f"scripts/prepare_model.py smollm2 --output={model.path} writes a small model there"
        )


def _check_attention(config: Config, key: str, model: ModelSettings) -> None:
    sized = "critic" if key == "critic" else "actor"
    tokens = (config.critic if key == "critic" else config.actor).micro_batch_tokens
    if model.attention != "cudnn":
        return
    if config.exact != "off":
        raise ConfigError(
            f"config.{key}.attention=cudnn: its gradient adds up in no fixed order, so it "
            f"cannot be exact; config.{key}.attention=xla works, or --config.exact=off"
        )
    if tokens:
        raise ConfigError(
            f"config.{key}.attention=cudnn takes a sample a row, and "
            f"config.{sized}.micro_batch_tokens={tokens} packs several: "
            f"config.{key}.attention=auto works, or config.{sized}.micro_batch_tokens=0"
        )
    if config.mesh.sequence > 1:
        raise ConfigError(
            f"config.{key}.attention=cudnn takes whole rows, and "
            f"config.mesh.sequence={config.mesh.sequence} splits them: "
            f"config.{key}.attention=auto works, or --config.mesh.sequence=1"
        )


def _check_strict(config: Config) -> None:
    """Strict sums are tested on one device, for layers whose form the sampler shares."""
    if config.exact != "strict":
        return
    if is_offline(config):
        raise ConfigError(
            "config.exact=strict compares with the sampler's log-probs, and offline training "
            "samples nothing; --config.exact=repeatable works"
        )
    actor, rollout, mesh = config.actor, config.rollout, config.mesh
    works = {
        "rollout.quantization": (rollout.quantization, "none"),
        "rollout.dtype": (rollout.dtype or actor.dtype, actor.dtype),
        "placement": (config.placement or "colocated", "colocated"),
        "partial_rollouts": (config.partial_rollouts, 0),
        **{f"mesh.{axis}": (size, 1) for axis, size in mesh.sizes.items()},
    }
    for key, model in _models(config):
        if key in ("actor", "teacher"):
            works[f"{key}.residual_dtype"] = model.residual_dtype, "float32"
            works[f"{key}.scan_layers"] = model.scan_layers, False
    for key, (value, fitting) in works.items():
        if value != fitting:
            raise ConfigError(
                f"config.{key}={value}: with it, bits of sampler and trainer are not known to be "
                f"equal (config.exact=strict); config.{key}={fitting} works, or "
                "--config.exact=repeatable"
            )


def _check_split(config: Config, key: str, model: ModelSettings) -> None:
    """The mesh must divide the model's sizes. One that is 0 or not given is known later."""
    sizes = _hf_config(key, model)
    mesh = _mesh(config, key)
    by_heads = ("num_attention_heads", "intermediate_size", "vocab_size", "moe_intermediate_size")
    stored = ("hidden_size", "q_lora_rank", "kv_lora_rank")
    names = {
        "mesh.tensor": (mesh.tensor, by_heads),
        "mesh.generation.tensor": (mesh.generation.tensor or 1, by_heads),
        "mesh.passes.tensor": (mesh.passes.tensor or 1, by_heads),
        f"{key}.tensor": (model.tensor or 1, by_heads),
        "mesh.fsdp": (mesh.pipeline * mesh.fsdp * mesh.expert * mesh.sequence, stored),
        "mesh.expert": (mesh.expert, ("num_experts", "num_local_experts", "n_routed_experts")),
    }
    for name_of_size, (parts, of_axis) in names.items():
        given = {name: sizes[name] for name in of_axis if isinstance(sizes.get(name), int)}
        for name, size in given.items():
            if size < 0:
                raise ConfigError(f"config.{key}.hf_config.{name}={size}: must be positive")
            if size % parts:
                fitting = [d for d in range(1, parts) if not any(s % d for s in given.values())]
                if mesh != config.mesh and name_of_size == "mesh.fsdp":
                    name_of_size = f"placement.{_role(config, key)}"
                    raise ConfigError(
                        f"config.{name_of_size} has {parts} devices, which do not divide "
                        f"{name}={size} of the model config.{key}; {fitting[-1]} devices work"
                    )
                if name_of_size == "mesh.fsdp" and parts != mesh.fsdp:
                    raise ConfigError(
                        f"config.mesh: pipeline × fsdp × expert × sequence = {parts} splits the "
                        f"weights and does not divide {name}={size} of the model config.{key}; "
                        f"sizes whose product is {fitting[-1]} work, with config.mesh.data for "
                        "other devices"
                    )
                raise ConfigError(
                    f"config.{name_of_size}={parts}: does not divide {name}={size} of the model "
                    f"config.{key}; config.{name_of_size}={fitting[-1]} works"
                )


def _check_layers(config: Config, key: str, model: ModelSettings) -> None:
    """The stages of a pipeline must share a model's layers evenly."""
    mesh, sizes = _mesh(config, key), _hf_config(key, model)
    if mesh.pipeline == 1:
        return
    layers = sizes.get("num_hidden_layers")
    groups = mesh.pipeline * mesh.pipeline_rounds
    if isinstance(layers, int) and layers > 0 and layers % groups:
        what, other = "pipeline_rounds", mesh.pipeline
        if layers % mesh.pipeline:
            what, other = "pipeline", 1
        fits = [n for n in range(1, layers + 1) if layers % (n * other) == 0]
        rounds = " and pipeline_rounds=1" if what == "pipeline" and mesh.pipeline_rounds > 1 else ""
        raise ConfigError(
            f"config.mesh.pipeline={mesh.pipeline} × pipeline_rounds={mesh.pipeline_rounds} groups "
            f"do not divide num_hidden_layers={layers} of the model config.{key}; "
            f"config.mesh.{what}={_closest(fits, getattr(mesh, what))}{rounds} works"
        )


def _hf_config(key: str, model: ModelSettings) -> dict[str, Any]:
    file = Path(model.path) / "config.json"
    if not model.path:
        return model.hf_config
    if not file.is_file() or (file.parent / "checkpoints").is_dir():
        return {}  # one of our checkpoints or runs
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"config.{key}.path={model.path}: {file} is not JSON: {error}") from None
    return found if isinstance(found, dict) else {}


# ------------------------------------------------------------------------- data and functions


def _check_data(config: Config) -> None:
    data = config.data
    for key, rows in (("train_data", data.train_rows), ("val_data", data.val_rows)):
        if rows is not None and rows.rows is None:
            raise ConfigError(
                f"config.data.{key.removesuffix('data')}rows were {rows.num_rows} rows of a Python "
                f"program, which this file does not hold: rl.train(config, {key}=rows) gives them"
            )
    if not (data.train_files or data.train_tasks or data.train_rows or data.dataset_class):
        raise ConfigError(
            "config.data has no training data: set --config.data.train_files=[FILE] or "
            "--config.data.train_tasks=[chain_sum]"
        )
    trainings = [(f"{key}.files", training.files) for key, training in _trainings(config)]
    for key, files in (
        ("data.train_files", data.train_files),
        ("data.val_files", data.val_files),
        *trainings,
    ):
        mine = bool(data.dataset_class) and key.startswith("data.")  # the class reads them
        for file in () if mine else files:
            try:
                check_files(file)
            except ValueError as error:
                raise ConfigError(f"config.{key}: {error}") from None
    known = data.tokenizer in ("", "char") or is_hub_name(data.tokenizer)
    if not known and not Path(data.tokenizer).exists():
        raise ConfigError(
            f"config.data.tokenizer={data.tokenizer}: expected char or a Hugging Face folder"
            f"{nearest_file(Path(data.tokenizer))}"
        )
    if not config.actor.path and not config.actor.hf_config:
        raise ConfigError(
            "config.actor has no model: set --config.actor.path=HF_DIR, or hf_config in the file"
        )
    if not data.tokenizer and not config.actor.path:
        raise ConfigError(
            "config.data.tokenizer is empty and config.actor.path, whose tokenizer would be taken, "
            "too; --config.data.tokenizer=char works"
        )


def _check_profile(config: Config) -> None:
    late = [step for step in config.profile.steps if step > config.total_steps]
    if late:
        raise ConfigError(
            f"config.profile.steps has {late[0]}, and config.total_steps={config.total_steps} is "
            f"the last step: give steps up to that, such as [{min(3, config.total_steps)}]"
        )


def _check_phases(config: Config) -> None:
    for i, phase in enumerate(config.phases):
        if is_offline(config) or _is_offline(phase.algorithm):
            raise ConfigError(
                f"config.phases.{i}: phases are of online algorithms, and an offline one is here; "
                "run it alone and give its checkpoint as --config.actor.path"
            )
    total = sum(phase.steps for phase in config.phases)
    if config.phases and total >= config.total_steps:
        raise ConfigError(
            f"config.phases takes {total} steps of config.total_steps={config.total_steps} and "
            f"leaves none for config.algorithm; --config.total_steps={total + 1} works"
        )


def _check_teacher(config: Config) -> None:
    teacher = config.teacher
    if teacher is None:
        return
    if not teacher.path and teacher.training is None:
        raise ConfigError(
            "config.teacher has no path and no training: set --config.teacher.path=DIR, or "
            "--config.teacher.training={} to train it in the run"
        )
    if is_offline(config):
        raise ConfigError(
            "config.teacher: an offline run does not read it; set --config.teacher=null, or an "
            "algorithm that does: --config.algorithm=distillation"
        )


def _check_functions(config: Config) -> None:
    """Files and packages of the user's functions exist; they are loaded later."""
    named: list[tuple[str, Any]] = [
        ("algorithm", config.algorithm),
        ("data.priority", config.data.priority),
        *graders(config),
        *((f"phases.{i}.algorithm", p.algorithm) for i, p in enumerate(config.phases)),
    ]
    for key, given in named:
        if isinstance(given, Given) and given.function is None:
            name = given.path.rpartition(":")[2]
            raise ConfigError(
                f"config.{key} was the function {name} of a Python program, which this file does "
                f"not hold: rl.train(config, rewards=[{name}]) gives it, or write it in a file and "
                f"name it, my_file.py:{name}"
            )
    customs = [(key, f) for key, f in named if isinstance(f, Custom) and not isinstance(f, Given)]
    paths = [(f"{key}.path", f.path) for key, f in customs]
    if config.data.dataset_class:
        paths.append(("data.dataset_class", config.data.dataset_class))
    for key, path in paths:
        try:
            check_path(path)
        except ValueError as error:
            raise ConfigError(f"config.{key}={path}: {error}") from None


# ------------------------------------------------------------------------- parts


def _models(config: Config) -> Iterator[tuple[str, ModelSettings]]:
    yield "actor", config.actor
    yield "critic", config.critic
    if config.reward.model is not None:
        yield "reward.model", config.reward.model
    if config.teacher is not None:
        yield "teacher", config.teacher
    for i, model in enumerate(config.models):
        yield f"models.{i}", model


def _role(config: Config, key: str) -> str:
    """The role of the model at `key`."""
    first, _, number = key.partition(".")
    return config.models[int(number)].name if first == "models" else first


def _mesh(config: Config, key: str) -> MeshConfig:
    """The mesh of the model at `key`."""
    return mesh_of_role(config, _role(config, key))


def _trainings(config: Config) -> Iterator[tuple[str, SupervisedConfig]]:
    if config.warmup is not None:
        yield "warmup", config.warmup
    if config.reward.model is not None and config.reward.model.training is not None:
        yield "reward.model.training", config.reward.model.training
    if config.teacher is not None and config.teacher.training is not None:
        yield "teacher.training", config.teacher.training
