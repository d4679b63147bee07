"""What a run is: recorded in its checkpoints, on the console, and in RUN/about.json."""

import hashlib
import json
import os
import platform
import site
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import jax

from jaxrl_llm.checkpoint.identity import (
    LEARNER,
    MODELS,
    SETTING,
    TOKENIZER,
    Record,
    model_record,
    package_versions,
)
from jaxrl_llm.compiling.stored import Start, settings_of_jax
from jaxrl_llm.config import Config
from jaxrl_llm.plan.offline import OfflinePlan
from jaxrl_llm.plan.roles import Role
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.progress import Plan
from jaxrl_llm.typed_records.tree import as_dict

ABOUT = "about.json"
PACKAGES = ("jaxrl_llm", "jaxrl_llm.models")  # whose code decides programs
NOT_IN_PROGRAMS = {"name", "run_dir", "compile_cache", "log", "alarms"}  # keys of a config


def run_identity(plan: Plan, tokenizer: Tokenizer) -> Record:
    """What a checkpoint of this run is of. It is compared at a resume."""
    roles = plan.roles | plan.bases
    if isinstance(plan, OfflinePlan) and plan.reference is not None:
        roles[plan.reference.name] = plan.reference
    devices = plan.learner.mesh.devices
    setting = {
        **package_versions(),
        "device": f"{devices.size} x {devices.flat[0].device_kind}",
        "processes": str(jax.process_count()),
        "mesh": _sizes(plan.learner),
    }
    for name, role in roles.items():
        setting |= {f"{name}.{key}": value for key, value in _how(role).items()}
    return {
        MODELS: {name: model_record(role.spec, role.forward.dtype) for name, role in roles.items()},
        TOKENIZER: tokenizer.digest(),
        LEARNER: plan.learner.name,
        SETTING: setting,
    }


def start_of(config: Config, plan: Plan, tokenizer: Tokenizer) -> Start:
    """The start of a run, by its config, its identity, its code, and what jax reads.

    The code is all of this package, and what was imported from outside of Python's own folders.
    """
    given = {key: value for key, value in as_dict(config).items() if key not in NOT_IN_PROGRAMS}
    known = [given, run_identity(plan, tokenizer), settings_of_jax(), _code()]
    text = json.dumps(known, sort_keys=True, default=str)
    return Start(hashlib.sha256(text.encode()).hexdigest()[:32])


def _code() -> dict[str, str]:
    """The digest of each source file."""
    packages = [Path(folder) for name in PACKAGES for folder in sys.modules[name].__path__]
    files = {str(file): file for folder in packages for file in folder.rglob("*.py")}
    theirs = {sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()}
    for name, module in list(sys.modules.items()):
        text = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        file = Path(text) if isinstance(text, str) else Path()
        is_code = file.suffix == ".py" and file.is_absolute()
        if is_code and not any(map(file.is_relative_to, theirs)):
            files[name] = file
    return {name: _digest(file) for name, file in files.items()}


def _digest(file: Path) -> str:
    """Empty for a file that is not there, such as one of a zip."""
    with suppress(OSError):
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return ""


def _sizes(role: Role) -> str:
    found = [f"{axis}={size}" for axis, size in role.mesh.shape.items() if size > 1]
    return " ".join(found) or "one device"


def _how(role: Role) -> dict[str, str]:
    """How a role is computed: the same function, up to rounding."""
    forward = role.forward
    return {
        "attention": forward.attention,
        "remat": forward.remat,
        "scan_layers": str(forward.scan_layers).lower(),
        "residual_dtype": forward.residual_dtype,
    }


def about(
    plan: Plan, *, run_dir: Path, num_train: int, num_held_out: int, step: int | None, steps: int
) -> dict[str, str]:
    """A line for each of: run, devices, model, data, versions. `step` is None for a new run."""
    state = "new" if step is None else f"goes on from step {step}"
    held_out = f", {num_held_out:,} held out" if num_held_out else ", none held out"
    versions = package_versions()
    return {
        "run": f"{run_dir}, {state}, {steps:,} steps",
        "devices": _devices(plan),
        "model": "; ".join(_model(name, role) for name, role in plan.roles.items()),
        "data": f"{num_train:,} training rows{held_out}",
        "versions": f"jaxrl_llm {versions['jaxrl_llm']}, jax {versions['jax']}, "
        f"Python {platform.python_version()}",
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def about_lines(found: dict[str, str]) -> str:
    """`about` for the console."""
    return "\n".join(f"{name:<9} {text}" for name, text in found.items() if name != "started")


def write_about(folder: Path, found: dict[str, str]) -> None:
    """Replace RUN/about.json, which the report shows."""
    temporary = folder / f"{ABOUT}.tmp"
    temporary.write_text(json.dumps(found, indent=2) + "\n")
    os.replace(temporary, folder / ABOUT)


def _devices(plan: Plan) -> str:
    mesh = plan.learner.mesh
    sizes = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
    along = f" ({', '.join(sizes)})" if sizes else ""
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{plan.num_devices} x {mesh.devices.flat[0].device_kind}{along}{processes}"


def _model(name: str, role: Role) -> str:
    config = role.spec.config
    return (
        f"{name} {config.family}, {parameters(role.spec.num_params)} parameters, "
        f"{config.num_layers} layers, {role.forward.dtype}"
    )


def parameters(number: int) -> str:
    """A number of parameters as people say it: 1.54 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
