"""Inference messages with their tensors' bytes left where they lie; protobuf copies them several times.

Only the two fields with raw tensors are read and written by hand, everything else is protobuf's.
Source: https://protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Sequence

from stack_serve.oip.errors import ProtocolError

__all__ = ["joined", "split"]

RAW_INPUTS, RAW_OUTPUTS = 7, 6
"""The numbers of `raw_input_contents` in a request, and of `raw_output_contents` in an answer."""

_VARINT, _EIGHT_BYTES, _SIZED, _FOUR_BYTES = 0, 1, 2, 5


def split(message: bytes, field: int = RAW_INPUTS) -> tuple[bytes, list[memoryview]]:
    """Removes the values of a repeated bytes field from a message; returns the remainder and views of the values.

    Raises:
      ProtocolError: the message is truncated or malformed.
    """
    view = memoryview(message)
    rest: list[memoryview] = []
    values: list[memoryview] = []
    place = 0
    while place < len(message):
        start = place
        key, place = _varint(message, place)
        kind = key & 7
        size = 0
        if kind == _VARINT:
            _, place = _varint(message, place)
        elif kind == _SIZED:
            size, place = _varint(message, place)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ProtocolError("The request is no ModelInferRequest.")
        end = place + size
        if end > len(message):
            raise ProtocolError("The request is cut off.")
        if key == field << 3 | _SIZED:
            values.append(view[place:end])
        else:
            rest.append(view[start:end])
        place = end
    return b"".join(rest), values


def joined(message: bytes, values: Sequence[bytes | memoryview], field: int = RAW_OUTPUTS) -> bytes:
    """Appends the values of a repeated bytes field to a message."""
    parts: list[bytes | memoryview] = [message]
    for value in values:
        # Field numbers below 16 and the wire type fit into one byte.
        parts += [bytes([field << 3 | _SIZED]), _as_varint(len(value)), value]
    return b"".join(parts)


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        # A valid varint has at most ten bytes; without the limit, bad input would build a huge integer.
        if place >= len(message) or shift > 63:
            raise ProtocolError("The request is cut off.")
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7


def _as_varint(value: int) -> bytes:
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)
