"""Which models a checkpoint is of: recorded in its loop state, and compared before it is used.

Weights fit every model of the same shapes. So a checkpoint says what its weights are weights of:
the config and the dtypes of each model, and the digest of the tokenizer. Package versions, files of
the user's functions and what else may change are recorded too. They are named when they differ.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoint import manager
from jaxrl_llm.config import Config, ConfigError, Custom
from jaxrl_llm.models.base import ModelSpec
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.hf import FEW
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.references import file_of, imported_files
from jaxrl_llm.typed_records.python_objects import Given
from jaxrl_llm.typed_records.tree import every

IDENTITY = "identity"  # entry of the loop state
# Entries of a record. LEARNER is the role whose model checkpoints/huggingface describes.
MODELS, TOKENIZER, LEARNER, SETTING = "models", "tokenizer", "learner", "setting"
CODE = "code"  # digests of the files of the user's functions
# Digests of rows that are not a run's position in its data; an entry may be absent.
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
_DTYPES = ("kind", "dtype", "param_dtype")  # of a model; the rest are fields of its config
LORA = "lora."  # before the fields of its adapters

Record = dict[str, Any]  # of a model, in JSON's types
Identity = dict[str, Any]  # of a checkpoint: its models by role, tokenizer, learner and setting

_OTHER_ROWS = {
    HELD_OUT: "the held-out rows have changed since the checkpoint: what was measured before it is "
    "of other rows, the best checkpoint too",
    COLUMNS: "columns of the training rows have changed since the checkpoint: a reward function "
    "that reads them gives other rewards than in the run that began",
}


def model_record(spec: ModelSpec, dtype: str) -> Record:
    """A model that is stored as `spec` says and computed in `dtype`."""
    given = {"kind": spec.kind, "dtype": dtype, "param_dtype": spec.stored_dtype}
    if spec.lora is not None:
        given |= lora_record(spec.lora)
    return given | config_record(spec.config)


def lora_record(lora: Lora) -> Record:
    """The adapters of a model; `lora_of` reads it."""
    found = dataclasses.asdict(lora) | {"modules": sorted(lora.modules)}
    del found["merge"]  # how it is computed, not what it is
    return {LORA + key: value for key, value in found.items()}


def lora_of(model: Record) -> Lora | None:
    """The adapters in a model's record; None where all weights learned."""
    found: Record = {k.removeprefix(LORA): v for k, v in model.items() if k.startswith(LORA)}
    if found:
        found["modules"] = frozenset(found["modules"])
    return Lora(**found) if found else None


def config_record(config: ModelConfig) -> Record:
    """The fields of a model's config."""
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    # Checkpoints of older versions do not have the features of few families.
    found = {name: x for name, x in found.items() if name not in FEW or x != FEW[name]}
    scaling = config.rope_scaling
    if scaling is not None:
        found["rope_scaling"] = {"rope_type": scaling.kind} | dataclasses.asdict(scaling)
    if config.latent is not None:
        found["latent"] = dataclasses.asdict(config.latent)
    if config.delta is not None:
        found["delta"] = dataclasses.asdict(config.delta)
    if config.mixture is not None:
        # Checkpoints of older versions have the fields without a default.
        fields = dataclasses.fields(config.mixture)
        given = dataclasses.asdict(config.mixture)
        found["mixture"] = {f.name: given[f.name] for f in fields if given[f.name] != f.default}
    return json.loads(json.dumps(found))  # lists in place of tuples


def code_record(config: Config) -> dict[str, str]:
    """The digest of the file of each function that the config names by path.

    The modules that it imports from its folder have their own. Objects of a program have digests in
    the config.
    """
    files: dict[str, Path | None] = {}
    for key, given in every(config, Custom):
        if not isinstance(given, Given):
            name = f"config.{key}={given.path}"
            files[name] = file_of(given.path)
            imported = imported_files(given.path)
            files |= {f"module {module} of {name}": file for module, file in imported.items()}
    return {
        name: hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
        for name, file in files.items()
        if file is not None
    }


def package_versions() -> dict[str, str]:
    """The versions of the packages that a run's numbers depend on."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


# ------------------------------------------------------------------------- compare


def read_identity(checkpoint: Path) -> Identity | None:
    """The record of a finished checkpoint; None where an older version wrote it.

    Raises: DamagedCheckpoint.
    """
    return manager.loop_state(checkpoint).get(IDENTITY)


def check_resume(checkpoint: Path, now: Identity) -> str:
    """Compare a checkpoint with the run that is to go on from it, before any array exists.

    Returns what differs and may, in lines for the user; empty where nothing does.

    Raises: ConfigError for another model or tokenizer; it names the key and both values.
    """
    saved = read_identity(checkpoint)
    if saved is None:
        return (
            f"{checkpoint} does not say which model it is of, as an older version wrote it: it "
            "could not be compared with this config"
        )
    wrong, noted = [], []
    for role in saved[MODELS].keys() & now[MODELS].keys():
        for key, there, here in _differences(saved[MODELS][role], now[MODELS][role]):
            found = noted if key in MAY_CHANGE else wrong
            found.append(_line(f"{role}.{key}", there, here))
    if saved[TOKENIZER] != now[TOKENIZER]:
        wrong.append(_line("digest of the tokenizer", saved[TOKENIZER], now[TOKENIZER]))
    if wrong:
        raise ConfigError(
            f"{checkpoint} was saved with another model or tokenizer than this run has:\n  "
            + "\n  ".join(sorted(wrong))
            + "\nGo on with the config and the model's files that it was made with. To begin from "
            "weights of another model, give its folder as --config.actor.path"
        )
    noted += [_line(*found) for found in _differences(saved[SETTING], now[SETTING])]
    lines = [f"other than in the checkpoint: {', '.join(noted)}"] if noted else []
    was, code = saved.get(CODE, {}), now.get(CODE, {})
    if changed := [name for name in code if was.get(name, code[name]) != code[name]]:
        lines.append(
            f"the file of {', '.join(changed)} has changed since the checkpoint: the run goes on "
            "with the new one, and its steps are no longer those of the run that began"
        )
    rows, there = now.get(ROWS, {}), saved.get(ROWS, {})
    for name, sentence in _OTHER_ROWS.items():
        if name in rows and there.get(name, rows[name]) != rows[name]:
            lines.append(sentence)
    return "\n".join(lines)


def check_model(
    checkpoint: Path, config: ModelConfig, described_in: Path, role: str | None = None
) -> None:
    """Compare a model's config, read from a file, with what the checkpoint was saved with.

    None is the role that the run learned. Does nothing where the checkpoint has no record.

    Raises: ConfigError that names the key, both values and the file.
    """
    saved = read_identity(checkpoint)
    model = None if saved is None else saved[MODELS].get(role or saved[LEARNER])
    if model is None:
        return
    there = {k: v for k, v in model.items() if k not in _DTYPES and not k.startswith(LORA)}
    found = _differences(there, config_record(config))
    lines = [_line(key, was, here) for key, was, here in found if key not in MAY_CHANGE]
    if lines:
        raise ConfigError(
            f"{described_in} describes another model than {checkpoint} was saved with: "
            f"{', '.join(lines)}. Put the right values or the file back"
        )


def check_tokenizer(checkpoint: Path, digest: str, folder: Path) -> None:
    """Compare the tokenizer in `folder` with that of the run. ConfigError names both digests."""
    saved = read_identity(checkpoint)
    if saved is not None and saved[TOKENIZER] != digest:
        raise ConfigError(
            f"the tokenizer in {folder} is not the one that {checkpoint} was saved with: "
            f"{_line('its digest', saved[TOKENIZER], digest)}. Put its files back"
        )


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, saved value, value now) where two flat records differ."""
    keys = dict.fromkeys([*saved, *now])
    return [(k, saved.get(k), now.get(k)) for k in keys if saved.get(k) != now.get(k)]


def _line(key: str, there: Any, here: Any) -> str:
    return f"{key} {_shown(there)} there, {_shown(here)} now"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
