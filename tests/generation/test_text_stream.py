"""A text that comes in pieces is the text that comes at once."""

import random

import pytest
from turn_tokenizers import KINDS, trained

from jaxrl_llm.generation.completions import TextStream
from jaxrl_llm.tokenizer import CharTokenizer

TEXT = " Hé, 漢字 and 🙂! It is  four.\n\n<|im_end|> x"


class Plain:
    """A tokenizer of the tokenizers library."""

    def __init__(self, kind: str):
        self.fast = trained(kind)

    def decode(self, ids, *, skip_special=True):
        return self.fast.decode([*ids], skip_special_tokens=skip_special)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_whole_text(kind):
    tokenizer, random_ = Plain(kind), random.Random(0)
    size = tokenizer.fast.get_vocab_size()
    noise = [random_.randrange(size) for _ in range(300)]  # also parts of characters
    for ids in (tokenizer.fast.encode(TEXT, add_special_tokens=False).ids, noise):
        for most in (1, 2, 7):
            stream, pieces, rest = TextStream(tokenizer), [], list(ids)
            while rest:
                number = random_.randint(1, most)
                pieces.append(stream.add(rest[:number]))
                rest = rest[number:]
            if ids is not noise:
                assert not any("\ufffd" in piece for piece in pieces)
            pieces.append(stream.end())
            assert "".join(pieces) == tokenizer.decode(ids)


def test_characters_come_one_by_one():
    tokenizer = CharTokenizer()
    stream = TextStream(tokenizer)
    assert [stream.add([i]) for i in (*tokenizer.encode("1+2"), 1)] == ["1", "+", "2", ""]
