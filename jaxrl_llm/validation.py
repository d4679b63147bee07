"""What a config must satisfy before a run starts, checked without jax, in milliseconds.

Types are checked by `overrides.coerce`; here are the sizes, words and files. Every message names
the key, its value, and a value that works.
"""

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_llm.coercion import describe, function_settings
from jaxrl_llm.config import (
    Config,
    ConfigError,
    FunctionConfig,
    ModelSettings,
    OptimizerConfig,
    SupervisedConfig,
    TaskConfig,
)
from jaxrl_llm.signatures import REQUIRED, dict_keys, find_definition, nearest, nearest_file

PRIORITY_MODULE = "jaxrl_llm.data.priority"

WORDS = {
    "data.prompt_style": ("plain", "chat"),
    "data.truncation": ("error", "left", "right", "middle"),
    "rollout.dtype": ("", "float32", "bfloat16"),
}
MODEL_WORDS = {
    "dtype": ("float32", "bfloat16"),
    "param_dtype": ("float32", "bfloat16"),
}
SCHEDULES = ("constant", "linear", "cosine")
AT_LEAST_ONE = (
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "data.train_batch_size",
    "data.val_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.prefetch",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "critic.ppo_epochs",
    "rollout.n",
    "rollout.filter_groups.max_num_gen_batches",
    "validation.n",
    "reward.num_workers",
    "checkpoint.keep_latest",
)
AT_LEAST_ZERO = (
    "seed",
    "total_steps",
    "save_every",
    "data.num_workers",
    "actor.micro_batch_size",
    "actor.micro_batch_tokens",
    "critic.micro_batch_size",
    "critic.micro_batch_tokens",
    "critic.warmup_steps",
    "rollout.temperature",
    "rollout.top_k",
    "rollout.num_slots",
    "rollout.cache_tokens",
    "validation.every",
    "validation.temperature",
    "log.console_every",
    "log.samples_every",
    "log.num_samples",
    "checkpoint.keep_best",
)
FRACTIONS = ("data.max_bad_fraction", "data.priority_uniform", "rollout.min_p")  # from 0 to 1
PROBABILITIES = ("rollout.top_p", "validation.top_p")  # above 0, up to 1


def validate(config: Config) -> None:
    """Raise ConfigError for the first thing in `config` that cannot work."""
    _check_numbers(config)
    _check_words(config)
    if is_offline(config):
        _check_offline(config)
    else:
        _check_batches(config)
        _check_rewards(config)
    _check_supervised_batches(config)
    _check_teacher(config)
    _check_phases(config)
    _check_data(config)
    _check_priority(config)
    _check_settings(config)
    for key, model in _models(config):
        _check_model(key, model, config)
    if config.resume not in ("auto", "never") and not Path(config.resume).exists():
        raise ConfigError(
            f"config.resume={config.resume}: expected auto, never, or the folder of a checkpoint"
            f"{nearest_file(Path(config.resume))}"
        )


def is_offline(config: Config) -> bool:
    """Whether the run learns from fixed records: its algorithm's function says so by its return
    annotation, `-> OfflineAlgorithm`."""
    try:
        _, definition = find_definition(config.algorithm.path)
    except ConfigError as error:
        raise ConfigError(f"config.algorithm.path={config.algorithm.path}: {error}") from None
    returns = None if isinstance(definition, ast.ClassDef) else definition.returns
    return returns is not None and ast.unparse(returns).strip("'\"").endswith("OfflineAlgorithm")


# ------------------------------------------------------------------------- numbers and words


def _check_numbers(config: Config) -> None:
    for key in AT_LEAST_ONE:
        _at_least(config, key, 1)
    for key in AT_LEAST_ZERO:
        _at_least(config, key, 0)
    for key in FRACTIONS:
        if not 0 <= _get(config, key) <= 1:
            raise ConfigError(f"config.{key}={_get(config, key)}: must be from 0 to 1; 0 works")
    for key in PROBABILITIES:
        if not 0 < _get(config, key) <= 1:
            raise ConfigError(
                f"config.{key}={_get(config, key)}: must be above 0 and at most 1; 1.0 works"
            )
    if config.reward.timeout_s <= 0:
        raise ConfigError(
            f"config.reward.timeout_s={config.reward.timeout_s}: must be above 0; 30 works"
        )
    for key, training in _trainings(config):
        for name in ("steps", "micro_batch_size", "eval_every"):
            if getattr(training, name) < 0:
                value = getattr(training, name)
                raise ConfigError(f"config.{key}.{name}={value}: must be 0 or more; 0 works")
        if training.batch_size < 1:
            raise ConfigError(
                f"config.{key}.batch_size={training.batch_size}: must be 1 or more; 256 works"
            )
        if not 0 <= training.stop_at <= 1:
            raise ConfigError(
                f"config.{key}.stop_at={training.stop_at}: an accuracy from 0 to 1; 0 works"
            )
    for key, optimizer in _optimizers(config):
        _check_optimizer(key, optimizer)


def _check_optimizer(key: str, optimizer: OptimizerConfig) -> None:
    def bad(name: str, what: str) -> ConfigError:
        return ConfigError(f"config.{key}.{name}={getattr(optimizer, name)}: {what}")

    for name in ("learning_rate", "warmup_steps", "total_steps", "weight_decay"):
        if getattr(optimizer, name) < 0:
            raise bad(name, "must be 0 or more; 0 works")
    for name in ("b1", "b2"):
        if not 0 <= getattr(optimizer, name) < 1:
            raise bad(name, "must be from 0 to below 1; 0.9 works")
    if optimizer.eps <= 0:
        raise bad("eps", "must be above 0; 1e-8 works")
    if optimizer.max_grad_norm <= 0:
        raise bad("max_grad_norm", "must be above 0; 1.0 works, 1e9 never clips")
    if not 0 <= optimizer.min_learning_rate_ratio <= 1:
        raise bad("min_learning_rate_ratio", "must be from 0 to 1; 0 works")
    _word(f"{key}.schedule", optimizer.schedule, SCHEDULES)


def _check_words(config: Config) -> None:
    for key, words in WORDS.items():
        _word(key, _get(config, key), words)
    optimizers = {key for key, _ in _optimizers(config)}
    for key, model in _models(config):
        for name, words in MODEL_WORDS.items():
            _word(f"{key}.{name}", getattr(model, name), words)
        own = optimizers & {f"{key}.optimizer", f"{key}.training.optimizer"}
        if own and model.param_dtype != "float32":
            raise ConfigError(
                f"config.{key}.param_dtype={model.param_dtype}: most updates are smaller than half "
                "of a bfloat16 step and would be lost, so weights that learn are float32; "
                f"config.{key}.dtype=bfloat16 computes in it, and "
                f"config.{own.pop()}.moment_dtype=bfloat16 or .offload=true saves memory"
            )


# ------------------------------------------------------------------------- sizes


def _check_batches(config: Config) -> None:
    replicas = config.mesh.num_replicas
    split = (
        f"the {replicas} replicas of the mesh (data {config.mesh.data} × fsdp {config.mesh.fsdp})"
    )
    prompts, n = config.data.train_batch_size, config.rollout.n
    mini = config.actor.ppo_mini_batch_size
    if (prompts * n) % replicas:
        better = _nearest(
            [p for p in range(1, 2 * prompts + replicas) if p * n % replicas == 0], prompts
        )
        raise ConfigError(
            f"config.data.train_batch_size={prompts}: with config.rollout.n={n} that is "
            f"{prompts * n} samples, which {split} do not divide; {better} works"
        )
    if prompts % mini:
        divisors = [d for d in range(1, prompts + 1) if prompts % d == 0 and d * n % replicas == 0]
        raise ConfigError(
            f"config.actor.ppo_mini_batch_size={mini}: must divide "
            f"config.data.train_batch_size={prompts}; {_nearest(divisors, mini)} works"
        )
    if (mini * n) % replicas:
        divisors = [d for d in range(1, prompts + 1) if prompts % d == 0 and d * n % replicas == 0]
        raise ConfigError(
            f"config.actor.ppo_mini_batch_size={mini}: with config.rollout.n={n} that is "
            f"{mini * n} samples, which {split} do not divide; {_nearest(divisors, mini)} works"
        )
    for role in ("actor", "critic"):
        micro = _get(config, f"{role}.micro_batch_size")
        _check_micro(f"{role}.micro_batch_size", micro, mini * n, replicas, "mini-batch")
        _check_packing(config, role)
    room, longest = config.rollout.cache_tokens, config.data.max_response_length
    if 0 < room < longest:
        raise ConfigError(
            f"config.rollout.cache_tokens={room}: one response may have "
            f"config.data.max_response_length={longest} tokens; give at least that, or 0 for room "
            "for every slot"
        )
    if config.rollout.filter_groups.enable and n == 1:
        raise ConfigError(
            "config.rollout.filter_groups.enable=true: a group of config.rollout.n=1 sample never "
            "varies; config.rollout.n=8 is usual"
        )


def _check_offline(config: Config) -> None:
    """Sizes of an offline run: a batch of records on the replicas, in passes."""
    replicas, size = config.mesh.num_replicas, config.data.train_batch_size
    if size % replicas:
        up = -(-size // replicas) * replicas
        raise ConfigError(
            f"config.data.train_batch_size={size}: the {replicas} replicas of the mesh (data "
            f"{config.mesh.data} × fsdp {config.mesh.fsdp}) do not divide it; {up} works"
        )
    micro = config.actor.micro_batch_size
    _check_micro("actor.micro_batch_size", micro, size, replicas, "batch")
    _check_packing(config, "actor")
    if config.warmup is not None and config.warmup.stop_at and not config.validation.generate:
        raise ConfigError(
            f"config.warmup.stop_at={config.warmup.stop_at}: nothing measures that accuracy; set "
            "--config.validation.generate=true, or config.warmup.stop_at=0"
        )


def _check_supervised_batches(config: Config) -> None:
    replicas = config.mesh.num_replicas
    split = (
        f"the {replicas} replicas of the mesh (data {config.mesh.data} × fsdp {config.mesh.fsdp})"
    )
    for key, training in _trainings(config):
        size = training.batch_size
        if size % replicas:
            up = -(-size // replicas) * replicas
            raise ConfigError(
                f"config.{key}.batch_size={size}: {split} do not divide it; {up} works"
            )
        _check_micro(f"{key}.micro_batch_size", training.micro_batch_size, size, replicas, "batch")


def _check_micro(key: str, micro: int, samples: int, replicas: int, what: str) -> None:
    each = samples // replicas
    if micro and each % micro:
        better = _nearest([d for d in range(1, each + 1) if each % d == 0], micro)
        raise ConfigError(
            f"config.{key}={micro}: must divide the {each} samples of a {what} that each of "
            f"{replicas} replicas holds; {better} works, 0 takes all at once"
        )


def _check_packing(config: Config, role: str) -> None:
    tokens = _get(config, f"{role}.micro_batch_tokens")
    longest = config.data.max_prompt_length + config.data.max_response_length
    if tokens and _get(config, f"{role}.micro_batch_size"):
        raise ConfigError(
            f"config.{role}.micro_batch_tokens={tokens} and config.{role}.micro_batch_size="
            f"{_get(config, f'{role}.micro_batch_size')}: a pass is sized by tokens or by samples; "
            "set one of them to 0"
        )
    if tokens and tokens < longest:
        raise ConfigError(
            f"config.{role}.micro_batch_tokens={tokens}: a sample may have {longest} tokens "
            f"(max_prompt_length + max_response_length) and is never cut; {longest} or more works"
        )


def _check_model(key: str, model: ModelSettings, config: Config) -> None:
    if model.path and not Path(model.path).is_dir() and not is_hub_name(model.path):
        raise ConfigError(
            f"config.{key}.path={model.path}: no such folder{nearest_file(Path(model.path))}\n"
            f"scripts/prepare_model.py smollm2 --output={model.path} writes a small model there"
        )
    if config.exact and model.attention == "cudnn":
        raise ConfigError(
            f"config.{key}.attention=cudnn: its gradient adds up in no fixed order, so it "
            f"cannot be exact; config.{key}.attention=xla works, or --config.exact=false"
        )
    sized = "critic" if key == "critic" else "actor"
    tokens = _get(config, f"{sized}.micro_batch_tokens")
    if tokens and model.attention == "cudnn":
        raise ConfigError(
            f"config.{key}.attention=cudnn takes a sample a row, and "
            f"config.{sized}.micro_batch_tokens={tokens} packs several: "
            f"config.{key}.attention=auto works, or config.{sized}.micro_batch_tokens=0"
        )
    if config.rollout.quantization != "none" and config.mesh.tensor > 1:
        raise ConfigError(
            f"config.rollout.quantization={config.rollout.quantization} needs whole weights on "
            f"each device, and config.mesh.tensor={config.mesh.tensor} splits them: use "
            "config.mesh.fsdp or config.mesh.data, or --config.rollout.quantization=none"
        )
    sizes = _hf_config(key, model)
    names = {
        "tensor": ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"),
        "fsdp": ("hidden_size",),
    }
    for axis, of_axis in names.items():
        parts = getattr(config.mesh, axis)
        # One that is not given, or 0, is settled later: by the family's default, the tokenizer.
        given = {name: sizes[name] for name in of_axis if isinstance(sizes.get(name), int)}
        given = {name: size for name, size in given.items() if size}
        for name, size in given.items():
            if size < 0:
                raise ConfigError(f"config.{key}.hf_config.{name}={size}: must be positive")
            if size % parts:
                fitting = [d for d in range(1, parts) if not any(s % d for s in given.values())]
                raise ConfigError(
                    f"config.mesh.{axis}={parts}: does not divide {name}={size} of the model "
                    f"config.{key}; config.mesh.{axis}={fitting[-1]} works"
                )


def _hf_config(key: str, model: ModelSettings) -> dict[str, Any]:
    if not model.path:
        return model.hf_config
    file = Path(model.path) / "config.json"
    if not file.is_file():
        return {}  # one of our checkpoints, which describes itself
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"config.{key}.path={model.path}: {file} is not JSON: {error}") from None


# ------------------------------------------------------------------------- files and functions


def _check_data(config: Config) -> None:
    data = config.data
    if not data.train_files and not data.train_tasks and not data.dataset_class:
        raise ConfigError(
            "config.data has no training data: set --config.data.train_files=[FILE] or "
            "--config.data.train_tasks=[chain_sum]"
        )
    _files_exist("data.train_files", data.train_files)
    _files_exist("data.val_files", data.val_files)
    for key, training in _trainings(config):
        _files_exist(f"{key}.files", training.files)
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
    if data.dataset_class:
        _function_exists("data.dataset_class", data.dataset_class)


def _check_priority(config: Config) -> None:
    """Who is drawn by priority must be scored, and the function read only what is known of it."""
    priority = config.data.priority
    if priority is None:
        return
    key = f"config.data.priority={priority.path}"
    if is_offline(config):
        raise ConfigError(
            f"{key}: an offline run scores no answers to go by; set --config.data.priority=null"
        )
    if not config.data.shuffle:
        raise ConfigError(
            f"{key}: draws by chance, and config.data.shuffle=false asks for the order of the "
            "files; set one of --config.data.shuffle=true and --config.data.priority=null"
        )
    known = dict_keys(PRIORITY_MODULE, "FIELDS")
    _, definition = find_definition(priority.path)
    if isinstance(definition, ast.ClassDef):
        raise ConfigError(f"{key}: is a class; a function of {', '.join(known)} works")
    arguments = definition.args
    reads = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    for name in reads:
        if name not in known:
            raise ConfigError(
                f"{key}: its parameter {name!r} is nothing that is known of a prompt"
                f"{nearest(name, known)}; there are {', '.join(known)}. A setting must be "
                "keyword-only (after *)"
            )
    if not reads:
        raise ConfigError(f"{key}: reads nothing; its parameters may be {', '.join(known)}")
    if "std" in reads and config.rollout.n == 1:
        raise ConfigError(
            f"{key}: reads the std of a prompt's samples, and config.rollout.n=1 makes one; "
            f"config.rollout.n=8 is usual, or {PRIORITY_MODULE}:failure_rate"
        )


def _check_rewards(config: Config) -> None:
    reward = config.reward
    if not reward.functions and reward.model is None:
        raise ConfigError(
            "config.reward has neither functions nor a model: set "
            "--config.reward.functions=[my_rewards.py:my_function]"
        )
    if reward.weights and len(reward.weights) != len(reward.functions):
        ones = ",".join(["1"] * len(reward.functions))
        raise ConfigError(
            f"config.reward.weights={list(reward.weights)}: {len(reward.weights)} weights for "
            f"{len(reward.functions)} functions; [{ones}] works"
        )
    model = reward.model
    if model is not None and not model.path and model.training is None:
        raise ConfigError(
            "config.reward.model has no path and no training: set --config.reward.model.path=DIR, "
            "or --config.reward.model.training={} to train it in the run"
        )


def _check_phases(config: Config) -> None:
    for i, phase in enumerate(config.phases):
        key = f"phases.{i}"
        if phase.steps < 1:
            raise ConfigError(f"config.{key}.steps={phase.steps}: must be 1 or more; 1 works")
        if is_offline(config) or is_offline(replace(config, algorithm=phase.algorithm)):
            raise ConfigError(
                f"config.{key}: phases are of online algorithms, and an offline one is here; run "
                "it by itself and give its checkpoint as --config.actor.path"
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
    _at_least(config, "teacher.top_k", 1)
    if not teacher.path and teacher.training is None:
        raise ConfigError(
            "config.teacher has no path and no training: set --config.teacher.path=DIR, or "
            "--config.teacher.training={} to train it in the run"
        )
    if is_offline(config):
        raise ConfigError(
            "config.teacher: an offline run has no use for it; set --config.teacher=null, or an "
            "algorithm such as jaxrl_llm.algorithms.imitation_alias:distillation"
        )


def _check_settings(config: Config) -> None:
    """Settings without a default must be given; unknown ones and types are checked on reading."""
    for key, node in _functions(config, "config"):
        for name, setting in function_settings(node, key).items():
            if setting.default is REQUIRED and name not in node.settings:
                kind = describe(setting.annotation)
                raise ConfigError(f"{key}.settings.{name} is missing; set it ({kind})")


def _files_exist(key: str, files: Sequence[str]) -> None:
    for file in files:
        if not Path(file).exists():
            raise ConfigError(f"config.{key}: {file} does not exist{nearest_file(Path(file))}")


def _function_exists(key: str, path: str) -> None:
    try:
        find_definition(path)
    except ConfigError as error:
        raise ConfigError(f"config.{key}={path}: {error}") from None


# ------------------------------------------------------------------------- small helpers


def is_hub_name(path: str) -> bool:
    """Whether `path` can only mean a model on a hub: owner/name, where no folder owner exists."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path)) and not Path(path).parent.is_dir()


def _models(config: Config) -> Iterator[tuple[str, ModelSettings]]:
    yield "actor", config.actor
    yield "critic", config.critic
    if config.reward.model is not None:
        yield "reward.model", config.reward.model
    if config.teacher is not None:
        yield "teacher", config.teacher


def _trainings(config: Config) -> Iterator[tuple[str, SupervisedConfig]]:
    if config.warmup is not None:
        yield "warmup", config.warmup
    if config.reward.model is not None and config.reward.model.training is not None:
        yield "reward.model.training", config.reward.model.training
    if config.teacher is not None and config.teacher.training is not None:
        yield "teacher.training", config.teacher.training


def _optimizers(config: Config) -> Iterator[tuple[str, OptimizerConfig]]:
    yield "actor.optimizer", config.actor.optimizer
    yield "critic.optimizer", config.critic.optimizer
    for key, training in _trainings(config):
        yield f"{key}.optimizer", training.optimizer


def _functions(node: Any, key: str) -> Iterator[tuple[str, FunctionConfig | TaskConfig]]:
    """(key, entry) of every function and task that the config names."""
    if isinstance(node, FunctionConfig | TaskConfig):
        yield key, node
    elif isinstance(node, tuple):
        for i, entry in enumerate(node):
            yield from _functions(entry, f"{key}.{i}")
    elif dataclasses.is_dataclass(node):
        for entry in dataclasses.fields(node):
            yield from _functions(getattr(node, entry.name), f"{key}.{entry.name}")


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _at_least(config: Config, key: str, least: int) -> None:
    value = _get(config, key)
    if value < least:
        raise ConfigError(f"config.{key}={value}: must be {least} or more; {least} works")


def _word(key: str, value: str, words: Sequence[str]) -> None:
    if value not in words:
        shown = ", ".join(word or "''" for word in words)
        hint = nearest(value, [word for word in words if word])
        raise ConfigError(f"config.{key}={value}: expected one of {shown}{hint}")


def _nearest(choices: Sequence[int], value: int) -> int:
    return min(choices, key=lambda choice: (abs(choice - value), -choice))
