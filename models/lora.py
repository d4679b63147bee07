"""Low-rank adapters: LoRA, rsLoRA and DoRA.

LoRA: arXiv:2106.09685. rsLoRA: arXiv:2312.03732. DoRA: arXiv:2402.09353.
A module with an adapter computes with W + scale * A B in place of its weights W. Only A and B
learn; DoRA also learns the norm of each output. The parameters of an adapted model are two trees of
nested dicts that are joined for a pass: the base, and what learns.

Shape letters: D the module's inputs, R rank, F its outputs.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.layers import Embedding, ParameterAxis, Projection, multiply, parameter

ALL_LINEAR = "all-linear"  # PEFT's name for every projection of the layers
ADAPTER = "adapter"  # the part of a module's parameters that is its adapter
MAGNITUDE = "magnitude"  # DoRA's norms, which stay float32
HEAD = "score"  # of a scalar model: it learns in full
EMBEDDING, UNEMBEDDING = "embed_tokens", "lm_head"

Tree = Any  # nested dicts of arrays with str keys


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapters of a model; PEFT's names and meanings."""

    rank: int
    alpha: float
    modules: frozenset[str]  # Hugging Face names, such as model.layers.0.self_attn.q_proj
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0  # of the inputs, while learning
    dtype: str = "float32"  # of A, B and what else learns

    @property
    def scale(self) -> float:
        """The factor of A B."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def chosen_modules(targets: Sequence[str], tensors: Iterable[str]) -> frozenset[str]:
    """The modules that `targets` name, among those of a model with these Hugging Face tensors.

    A target is "all-linear", the end of a module's name after a dot, or a pattern of whole names.

    Raises: ValueError for a target that no module has, with the names that there are.
    """
    every = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    linear = [name for name in every if name.endswith("_proj")]
    tables = [name for name in every if name.rpartition(".")[2] in (EMBEDDING, UNEMBEDDING)]
    chosen: set[str] = set()
    for target in targets:
        found = linear if target == ALL_LINEAR else _matching(target, [*linear, *tables])
        if not found:
            ends = dict.fromkeys(name.rpartition(".")[2] for name in [*linear, *tables])
            raise ValueError(
                f"lora.targets: no module is called {target!r} or matches it; the names are "
                f"{ALL_LINEAR}, {', '.join(ends)}, and a pattern is of whole names, such as "
                r"model\.layers\.[01]\..*_proj"
            )
        chosen.update(found)
    return frozenset(chosen)


def _matching(target: str, names: Sequence[str]) -> list[str]:
    named = [name for name in names if name == target or name.endswith(f".{target}")]
    try:
        return named or [name for name in names if re.fullmatch(target, name)]
    except re.error as error:
        raise ValueError(f"lora.targets: {target!r} is no pattern: {error}") from None


# ------------------------------------------------------------------------- modules


class Adapter(nnx.Module):
    """A B of one module. `shape` and `axes` are of the module's weights, inputs first."""

    def __init__(
        self, shape: tuple[int, ...], axes: tuple[ParameterAxis, ...], contract: int, lora: Lora
    ) -> None:
        inputs, outputs = shape[:contract], shape[contract:]
        self.contract, self.scale, self.dropout = contract, lora.scale, lora.dropout
        first, second = self._inits
        self.a = parameter((*inputs, lora.rank), (*axes[:contract], "rank"), first, lora.dtype)
        self.b = parameter((lora.rank, *outputs), ("rank", *axes[contract:]), second, lora.dtype)
        # Like norms: small, and whole on each device.
        whole = ("norm",) * len(outputs)
        self.magnitude = parameter(outputs, whole, "ones", jnp.float32) if lora.dora else None

    _inits = ("uniform", "zeros")  # a new adapter changes nothing

    def __call__(self, x: jax.Array, y_F: jax.Array, kernel: jax.Array) -> jax.Array:
        """`y_F`, which is x times the kernel with joined outputs, of the adapted module."""
        a, b = self.a.get_value(), self.b.get_value()
        z_R = multiply(x, a, self.contract) * self.scale
        y_F = y_F + multiply(z_R, b, 1, joined=True)
        if self.magnitude is None:
            return y_F
        norms = column_norms(kernel, self.a[...], self.b[...], self.scale, self.contract)
        factor = self.magnitude[...] / jax.lax.stop_gradient(norms)
        return y_F * factor.reshape(-1).astype(y_F.dtype)


class EmbeddingAdapter(Adapter):
    """A B of an embedding: A is a second table, of short vectors."""

    _inits = ("zeros", "unit_normal")


class TableAdapter(Adapter):
    """A B of a head, whose weights are a table [V, D]."""

    def table(self, table_VD: jax.Array) -> jax.Array:
        """The weights of the adapted head."""
        return table_VD + (self.scale * self.a[...] @ self.b[...]).T.astype(table_VD.dtype)


def column_norms(kernel: Any, a: Any, b: Any, scale: float, contract: int) -> jax.Array:
    """Norms of W + scale * A B over the inputs, float32 [*outputs]."""
    kernel, a, b = (x.astype(jnp.float32) for x in (kernel, a, b))
    whole = kernel + scale * jnp.tensordot(a, b, 1)
    return jnp.sqrt(jnp.square(whole).sum(axis=tuple(range(contract))))


def attach(model: nnx.Module, paths: Mapping[tuple[str, ...], str], lora: Lora) -> None:
    """Give an adapter to each module of `lora`. `paths` names the tensor of each parameter.

    Raises: ValueError for a tied embedding, and for DoRA of a table.
    """
    for path, tensor in paths.items():
        if tensor.removesuffix(".weight") not in lora.modules or path[-1] == "bias":
            continue
        module = _at(model, path[:-1])
        if isinstance(module, Projection):
            kernel = module.kernel
            axes = kernel.get_metadata()["axes"]
            module.adapter = Adapter(kernel.shape, axes, module.contract, lora)
            continue
        assert isinstance(module, Embedding)
        if lora.dora:
            raise ValueError(f"lora.dora: {tensor} is a table, which has no DoRA; leave it out")
        (V, D), (rows, columns) = module.table.shape, module.table.get_metadata()["axes"]
        if path[0] == "head":
            module.adapter = TableAdapter((D, V), (columns, rows), 1, lora)
        elif getattr(model, "head", None) is None and hasattr(model, "unembedding"):
            raise ValueError(
                f"lora.targets: {tensor} is also the head of this model, as they are tied; leave "
                f"{EMBEDDING} out"
            )
        else:
            module.adapter = EmbeddingAdapter((V, D), (rows, columns), 1, lora)


def _at(model: Any, path: Sequence[str]) -> Any:
    for part in path:
        model = model[part] if isinstance(model, nnx.Dict) else getattr(model, part)
    return model


# ------------------------------------------------------------------------- trees


def split(tree: Tree) -> tuple[Tree, Tree]:
    """The base, and what learns: adapters and the head of a scalar model."""
    base: Tree = {}
    own: Tree = {}
    for key, value in tree.items():
        if key in (ADAPTER, HEAD):
            own[key] = value
        elif isinstance(value, dict):
            left, right = split(value)
            if left:
                base[key] = left
            if right:
                own[key] = right
        else:
            base[key] = value
    return base, own


def join(base: Tree, own: Tree) -> Tree:
    """The inverse of `split`."""
    found = dict(base)
    for key, value in own.items():
        known = found.get(key)
        found[key] = join(known, value) if isinstance(known, dict) else value
    return found


def first_magnitudes(params: Tree, lora: Lora) -> Tree:
    """Joined parameters whose DoRA norms are those of their modules."""

    def found(_: str, module: Tree) -> Tree:
        adapter = module[ADAPTER]
        a, b, kernel = adapter["a"], adapter["b"], module["kernel"]
        norms = column_norms(kernel, a, b, lora.scale, a.ndim - 1)
        return module | {ADAPTER: adapter | {MAGNITUDE: norms}}

    return _each_adapted(params, found) if lora.dora else params


def merged(params: Tree, lora: Lora) -> Tree:
    """Parameters without adapters: W + scale * A B in the dtype of W.

    A and B are rounded to it before they are multiplied, as in a training pass in that dtype.
    """

    def dense(key: str, module: Tree) -> Tree:
        adapter, rest = module[ADAPTER], {k: v for k, v in module.items() if k != ADAPTER}
        name = "kernel" if "kernel" in module else "table"
        a, b, old = adapter["a"], adapter["b"], module[name]
        # One matmul that adds: a product in float32 would be a second copy of the weights.
        change = jnp.tensordot(a.astype(old.dtype), (lora.scale * b).astype(old.dtype), 1)
        new = old + (change.T if key == "head" else change)  # the head is a table [V, D]
        if MAGNITUDE in adapter:
            norms = column_norms(old, a, b, lora.scale, a.ndim - 1)
            new = new.astype(jnp.float32) * (adapter[MAGNITUDE] / norms)
        return rest | {name: new.astype(old.dtype)}

    return _each_adapted(params, dense)


def _each_adapted(tree: Tree, change: Callable[[str, Tree], Tree], key: str = "") -> Tree:
    """`tree` with `change` applied to the key and the parameters of each module with an adapter."""
    if ADAPTER in tree:
        return change(key, tree)
    return {
        name: _each_adapted(value, change, name) if isinstance(value, dict) else value
        for name, value in tree.items()
    }
