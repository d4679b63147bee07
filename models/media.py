"""Images of samples as images of rows, and their features among a row's tokens.

Shape letters: N samples, I images of a sample, P places of a sample, B rows, C images of a row,
n tokens of an image at most, c patches of a token, q values of a patch, T tokens of a row, M
features of a row, D hidden size of the decoder, V parts of a feature.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed.layout import Layout, layout_in_scope
from jaxrl_llm.models.config import FEWEST_IMAGE_TOKENS, QwenVision, Vision
from jaxrl_llm.types import IMAGE_FIELDS


class Images(NamedTuple):
    """The images of samples, in the order of `types.IMAGE_FIELDS`.

    A place is a feature: n times the image's number in its sample, plus the token's number in it.
    The last two fields are for images of several sizes.
    """

    pixels_NIncq: jax.Array  # uint8
    places_NP: jax.Array  # place of each token of the sample's first P; -1: text
    grids_NI2: jax.Array | None = None  # rows and columns of each image's tokens; 0: no image
    offsets_NP3: jax.Array | None = None  # what rope's positions differ from a token's number


class Media(NamedTuple):
    """The images of rows, and where their features stand."""

    pixels_NIncq: jax.Array  # images of all samples
    image_BC2: jax.Array  # sample and number of each image of a row; -1: no image
    place_BT: jax.Array  # feature of each token, n for each image of the row; -1: text
    grids_BC2: jax.Array | None = None
    rope_BT3: jax.Array | None = None  # positions for rope on three axes; None: the usual ones

    def ordered(self, reorder: Callable[..., jax.Array]) -> "Media":
        """The media of rows whose tokens `reorder` puts into another order."""
        rope = self.rope_BT3
        return self._replace(
            place_BT=reorder(self.place_BT, fill=-1),
            rope_BT3=None if rope is None else jax.vmap(reorder, -1, -1)(rope),
        )

    def positions(self, usual_BT: jax.Array) -> jax.Array:
        """The positions for rope."""
        return usual_BT if self.rope_BT3 is None else self.rope_BT3


class Features(NamedTuple):
    """Vectors that replace the embeddings of some tokens.

    The first part replaces; part i is added to the residual stream after decoder layer i - 1.
    """

    vectors_VBMD: jax.Array
    place_BT: jax.Array  # feature of each token; -1: text

    def inserted(self, x_BTD: jax.Array) -> jax.Array:
        """The embeddings with the features at their places."""
        chosen_BTD = self._at_tokens(0)
        return jnp.where(self.place_BT[..., None] >= 0, chosen_BTD.astype(x_BTD.dtype), x_BTD)

    @property
    def num_deep(self) -> int:
        """Decoder layers after which features are added."""
        return self.vectors_VBMD.shape[0] - 1

    def added(self, layer: int, x_BTD: jax.Array) -> jax.Array:
        """The residual stream after a decoder layer."""
        chosen_BTD = self._at_tokens(layer + 1).astype(x_BTD.dtype)
        return x_BTD + jnp.where(self.place_BT[..., None] >= 0, chosen_BTD, 0)

    def _at_tokens(self, part: int) -> jax.Array:
        at_BT1 = jnp.maximum(self.place_BT, 0)[..., None]
        return jnp.take_along_axis(self.vectors_VBMD[part], at_BT1, axis=1)


def media_fields(vision: Vision | QwenVision | None) -> tuple[str, ...]:
    """The fields of images that a model with this encoder reads."""
    if vision is None:
        return ()
    return IMAGE_FIELDS if isinstance(vision, QwenVision) else IMAGE_FIELDS[:2]


def images_in(fields: Mapping[str, jax.Array]) -> Images | None:
    """The images of samples, from their fields; None without any."""
    named = [fields[name] for name in IMAGE_FIELDS if name in fields]
    return Images(*named) if named else None


def media_of(
    images: Images,
    source_BT: jax.Array,
    place_BT: jax.Array,
    position_BT: jax.Array,
    real_BT: jax.Array,
    samples: int | None = None,
) -> Media:
    """The images of rows whose token t is token `place_BT[:, t]` of sample `source_BT[:, t]`.

    `position_BT` is the token's number in its sequence. Tokens after the first P of a sample are
    text. A row has room for the images of so many `samples`, or of all, as far as they fit into its
    tokens.
    """
    size, width, length = images.pixels_NIncq.shape[2], images.places_NP.shape[1], place_BT.shape[1]
    at_BT = jnp.minimum(place_BT, width - 1)
    found_BT = images.places_NP[source_BT, at_BT]
    found_BT = jnp.where(real_BT & (place_BT < width), found_BT, -1)
    begins_BT = (found_BT >= 0) & (found_BT % size == 0)
    fewest = size if images.grids_NI2 is None else min(FEWEST_IMAGE_TOKENS, size)
    all_samples, each = images.pixels_NIncq.shape[:2]
    most = min(length // fewest, (samples or all_samples) * each)

    def firsts(begins_T: jax.Array) -> jax.Array:
        return jnp.nonzero(begins_T, size=most, fill_value=length)[0]

    first_BC = jax.vmap(firsts)(begins_BT)
    token_BC = jnp.minimum(first_BC, length - 1)
    sample_BC, image_BC = (
        jnp.take_along_axis(x, token_BC, axis=1) for x in (source_BT, found_BT // size)
    )
    is_image_BC1 = (first_BC < length)[..., None]
    image_BC2 = jnp.where(is_image_BC1, jnp.stack([sample_BC, image_BC], axis=-1), -1)
    number_BT = jnp.cumsum(begins_BT, axis=1) - 1  # number of the image in the row
    at_feature_BT = jnp.where(found_BT >= 0, number_BT * size + found_BT % size, -1)
    if images.grids_NI2 is None or images.offsets_NP3 is None:
        return Media(images.pixels_NIncq, image_BC2, at_feature_BT)
    grids_BC2 = images.grids_NI2[image_BC2[..., 0], image_BC2[..., 1]]
    rope_BT3 = position_BT[..., None] + images.offsets_NP3[source_BT, at_BT]
    return Media(
        images.pixels_NIncq,
        image_BC2,
        at_feature_BT,
        grids_BC2=jnp.where(is_image_BC1, grids_BC2, 0),
        rope_BT3=rope_BT3,
    )


def features_of(encoder: Any, media: Media) -> Features:
    """The features of the images of rows; each replica of a layout in scope encodes its own."""
    layout = layout_in_scope()
    rows, samples = media.place_BT.shape[0], media.pixels_NIncq.shape[0]
    if layout is None or any(size % layout.num_replicas for size in (rows, samples)):
        return encoder(media)
    return _of_replicas(encoder, media, layout)


def _of_replicas(encoder: Any, media: Media, layout: Layout) -> Features:
    graphdef, state = nnx.split(encoder)
    replicas, axes = layout.num_replicas, layout.axes("batch")

    def local(copies: Any, media: Media) -> tuple[jax.Array, jax.Array]:
        own = nnx.merge(graphdef, jax.tree.map(lambda x: x[0], copies))
        image_BC2, num_samples = media.image_BC2, media.pixels_NIncq.shape[0]
        first = jax.lax.axis_index(axes) * num_samples if axes else 0
        image_BC2 = jnp.where(image_BC2 >= 0, image_BC2 - jnp.array([1, 0]) * first, -1)
        features = own(media._replace(image_BC2=image_BC2))
        return features.vectors_VBMD, features.place_BT

    in_scope = jax.sharding.get_abstract_mesh()
    mesh = layout.mesh.abstract_mesh if in_scope.empty else in_scope
    others = {axis for axis in mesh.axis_names if axis not in mesh.manual_axes}
    own = PartitionSpec(axes)
    vectors_VBMD, place_BT = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(own, own),
        out_specs=(PartitionSpec(None, axes), own),
        axis_names={*axes, *others},
        check_vma=False,
        # A copy for each replica: the gradient of one array would be summed inside.
    )(jax.tree.map(lambda x: jnp.broadcast_to(x, (replicas, *x.shape)), state), media)
    return Features(vectors_VBMD, place_BT)
