"""Allocator of adapter slots on the devices, with reference counts and LRU eviction."""

from collections import OrderedDict

__all__ = ["AdapterSlots"]


class AdapterSlots:
    """Reference-counted slots that retain adapters without users until another adapter needs the slot.

    Invariants:
      a slot is free (without adapter), kept (its adapter has 0 users) or held (1 or more users)
      an adapter is in at most one slot

    Adapters are identified by `HostAdapter.number`. The least recently used kept adapter is evicted first.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(reversed(range(slots)))
        self._slot_of: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    def can_hold(self, adapter: int | None) -> bool:
        """Returns whether `hold` would succeed; True without an adapter."""
        return adapter is None or adapter in self._slot_of or bool(self._free or self._kept)

    def hold(self, adapter: int) -> tuple[int, bool]:
        """Adds a user of an adapter; returns its slot, and whether the adapter must be loaded into it first."""
        is_new = adapter not in self._slot_of
        if is_new:
            self._slot_of[adapter] = self._free.pop() if self._free else self._evict_oldest()
        # An adapter in use must not be among the candidates for eviction.
        self._kept.pop(adapter, None)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        return self._slot_of[adapter], is_new

    def release(self, adapter: int) -> None:
        """Removes a user added by `hold`."""
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._kept[adapter] = None

    def _evict_oldest(self) -> int:
        # The scheduler calls `can_hold` before it admits a sequence, so an adapter without users exists.
        oldest, _ = self._kept.popitem(last=False)
        return self._slot_of.pop(oldest)
