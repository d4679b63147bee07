"""Low-rank adapters: LoRA, rsLoRA and DoRA.

LoRA: arXiv:2106.09685. rsLoRA: arXiv:2312.03732. DoRA: arXiv:2402.09353.
A module with an adapter computes with W + scale * A B in place of its weights W. Only A and B
learn; DoRA also learns the norm of each output. The parameters of an adapted model are two trees of
nested dicts that are joined for a pass: the base, and the weights that learn.

Shape letters: D the module's inputs, R rank, F its outputs.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxrl_llm.distributed.sharding import LogicalAxis
from jaxrl_llm.models.expert_rows import Stack, Stacked
from jaxrl_llm.models.frozen import SCALE, Quantized, dequantized, weights_of
from jaxrl_llm.models.layers import Embedding, Layer, Projection, multiply, parameter
from jaxrl_llm.models.lora_targets import EMBEDDING, EXPERTS, UNEMBEDDING
from jaxrl_llm.models.weight import Weight
from jaxrl_llm.numerics import round_by_chance

ADAPTER = "adapter"  # the part of a module's parameters that is its adapter
MAGNITUDE = "magnitude"  # DoRA's norms, which stay float32
DROPOUT = "dropout"  # entry of the parameters in an update: its random key for dropout
# Maps a module to the module that owns its shared A.
SHARED_WITH = {"q": "k", "v": "k", "k": "gate", "up": "gate", "rate": "decay"}
HEAD = "score"  # head of a scalar model: it learns in full

Tree = Any  # nested dicts of arrays with str keys
Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapters of a model; PEFT's names and meanings."""

    rank: int
    alpha: float
    modules: frozenset[str]  # Hugging Face names, such as model.layers.0.self_attn.q_proj
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0  # dropout rate of the inputs, while learning
    dtype: str = "float32"  # dtype of A, B and other weights that learn
    merge: bool = True  # compute with W + scale * A B, rounded; False computes A B apart

    @property
    def merges_updates(self) -> bool:
        """True if passes and updates compute with merged weights too, and not the sampler alone."""
        return self.merge and not self.dora and not self.dropout

    @property
    def adapts_head(self) -> bool:
        """True if the table of the head has an adapter."""
        return self._has(UNEMBEDDING)

    @property
    def adapts_tables(self) -> bool:
        """True if the head or the embedding has an adapter; updates compute it apart."""
        return self._has(UNEMBEDDING, EMBEDDING)

    @property
    def adapts_experts(self) -> bool:
        """True if experts have adapters."""
        return any(EXPERTS in name for name in self.modules)

    def _has(self, *ends: str) -> bool:
        return any(name.rpartition(".")[2] in ends for name in self.modules)

    def check(self) -> None:
        """Raises: ValueError for settings that cannot be computed together."""
        unlike = {"lora.dora": self.dora, "an adapter of lm_head": self.adapts_head}
        for what in (name for name in ("dora", "dropout") if getattr(self, name)):
            if self.adapts_experts:
                raise ValueError(
                    f"lora.{what}={getattr(self, what)} with adapters of experts: leave it out, or "
                    f"set lora.targets={self._without_experts()}"
                )
        for what in (name for name, holds in unlike.items() if holds):
            if self.dropout:
                raise ValueError(f"lora.dropout={self.dropout} with {what}: set it to 0")
            if not self.merge:
                raise ValueError(f"lora.merge=False with {what}: leave it True")

    def _without_experts(self) -> str:
        """Targets of the chosen modules that no expert has, or usual attention's."""
        ends = {False: set[str](), True: set[str]()}
        for name in self.modules:
            ends[EXPERTS in name].add(name.rpartition(".")[2])
        others = sorted(ends[False] - ends[True], key=lambda end: ("qkvo".find(end[0]), end))
        return ",".join(others) or "q_proj,k_proj,v_proj,o_proj"

    @property
    def scale(self) -> float:
        """The factor of A B."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


# ------------------------------------------------------------------------- modules


class LowRank(Layer):
    """A B of one module. `shape` and `axes` are of the module's weights, inputs first."""

    def __init__(
        self, shape: tuple[int, ...], axes: tuple[LogicalAxis, ...], contract: int, lora: Lora
    ) -> None:
        inputs, outputs = shape[:contract], shape[contract:]
        self.contract, self.scale = contract, lora.scale
        first, second = self._inits
        self.a = parameter((*inputs, lora.rank), (*axes[:contract], "rank"), first, lora.dtype)
        self.b = parameter((lora.rank, *outputs), ("rank", *axes[contract:]), second, lora.dtype)

    _inits = ("uniform", "zeros")  # a new adapter changes nothing


class Adapter(LowRank):
    """A B of a projection, and with DoRA the norm of each output."""

    def __init__(
        self, shape: tuple[int, ...], axes: tuple[LogicalAxis, ...], contract: int, lora: Lora
    ) -> None:
        super().__init__(shape, axes, contract, lora)
        self.dropout, outputs = lora.dropout, shape[contract:]
        # Like norms: small, and whole on each device.
        whole = ("norm",) * len(outputs)
        self.magnitude = parameter(outputs, whole, "ones", jnp.float32) if lora.dora else None

    key: Any = None  # key of dropout, in an update; see `set_dropout`

    def _dropped(self, x: jax.Array) -> jax.Array:
        if self.key is None:
            return x
        key = jax.random.wrap_key_data(self.key[...])
        kept = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), 0)

    def __call__(self, x: jax.Array, kernel: Any, dot: Callable[..., Any]) -> jax.Array:
        """x times the adapted weights, with joined outputs.

        `kernel`: an array, a `Quantized` or `Merged`.
        """
        a, b = self.a.get_value(), self.b.get_value()
        if isinstance(kernel, Merged):
            return merged_matmul(kernel.computed, x, a, b, self.contract, self.scale, dot)
        z_R = multiply(self._dropped(x), a, self.contract) * self.scale
        y_F = multiply(x, kernel, self.contract, joined=True) + multiply(z_R, b, 1, joined=True)
        if self.magnitude is None:
            return y_F
        norms = column_norms(kernel, self.a[...], self.b[...], self.scale, self.contract)
        factor = self.magnitude[...] / jax.lax.stop_gradient(norms)
        return y_F * factor.reshape(-1).astype(y_F.dtype)


class StackAdapter(Layer):
    """A B of each expert of a projection: A [E, inputs, R], B [E, R, outputs]."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[LogicalAxis, ...], lora: Lora) -> None:
        (E, D, F), (each, inputs, outputs) = shape, axes
        self.scale, R = lora.scale, lora.rank
        self.a = parameter((E, D, R), (each, inputs, "rank"), "uniform_each", lora.dtype)
        self.b = parameter((E, R, F), (each, "rank", outputs), "zeros", lora.dtype)

    def weights(self, kernel: Any, dtype: DTypeLike) -> Stacked:
        """The weights of a pass in `dtype`. `kernel`: an array, a `Quantized` or `Merged`."""
        merged = isinstance(kernel, Merged)
        if merged:
            kernel = kernel.computed
        elif not isinstance(kernel, Quantized):
            kernel = kernel.astype(dtype)
        a, b = self.a[...].astype(dtype), self.b[...].astype(dtype)
        return Stacked(kernel, a, b, scale=self.scale, merged=merged)


class EmbeddingAdapter(LowRank):
    """A B of an embedding: A is a second table, of short vectors."""

    _inits = ("zeros", "unit_normal")

    def __call__(self, table_VD: Any, lookup: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The vectors of tokens, which `lookup` finds. `table_VD`: an array or `Merged`."""
        change_BTD = multiply(lookup(self.a[...]) * self.scale, self.b.get_value(), 1)
        if isinstance(table_VD, Merged):
            return _with_gradient_of(lookup(table_VD.computed), change_BTD)
        return lookup(table_VD) + change_BTD


class HeadAdapter(LowRank):
    """A B of a head, whose weights are a table [V, D]."""

    def __call__(self, table_VD: Any) -> jax.Array:
        """The weights of the adapted head. `table_VD`: an array or `Merged`."""
        merged = isinstance(table_VD, Merged)
        table_VD = table_VD.computed if merged else table_VD
        change_VD = (self.scale * self.a[...] @ self.b[...]).T.astype(table_VD.dtype)
        return _with_gradient_of(table_VD, change_VD) if merged else table_VD + change_VD


# ------------------------------------------------------------------------- merged weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Merged:
    """Merged weights where a layer expects the base's; gradients go to the adapter.

    The learner makes it once per optimizer step, like a `Weight`. A pass then costs as much as a
    pass without adapters.
    """

    computed: jax.Array


@jax.custom_vjp
def _with_gradient_of(value: jax.Array, of: jax.Array) -> jax.Array:
    """`value`, whose gradient goes to `of`."""
    return value


_with_gradient_of.defvjp(
    lambda value, of: (value, of),
    lambda of, gradient: (jnp.zeros_like(gradient), gradient.astype(of.dtype)),
)


def merged_matmul(
    computed: jax.Array,
    x: jax.Array,
    a: Any,
    b: Any,
    contract: int,
    scale: float,
    dot: Callable[..., Any],
) -> jax.Array:
    """x times merged weights with joined outputs; gradients go to x, A and B.

    `a` and `b`: arrays, or a `Weight` whose gradient has the stored dtype. `dot` computes the
    product, as `jnp.tensordot`.
    """
    a, b = (w.stored if isinstance(w, Weight) else w for w in (a, b))
    y: Any = _merged_matmul(computed, x, a, b, contract, scale, dot)
    return y


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _merged_matmul(
    computed: jax.Array,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    contract: int,
    scale: float,
    dot: Callable[..., Any],
) -> jax.Array:
    return multiply(x, computed, contract, joined=True, dot=dot)


def _merged_backward(
    contract: int, scale: float, dot: Any, residuals: Any, gradient: jax.Array
) -> Any:
    computed, x, a, b = residuals
    size, rank = math.prod(computed.shape[:contract]), b.shape[0]
    x_TD, g_TF = x.reshape(-1, size), gradient.reshape(-1, computed.size // size)
    a_DR = a.reshape(size, rank).astype(x.dtype)
    b_RF = (scale * b).reshape(rank, -1).astype(x.dtype)
    g_TR = jnp.einsum("TF,RF->TR", g_TF, b_RF)
    z_TR = jnp.einsum("TD,DR->TR", x_TD, a_DR)
    # A scaled B: its gradient has the factor, z has not.
    b_gradient = scale * jnp.einsum("TR,TF->RF", z_TR, g_TF, preferred_element_type=b.dtype)
    a_gradient = jnp.einsum("TD,TR->DR", x_TD, g_TR, preferred_element_type=a.dtype)
    x_gradient = jnp.einsum("TF,DF->TD", g_TF, computed.reshape(size, -1))
    return (
        jnp.zeros_like(computed),  # nothing asks for it
        x_gradient.reshape(x.shape),
        a_gradient.reshape(a.shape),
        b_gradient.reshape(b.shape),
    )


_merged_matmul.defvjp(lambda *operands: (_merged_matmul(*operands), operands[:4]), _merged_backward)


def column_norms(kernel: Any, a: Any, b: Any, scale: float, contract: int) -> jax.Array:
    """Norms of W + scale * A B over the inputs, float32 [*outputs]."""
    kernel, a, b = (x.astype(jnp.float32) for x in (kernel, a, b))
    whole = kernel + scale * jnp.tensordot(a, b, 1)
    return jnp.sqrt(jnp.square(whole).sum(axis=tuple(range(contract))))


def attach(model: nnx.Module, paths: Mapping[tuple[str, ...], str], lora: Lora) -> None:
    """Give an adapter to each module of `lora`. `paths` names the tensor of each parameter.

    Raises: ValueError for a tied embedding, and for DoRA of a table.
    """
    _attach_each(model, paths, lora)
    for path in paths:  # parts of one tensor read the same input
        if path[-1] == "kernel" and (owner := _owner(path, paths)) != path:
            module = _at(model, path[:-1])
            if module.adapter is not None:
                module.adapter.a = _at(model, owner[:-1]).adapter.a


def _owner(path: Path, paths: Mapping[Path, str]) -> Path:
    """The kernel whose module has the A of this one in the parameters: of the same tensor."""
    first = (*path[:-2], SHARED_WITH.get(path[-2], ""), path[-1])
    return _owner(first, paths) if paths.get(first) == paths[path] else path


def _attach_each(model: nnx.Module, paths: Mapping[Path, str], lora: Lora) -> None:
    for path, tensor in paths.items():
        if tensor.removesuffix(".weight") not in lora.modules or path[-1] == "bias":
            continue
        module = _at(model, path[:-1])
        if isinstance(module, Projection):
            kernel = module.kernel
            axes = kernel.get_metadata()["axes"]
            module.adapter = Adapter(kernel.shape, axes, module.contract, lora)
            continue
        if isinstance(module, Stack):
            kernel = module.kernel
            module.adapter = StackAdapter(kernel.shape, kernel.get_metadata()["axes"], lora)
            continue
        assert isinstance(module, Embedding)
        if lora.dora:
            raise ValueError(f"lora.dora: {tensor} is a table, which has no DoRA; leave it out")
        (V, D), (rows, columns) = module.table.shape, module.table.get_metadata()["axes"]
        if path[0] == "head":
            module.adapter = HeadAdapter((D, V), (columns, rows), 1, lora)
        elif getattr(model, "head", None) is None and hasattr(model, "unembedding"):
            raise ValueError(
                f"lora.targets: {tensor} is also the head of this model, as they are tied; leave "
                f"{EMBEDDING} out"
            )
        else:
            module.adapter = EmbeddingAdapter((V, D), (rows, columns), 1, lora)


def set_dropout(model: nnx.Module, key: jax.Array) -> None:
    """Have each adapter of a bound model drop its own inputs, by a key of its own."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Adapter) and module.dropout:
            name = "/".join(map(str, path))
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            module.key = DropoutKey(jax.random.key_data(own))


class DropoutKey(nnx.Variable):
    """The data of an adapter's random key."""


def dropping_apart(states: Tree, number: jax.Array) -> Tree:
    """States of modules whose adapters drop other inputs for each `number`.

    Requires: they are of several modules each, and so are the keys: [modules, ...].
    """

    def apart(variable: Any) -> Any:
        if not isinstance(variable, DropoutKey):
            return variable
        keys = jax.random.wrap_key_data(variable.get_value())
        folded = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        return variable.replace(jax.random.key_data(folded))

    return jax.tree.map(apart, states, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _at(model: Any, path: Sequence[str]) -> Any:
    for part in path:
        model = model[part] if isinstance(model, nnx.Dict) else getattr(model, part)
    return model


# ------------------------------------------------------------------------- trees


def split(tree: Tree) -> tuple[Tree, Tree]:
    """The base, and the weights that learn: adapters and the head of a scalar model."""
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
    joined = dict(base)
    for key, value in own.items():
        known = joined.get(key)
        joined[key] = join(known, value) if isinstance(known, dict) else value
    return joined


def first_magnitudes(params: Tree, lora: Lora) -> Tree:
    """Joined parameters whose DoRA norms are the norms of their modules."""

    def with_norms(_: Path, module: Tree, a: jax.Array) -> Tree:
        adapter, kernel = module[ADAPTER], weights_of(module)
        norms = column_norms(kernel, a, adapter["b"], lora.scale, a.ndim - 1)
        return module | {ADAPTER: adapter | {MAGNITUDE: norms}}

    return _each_adapted(params, with_norms) if lora.dora else params


def merged(params: Tree, lora: Lora, dtype: DTypeLike) -> Tree:
    """Parameters without adapters: W + scale * A B in `dtype`; the others are as they were.

    No kernel of the result is in float8: most changes would be lost in its steps.
    """

    def dense(path: Path, module: Tree, a: jax.Array) -> Tree:
        rest = {name: x for name, x in module.items() if name not in (ADAPTER, SCALE)}
        return rest | _sum(path, module, a, lora, dtype)

    return dequantized(_each_adapted(params, dense), dtype)


def merged_ahead(params: Tree, lora: Lora, dtype: DTypeLike) -> Tree:
    """The base with `Merged` weights."""

    def ahead(path: Path, module: Tree, a: jax.Array) -> Tree:
        rest = {name: value for name, value in module.items() if name != ADAPTER}
        return rest | {n: Merged(x) for n, x in _sum(path, module, a, lora, dtype).items()}

    return split(_each_adapted(params, ahead))[0]


def _sum(path: Path, module: Tree, a: jax.Array, lora: Lora, dtype: DTypeLike) -> Tree:
    """The merged weights of a module, by their name.

    A base in bf16 lies on the grid of bf16, and most changes are less than half a step of it.
    Rounded to the nearest, the sum would be the base. So it is rounded stochastically, by bits that
    depend on the place alone: equal adapters give equal weights.
    """
    adapter, name = module[ADAPTER], "kernel" if "kernel" in module else "table"
    b = adapter["b"]
    old = (weights_of(module) if name == "kernel" else module[name]).astype(jnp.float32)
    of_experts = a.ndim + b.ndim == old.ndim + 3
    product = jnp.matmul if of_experts else partial(jnp.tensordot, axes=1)
    change = product(a, lora.scale * b, preferred_element_type=jnp.float32)
    new = old + (change.T if path[-1] == "head" else change)  # the head is a table [V, D]
    if MAGNITUDE in adapter:
        new *= adapter[MAGNITUDE] / column_norms(old, a, b, lora.scale, a.ndim - 1)
    if jnp.dtype(dtype) != jnp.bfloat16:
        return {name: new.astype(dtype)}
    return {name: round_by_chance(new, jnp.int32(0), zlib.crc32("/".join(path).encode()))}


def _each_adapted(
    tree: Tree, change: Callable[[Path, Tree, jax.Array], Tree], path: Path = (), a: Any = None
) -> Tree:
    """`tree` with `change` applied to path, parameters and A of each module that has an adapter.

    `a` is another module's, for a module without one.
    """
    if ADAPTER in tree:
        return change(path, tree, tree[ADAPTER].get("a", a))

    def shared(name: str) -> Any:
        owner = SHARED_WITH.get(name, "")
        adapter = tree.get(owner, {}).get(ADAPTER, {})
        return adapter["a"] if "a" in adapter else shared(owner) if adapter else None

    return {
        name: _each_adapted(value, change, (*path, name), shared(name))
        if isinstance(value, dict)
        else value
        for name, value in tree.items()
    }
