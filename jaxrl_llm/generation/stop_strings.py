"""Stop strings: a response ends with the token that completes one of them in its text.

A string may begin and end inside of tokens. So an automaton (Aho-Corasick) reads the bytes of the
response. Its state is the longest end of the text that begins a stop string. What a token does to
each state is a table, made once: the device looks one entry up for each token.

Shape letters: V tokens, S states, C classes of tokens that do the same to all states.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_llm.tokenizer import Tokenizer

BYTES = 256
START = 0  # the state before the first token
REPLACEMENT = "\ufffd"  # stands for bytes that are not text


@dataclass(frozen=True, eq=False)
class StopStrings:
    """The automaton of some strings over the tokens of a tokenizer. Equal ones compare equal.

    `complete` is the last state. It is entered with the token that completes a string, and kept.
    """

    strings: tuple[str, ...]
    class_of_V: np.ndarray  # the last entry is for ids that the tokenizer does not have
    next_SC: np.ndarray
    digest: str

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StopStrings) and self.digest == other.digest

    def __repr__(self) -> str:
        return f"StopStrings({self.strings!r})"

    @property
    def complete(self) -> int:
        """The state once a string is complete."""
        return len(self.next_SC) - 1

    def after(self, state: int, token: int) -> int:
        """The state after one more token, on the host."""
        return int(self.next_SC[state, self.class_of_V[min(token, len(self.class_of_V) - 1)]])

    def step(self, states_N: jax.Array, tokens_N: jax.Array) -> jax.Array:
        """The states after one more token; int32 [N]."""
        known_N = jnp.minimum(tokens_N, len(self.class_of_V) - 1)
        return jnp.asarray(self.next_SC)[states_N, jnp.asarray(self.class_of_V)[known_N]]

    def read(self, tokens_NR: jax.Array, mask_NR: jax.Array) -> jax.Array:
        """The states after the tokens in the mask, from the start on; int32 [N]."""

        def one(states_N: jax.Array, column: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            tokens_N, mask_N = column
            return jnp.where(mask_N > 0, self.step(states_N, tokens_N), states_N), None

        start_N = jnp.full(tokens_NR.shape[:1], START, jnp.int32)
        return lax.scan(one, start_N, (tokens_NR.T, mask_NR.T))[0]

    def are_in(self, tokens_NR: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
        """True for each response that contains a stop string, on the host; bool [N]."""
        states_N = np.full(len(tokens_NR), START)
        known_NR = np.minimum(tokens_NR, len(self.class_of_V) - 1)
        for place in range(int(lengths_N.max(initial=0))):
            after_N = self.next_SC[states_N, self.class_of_V[known_NR[:, place]]]
            states_N = np.where(place < lengths_N, after_N, states_N)
        return states_N == self.complete


@dataclass(frozen=True)
class Stops:
    """The ends of a response: ids of its last token, or a string in its text."""

    token_ids: tuple[int, ...]
    strings: StopStrings | None = None

    def are_in(self, tokens_NR: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
        """True for each complete response, on the host; bool [N]. They are padded on the right."""
        rows_N = np.arange(len(tokens_NR))
        last_N = tokens_NR[rows_N, np.maximum(lengths_N - 1, 0)]
        ended_N = (lengths_N > 0) & np.isin(last_N, self.token_ids)
        return (
            ended_N if self.strings is None else ended_N | self.strings.are_in(tokens_NR, lengths_N)
        )


@functools.lru_cache(maxsize=4)
def stop_strings(strings: tuple[str, ...], tokenizer: Tokenizer) -> StopStrings | None:
    """The automaton of `strings`; None without any.

    Raises: ValueError for a string that no text of the tokenizer contains, and where the bytes of
        its tokens are not known.
    """
    if not strings:
        return None
    try:
        token_bytes = tokenizer.token_bytes()
    except ValueError as error:
        raise ValueError(
            f"stop strings need a tokenizer whose tokens are known as bytes, and {error}: give "
            "token ids, config.rollout.stop_token_ids, in place of stop strings"
        ) from None
    for text in strings:
        _check(text, tokenizer, token_bytes)
    table_VS = _tokens_table(_bytes_table([text.encode() for text in strings]), token_bytes)
    classes: dict[bytes, int] = {}
    class_of_V = np.array(
        [classes.setdefault(row.tobytes(), len(classes)) for row in table_VS], np.int32
    )
    columns_CS = np.stack([np.frombuffer(row, np.int16) for row in classes])
    next_SC = columns_CS.T.astype(np.int32)
    digest = hashlib.blake2b(next_SC.tobytes() + class_of_V.tobytes(), digest_size=16)
    digest.update("\0".join(strings).encode())
    return StopStrings(strings, class_of_V, next_SC, digest.hexdigest())


def _check(text: str, tokenizer: Tokenizer, token_bytes: Sequence[bytes]) -> None:
    """Refuse a string that cannot be in a response."""
    if not text or REPLACEMENT in text:
        raise ValueError(f"the stop string {text!r} is not text: remove it")
    try:
        ids = tokenizer.encode(text)
    except ValueError as error:
        raise ValueError(f"the stop string {text!r} cannot be in a response: {error}") from None
    for i in ids:
        if not token_bytes[i]:
            raise ValueError(
                f"the stop string {text!r} has the special token {i}, which is not in the text of "
                f"a response: give its id in place, config.rollout.stop_token_ids=[{i}]"
            )


def _bytes_table(strings: Sequence[bytes]) -> np.ndarray:
    """The state after each byte, [S, 256]; in the last state a string is complete."""
    prefixes = sorted({text[:n] for text in strings for n in range(len(text))}, key=len)
    states = {prefix: number for number, prefix in enumerate(prefixes)}
    complete = len(states)
    table = np.zeros((complete + 1, BYTES), np.int16)
    for prefix, state in states.items():
        for byte in range(BYTES):
            read = prefix + bytes([byte])
            ends = (read[begin:] for begin in range(len(read)))
            if read.endswith(tuple(strings)):
                table[state, byte] = complete
            else:
                table[state, byte] = next((states[end] for end in ends if end in states), START)
    table[complete] = complete
    return table


def _tokens_table(after_byte: np.ndarray, token_bytes: Sequence[bytes]) -> np.ndarray:
    """The state after each token, [V + 1, S]. The last row is for a token without text."""
    texts = [*token_bytes, b""]
    table = np.tile(np.arange(len(after_byte), dtype=np.int16), (len(texts), 1))
    lengths = np.array([len(text) for text in texts])
    for place in range(lengths.max()):
        longer = np.flatnonzero(lengths > place)
        read = np.array([texts[i][place] for i in longer])
        table[longer] = after_byte[table[longer], read[:, None]]
    return table
