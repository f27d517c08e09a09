"""The pages of a key-value cache as numbers: who holds them, and which are kept for those that begin alike."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

__all__ = ["PagePool", "extend_digests"]


class PagePool:
    """Counts the references to each page; keeps registered pages that nobody holds until their room is needed.

    Invariants:
      a page is free (0 references, not registered), kept (0 references, registered) or held (1 or more)
      available == free + kept == pages - held
      a digest names at most one page

    Of the kept pages the one that was released longest ago is given away first, and of those released together the
    last of the sequence, which is of no use without the ones before it.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._references = [0] * pages
        self._free = list(reversed(range(pages)))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._kept)

    def references(self, page: int) -> int:
        """How many hold the page."""
        return self._references[page]

    def take(self) -> int:
        """Returns a page for its taker alone; there must be one available."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
        self._references[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Holds registered pages, as `find` returns them, once more."""
        for page in pages:
            if not self._references[page]:
                del self._kept[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Gives back what `take` and `share` gave, in the order of a sequence's tokens."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._digest_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def register(self, page: int, digest: bytes) -> None:
        """Lets others find a held page by its contents; if another one has them already, that one is found."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Returns the pages of the longest run of digests, from the first, that are registered."""
        found = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def kept_among(self, pages: Iterable[int]) -> int:
        """How many of the pages nobody holds, so that sharing them leaves so many fewer available."""
        return sum(not self._references[page] for page in pages)

    def forget(self) -> None:
        """Nothing is found any more; those who hold pages keep them."""
        self._page_of.clear()
        self._digest_of.clear()
        self._free.extend(reversed(self._kept))
        self._kept.clear()


def extend_digests(
    digests: list[bytes], tokens: Sequence[int], *, page_tokens: int, pages: int, adapter: int | None = None
) -> None:
    """Appends digests until there are `pages` of them, all of which `tokens` must fill.

        digests[i] = sha256(digests[i - 1] + tokens[i page_tokens : (i + 1) page_tokens])

    Each stands for its page's tokens and all before them, which with the adapter are what keys and values depend on.
    The adapter's number stands in the place of digests[-1].
    """
    first = b"" if adapter is None else adapter.to_bytes(8, "little")
    for page in range(len(digests), pages):
        contents = array("i", tokens[page * page_tokens : (page + 1) * page_tokens]).tobytes()
        digests.append(sha256((digests[-1] if digests else first) + contents).digest())
