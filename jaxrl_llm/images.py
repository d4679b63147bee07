"""Images of rows: what a row may hold, and the arrays and tokens that they become.

An image is expanded once, where a prompt becomes ids. Rows keep files and bytes; pixels are made
when a batch is.
"""

import base64
import binascii
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MARK = "<image>"  # stands for an image in a text
PAD = "<|image_pad|>"  # Qwen's token of an image
# Fields of a batch; see `types.RolloutBatch`.
PIXELS, PLACES = "images", "image_places"
GRIDS, OFFSETS = "image_grids", "image_offsets"
Grid = tuple[int, int]  # rows and columns of the tokens of an image
_BEGIN, _END = ("<fake_token_around_image>", "<global-img>"), ("<fake_token_around_image>",)


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """How a model takes images: their sizes, and one token id that repeats."""

    token_id: int
    patch: int
    scale: int  # patches of a side of a token
    most: int  # images of a row
    resample: int = 3  # Pillow's number of the filter that resizes
    size: int | None = None  # pixels of a side of every image; None: images keep their shape
    longest_side: int | None = None  # longer side after a first resize; None: one resize
    max_pixels: int = 0  # where images keep their shape: larger ones are shrunk
    min_pixels: int = 0  # smaller ones are enlarged
    text: str = MARK  # an image in a text before it is tokenised
    begin: tuple[int, ...] = ()  # ids before the tokens of an image
    end: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the largest image, without those around them."""
        return (self.max_pixels if self.size is None else self.size**2) // self._side**2

    @property
    def _side(self) -> int:
        """Pixels of a side of a token."""
        return self.patch * self.scale

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the fields of a row's images, but for those with one entry a token."""
        pixels = (self.most, self.tokens, self.scale**2, 3 * self.patch**2)
        grids = {} if self.size is not None else {GRIDS: (self.most, 2)}
        return {PIXELS: pixels, **grids}

    def token_shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the fields with one entry a token, of rows of `length` tokens."""
        offsets = {} if self.size is not None else {OFFSETS: (length, 3)}
        return {PLACES: (length,), **offsets}

    def grids(self, images: Sequence[Any]) -> list[Grid]:
        """Rows and columns of the tokens of each image, which is opened.

        Raises: ValueError for an image that cannot be read, or that is too long and narrow.
        """
        return [self._grid(opened(image)) for image in images]

    def expanded(self, ids: Sequence[int], grids: Iterator[Grid]) -> list[int]:
        """The ids with all tokens of each image in place of its mark.

        Marks without a grid stay as they are.
        """
        out: list[int] = []
        for token in ids:
            grid = next(grids, None) if token == self.token_id else None
            repeated = [self.token_id] * (grid[0] * grid[1]) if grid else [token]
            out += [*self.begin, *repeated, *self.end] if grid else repeated
        return out

    def check(self, ids: Sequence[int], grids: Sequence[Grid]) -> None:
        """Compare a row's ids before their expansion with the grids of its images.

        Raises: ValueError for another number of marks, too many images, or an image at the end.
        """
        # Generation embeds the last token of a prompt as text.
        if ids and ids[-1] == self.token_id and not self.end:
            raise ValueError("the prompt ends in an image: put text after it")
        marks = sum(token == self.token_id for token in ids)
        if marks != len(grids):
            raise ValueError(f"the row has {len(grids)} images and {marks} marks {MARK}")
        if len(grids) > self.most:
            raise ValueError(
                f"the row has {len(grids)} images: raise config.data.max_images={self.most}"
            )

    def arrays(
        self, rows: Sequence[Sequence[int]], images: Sequence[Sequence[Any]], length: int
    ) -> dict[str, np.ndarray]:
        """The fields of the images of rows, whose ids are `rows`; see `types.RolloutBatch`."""
        num = len(rows)
        shapes = self.shapes | self.token_shapes(length)
        fields = {
            name: np.zeros((num, *shape), np.uint8 if name == PIXELS else np.int32)
            for name, shape in shapes.items()
        }
        fields[PLACES][:] = -1
        for row, (ids, own) in enumerate(zip(rows, images, strict=True)):
            grids = []
            for i, image in enumerate(map(opened, own)):
                grids.append(self._grid(image))
                patches = self._patches(image, grids[-1])
                fields[PIXELS][row, i, : len(patches)] = patches
            (at,) = np.nonzero(np.asarray(ids, np.int64) == self.token_id)
            features = [i * self.tokens + x for i, (h, w) in enumerate(grids) for x in range(h * w)]
            fields[PLACES][row, at] = features
            if self.size is None:
                fields[GRIDS][row, : len(grids)] = np.array(grids, np.int32).reshape(-1, 2)
                fields[OFFSETS][row] = _offsets(at, grids, length)
        return fields

    def _grid(self, image: Any) -> Grid:
        """Rows and columns of the tokens of an opened image."""
        if self.size is not None:
            return self.size // self._side, self.size // self._side
        width, height = image.size
        return token_grid(height, width, self._side, self.min_pixels, self.max_pixels)

    def _patches(self, image: Any, grid: Grid) -> np.ndarray:
        """The patches of an image; a token has its patches together, each by column and row."""
        from PIL import Image  # pyright: ignore[reportMissingImports]

        p, s, (rows, columns) = self.patch, self.scale, grid
        how = Image.Resampling(self.resample)
        width, height = image.size
        sizes = [_rescaled(width, height, self.longest_side)] if self.longest_side else []
        for size in (*sizes, (columns * s * p, rows * s * p)):
            image = image if image.size == size else image.resize(size, how)
        squares = np.asarray(image).reshape(rows, s, p, columns, s, p, 3)
        return squares.transpose(0, 3, 1, 4, 5, 2, 6).reshape(rows * columns, s * s, -1)


def _rescaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Width and height of an image with another longer side: SmolVLM's first resize."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def token_grid(height: int, width: int, side: int, fewest: int, most: int) -> Grid:
    """Rows and columns of tokens of `side` pixels for an image: Qwen-VL's resize.

    Sides are rounded. An image of more than `most` pixels is shrunk, one of less than `fewest` is
    enlarged. Both keep their ratio.

    Raises: ValueError for an image more than 200 times as long as narrow.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(
            f"an image has {width} x {height} pixels: one side is over 200 times larger"
        )
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(x / shrink / side)) for x in (height, width))
    elif rows * columns * side**2 < fewest:
        grow = math.sqrt(fewest / (height * width))
        rows, columns = (math.ceil(x * grow / side) for x in (height, width))
    if rows * columns * side**2 > most:
        raise ValueError(
            f"an image of {width} x {height} pixels takes {rows} x {columns} tokens: raise "
            f"config.data.max_image_tokens={most // side**2}"
        )
    return rows, columns


def _offsets(at: np.ndarray, grids: Sequence[Grid], length: int) -> np.ndarray:
    """What the positions of a row's tokens on three axes differ from their numbers, [length, 3].

    An image at position c has its tokens at time c, height c + row and width c + column. The text
    behind it goes on at c plus the longer side.
    """
    offsets = np.zeros((length, 3), np.int32)
    delta, done = 0, 0
    for rows, columns in grids:
        own = at[done : done + rows * columns]
        first, done = int(own[0]), done + rows * columns
        row, column = np.divmod(np.arange(rows * columns), columns)
        offsets[own] = np.stack([0 * row, row, column], axis=1) + (first + delta - own)[:, None]
        delta += max(rows, columns) - rows * columns
        offsets[own[-1] + 1 :] = delta
    return offsets


def see_images(tokenizer: Any, images: ImageInput | None) -> None:
    """From now on, rows that this tokenizer reads may have images.

    Raises: ValueError where the tokenizer has another id for an image than the model.
    """
    if images is not None:
        added, size = tokenizer.added_tokens, tokenizer.vocab_size
        name = PAD if PAD in added else MARK
        own = added[name][0] if name in added else None
        if own != images.token_id and (own is not None or images.token_id < size):
            raise ValueError(
                f"image_token_id={images.token_id} of the model is not the id of {name} in its "
                f"tokenizer, {own}: take the tokenizer of the model, or with the character "
                f"tokenizer an id of {size} or more, below vocab_size"
            )
        if name == PAD:
            images = replace(images, text=f"<|vision_start|>{PAD}<|vision_end|>")
        elif all(name in added for name in (*_BEGIN, *_END)):
            begin, end = (tuple(added[name][0] for name in names) for names in (_BEGIN, _END))
            images = replace(images, begin=begin, end=end)
    tokenizer.images = images


def images_of(tokenizer: Any) -> ImageInput | None:
    """How rows take images; None where they have none."""
    return getattr(tokenizer, "images", None)


def with_image_parts(messages: list[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Messages whose contents are parts, with an image for each mark in their text.

    Without any mark the images come before the first text of the user, as in TRL.
    """
    asked = [dict(message) for message in messages]
    if images and not any(MARK in str(message.get("content", "")) for message in asked):
        first = next((m for m in asked if m["role"] == "user"), asked[0])
        first["content"] = MARK * images + str(first.get("content", ""))
    for message in asked:
        if isinstance(content := message.get("content"), str):
            texts = content.split(MARK)
            parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}]
            for text in texts[1:]:
                parts += [{"type": "image"}, {"type": "text", "text": text}]
            message["content"] = [part for part in parts if part.get("text") != ""]
    return asked


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


def content(image: Any) -> bytes:
    """The bytes of an image's file; a PIL image is a PNG."""
    source = _source(image)
    return source if isinstance(source, bytes) else _read(source)


def _read(source: Any) -> bytes:
    if isinstance(source, io.BytesIO):
        return source.getvalue()
    with open(source, "rb") as file:
        return file.read()


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
