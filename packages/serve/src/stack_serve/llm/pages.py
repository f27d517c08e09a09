"""Page allocator of the key-value cache, with reference counts and prefix caching."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

from stack_core.abi.generation import PromptImage

__all__ = ["PagePool", "extend_digests"]


class PagePool:
    """Reference-counted page pool that retains unreferenced registered pages until they are needed.

    Invariants:
      a page is free (0 references, not registered), kept (0 references, registered) or held (1 or more)
      available == free + kept == pages - held
      a digest names at most one page

    Kept pages are evicted in the order of their release. Pages released together are evicted from the end of the
    sequence, because a page is useless without its predecessors.
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
        """Number of pages available to `take`."""
        return len(self._free) + len(self._kept)

    def references(self, page: int) -> int:
        """Returns the reference count of a page."""
        return self._references[page]

    def take(self) -> int:
        """Allocates a page with one reference; a page must be available."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
        self._references[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to each of the registered pages, as returned by `find`."""
        for page in pages:
            if not self._references[page]:
                del self._kept[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference to each page; `pages` are in the order of a sequence's tokens."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._digest_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def register(self, page: int, digest: bytes) -> None:
        """Registers a held page under the digest of its contents, unless the digest already has a page."""
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Returns the pages of the longest registered prefix of the digests."""
        found = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def count_unreferenced(self, pages: Iterable[int]) -> int:
        """Counts the unreferenced pages, by which `share` would reduce the available pages."""
        return sum(not self._references[page] for page in pages)

    def forget(self) -> None:
        """Clears the prefix cache; referenced pages stay allocated."""
        self._page_of.clear()
        self._digest_of.clear()
        self._free.extend(reversed(self._kept))
        self._kept.clear()


def extend_digests(
    digests: list[bytes],
    tokens: Sequence[int],
    *,
    page_tokens: int,
    pages: int,
    adapter: int | None = None,
    images: Sequence[PromptImage] = (),
) -> None:
    """Appends page digests until there are `pages` of them; `tokens` must fill all these pages.

        digests[i] = sha256(digests[i - 1] + tokens[i page_tokens : (i + 1) page_tokens])

    Each digest covers the tokens of its page and all earlier tokens, since keys and values depend on them and on the
    adapter. The adapter's number takes the place of digests[-1]. The digests of images that the page overlaps follow
    its tokens.
    """
    first = b"" if adapter is None else adapter.to_bytes(8, "little")
    for page in range(len(digests), pages):
        # A cryptographic hash, because a collision would serve the keys of another client's prompt.
        start, end = page * page_tokens, (page + 1) * page_tokens
        contents = array("i", tokens[start:end]).tobytes()
        contents += b"".join(each.digest for each in images if each.start < end and start < each.end)
        digests.append(sha256((digests[-1] if digests else first) + contents).digest())
