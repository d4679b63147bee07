"""The bytes that each token of a tokenizer stands for, so that text can be found in tokens.

Known are byte-level BPE (GPT-2, Qwen, Llama 3), sentencepiece with or without byte tokens (Llama 2,
Gemma, Mistral) and decoders that join the texts of tokens.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

CHECKED = 256  # pairs of tokens whose decoded text is compared
SPACE = "\u2581"  # how sentencepiece writes a space
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnknownBytes(ValueError):
    """It cannot be known which bytes the tokens of a tokenizer stand for."""


def bytes_of_tokens(tokenizer: Any) -> list[bytes]:
    """The bytes of each id of a tokenizer of transformers; special tokens have none.

    Guarantees: the bytes of consecutive tokens, joined, are the text that `decode` gives without
        special tokens. A space that it drops at the very beginning is kept.
    Raises: UnknownBytes for a tokenizer of another kind.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UnknownBytes(f"{type(tokenizer).__name__} is not one of the tokenizers library")
    convert = _conversion(json.loads(tokenizer.backend_tokenizer.decoder.__getstate__()))
    added = tokenizer.added_tokens_decoder
    special = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    texts = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    pieces = [b"" if x is None or i in special else convert(x) for i, x in enumerate(texts)]
    _check(tokenizer, pieces)
    return pieces


def _conversion(decoder: Any) -> Callable[[str], bytes]:
    """A function from the text of a token in the vocabulary to its bytes."""
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = {step["type"] for step in steps}
    if not kinds <= {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        raise UnknownBytes(f"its decoder is {', '.join(sorted(kinds))}")
    if "ByteLevel" in kinds:
        return _byte_level
    fallback = "ByteFallback" in kinds
    replaced = [(SPACE, " ")] if "Metaspace" in kinds else []
    replaced += [
        (step["pattern"].get("String", ""), step["content"])
        for step in steps
        if step["type"] == "Replace"
    ]

    def convert(text: str) -> bytes:
        number = BYTE_TOKEN.fullmatch(text) if fallback else None
        if number:
            return bytes([int(number[1], 16)])
        for old, new in replaced:
            text = text.replace(old, new) if old else text
        return text.encode()

    return convert


def _byte_level(text: str) -> bytes:
    """Each character stands for a byte, unless one of them stands for none."""
    values = [BYTE_OF.get(character) for character in text]
    return text.encode() if None in values else bytes(x for x in values if x is not None)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of byte-level BPE writes: itself, or one from U+0100 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


BYTE_OF = _byte_alphabet()


def _check(tokenizer: Any, pieces: Sequence[bytes]) -> None:
    """UnknownBytes where the bytes of some pair of tokens are not its decoded text."""
    draw, ids = random.Random(0), range(len(pieces))
    for _ in range(CHECKED):
        pair = [draw.choice(ids), draw.choice(ids)]
        try:
            expected = b"".join(pieces[i] for i in pair).decode()
        except UnicodeDecodeError:
            continue  # a part of a character
        text = tokenizer.decode(pair, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if text not in (expected, expected.removeprefix(" ")):
            raise UnknownBytes(f"tokens {pair} are decoded to {text!r} and not to {expected!r}")
