"""The images of traced samples: each file is stored once, under its digest."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.images import content

# Endings by the first bytes of a file. An image of another kind has the ending "bin".
_KINDS = {b"\x89PNG": "png", b"\xff\xd8": "jpg", b"GIF8": "gif", b"RIFF": "webp"}


class ImageStore:
    """Writes images to a folder, up to a limit of its size."""

    def __init__(self, folder: Path, most_bytes: float):
        self._folder, self._left = folder, most_bytes
        self._stored: set[str] = set()
        if folder.is_dir():
            for path in folder.iterdir():
                self._stored.add(path.name)
                self._left -= path.stat().st_size

    def names(self, images: Sequence[Any]) -> list[str]:
        """The file names of a row's images, which are there afterwards, up to the limit."""
        return [self._store(content(image)) for image in images]

    def _store(self, data: bytes) -> str:
        ending = next((end for start, end in _KINDS.items() if data.startswith(start)), "bin")
        name = f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.{ending}"
        if name not in self._stored and len(data) <= self._left:
            self._folder.mkdir(parents=True, exist_ok=True)
            part = self._folder / f".{name}.{os.getpid()}"  # other processes write it too
            part.write_bytes(data)
            part.replace(self._folder / name)
            self._stored.add(name)
            self._left -= len(data)
        return name
