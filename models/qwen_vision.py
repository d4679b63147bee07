"""The image encoders of Qwen2.5-VL and Qwen3-VL: a ViT with rope on two axes, for any image size.

An image has room for n tokens, and those behind its own are padding. Few images are computed at
once, because the weights of attention over a large one take much memory.

Shape letters: B rows, C images of a row, K images that are computed together, n tokens of an image
at most, c patches of a token, q values of a patch, L = n * c patches, M features of a row, W hidden
size of the encoder, N heads, H head dim, F inner size of the MLP, D hidden size of the decoder, V
parts of a feature.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxrl_llm.models.config import ModelConfig, QwenVision
from jaxrl_llm.models.layers import Layer, Projection, RMSNorm, apply_rope, parameter
from jaxrl_llm.models.media import Features, Media
from jaxrl_llm.models.qwen_vision_files import FRAMES
from jaxrl_llm.models.rope import rope_powers
from jaxrl_llm.models.vision import LayerNorm, normalised, of_images

PATCHES = 4096  # patches that are computed together, from one large image or several small ones
EPS = 1e-6


def _norm(vision: QwenVision, size: int, dtype: DTypeLike) -> RMSNorm | LayerNorm:
    kind = RMSNorm if _is_gated(vision) else LayerNorm
    return kind(size, eps=EPS, dtype=dtype)


def _is_gated(vision: QwenVision) -> bool:
    """True for Qwen2.5-VL: RMS norms and gated MLPs, and a patch embedding without bias."""
    return vision.model_type == "qwen2_5_vl"


def _linear(size: int, outputs: int, dtype: DTypeLike, *, bias: bool = True) -> Projection:
    return Projection((size, outputs), ("norm", "norm"), bias=bias, dtype=dtype)


class QwenBlock(Layer):
    """One layer of the encoder; a patch sees the patches that the mask allows."""

    def __init__(self, vision: QwenVision, *, dtype: DTypeLike) -> None:
        W, N, F = vision.hidden_size, vision.num_heads, vision.intermediate_size
        H = W // N
        self.attention_norm = _norm(vision, W, dtype)
        axes = ("norm", "norm", "norm", "head_dim")
        self.qkv = Projection((W, 3, N, H), axes, bias=True, dtype=dtype)
        axes = ("norm", "head_dim", "norm")
        self.o = Projection((N, H, W), axes, contract=2, bias=True, dtype=dtype)
        self.mlp_norm = _norm(vision, W, dtype)
        self.gate = _linear(W, F, dtype) if _is_gated(vision) else None
        self.up = _linear(W, F, dtype)
        self.down = _linear(F, W, dtype)

    def __call__(
        self, x_LW: jax.Array, rope: tuple[jax.Array, jax.Array], visible_LL: jax.Array
    ) -> jax.Array:
        q_LNH, k_LNH, v_LNH = jnp.moveaxis(self.qkv(self.attention_norm(x_LW)), 1, 0)
        q_LNH, k_LNH = (apply_rope(x, *rope) for x in (q_LNH, k_LNH))
        x_LW = x_LW + self.o(
            jax.nn.dot_product_attention(q_LNH, k_LNH, v_LNH, mask=visible_LL[None])
        )
        read_LW = self.mlp_norm(x_LW)
        if self.gate is None:
            hidden_LF = jax.nn.gelu(self.up(read_LW), approximate=True)
        else:
            hidden_LF = jax.nn.silu(self.gate(read_LW)) * self.up(read_LW)
        return x_LW + self.down(hidden_LF)


class Projector(Layer):
    """Joins the patches of a token and maps them to the decoder's hidden size."""

    def __init__(
        self, config: ModelConfig, vision: QwenVision, *, joined: bool, dtype: DTypeLike
    ) -> None:
        size = vision.scale**2 * vision.hidden_size
        self.joined = joined  # whether the norm follows the joining
        self.norm = _norm(vision, size if joined else vision.hidden_size, dtype)
        self.up = _linear(size, size, dtype)
        self.down = _linear(size, config.hidden_size, dtype)

    def __call__(self, x_LW: jax.Array, tokens: int) -> jax.Array:
        x = x_LW.reshape(tokens, -1) if self.joined else x_LW
        hidden = jax.nn.gelu(self.up(self.norm(x).reshape(tokens, -1)), approximate=False)
        return self.down(hidden)


class QwenEncoder(Layer):
    """Pixels to features, a few images at once. Places of a row without an image cost little."""

    def __init__(self, config: ModelConfig, vision: QwenVision, *, dtype: DTypeLike) -> None:
        W, values = vision.hidden_size, FRAMES * 3 * vision.patch_size**2
        self.vision = vision
        self.patch = _linear(values, W, dtype, bias=not _is_gated(vision))
        self.positions = None
        if vision.table_side:
            shape = (vision.table_side**2, W)
            self.positions = parameter(shape, ("norm", "norm"), "normal", dtype)
        self.layers = nnx.Dict(
            {str(i): QwenBlock(vision, dtype=dtype) for i in range(vision.num_layers)}
        )
        self.projector = Projector(config, vision, joined=False, dtype=dtype)
        self.deep_projectors = None
        if vision.deep_layers:
            projectors = range(len(vision.deep_layers))
            self.deep_projectors = nnx.Dict(
                {str(i): Projector(config, vision, joined=True, dtype=dtype) for i in projectors}
            )

    def __call__(self, media: Media) -> Features:
        """The features of all images of each row, without gaps between its images."""
        grids_BC2 = media.grids_BC2
        assert grids_BC2 is not None
        (B, C), n = media.image_BC2.shape[:2], media.pixels_NIncq.shape[2]
        sizes_BC = grids_BC2.prod(axis=-1)
        start_BC = jnp.cumsum(sizes_BC, axis=1) - sizes_BC
        number_BT = jnp.maximum(media.place_BT, 0) // n
        at_BT = jnp.take_along_axis(start_BC, number_BT, axis=1) + media.place_BT % n
        graphdef, state = nnx.split(self)
        if self.vision.train == "none":
            state = jax.tree.map(jax.lax.stop_gradient, state)

        def of_image(state: Any, pixels_ncq: jax.Array, grid_2: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, state)._of_image(pixels_ncq, grid_2)

        encode = partial(of_images, jax.vmap(of_image, in_axes=(None, 0, 0)))
        if self.vision.train == "all":
            encode = jax.checkpoint(encode)
        M, c = media.place_BT.shape[1], media.pixels_NIncq.shape[3]
        K = min(B * C, max(1, PATCHES // (n * c)))
        shape = jax.eval_shape(encode, state, media.pixels_NIncq[:1, 0], grids_BC2[:1, 0])

        def add(vectors_VBMD: jax.Array, number_K: jax.Array) -> tuple[jax.Array, None]:
            row_K, place_K = number_K // C, number_K % C
            sample_K, image_K = media.image_BC2[row_K, place_K].T
            image_K = jnp.where(number_K < B * C, image_K, -1)
            vectors_KVnD = jax.lax.cond(
                (image_K >= 0).any(),
                lambda: encode(
                    state, media.pixels_NIncq[sample_K, image_K], grids_BC2[row_K, place_K]
                ),
                lambda: jnp.zeros((K, *shape.shape[1:]), shape.dtype),
            )
            is_own_Kn = jnp.arange(n) < sizes_BC[row_K, place_K][:, None]
            is_own_Kn &= (image_K >= 0)[:, None]
            at_Kn = jnp.where(is_own_Kn, start_BC[row_K, place_K][:, None] + jnp.arange(n), M)
            vectors_VKnD = vectors_KVnD.swapaxes(0, 1)
            return vectors_VBMD.at[:, row_K[:, None], at_Kn].set(vectors_VKnD, mode="drop"), None

        vectors_VBMD = jnp.zeros((shape.shape[1], B, M, shape.shape[3]), shape.dtype)
        numbers = jnp.arange(-(-B * C // K) * K).reshape(-1, K)
        vectors_VBMD, _ = jax.lax.scan(add, vectors_VBMD, numbers)
        return Features(vectors_VBMD, jnp.where(media.place_BT >= 0, at_BT, -1))

    def _of_image(self, pixels_ncq: jax.Array, grid_2: jax.Array) -> jax.Array:
        """The parts of the features of one image, [V, n, D]."""
        vision, (n, c, _) = self.vision, pixels_ncq.shape
        token_n, columns = jnp.arange(n), jnp.maximum(grid_2[1], 1)
        row_n, column_n = token_n // columns, token_n % columns
        real_n = token_n < grid_2[0] * grid_2[1]
        inner_c = jnp.arange(c)
        row_L, column_L = (
            (at_n[:, None] * vision.scale + inner_c).reshape(-1)
            for at_n, inner_c in (
                (row_n, inner_c // vision.scale),
                (column_n, inner_c % vision.scale),
            )
        )
        x_LW = self._embedded(pixels_ncq.reshape(n * c, -1), row_L, column_L, grid_2)
        powers = rope_powers(10000.0, vision.hidden_size // vision.num_heads // 2)
        angles = jnp.concatenate([at[:, None] * (1 / powers) for at in (row_L, column_L)], axis=1)
        rope = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        whole_LL = _alike(jnp.repeat(real_n, c))
        window_LL = whole_LL
        if vision.window_size is not None:
            side = vision.window_size // vision.patch_size // vision.scale
            window_n = row_n // side * n + column_n // side
            window_LL = _alike(jnp.repeat(jnp.where(real_n, window_n, -1), c))
        deep = []
        for i, layer in enumerate(self.layers[str(i)] for i in range(vision.num_layers)):
            is_whole = vision.window_size is None or i in vision.whole_layers
            x_LW = _run(layer, vision, x_LW, rope, whole_LL if is_whole else window_LL)
            if i in vision.deep_layers:
                assert self.deep_projectors is not None
                projector = self.deep_projectors[str(vision.deep_layers.index(i))]
                deep.append(projector(_fixed(x_LW, vision), n))
        return jnp.stack([self.projector(_fixed(x_LW, vision), n), *deep])

    def _embedded(
        self, pixels_Lq: jax.Array, row_L: jax.Array, column_L: jax.Array, grid_2: jax.Array
    ) -> jax.Array:
        """The patches as vectors, with learned positions where there are some."""
        vision, dtype = self.vision, self.projector.down.kernel[...].dtype
        colours = normalised(pixels_Lq, vision).reshape(len(pixels_Lq), -1, 1, 3)
        colours = jnp.repeat(colours, FRAMES, axis=2)
        x_LW = self.patch(colours.reshape(len(pixels_Lq), -1).astype(dtype))
        if self.positions is None:
            return x_LW
        side, table = vision.table_side, self.positions[...].astype(jnp.float32)
        rows, columns = (
            _taps(at_L, size * vision.scale, side)
            for at_L, size in ((row_L, grid_2[0]), (column_L, grid_2[1]))
        )
        position_LW = jnp.zeros(x_LW.shape, jnp.float32)
        for low_L, share_L in rows:
            for left_L, part_L in columns:
                position_LW += table[low_L * side + left_L] * (share_L * part_L)[:, None]
        return x_LW + position_LW.astype(dtype)


def _taps(at_L: jax.Array, size: jax.Array, side: int) -> list[tuple[jax.Array, jax.Array]]:
    """The two neighbours in a table of `side` of places on an axis of `size`, and their weights."""
    source_L = at_L * (side - 1) / jnp.maximum(size - 1, 1)
    floor_L = jnp.floor(source_L)
    share_L = source_L - floor_L
    low_L = jnp.clip(floor_L.astype(jnp.int32), 0, side - 1)
    return [(low_L, 1 - share_L), (jnp.minimum(low_L + 1, side - 1), share_L)]


def _alike(group_L: jax.Array) -> jax.Array:
    """Whether two patches are in the same group, [L, L]; padding is a group, so no row is empty."""
    return group_L[:, None] == group_L


def _fixed(x: jax.Array, vision: QwenVision) -> jax.Array:
    """The input of a projector: without gradient where the layers do not learn."""
    return jax.lax.stop_gradient(x) if vision.train == "projector" else x


def _run(layer: QwenBlock, vision: QwenVision, *inputs: Any) -> jax.Array:
    """The layer, recomputed in the backward pass where it learns."""
    if vision.train != "all":
        return layer(*inputs)
    graphdef, state = nnx.split(layer)

    @jax.checkpoint
    def run(state: Any, *inputs: Any) -> jax.Array:
        return nnx.merge(graphdef, state)(*inputs)

    return run(state, *inputs)
