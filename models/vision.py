"""An image encoder of fixed-size images: a ViT over patches, and the projector to the decoder.

Shape letters: B rows, C images of a row, X images, n tokens of an image, c patches of a token, q
values of a patch, L patches of an image, W hidden size of the encoder, N heads, H head dim, D
hidden size of the decoder.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxrl_llm.kernels.strict import by_rows, strict_in_scope
from jaxrl_llm.models.config import ModelConfig, Pixels, QwenVision, Vision
from jaxrl_llm.models.layers import Layer, Projection, parameter
from jaxrl_llm.models.media import Features, Media

PROJECTORS = ("projector", "deep_projectors")  # parts of an encoder after its last layer


class LayerNorm(Layer):
    """(x - mean) / std * scale + bias over the last dim, with statistics in float32."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike) -> None:
        self.eps = eps
        self.scale = parameter((size,), ("norm",), "ones", dtype)
        self.bias = parameter((size,), ("norm",), "zeros", dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - x32.mean(axis=-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.eps)
        y = scaled * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class EncoderBlock(Layer):
    """One layer of the encoder; every patch of an image sees all others."""

    def __init__(self, vision: Vision, *, dtype: DTypeLike) -> None:
        W, N, F = vision.hidden_size, vision.num_heads, vision.intermediate_size
        H = W // N
        self.attention_norm = LayerNorm(W, eps=vision.norm_eps, dtype=dtype)
        for name in ("q", "k", "v"):
            axes = ("norm", "norm", "head_dim")
            setattr(self, name, Projection((W, N, H), axes, bias=True, dtype=dtype))
        axes = ("norm", "head_dim", "norm")
        self.o = Projection((N, H, W), axes, contract=2, bias=True, dtype=dtype)
        self.mlp_norm = LayerNorm(W, eps=vision.norm_eps, dtype=dtype)
        self.up = Projection((W, F), ("norm", "norm"), bias=True, dtype=dtype)
        self.down = Projection((F, W), ("norm", "norm"), bias=True, dtype=dtype)

    q: Projection
    k: Projection
    v: Projection

    def __call__(self, x_XLW: jax.Array) -> jax.Array:
        read_XLW = self.attention_norm(x_XLW)
        heads = (self.q(read_XLW), self.k(read_XLW), self.v(read_XLW))
        x_XLW = x_XLW + self.o(jax.nn.dot_product_attention(*heads))
        hidden_XLF = jax.nn.gelu(self.up(self.mlp_norm(x_XLW)), approximate=True)
        return x_XLW + self.down(hidden_XLF)


class ImageEncoder(Layer):
    """Pixels to features.

    The patches of a token stand together, so the projector reads neighbours. Attention does not
    depend on their order.
    """

    def __init__(self, config: ModelConfig, vision: Vision, *, dtype: DTypeLike) -> None:
        W, (_, cells, values) = vision.hidden_size, vision.image_shape
        self.vision = vision
        self.patch = Projection((values, W), ("norm", "norm"), bias=True, dtype=dtype)
        shape = (vision.num_patches, W)
        self.positions = parameter(shape, ("norm", "norm"), "normal", dtype)
        self.layers = nnx.Dict(
            {str(i): EncoderBlock(vision, dtype=dtype) for i in range(vision.num_layers)}
        )
        self.norm = LayerNorm(W, eps=vision.norm_eps, dtype=dtype)
        shape = (cells * W, config.hidden_size)
        self.projector = Projection(shape, ("norm", "norm"), dtype=dtype)

    def __call__(self, media: Media) -> Features:
        """The features of all images of each row."""
        (B, C), (n, c, q) = media.image_BC2.shape[:2], media.pixels_NIncq.shape[2:]
        sample_BC, image_BC = media.image_BC2[..., 0], media.image_BC2[..., 1]
        pixels_BCncq = media.pixels_NIncq[sample_BC, image_BC]
        pixels_BCncq = jnp.where((image_BC >= 0)[..., None, None, None], pixels_BCncq, 0)
        graphdef, state = nnx.split(self)
        vectors_XnD = of_images(
            lambda state, pixels_XLq: nnx.merge(graphdef, state)._of_images(pixels_XLq, n),
            state,
            pixels_BCncq.reshape(B * C, n * c, q),
        )
        return Features(vectors_XnD.reshape(1, B, C * n, -1), media.place_BT)

    def _of_images(self, pixels_XLq: jax.Array, n: int) -> jax.Array:
        """The features of images, [X, n, D]."""
        table_LW = self._in_token_order(self.positions[...])
        values_XLq = normalised(pixels_XLq, self.vision)
        x_XLW = self.patch(values_XLq.astype(table_LW.dtype)) + table_LW
        for i in range(len(self.layers)):
            x_XLW = self.layers[str(i)](x_XLW)
        x_XLW = self.norm(x_XLW)
        if self.vision.train == "projector":
            x_XLW = jax.lax.stop_gradient(x_XLW)
        vectors_XnD = self.projector(x_XLW.reshape(len(x_XLW), n, -1))
        return jax.lax.stop_gradient(vectors_XnD) if self.vision.train == "none" else vectors_XnD

    def _in_token_order(self, table_LW: jax.Array) -> jax.Array:
        """A table of patches, row by row of the image, with the patches of a token together."""
        s = self.vision.scale
        side = self.vision.image_size // self.vision.patch_size // s
        squares = table_LW.reshape(side, s, side, s, -1)
        return squares.swapaxes(1, 2).reshape(table_LW.shape)


def normalised(pixels_Lq: jax.Array, pixels: Pixels) -> jax.Array:
    """uint8 pixels less their mean, over their standard deviation; colours are the last values."""
    colours = pixels_Lq.reshape(*pixels_Lq.shape[:-1], -1, 3).astype(jnp.float32) / 255
    colours = (colours - jnp.array(pixels.mean)) / jnp.array(pixels.std)
    return colours.reshape(pixels_Lq.shape)


def of_images(run: Callable[..., jax.Array], state: Any, *images: jax.Array) -> jax.Array:
    """`run(state, *images)`. Strict programs run one image after the other.

    The bits of an image then do not depend on the number of images.
    """
    strict = strict_in_scope()
    if strict is None:
        return run(state, *images)
    return by_rows(replace(strict, rows=1), run, state, *images, lead=1)


def frozen_parameters(vision: Vision | QwenVision | None, params: Any) -> Any:
    """A tree that is True where a parameter of the encoder does not learn; None where all do."""
    if vision is None or vision.train == "all":
        return None

    def is_frozen(path: Any, _: Any) -> bool:
        part, *rest = (key.key for key in path)
        return part == "vision" and not (vision.train == "projector" and rest[0] in PROJECTORS)

    return jax.tree.map_with_path(is_frozen, params)
