"""Images of rows: what a row may hold, and the arrays and tokens that they become.

An image is expanded once, where a prompt becomes ids. Rows keep files and bytes; pixels are made
when a batch is.
"""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MARK = "<image>"  # stands for an image in a text
_BEGIN, _END = ("<fake_token_around_image>", "<global-img>"), ("<fake_token_around_image>",)


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """How a model takes images: one size, and one token id that repeats."""

    token_id: int
    size: int  # pixels of a side
    patch: int
    scale: int  # patches of a side of a token
    most: int  # images of a row
    begin: tuple[int, ...] = ()  # ids before the tokens of an image
    end: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of an image, without those around them."""
        return (self.size // self.patch // self.scale) ** 2

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the images of a row: images, tokens, patches of a token, values."""
        return self.most, self.tokens, self.scale**2, 3 * self.patch**2

    def around(self, added: Mapping[str, tuple[int, bool]]) -> tuple[tuple[int, ...], ...]:
        """The ids before and after an image, of a tokenizer with these added tokens."""
        if not all(name in added for name in (*_BEGIN, *_END)):
            return (), ()
        return tuple(added[name][0] for name in _BEGIN), tuple(added[name][0] for name in _END)

    def expanded(self, ids: Sequence[int]) -> list[int]:
        """The ids with all tokens of each image in place of its mark."""
        image = (*self.begin, *[self.token_id] * self.tokens, *self.end)
        return [i for token in ids for i in (image if token == self.token_id else (token,))]

    def check(self, ids: Sequence[int], images: Sequence[Any]) -> None:
        """Open the images of a row whose expanded ids are `ids`.

        Raises: ValueError for an image that cannot be read, or another number of marks.
        """
        if ids and ids[-1] == self.token_id:  # generation embeds the last token of a prompt as text
            raise ValueError("the prompt ends in an image: put text after it")
        marks = sum(token == self.token_id for token in ids) / self.tokens
        if marks != len(images):
            raise ValueError(f"the row has {len(images)} images and {marks:g} marks {MARK}")
        if len(images) > self.most:
            raise ValueError(
                f"the row has {len(images)} images: raise config.data.max_images={self.most}"
            )
        for image in images:
            opened(image)

    def pixels(self, rows: Sequence[Sequence[Any]]) -> np.ndarray:
        """The images of rows, uint8 [B, images, tokens, patches of a token, values]."""
        array = np.zeros((len(rows), *self.shape), np.uint8)
        for row, images in enumerate(rows):
            for place, image in enumerate(images):
                array[row, place] = self._patches(opened(image))
        return array

    def places(self, rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
        """The place of each token among the features of its row, int32 [B, length]; -1: text."""
        places = np.full((len(rows), length), -1, np.int32)
        for row, ids in enumerate(rows):
            (at,) = np.nonzero(np.asarray(ids, np.int64) == self.token_id)
            places[row, at] = np.arange(len(at))
        return places

    def _patches(self, image: Any) -> np.ndarray:
        """The patches of an image; a token has its patches together, each by column and row."""
        p, s = self.patch, self.scale
        if image.size != (self.size, self.size):
            from PIL import Image  # pyright: ignore[reportMissingImports]

            image = image.resize((self.size, self.size), Image.Resampling.LANCZOS)
        side = self.size // p // s
        squares = np.asarray(image).reshape(side, s, p, side, s, p, 3)
        return squares.transpose(0, 3, 1, 4, 5, 2, 6).reshape(side * side, s * s, -1)


def see_images(tokenizer: Any, images: ImageInput | None) -> None:
    """From now on, rows that this tokenizer reads may have images.

    Raises: ValueError where the tokenizer has another id for an image than the model.
    """
    if images is not None:
        added, size = tokenizer.added_tokens, tokenizer.vocab_size
        own = added[MARK][0] if MARK in added else None
        if own != images.token_id and (own is not None or images.token_id < size):
            raise ValueError(
                f"image_token_id={images.token_id} of the model is not the id of {MARK} in its "
                f"tokenizer, {own}: take the tokenizer of the model, or with the character "
                f"tokenizer an id of {size} or more, below vocab_size"
            )
        begin, end = images.around(added)
        images = replace(images, begin=begin, end=end)
    tokenizer.images = images


def images_of(tokenizer: Any) -> ImageInput | None:
    """How rows take images; None where they have none."""
    return getattr(tokenizer, "images", None)


def opened(image: Any) -> Any:
    """A PIL image in RGB.

    `image` is one, its bytes, a path, a data URL, or a map with one of them, as datasets and chat
    messages have it.

    Raises: ValueError for anything else, and for an image that cannot be read.
    """
    from PIL import Image, UnidentifiedImageError  # pyright: ignore[reportMissingImports]

    if isinstance(image, Image.Image):
        return image.convert("RGB")
    source = _source(image)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
            return file.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as error:
        raise ValueError(f"an image cannot be read: {error}") from None


def _source(image: Any) -> Any:
    """The bytes or the path of an image."""
    if isinstance(image, Mapping):
        keys = ("bytes", "image", "path", "image_url", "url")
        inner = next((image[key] for key in keys if image.get(key) is not None), None)
        if inner is None:
            raise ValueError(f"an image has the keys {', '.join(image)}, and none of {keys}")
        if not isinstance(inner, bytes | str | Mapping):
            return _file_of(inner)
        return _source(inner)
    if isinstance(image, bytes):
        return image
    if isinstance(image, str) and image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ValueError(f"an image's data URL is no base64: {error}") from None
    if isinstance(image, str) and image.startswith(("http://", "https://")):
        raise ValueError(f"an image is at {image}: training fetches nothing, so give a file")
    if isinstance(image, str):
        return image.removeprefix("file://")
    return _file_of(image)


def _file_of(image: Any) -> io.BytesIO:
    """A PIL image as a file without loss."""
    from PIL import Image  # pyright: ignore[reportMissingImports]

    if not isinstance(image, Image.Image):
        raise ValueError(f"an image is a {type(image).__name__}, neither bytes nor a path")
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return io.BytesIO(file.getvalue())
