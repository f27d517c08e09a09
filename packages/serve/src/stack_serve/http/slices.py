"""Much work of one request in short slices, between which others have the event loop."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import orjson

__all__ = ["Each", "Items", "Members", "Turns", "batches", "json_pieces", "maybe_in_thread"]

T = TypeVar("T")

_SLICE_S = 0.001
_BATCH = 64
# For less, the switch to another thread costs more than the work.
_LITTLE = 8192


class Turns:
    """Has a task that works for long let others go on after each millisecond."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + _SLICE_S

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until_s

    async def rest(self) -> None:
        """Lets other tasks go on; to be called when the turn is over."""
        await asyncio.sleep(0)
        self._until_s = time.monotonic() + _SLICE_S


async def maybe_in_thread(size: int, function: Callable[..., T], *args: Any) -> T:
    """Calls a function that takes long if `size`, in characters or so, is large: then on another thread."""
    return function(*args) if size < _LITTLE else await asyncio.to_thread(function, *args)


class Items:
    """A JSON array whose items are produced in batches: `made` yields lists or arrays of items."""

    def __init__(self, made: Iterable[Any]) -> None:
        self.made = made


class Each:
    """A JSON array of large items, each of which may contain parts that are produced in batches."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


class Members(dict[str, Any]):
    """A JSON object with a member that is produced in batches."""


def batches(values: Sequence[T], parts: int = 1) -> Iterator[Sequence[T]]:
    """Yields the values in batches that take well below a millisecond to write.

    Args:
      parts: number of parts of each value.
    """
    size = max(_BATCH // parts, 1)
    return (values[start : start + size] for start in range(0, len(values), size))


def json_pieces(value: Any) -> Iterator[bytes]:
    """JSON, piece by piece."""
    if isinstance(value, Items):
        yield b"["
        comma = b""
        for batch in value.made:
            # The batches form one array, so each loses its brackets.
            yield comma + orjson.dumps(batch, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            comma = b","
        yield b"]"
    elif isinstance(value, Each):
        yield b"["
        for place, item in enumerate(value.items):
            if place:
                yield b","
            yield from json_pieces(item)
        yield b"]"
    elif isinstance(value, Members):
        yield from _members(value)
    else:
        yield orjson.dumps(value)


def _members(value: Mapping[str, Any]) -> Iterator[bytes]:
    before = b"{"
    for name, member in value.items():
        yield before + orjson.dumps(name) + b":"
        yield from json_pieces(member)
        before = b","
    yield b"}" if value else b"{}"
