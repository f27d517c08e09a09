"""Reader of protobuf's wire format without compiled schemas, for one message or millions of similar ones.

A message is a sequence of fields, each a tag (number << 3 | wire type) and a value: a varint (0), 8 bytes (1), a length
and that many bytes (2), or 4 bytes (5). https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

__all__ = [
    "PADDING",
    "Buffer",
    "Spans",
    "Value",
    "WireError",
    "encode_bytes",
    "encode_varint",
    "fields",
    "partition",
    "read_fields",
    "signed",
    "varints",
]

Buffer = bytes | bytearray
Value = int | tuple[int, int]  # a varint, or (start, end) of the bytes of other values

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES: Final = 10
PADDING: Final = 16  # bytes after a buffer that `read_fields` may read
_BATCH: Final = 1 << 16  # messages per batch: their columns fit the processor's cache


class WireError(ValueError):
    """Error for bytes that are not a complete protobuf message; `position` is the place of the damage."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def fields(data: Buffer, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Value]]:
    """Yields the fields of one message: (number, integer), or (number, (start, end)) for bytes.

    Raises:
      WireError: the message is damaged, or a field extends past its end.
    """
    end = len(data) if end is None else end
    position = start
    # Most tags, numbers and sizes take one byte, and calls would dominate the time to read them.
    while position < end:
        tag = data[position]
        position += 1
        if tag > 127:
            tag, position = _varint(data, position - 1, end)
        kind = tag & 7
        if kind == _VARINT:
            value = data[position] if position < end else 128
            value, position = (value, position + 1) if value < 128 else _varint(data, position, end)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size = data[position] if position < end else 128
            size, position = (size, position + 1) if size < 128 else _varint(data, position, end)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise WireError(f"byte {position} has wire type {kind}, which no message has", position)
        if position + size > end:
            raise WireError(f"a field of {size} bytes at byte {position} is cut off at byte {end}", position)
        yield tag >> 3, (position, position + size)
        position += size


def varints(data: Buffer, value: Value) -> list[int]:
    """Returns the elements of a repeated integer field, packed or a single one."""
    if isinstance(value, int):
        return [value]
    found: list[int] = []
    element = shift = 0
    for byte in data[slice(*value)]:
        element |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            found.append(element)
            element = shift = 0
        elif shift >= 7 * _MAX_VARINT_BYTES:
            raise WireError(f"a number before byte {value[1]} has more than {_MAX_VARINT_BYTES} bytes", value[1])
    if shift:
        raise WireError(f"the data end within a number at byte {value[1]}", value[1])
    return found


def encode_bytes(number: int, content: bytes) -> bytes:
    """Encodes a field of bytes for a message."""
    return encode_varint(number << 3 | _BYTES) + encode_varint(len(content)) + content


def encode_varint(value: int) -> bytes:
    """Encodes an integer; negative ones as their two's complement of 64 bits."""
    rest = value & (1 << 64) - 1
    found = bytearray()
    while rest > 127:
        found.append(rest & 127 | 128)
        rest >>= 7
    found.append(rest)
    return bytes(found)


def signed(value: int) -> int:
    """Converts an unsigned number of the wire to int64."""
    return value - (1 << 64) if value >= 1 << 63 else value


@dataclass(frozen=True)
class Spans:
    """Locations of messages in a buffer: message i is `data[starts[i]:ends[i]]`."""

    starts: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, which: slice | np.ndarray) -> "Spans":
        return Spans(self.starts[which], self.ends[which])


def partition(
    data: Buffer, number: int, start: int, end: int, *, cut: bool = False
) -> tuple[Spans, list[tuple[int, Value]], str]:
    """Splits a message into one repeated field of messages, possibly millions, and the remaining fields.

    Args:
      data: buffer with the message.
      number: number of the repeated field.
      start, end: location of the message in the buffer.
      cut: includes the last message if it is truncated.

    Returns:
      The messages, the remaining fields, and the reason why the rest could not be read, or "".
    """
    tag = number << 3 | _BYTES  # tags of fields up to 15 have one byte
    places: list[int] = []  # positions of the tags
    others: list[tuple[int, Value]] = []
    position, begin, problem, append = start, start, "", places.append
    try:
        while position < end:
            # A tag in the last byte lacks its length, which `fields` reports.
            if data[position] != tag or position + 1 == end:
                found = next(fields(data, position, end))
                others.append(found)
                position = _after(data, position, found[1], end)
                continue
            # Sizes up to 127 take one byte, and only larger ones need the slower reader.
            size, begin = data[position + 1], position + 2
            if size > 127:
                size, begin = _varint(data, position + 1, end)
            append(position)
            position = begin + size
        if position > end:
            problem = f"a field of {position - begin} bytes at byte {begin} is cut off at byte {end}"
            if not cut:
                places.pop()
    except WireError as error:
        problem = str(error)
    sizes, starts = _varints_at(np.frombuffer(data, np.uint8), np.array(places, np.int64) + 1)
    # Compared unsigned: a truncated last message may claim any size.
    return Spans(starts, starts + np.minimum(sizes, (end - starts).astype(np.uint64)).astype(np.int64)), others, problem


def _after(data: Buffer, position: int, value: Value, end: int) -> int:
    """Returns the end of the field at `position` that was read as `value`."""
    return value[1] if isinstance(value, tuple) else _varint(data, _varint(data, position, end)[1], end)[1]


def read_fields(
    array: np.ndarray, spans: Spans, numbers: Sequence[int], nested: int | None = None
) -> tuple[dict[int, np.ndarray], Spans, np.ndarray]:
    """Reads the fields of many messages together, field by field instead of message by message.

    Args:
      array: uint8, the whole buffer with `PADDING` bytes after its messages.
      spans: locations of the messages.
      numbers: fields to read; each occurs at most once per message and is not 4 bytes wide.
      nested: number of a repeated field of messages.

    Returns:
      For each number a uint64 column with one row per message: the varint or the 8 bytes, for bytes the place of their
      length, 0 for absent fields; the messages of `nested`; and for each of these the row of its parent message.

    Raises:
      WireError: a message is damaged.
    """
    columns = {number: np.zeros(len(spans), np.uint64) for number in numbers}
    inner: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for first in range(0, len(spans), _BATCH):
        rows = slice(first, first + _BATCH)
        views = {number: column[rows] for number, column in columns.items()}
        found = _read_batch(array, spans[rows], views, nested)
        inner += [(starts, ends, owners + first) for starts, ends, owners in found]
    starts, ends, owners = (np.concatenate(part) for part in zip(*inner, strict=True)) if inner else [_NONE] * 3
    return columns, Spans(starts, ends), owners


_NONE: Final = np.zeros(0, np.int64)


def _read_batch(
    array: np.ndarray, spans: Spans, columns: Mapping[int, np.ndarray], nested: int | None
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Reads the n-th field of all messages together, for n = 1, 2, ... until the last message has ended."""
    found = []
    cursor, ends, rows = spans.starts, spans.ends, np.arange(len(spans))
    while True:
        open_ = cursor < ends
        if not open_.all():
            cursor, ends, rows = cursor[open_], ends[open_], rows[open_]
        if not len(rows):
            return found
        tag, begin = _varints_at(array, cursor)
        value, cursor = _varints_at(array, begin)
        # Messages of one kind mostly agree in their n-th field, so there are few tags.
        for each in _distinct(tag):
            number, kind = each >> 3, each & 7
            which = np.flatnonzero(tag == each)
            content, after = _contents(array, kind, begin[which], value[which], cursor[which])
            if number == nested and kind == _BYTES:
                found.append((cursor[which], after, rows[which]))
            cursor[which] = after
            if number in columns:
                columns[number][rows[which]] = content
        if (cursor > ends).any():
            raise _damaged(cursor[cursor > ends])


def _contents(
    array: np.ndarray, kind: int, begin: np.ndarray, value: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the contents of fields of one wire type, and the places after them.

    Args:
      array: the whole buffer.
      kind: wire type of the fields.
      begin: places after the tags.
      value: varints read at `begin`.
      after: places after these varints.
    """
    if kind == _VARINT:
        return value, after
    if kind == _BYTES:
        return begin.astype(np.uint64), after + value.astype(np.int64)
    if kind == _FIXED64:
        return _words_at(array, begin), begin + 8
    # Its value is never used (see `read_fields`).
    if kind == _FIXED32:
        return value, begin + 4
    raise _damaged(after)


def _distinct(tags: np.ndarray) -> list[int]:
    """Returns the distinct tags; almost always there are a few small ones."""
    if int(tags.max()) < 1 << 8:
        return np.flatnonzero(np.bincount(tags.astype(np.uint8))).tolist()
    return np.unique(tags).tolist()


def _damaged(cursor: np.ndarray) -> WireError:
    position = int(cursor[0])
    return WireError(f"the message before byte {position} is damaged", position)


def _varints_at(array: np.ndarray, cursor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decodes the varints at the given places, and returns the values and the places behind."""
    byte = array[cursor]
    value = (byte & 0x7F).astype(np.uint64)
    cursor = cursor + 1
    more = np.flatnonzero(byte & 0x80)
    # Most varints have one byte, so these rounds touch few rows.
    for shift in range(7, 7 * _MAX_VARINT_BYTES, 7):
        if not len(more):
            break
        places = cursor[more]
        byte = array[places]
        value[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        cursor[more] = places + 1
        more = more[(byte & 0x80) != 0]
    if len(more):
        raise _damaged(cursor[more])
    return value, cursor


def _words_at(array: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array[places[:, None] + np.arange(8)]).view("<u8")[:, 0]


def _varint(data: Buffer, position: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        if position >= end:
            raise WireError(f"the data end within a number at byte {position}", position)
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 128:
            return value, position
    raise WireError(f"the number before byte {position} has more than {_MAX_VARINT_BYTES} bytes", position)
