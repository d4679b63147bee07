"""The arrays that decode attention takes.

Shape letters of this package: B slots, N query heads, K KV heads, G = N / K query heads of a KV
head, H head dim, C prompt rows, P entries of a prompt row, O pages, R entries of a page, T pages
of a slot at most. An entry is the key and the value of one token.
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class DecodeInputs(NamedTuple):
    """One decode step of one layer: the new token of each slot, and the KV cache.

    The cache has two arrays. A prompt row is read by every slot that answers the prompt. Pages
    hold the entries that slots add. Keys are at index 0 of the axis of size 2, values at index 1.
    """

    q_BNH: Float[Array, "B N H"]
    new_BK2H: Float[Array, "B K 2 H"]  # key and value of each slot's new token
    prefix_CK2PH: Float[Array, "C K 2 P H"]
    prefix_rows_B: Int[Array, " B"]  # each slot's prompt row
    prefix_lengths_B: Int[Array, " B"]  # entries that a slot sees of its prompt row
    own_OK2RH: Float[Array, "O K 2 R H"]
    # Own entry i of slot b is entry i % R of page page_table_BT[b, i // R].
    page_table_BT: Int[Array, "B T"]
    own_lengths_B: Int[Array, " B"]  # own entries that a slot sees, the new token's included
    # The queries in rows, if they exist already; see heads.py. What pads a KV head may be anything.
    queries_BXH: Float[Array, "B X H"] | None = None

    @property
    def group_size(self) -> int:
        """G, the query heads of a KV head."""
        return self.q_BNH.shape[1] // self.own_OK2RH.shape[1]

    @property
    def prefix_capacity(self) -> int:
        """P, the entries that a prompt row has room for."""
        return self.prefix_CK2PH.shape[3]

    @property
    def own_capacity(self) -> int:
        """T R, the entries that a slot's pages have room for."""
        return self.page_table_BT.shape[1] * self.own_OK2RH.shape[3]

    def check(self) -> None:
        """Assert that shapes and dtypes fit together."""
        B, N, H = self.q_BNH.shape
        K, P, R = self.prefix_CK2PH.shape[1], self.prefix_capacity, self.own_OK2RH.shape[3]
        assert self.prefix_CK2PH.shape[1:] == (K, 2, P, H) and N % K == 0, self.prefix_CK2PH.shape
        assert self.own_OK2RH.shape[1:] == (K, 2, R, H), self.own_OK2RH.shape
        assert self.new_BK2H.shape == (B, K, 2, H), self.new_BK2H.shape
        assert self.prefix_CK2PH.dtype == self.own_OK2RH.dtype == self.new_BK2H.dtype
        for x in (self.prefix_rows_B, self.prefix_lengths_B, self.own_lengths_B):
            assert x.shape == (B,), x.shape
        assert self.page_table_BT.ndim == 2 and self.page_table_BT.shape[0] == B
