"""The models of a checkpoint: recorded in its loop state, and compared before it is used.

Weights fit every model of the same shapes. So a checkpoint records the config and the dtypes of
each model, and the digest of the tokenizer; others are refused. Package versions, the git commit,
files of the user's functions and devices are recorded too. A resume names those that differ.
"""

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoint import manager
from jaxrl_llm.config import Config, ConfigError, Custom
from jaxrl_llm.models.base import ModelSpec
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.object_digests import source_object
from jaxrl_llm.references import file_of, git_commit
from jaxrl_llm.typed_records.python_objects import Given
from jaxrl_llm.typed_records.tree import every

IDENTITY = "identity"  # entry of the loop state
# Entries of a record. LEARNER is the role whose model checkpoints/huggingface describes.
MODELS, TOKENIZER, LEARNER, SETTING = "models", "tokenizer", "learner", "setting"
CODE = "code"  # the git commit, and digests of the files of the user's functions
COMMIT = "git commit"  # entry of CODE; empty outside of a repository
# Digests of rows, in addition to the position in the training data; several processes have none.
ROWS, HELD_OUT, COLUMNS = "rows", "held_out", "columns"
# Fields of a model's config that its function does not depend on.
MAY_CHANGE = ("max_position_embeddings", "initializer_range")
PACKAGES = (
    "jaxrl_llm",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "tokenizers",
)
_DTYPES = ("kind", "dtype", "param_dtype")  # entries of a model that are not in its config
LORA = "lora."  # prefix of the fields of its adapters

Record = dict[str, Any]  # a model, in JSON's types
Identity = dict[str, Any]  # a checkpoint: its models by role, tokenizer, learner and setting

_OTHER_ROWS = {
    HELD_OUT: "the held-out rows have changed since the checkpoint: earlier metrics and the best "
    "checkpoint belong to other rows",
    COLUMNS: "columns of the training rows have changed since the checkpoint: a reward function "
    "that reads them gives other rewards than before",
}


def model_record(spec: ModelSpec, dtype: str) -> Record:
    """A model that is stored as `spec` says and computed in `dtype`."""
    record = {"kind": spec.kind, "dtype": dtype, "param_dtype": spec.stored_dtype}
    if spec.lora is not None:
        record |= lora_record(spec.lora)
    return record | config_record(spec.config)


def lora_record(lora: Lora) -> Record:
    """The adapters of a model; `lora_of` reads it."""
    record = dataclasses.asdict(lora) | {"modules": sorted(lora.modules)}
    del record["merge"]  # how it is computed, not what it is
    return {LORA + key: value for key, value in record.items()}


def lora_of(model: Record) -> Lora | None:
    """The adapters in a model's record; None where all weights learned."""
    fields: Record = {k.removeprefix(LORA): v for k, v in model.items() if k.startswith(LORA)}
    if not fields:
        return None
    fields["modules"] = frozenset(fields["modules"])
    return Lora(**fields)


def config_record(config: ModelConfig) -> Record:
    """The fields of a model's config, in JSON's types."""
    record = dataclasses.asdict(config)
    del record["float32_head"]  # how it is computed, not what it is
    if config.vision is not None:
        del record["vision"]["train"]  # likewise
    if config.rope_scaling is not None:
        record["rope_scaling"] |= {"rope_type": config.rope_scaling.kind}
    return json.loads(json.dumps(record))  # lists in place of tuples


def code_record(config: Config) -> dict[str, str]:
    """The git commit of the working folder, and `file_digests`."""
    return {COMMIT: git_commit(Path())} | file_digests(config)


def file_digests(config: Config) -> dict[str, str]:
    """The digest of the file of each function that the config names by path or holds."""
    files = {f"config.{key}={each.path}": _file(each) for key, each in every(config, Custom)}
    return {
        name: hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
        for name, file in files.items()
        if file is not None and file.is_file()
    }


def _file(custom: Custom) -> Path | None:
    if not isinstance(custom, Given):
        return file_of(custom.path)
    try:
        return Path(inspect.getsourcefile(source_object(custom.function)) or "")
    except TypeError:  # it is built in, or was defined in a shell
        return None


def package_versions() -> dict[str, str]:
    """The versions of the packages that a run's numbers depend on."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


# ------------------------------------------------------------------------- compare


def read_identity(checkpoint: Path) -> Identity:
    """The record of a finished checkpoint. Raises: DamagedCheckpoint."""
    return manager.loop_state(checkpoint)[IDENTITY]


def check_resume(checkpoint: Path, now: Identity) -> str:
    """Compare a checkpoint with the run that is to go on from it, before any array exists.

    Returns what differs and may, in lines for the user; empty where nothing does.

    Raises: ConfigError for another model or tokenizer; it names the key and both values.
    """
    saved = read_identity(checkpoint)
    refused, noted = [], []
    for role in saved[MODELS].keys() & now[MODELS].keys():
        for key, there, here in _differences(saved[MODELS][role], now[MODELS][role]):
            lines = noted if key in MAY_CHANGE else refused
            lines.append(_line(f"{role}.{key}", there, here))
    if saved[TOKENIZER] != now[TOKENIZER]:
        refused.append(_line("digest of the tokenizer", saved[TOKENIZER], now[TOKENIZER]))
    if refused:
        raise ConfigError(
            f"{checkpoint} was saved with another model or tokenizer than this run has:\n  "
            + "\n  ".join(sorted(refused))
            + "\nGo on with the config and the model's files that it was made with. To begin from "
            "weights of another model, give its folder as --config.actor.path"
        )
    noted += [_line(*entry) for entry in _differences(saved[SETTING], now[SETTING])]
    lines = [f"other than in the checkpoint: {', '.join(noted)}"] if noted else []
    if changed := [name for name, *_ in _differences(saved[CODE], now[CODE])]:
        lines.append(
            f"changed since the checkpoint: {', '.join(changed)}. The run goes on with the new "
            "code, so its steps may differ from the steps of an uninterrupted run"
        )
    for name, sentence in _OTHER_ROWS.items():
        digests = saved[ROWS].get(name), now[ROWS].get(name)
        if None not in digests and digests[0] != digests[1]:
            lines.append(sentence)
    return "\n".join(lines)


def check_model(
    checkpoint: Path, config: ModelConfig, described_in: Path, role: str | None = None
) -> None:
    """Compare a model's config, read from a file, with the record of the checkpoint.

    None is the role that the run learned. Does nothing for a role without a record.

    Raises: ConfigError that names the key, both values and the file.
    """
    saved = read_identity(checkpoint)
    model = saved[MODELS].get(role or saved[LEARNER])
    if model is None:
        return
    there = {k: v for k, v in model.items() if k not in _DTYPES and not k.startswith(LORA)}
    differences = _differences(there, config_record(config))
    lines = [_line(key, was, here) for key, was, here in differences if key not in MAY_CHANGE]
    if lines:
        raise ConfigError(
            f"{described_in} describes another model than {checkpoint} was saved with: "
            f"{', '.join(lines)}. Put the right values or the file back"
        )


def check_tokenizer(checkpoint: Path, digest: str, folder: Path) -> None:
    """Compare the tokenizer in `folder` with the run's. ConfigError names both digests."""
    saved = read_identity(checkpoint)[TOKENIZER]
    if saved != digest:
        raise ConfigError(
            f"the tokenizer in {folder} is not the one that {checkpoint} was saved with: "
            f"{_line('its digest', saved, digest)}. Put its files back"
        )


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, saved value, value now) where two flat records differ."""
    keys = dict.fromkeys([*saved, *now])
    return [(k, saved.get(k), now.get(k)) for k in keys if saved.get(k) != now.get(k)]


def _line(key: str, there: Any, here: Any) -> str:
    return f"{key} {_shown(there)} there, {_shown(here)} now"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
