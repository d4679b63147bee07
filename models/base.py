"""From a ModelConfig to parameters and back to a module.

`ModelSpec` describes a model without its values: shapes, dtypes and logical axes. Initialisation,
sharding, restore and the parameter count follow from it. Only `params` crosses a jit boundary, a
nested dict with str keys and array leaves. For example,
params["decoder"]["layers"]["0"]["attention"]["q"]["kernel"] has the shape [D, N, H].
"""

import functools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxrl_llm.distributed.transfer import holds, results_elsewhere
from jaxrl_llm.kernels.float8 import to_float8
from jaxrl_llm.models.config import Kind, ModelConfig
from jaxrl_llm.models.families import hf_names
from jaxrl_llm.models.frozen import (
    KERNEL,
    OF_EXPERTS,
    SCALE,
    dequantized,
    inputs_of,
    is_frozen,
    quantize,
    quantized_as,
)
from jaxrl_llm.models.gated_delta import PROJECTIONS
from jaxrl_llm.models.heads import CausalLM, ScalarModel
from jaxrl_llm.models.layers import FROZEN, Form
from jaxrl_llm.models.lora import Lora, attach, join, merged, split

__all__ = [
    "Kind",
    "ModelConfig",
    "ModelSpec",
    "Params",
    "bind",
    "dense_spec",
    "frozen_spec",
    "init_params",
    "init_sharded",
    "merge_adapters",
    "merge_projections",
    "model_spec",
    "quantize_projections",
    "scalar_params_from",
]

Params = dict[str, Any]  # nested, str keys, array leaves
HEAD_TABLE = ("head", "table")
FLOAT8_BASE = "float8"  # dtype of frozen projections; other weights have the computation's


@dataclass(frozen=True)
class ModelSpec:
    """A model without its values; may be a static argument of `jax.jit`.

    Equality and hash use the first five fields. `params`, `axes` and `init` have the same
    structure. Each is a copy of its own, as equal models share one spec.
    A leaf of `axes` is a tuple of logical axes, one a dim; a leaf of `init` is "normal", "ones",
    "zeros", "uniform", "uniform_each", "log_uniform" or "unit_normal".
    """

    config: ModelConfig
    kind: Kind
    dtype: str
    form: Form  # see `merge_projections` and `quantize_projections`
    lora: Lora | None  # adapters; with them `dtype` is the base's
    graphdef: Any = field(compare=False, repr=False)
    # The three below; all specs of this model share them, so they are only read.
    trees: tuple[Params, Params, Params] = field(compare=False, repr=False)

    @property
    def params(self) -> Params:
        """The shapes and dtypes: leaves are jax.ShapeDtypeStruct."""
        return _copy(self.trees[0])

    @property
    def axes(self) -> Params:
        """The logical axes."""
        return _copy(self.trees[1])

    @property
    def init(self) -> Params:
        """The initial distribution of each parameter."""
        return _copy(self.trees[2])

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied table counts once."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.params))

    @property
    def float32_head(self) -> tuple[str, ...]:
        """The path of the head's weights where they are float32 in any dtype, else empty."""
        if not self.config.float32_head or self.kind != "causal_lm":
            return ()
        return ("decoder", "embed", "table") if self.config.tie_word_embeddings else HEAD_TABLE

    @property
    def stored_dtype(self) -> str:
        """The dtype of most weights: `dtype`, or float8 where the projections are frozen in it."""
        return FLOAT8_BASE if self.form == FROZEN else self.dtype

    def of_dtype(self, dtype: Any) -> "ModelSpec":
        """The model of parameters in another dtype, such as those that were cast for a pass."""
        return model_spec(self.config, self.kind, dtype, form=self.form, lora=self.lora)

    @property
    def learned(self) -> Params:
        """The parameters that a training changes: all, or those that are not the base's."""
        return self.params if self.lora is None else split(self.params)[1]


def _copy(tree: Params) -> Params:
    return {name: _copy(x) if isinstance(x, dict) else x for name, x in tree.items()}


def model_spec(
    config: ModelConfig,
    kind: Kind = "causal_lm",
    dtype: Any = "float32",
    *,
    form: Form = "separate",
    lora: Lora | None = None,
) -> ModelSpec:
    """Describe a model of `config` without allocating it. Equal models share one spec.

    Raises: ValueError when a module of `lora` cannot have an adapter.
    """
    return _model_spec(config, kind, jnp.dtype(dtype).name, form, lora)


# Roles of a run, and layouts that a planner compares, have the same few models.
@functools.lru_cache(maxsize=64)
def _model_spec(
    config: ModelConfig, kind: Kind, name: str, form: Form, lora: Lora | None
) -> ModelSpec:
    modules: dict[Kind, Callable[..., nnx.Module]] = {"causal_lm": CausalLM, "scalar": ScalarModel}
    if kind not in modules:
        raise ValueError(f"model kind {kind!r} is unknown: use one of {', '.join(modules)}")

    def make() -> nnx.Module:
        model = modules[kind](config, form=form, dtype=name)
        if lora is not None:
            assert form in ("separate", FROZEN), form
            names = hf_names(config, kind)
            attach(model, {path: tensor.name for path, tensor in names.items()}, lora)
        return model

    graphdef, state = nnx.split(make())

    def metadata(key: str) -> Params:
        tree: Params = {}
        for path, variable in nnx.to_flat_state(state):
            _put(tree, tuple(str(part) for part in path), variable.get_metadata()[key])
        return tree

    # Shapes and dtypes alone: nothing of a mesh that is in scope now, as the spec is shared.
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.to_pure_dict(state))
    if lora is not None:
        params = _with_learned_in(params, lora.dtype)
    spec = ModelSpec(
        config=config,
        kind=kind,
        dtype=name,
        form=form,
        lora=lora,
        graphdef=graphdef,
        trees=(params, metadata("axes"), metadata("init")),
    )
    if path := spec.float32_head:
        *parents, leaf = path
        module = _at(params, parents)
        module[leaf] = jax.ShapeDtypeStruct(module[leaf].shape, jnp.float32)
    return spec


def frozen_spec(
    config: ModelConfig, kind: Kind, stored: str, dtype: str, lora: Lora | None = None
) -> ModelSpec:
    """A model whose frozen weights have the dtype `stored`; it computes in `dtype`.

    With `lora`, the base is frozen. "float8" applies to projections only: embeddings, norms, biases
    and the head then have `dtype`.

    Raises: ValueError as `model_spec` does.
    """
    if stored != FLOAT8_BASE:
        return model_spec(config, kind, stored, lora=lora)
    return model_spec(config, kind, dtype, form=FROZEN, lora=lora)


def dense_spec(spec: ModelSpec) -> ModelSpec:
    """The same model without adapters and with kernels that are arrays."""
    form: Form = "separate" if spec.form == FROZEN else spec.form
    return model_spec(spec.config, spec.kind, spec.dtype, form=form)


def _with_learned_in(params: Params, dtype: str) -> Params:
    """The parameters, with those that learn in `dtype` and the frozen ones as they were."""
    base, own = split(params)
    own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), own)
    return join(base, own)


def merge_adapters(
    spec: ModelSpec, params: Params, dtype: DTypeLike | None = None
) -> tuple[ModelSpec, Params]:
    """The same model with its adapters merged into the weights. Call it inside jit.

    The merged weights have `dtype`, by default the base's. Other weights do not change.
    """
    if spec.lora is None:
        return spec, params
    return dense_spec(spec), merged(params, spec.lora, dtype or spec.dtype)


def init_params(spec: ModelSpec, key: jax.Array) -> Params:
    """New parameters: normal weights with the config's deviation, norms 1, the rest 0.

    Guarantees: each parameter draws from the key folded with its own path, so its values do not
        depend on other parameters or on the layout.
    """
    return draw_params(spec, spec.params, key)


def init_sharded(spec: ModelSpec, key: jax.Array, shardings: Any) -> Params:
    """`init_params` in a layout, with one program for each shape. Call it outside of jit.

    A single program that draws all parameters of an 8B model takes minutes to compile.
    """

    def draw(path: tuple[Any, ...], sharding: Any) -> jax.Array:
        drawn, drawing = _drawing(spec, path)
        run, of_leaf = _program_of(drawing, sharding), _leaf_key(key, drawn)
        return run(of_leaf) if holds(sharding) else results_elsewhere(run, (of_leaf,))

    return jax.tree.map_with_path(lambda path, _, place: draw(path, place), spec.params, shardings)


def bind(spec: ModelSpec, params: Params) -> Any:
    """The module (CausalLM or ScalarModel) with these values. Call it inside jit."""
    return nnx.merge(spec.graphdef, params)


def merge_projections(spec: ModelSpec, params: Params) -> tuple[ModelSpec, Params]:
    """The same model with one kernel for the projections of an input. Call it inside jit.

    These are q, k and v of attention, gate and up of an MLP, and all of a gated delta rule.

    Reading weights and launching kernels bound a decode step of few tokens. Fewer and larger
    matmuls help with both.

    Requires: the weights are whole on each device. The merged dim joins dims that sharding rules
        split differently.
    """
    assert spec.form == "separate"
    layers = {}
    for name, layer in params["decoder"]["layers"].items():
        attention, mlp = dict(layer["attention"]), dict(layer["mlp"])
        if spec.config.is_linear(int(name)):
            kernels = [attention.pop(part)["kernel"] for part in PROJECTIONS]
            kernels = [kernel.reshape(len(kernel), -1) for kernel in kernels]
            attention["merged"] = {"kernel": jnp.concatenate(kernels, axis=-1)}
        elif spec.config.latent is None:  # latent attention keeps its projections
            H = spec.config.head_dim  # a gated query's projection has twice as many
            parts = [attention.pop(part) for part in ("q", "k", "v")]
            attention["qkv"] = {
                leaf: jnp.concatenate([_in_heads(part[leaf], H) for part in parts], axis=-2)
                for leaf in parts[0]
            }
        if spec.config.mixture_of(int(name)) is None:  # experts keep theirs
            kernels = [mlp.pop(part)["kernel"] for part in ("gate", "up")]
            mlp["gate_up"] = {"kernel": jnp.concatenate(kernels, axis=-1)}
        layers[name] = layer | {"attention": attention, "mlp": mlp}
    merged = params | {"decoder": params["decoder"] | {"layers": layers}}
    return model_spec(spec.config, spec.kind, spec.dtype, form="merged"), merged


def _in_heads(leaf: jax.Array, size: int) -> jax.Array:
    """[..., heads, dims] as heads of this size."""
    return leaf if leaf.shape[-1] == size else leaf.reshape(*leaf.shape[:-2], -1, size)


def quantize_projections(spec: ModelSpec, params: Params) -> tuple[ModelSpec, Params]:
    """The model with its layers' projections in float8_e4m3fn. Call it inside jit.

    Each output of a kernel has its own float32 scale, a power of two for experts. Results have the
    dtype of the spec. The embedding, the head, norms, biases and modules without a float8 form keep
    their dtype: routers, latent attention and gated delta rules. The result is for generation only;
    it cannot be trained.

    Heads may be split over devices in a model whose projections are separate.
    """
    forms: dict[Form, Form] = {"merged": "float8", "separate": "float8_separate"}
    quantized = model_spec(spec.config, spec.kind, spec.dtype, form=forms[spec.form])

    def small(old: Any, new: Any) -> Any:
        """Those of `old` in float8 that are in it in `new`."""
        if not isinstance(old, dict):
            return old
        if not is_frozen(new):
            return {name: small(value, new[name]) for name, value in old.items()}
        kernel, outputs = old[KERNEL], new[SCALE].ndim
        if (inputs := inputs_of(new)) == OF_EXPERTS:
            stack = quantize(kernel, inputs)
            return old | {KERNEL: stack.values, SCALE: stack.scale}
        kernel = jnp.moveaxis(kernel, range(inputs), range(outputs, kernel.ndim))
        kernel, scale = to_float8(kernel, axis=tuple(range(outputs, kernel.ndim)))
        return old | {KERNEL: kernel, SCALE: scale.reshape(new[SCALE].shape)}

    layers = small(params["decoder"]["layers"], quantized.params["decoder"]["layers"])
    return quantized, params | {"decoder": params["decoder"] | {"layers": layers}}


def scalar_params_from(lm_params: Params, spec: ModelSpec, key: jax.Array) -> Params:
    """Parameters of a scalar model: copies of a language model's, with a head of its own.

    Guarantees: the arrays are copies in the dtype of `spec`, so either model may be donated.
    """
    if spec.kind != "scalar":
        raise ValueError(f"the spec is a {spec.kind}: make it with model_spec(config, 'scalar')")
    dense = dense_spec(spec)
    copies = {}
    for name in dense.params.keys() - {"score"}:  # the decoder, and perhaps an image encoder
        copy = jax.tree.map(
            lambda abstract, value: jnp.array(value, dtype=abstract.dtype, copy=True),
            dense.params[name],
            dequantized(lm_params[name], spec.dtype),
        )
        copies[name] = quantized_as(spec.params[name], copy)
    return copies | draw_params(spec, {"score": spec.params["score"]}, key)


def draw_params(spec: ModelSpec, part: Params, key: jax.Array) -> Params:
    """First values of `part`, a part of the spec's parameters; see `init_params`."""

    def draw(path: tuple[Any, ...], _: Any) -> jax.Array:
        drawn, drawing = _drawing(spec, path)
        return drawing.draw(_leaf_key(key, drawn))

    return jax.tree.map_with_path(draw, part)


def _leaf_key(key: jax.Array, path: tuple[str, ...]) -> jax.Array:
    """The key folded with the parameter's path."""
    return jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))


@dataclass(frozen=True)
class _Drawing:
    """The distribution of first values, and their part of a frozen projection."""

    shape: tuple[int, ...]
    dtype: str
    init: str
    std: float
    part: str = ""  # KERNEL or SCALE of a frozen projection
    inputs: int = 0  # dims of its kernel

    def draw(self, key: jax.Array) -> jax.Array:
        drawn = _draw(key, self.shape, self.dtype, self.init, self.std)
        if not self.part:
            return drawn
        kernel = quantize(drawn, self.inputs)
        return kernel.values if self.part == KERNEL else kernel.scale


def _drawing(spec: ModelSpec, path: tuple[Any, ...]) -> tuple[tuple[str, ...], _Drawing]:
    """The draw of a parameter, and the path of its key: the kernel's for a kernel's scale."""
    *parents, name = (entry.key for entry in path)
    module, init = _at(spec.trees[0], parents), _at(spec.trees[2], parents)  # read, not copied
    std = spec.config.initializer_range
    if is_frozen(module) and name in (KERNEL, SCALE):
        shape, inputs = module[KERNEL].shape, inputs_of(module)
        drawing = _Drawing(shape, spec.dtype, init[KERNEL], std, name, inputs)
        return (*parents, KERNEL), drawing
    abstract = module[name]
    return (*parents, name), _Drawing(abstract.shape, abstract.dtype.name, init[name], std)


@functools.lru_cache(maxsize=1024)
def _program_of(drawing: _Drawing, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    """The same for every model: actor and critic have many shapes in common."""
    return jax.jit(drawing.draw, out_shardings=sharding)


def _at(tree: Any, path: Sequence[str]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _draw(
    key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike, init: str, std: float
) -> jax.Array:
    if init.startswith("uniform"):  # an A, within 1 / sqrt(inputs), as PEFT draws it
        inputs = shape[1:-1] if init == "uniform_each" else shape[:-1]
        bound = math.prod(inputs) ** -0.5
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)
    if init == "log_uniform":  # the decay of a gated delta rule
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)
    if init == "unit_normal":
        return jax.random.normal(key, shape, jnp.float32).astype(dtype)
    if init == "normal":
        # Drawn in float32, so that a bf16 model starts from the rounded float32 values.
        return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
    return jnp.full(shape, 1.0 if init == "ones" else 0.0, dtype)


def _put(tree: Params, path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
