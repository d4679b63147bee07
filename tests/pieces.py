"""A tokenizer of 23 pieces over two letters, so that a string lies in tokens in many ways."""

from collections.abc import Iterable

from jaxrl_llm.tokenizer import CharTokenizer

PIECES = ["", *"abab", "ab", "ba", "aa", "bb", "aab", "aba", "bab", "abb", *"abcdefghi", ""]


class Pieces(CharTokenizer):
    """Decodes only. The first and the last id have no text."""

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(letter) for letter in text]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        return "".join(PIECES[i] for i in ids)

    def token_bytes(self) -> list[bytes]:
        return [piece.encode() for piece in PIECES]
