"""The pages of the caches: which are free, and which have tokens that another text may begin
with (prefix caching)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

_Key = tuple[int, tuple[int, ...]]
"""The number of the page before (0 for none), and the tokens of a page."""


class PagePool:
    """The pages of the caches, by number from 0; each has room for `page_size` tokens.

    A full page keeps its tokens after its texts have ended, until another text needs the page.
    Until then, a text with the same beginning can reuse it.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))
        self._users = [0] * pages
        self._serials = count(1)
        self._known: dict[_Key, int] = {}
        self._keys: dict[int, tuple[_Key, int]] = {}

    @property
    def used(self) -> int:
        """The number of pages that running texts have."""
        return self.pages - len(self._free)

    def take(self) -> int | None:
        """Takes a page for new tokens, the one that has been free longest, and returns its number;
        None if no page is free."""
        if not self._free:
            return None
        page, _ = self._free.popitem(last=False)
        known = self._keys.pop(page, None)
        if known is not None:
            del self._known[known[0]]
        self._users[page] = 1
        return page

    def shared_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Takes the known full pages with which a text begins, and returns them, in order. At least
        one token is left over, because its logits are needed."""
        pages = self._known_pages(tokens)
        for page in pages:
            self._free.pop(page, None)
            self._users[page] += 1
        return pages

    def known(self, tokens: Sequence[int]) -> int:
        """Returns how many pages `shared_prefix` would take."""
        return len(self._known_pages(tokens))

    def _known_pages(self, tokens: Sequence[int]) -> list[int]:
        """Returns the pages that already hold the beginning of a text with these tokens, in
        order."""
        pages: list[int] = []
        before = 0
        for at in range(0, len(tokens) - self.page_size, self.page_size):
            page = self._known.get((before, tuple(tokens[at : at + self.page_size])))
            if page is None:
                break
            pages.append(page)
            before = self._keys[page][1]
        return pages

    def publish(self, pages: Sequence[int], at: int, tokens: Sequence[int]) -> None:
        """Records what a full page holds, so that other texts with the same beginning can use it.
        Another page with the same beginning, if recorded before, stays instead.

        pages   the pages of a text
        at      the place of the full page among these
        tokens  the tokens in that page
        """
        before = 0
        if at:
            known = self._keys.get(pages[at - 1])
            if known is None:  # an equal page is known instead
                return
            before = known[1]
        key, page = (before, tuple(tokens)), pages[at]
        if key not in self._known and page not in self._keys:
            self._known[key] = page
            self._keys[page] = key, next(self._serials)

    def release(self, pages: Sequence[int]) -> None:
        """Gives back the pages of a text, which are free once no other text uses them. The last
        pages are reused first, because fewer texts begin with them."""
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None
