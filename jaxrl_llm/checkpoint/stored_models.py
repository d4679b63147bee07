"""What a checkpoint says of a role's weights: whole, or adapters and the base below them.

The loop state of a checkpoint is read once for all questions about a role.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoint import manager
from jaxrl_llm.checkpoint.identity import IDENTITY, MODELS, lora_of
from jaxrl_llm.models.base import ModelSpec, frozen_spec
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.lora import Lora

BASE, CRITIC_BASE = "base", "critic_base"  # roles: the frozen weights below adapters
BASES = "bases"  # entry of the loop state: a record of each base that is read again

Record = dict[str, Any]  # in JSON's types


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """The weights of a role in a checkpoint."""

    checkpoint: Path
    role: str
    model: Record  # identity
    base: "StoredModel | None" = None  # frozen weights below adapters
    source: Record | None = None  # place to read a base from; None where the checkpoint has it

    @property
    def lora(self) -> Lora | None:
        """The adapters; None where all weights learned."""
        return lora_of(self.model)

    def restore(self, abstract: Any) -> Any:
        """The stored weights that `abstract` names, with its shardings.

        Raises: DamagedCheckpoint.
        """
        return manager.restore_role(self.checkpoint, self.role, abstract)

    def spec(self, config: ModelConfig) -> ModelSpec:
        """The abstract model, as it is stored."""
        kind: Kind = self.model["kind"]
        stored, dtype = self.model["param_dtype"], self.model["dtype"]
        return frozen_spec(config, kind, stored, dtype, self.lora)


def stored_model(checkpoint: Path, role: str) -> StoredModel:
    """The model of a role in a finished checkpoint, adapters with their base.

    Raises: DamagedCheckpoint.
    """
    loop = manager.loop_state(checkpoint)
    models, base = loop[IDENTITY][MODELS], None
    if lora_of(models[role]) is not None:
        name = CRITIC_BASE if role == "critic" and CRITIC_BASE in models else BASE
        source = loop.get(BASES, {}).get(name)
        base = StoredModel(checkpoint=checkpoint, role=name, model=models[name], source=source)
    return StoredModel(checkpoint=checkpoint, role=role, model=models[role], base=base)


def model_to_begin_from(checkpoint: Path, kind: Kind) -> StoredModel:
    """The checkpoint's actor; for a scalar model its reward model, if it has one."""
    stored = manager.stored_roles(checkpoint)
    role = "reward" if kind == "scalar" and "reward" in stored else "actor"
    if role not in stored:
        raise ValueError(
            f"{checkpoint} holds {', '.join(stored)} and no language model to begin from; name "
            "the checkpoint of another run"
        )
    return stored_model(checkpoint, role)
