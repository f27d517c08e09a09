"""Choice of the engine for a request, by cached prefixes and load. No clock, threads or processes."""

import math
from collections import OrderedDict
from collections.abc import Sequence

from stack_serve.parallel.config import RouterName

__all__ = ["Router"]

_BOUND = 1.25


class Router:
    """Chooses among engines of equal capacity.

    The router "cache_aware" chooses the engine with the longest prefix of the prompt in its cache, among the engines
    whose load stays within

        bound = max(ceil(1.25 * (total load + n) / engines), minimum load + n)

    for a request of n continuations; the load is the number of unfinished continuations. Equal prefixes go to the least
    loaded engine. The prefixes are estimated from the page digests of the prompts sent to each engine, the most recent
    ones up to the number of its pages. The estimate does not affect answers: an engine looks up its own cache.

    Sources: prefixes as in the router of SGLang (Zheng et al., SGLang: Efficient Execution of Structured Language Model
    Programs, 2024, arXiv:2312.07104); bound on the load from Mirrokni et al., Consistent Hashing with Bounded Loads,
    2018 (arXiv:1608.01350).

    Args:
      engines: number of engines.
      name: "cache_aware" or "round_robin".
      pages: number of cache pages of an engine.
    """

    def __init__(self, engines: int, name: RouterName, *, pages: int) -> None:
        self._name, self._pages = name, pages
        self._prefixes: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(engines)]
        self._turn = 0

    @property
    def uses_digests(self) -> bool:
        """True if `choose` reads the digests."""
        return self._name == "cache_aware" and len(self._prefixes) > 1

    def choose(self, digests: Sequence[bytes], loads: Sequence[int | None], *, continuations: int = 1) -> int:
        """Returns the number of an engine and records the prompt as cached there.

        Args:
          digests: page digests of the prompt.
          loads: unfinished continuations of each engine; None for an engine that is not available. At least one is.
          continuations: number of continuations of the request.
        """
        available = {number: load for number, load in enumerate(loads) if load is not None}
        if self._name == "round_robin":
            engine = min(available, key=lambda number: (number - self._turn) % len(loads))
            self._turn = engine + 1
            return engine
        mean = (sum(available.values()) + continuations) / len(available)
        bound = max(math.ceil(_BOUND * mean), min(available.values()) + continuations)
        allowed = [number for number, load in available.items() if load + continuations <= bound]
        engine = min(allowed, key=lambda number: (-self.matches(number, digests), available[number], number))
        self._record(engine, digests)
        return engine

    def has(self, digests: Sequence[bytes]) -> bool:
        """Returns whether some engine is estimated to have all pages of a prompt in its cache."""
        return any(self.matches(engine, digests) == len(digests) for engine in range(len(self._prefixes)))

    def matches(self, engine: int, digests: Sequence[bytes]) -> int:
        """Returns the estimated number of leading pages of a prompt in the cache of an engine."""
        known = self._prefixes[engine]
        return next((place for place, digest in enumerate(digests) if digest not in known), len(digests))

    def forget(self, engine: int | None = None) -> None:
        """Clears the estimate for one engine, or for all engines."""
        for prefixes in self._prefixes if engine is None else [self._prefixes[engine]]:
            prefixes.clear()

    def _record(self, engine: int, digests: Sequence[bytes]) -> None:
        known = self._prefixes[engine]
        # From the end, because pages are evicted from the end of a sequence, too.
        for digest in reversed(digests):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._pages:
            known.popitem(last=False)
