"""The pages of the sessions' cache, on the host: who holds which, and which tokens they have.

Full pages stay readable after their sequence has gone, in a tree by the tokens up to their end. A
new sequence that begins with the same tokens reads them and computes nothing. When pages run out,
those that were read longest ago are taken.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[int, tuple[int, ...]]  # the page before (-1: none), and the tokens of the page


@dataclass
class PagePool:
    """`num_pages` pages of `entries` tokens each."""

    num_pages: int
    entries: int
    _free: list[int] = field(init=False)  # without content, the last one is taken first
    _holders: list[int] = field(init=False)  # sequences that hold a page
    _tree: dict[Key, int] = field(default_factory=dict)
    _key_of: dict[int, Key] = field(default_factory=dict)
    _followers: dict[int, set[int]] = field(default_factory=dict)  # pages that come after a page
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict)  # in the tree, not held

    def __post_init__(self) -> None:
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._holders = [0] * self.num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be taken, those in the tree that nobody holds included."""
        return len(self._free) + len(self._idle)

    def take(self, number: int) -> list[int]:
        """Pages for new entries. Requires: as many are free."""
        pages = [self._next() for _ in range(number)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Hold the full pages that begin with `tokens`, in order; their entries are computed."""
        pages, before = [], -1
        for first in range(0, len(tokens) - self.entries + 1, self.entries):
            page = self._tree.get((before, tuple(tokens[first : first + self.entries])))
            if page is None:
                break
            self._holders[page] += 1
            self._idle.pop(page, None)
            pages.append(page)
            before = page
        return pages

    def key_after(self, pages: Sequence[int], tokens: Sequence[int]) -> Key | None:
        """The key of the full page that comes after `pages`, which `tokens` begin with."""
        first = len(pages) * self.entries
        if len(tokens) - first < self.entries:
            return None
        return pages[-1] if pages else -1, tuple(tokens[first : first + self.entries])

    def note(self, pages: list[int], tokens: Sequence[int], number: int) -> int:
        """Put the full pages of the first `number` computed tokens into the tree.

        A page whose tokens are there already stays out. Returns how many pages are in the tree.
        """
        before = -1
        for i in range(number // self.entries):
            key = (before, tuple(tokens[i * self.entries : (i + 1) * self.entries]))
            known = self._tree.get(key)
            if known is not None and known != pages[i]:
                return i  # what follows would hang on another sequence's page
            if known is None:
                self._tree[key] = pages[i]
                self._key_of[pages[i]] = key
                self._followers.setdefault(before, set()).add(pages[i])
            before = pages[i]
        return number // self.entries

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. The last ones of a sequence are taken first."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _next(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._idle.popitem(last=False)
        self._drop(page)
        return page

    def _drop(self, page: int) -> None:
        """Take a page out of the tree, and what follows it: nothing can be reached through it."""
        key = self._key_of.pop(page)
        del self._tree[key]
        self._followers.get(key[0], set()).discard(page)
        for follower in sorted(self._followers.pop(page, ())):
            self._drop(follower)
            if follower in self._idle:
                del self._idle[follower]
                self._free.append(follower)
