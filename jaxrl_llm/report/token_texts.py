"""The text of single tokens, by the tokenizer that a run stored with its checkpoints."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = "tokenizer.json"


class TokenTexts:
    """Texts by token id. Without a stored tokenizer there are none, and the page shows ids."""

    def __init__(self, folder: Path):
        self._file = folder / FILE
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}

    def of(self, ids: Iterable[int]) -> dict[str, str]:
        """The texts of these tokens, special tokens included; keys are strings, as in JSON."""
        if self._tokenizer is None and self._file.exists():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._file))
        if self._tokenizer is None:
            return {}
        wanted = set(ids)
        for token in wanted - set(self._texts):
            self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return {str(token): self._texts[token] for token in wanted}
