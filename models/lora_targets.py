"""The modules of a model that get adapters, by `lora.targets`. Imports no jax."""

import re
from collections.abc import Iterable, Sequence

from jaxrl_llm.references import nearest

ALL_LINEAR = "all-linear"  # PEFT's name for every projection of the layers
EXPERTS = ".experts."  # in the names of the projections of a mixture of experts
SHARED_GATE = "shared_expert_gate"  # a projection, for PEFT too
EMBEDDING, UNEMBEDDING = "embed_tokens", "lm_head"


def chosen_modules(targets: Sequence[str], tensors: Iterable[str]) -> frozenset[str]:
    """The modules that `targets` name, in a model with these Hugging Face tensors.

    A target is "all-linear", the end of a module's name after a dot, or a pattern of whole names.
    The first expert of a layer stands for all of them. Experts in one tensor are not linear.

    Raises: ValueError for a target that no module has, with the names that there are.
    """
    names = list(dict.fromkeys(tensors))
    every = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    linear = [
        name
        for name in every
        if "_proj" in (end := name.rpartition(".")[2]) or EXPERTS in name or end == SHARED_GATE
    ]
    stacks = [name for name in names if is_stack(name)]
    tables = [name for name in every if name.rpartition(".")[2] in (EMBEDDING, UNEMBEDDING)]
    named = [*linear, *stacks, *tables]
    chosen: set[str] = set()
    for target in targets:
        modules = linear if target == ALL_LINEAR else _matching(target, named)
        if not modules:
            ends = dict.fromkeys(name.rpartition(".")[2] for name in named)
            raise ValueError(
                f"lora.targets: no module is called {target!r} or matches it"
                f"{nearest(target, (ALL_LINEAR, *ends))}; the names are "
                f"{ALL_LINEAR}, {', '.join(ends)}, and a pattern is of whole names, such as "
                r"model\.layers\.[01]\..*_proj"
            )
        chosen.update(modules)
    return frozenset(chosen)


def is_stack(tensor: str) -> bool:
    """True if this is a tensor of weights of all experts of a layer."""
    layer, _, end = tensor.rpartition(EXPERTS)
    return bool(layer) and end.endswith("_proj") and "." not in end


def _matching(target: str, names: Sequence[str]) -> list[str]:
    named = [name for name in names if name == target or name.endswith(f".{target}")]
    try:
        return named or [name for name in names if re.fullmatch(target, name)]
    except re.error as error:
        raise ValueError(f"lora.targets: {target!r} is no pattern: {error}") from None
