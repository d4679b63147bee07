"""The models of a run, as its checkpoints record them."""

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
from jaxrl_llm.plan.offline import OfflinePlan
from jaxrl_llm.plan.roles import Role
from jaxrl_llm.tokenizer import Tokenizer
from jaxrl_llm.trainer.progress import Plan


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
