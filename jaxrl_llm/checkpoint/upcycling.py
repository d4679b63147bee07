"""A mixture of experts from a dense model: each expert of a layer begins as its MLP.

Sparse upcycling (arXiv:2212.05055), in the form that computes what the dense model does. The
weights of a token's experts add up to 1, and the experts are equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.checkpoint.huggingface import (
    default_model_card,
    export,
    import_params,
    load_model_config,
    load_model_kind,
    model_directory,
)
from jaxrl_llm.checkpoint.safetensors_files import DTYPES, FORMAT_NAMES, stored_tensors
from jaxrl_llm.models.base import ModelSpec, Params, model_spec
from jaxrl_llm.models.config import Mixture, ModelConfig

# The family with experts that has all other details of a dense one, and normalized weights.
UPCYCLED: Mapping[str, str] = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """Which mixture is made of a dense model.

    Routers are drawn with `router_std`; None takes the model's `initializer_range`. A router of
    zeros gives every expert one score. Then every token takes the first experts, which stay equal.

    Raises: ValueError for a number that makes no mixture.
    """

    experts: int
    experts_per_token: int = 2
    router_std: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.experts < 2:
            raise ValueError(f"--experts={self.experts}: a mixture has at least 2")
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"--experts_per_token={self.experts_per_token} of --experts={self.experts}: a "
                f"token takes 1 to {self.experts} different experts"
            )
        if self.router_std is not None and not 0 < self.router_std < float("inf"):
            raise ValueError(
                f"--router_std={self.router_std}: a router needs random weights, as with equal "
                "scores every token takes the first experts, and these stay equal; leave the flag "
                "out, or give a positive number such as 0.02"
            )


def upcycle(source: str | Path, output: str | Path, mixture: Upcycling) -> Path:
    """Write the mixture that computes what the dense model in `source` does. Returns `output`.

    Guarantees: values have the dtype of `source`; logits differ by rounding alone.

    Raises: ValueError for a model that is no dense one of `UPCYCLED`, or an `output` with files.
    """
    source, output = model_directory(source), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not empty: give the path of a new folder")
    config, kind = load_model_config(source), load_model_kind(source)
    dtype = _stored_dtype(source)
    dense = model_spec(config, kind, dtype)
    sparse = model_spec(upcycled_config(config, mixture), kind, dtype)
    params = with_experts(import_params(source, dense), sparse.config, mixture)
    card = _model_card(sparse, source, mixture)
    return export(output, sparse, params, tokenizer_files_from=source, model_card=card)


def upcycled_config(config: ModelConfig, mixture: Upcycling) -> ModelConfig:
    """The mixture's config: experts of the size of the dense MLP.

    Raises: ValueError for a family without a counterpart, or a feature that this one lacks.
    """
    if config.mixture is not None:
        raise ValueError(f"the model is a {config.family}, which has experts: give a dense one")
    if config.family not in UPCYCLED:
        raise ValueError(
            f"no family with experts has the other details of {config.family}: give a model of "
            f"{', '.join(UPCYCLED)}"
        )
    experts = Mixture(
        num_experts=mixture.experts,
        experts_per_token=mixture.experts_per_token,
        expert_size=config.intermediate_size,
        normalized=True,
    )
    if len(set(config.sliding_window)) > 1:
        raise ValueError(f"sliding_window: a {UPCYCLED[config.family]} has one for all layers")
    return replace(config, family=UPCYCLED[config.family], mixture=experts)


def with_experts(params: Params, config: ModelConfig, mixture: Upcycling) -> Params:
    """Parameters of the mixture `config` from the parameters of a dense model, on the host.

    Experts are views of the dense MLP, so they take no memory.
    """
    rng = np.random.default_rng(mixture.seed)
    std = config.initializer_range if mixture.router_std is None else mixture.router_std
    shape = (config.hidden_size, mixture.experts)
    decoder = dict(params["decoder"])
    decoder["layers"] = {
        name: layer | {"mlp": _experts(layer["mlp"], rng.normal(0.0, std, shape))}
        for name, layer in sorted(decoder["layers"].items(), key=lambda item: int(item[0]))
    }
    return params | {"decoder": decoder}


def _router(drawn_DE: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The router in float32. Raises: ValueError where all of it rounds to zero in `dtype`."""
    if not drawn_DE.astype(dtype).any():
        raise ValueError(f"--router_std is too small: in {dtype} the whole router is zero")
    return drawn_DE.astype(np.float32)


def _experts(mlp: Params, router_DE: np.ndarray) -> Params:
    copies = router_DE.shape[1]
    stacks: dict[str, Any] = {
        name: {"kernel": _copies(np.asarray(mlp[name]["kernel"]), copies)}
        for name in ("gate", "up", "down")
    }
    dtype = stacks["gate"]["kernel"].dtype
    return {"router": {"kernel": _router(router_DE, dtype)}, **stacks}


def _copies(kernel: np.ndarray, num: int) -> np.ndarray:
    return np.broadcast_to(kernel, (num, *kernel.shape))


def _stored_dtype(directory: Path) -> str:
    """The dtype of the files. Raises: ValueError where they have several, or another one."""
    dtypes = {tensor.dtype for tensor in stored_tensors(directory).values()}
    names = [name for name in DTYPES if FORMAT_NAMES[name] in dtypes]
    if len(dtypes) != 1 or not names:
        raise ValueError(
            f"{directory} has weights in {', '.join(sorted(dtypes))}: write it in one dtype of "
            f"{', '.join(DTYPES)}"
        )
    return names[0]


def _model_card(spec: ModelSpec, source: Path, mixture: Upcycling) -> str:
    description = (
        f"Upcycled from the dense model `{source.name}`, which it computes: each of its "
        f"{mixture.experts} experts a layer is a copy of the dense MLP, and routers are random. "
        "The license of the dense model counts."
    )
    facts = {"experts": mixture.experts, "experts of a token": mixture.experts_per_token}
    return default_model_card(spec, description=description, facts=facts)
