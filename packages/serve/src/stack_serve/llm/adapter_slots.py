"""The slots of adapters on the devices as numbers: which adapter lies in which, and who is using it."""

from collections import OrderedDict

__all__ = ["AdapterSlots"]


class AdapterSlots:
    """Adapters by their numbers, of which as many as there are slots can be used at once.

    Invariants:
      a slot is free, kept (its adapter has no user) or held (it has one or more)
      an adapter lies in at most one slot

    Of the kept adapters, the one that was used longest ago gives way first.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(reversed(range(slots)))
        self._slot_of: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    def can_hold(self, adapter: int | None) -> bool:
        """Whether `hold` can give the adapter a slot; who has none needs none."""
        return adapter is None or adapter in self._slot_of or bool(self._free or self._kept)

    def hold(self, adapter: int) -> tuple[int, bool]:
        """Adds a user of an adapter; returns its slot, and whether the adapter has to be loaded there first."""
        is_new = adapter not in self._slot_of
        if is_new:
            self._slot_of[adapter] = self._free.pop() if self._free else self._taken()
        self._kept.pop(adapter, None)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        return self._slot_of[adapter], is_new

    def release(self, adapter: int) -> None:
        """Takes a user away, as `hold` added it."""
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._kept[adapter] = None

    def _taken(self) -> int:
        oldest, _ = self._kept.popitem(last=False)
        return self._slot_of.pop(oldest)
