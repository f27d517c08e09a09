"""Cuts a trace to a time window and to the programs that ran, and compresses it.

python cut_trace.py TRACE.xplane.pb OUT.xz --start-ms 100 --end-ms 330 --programs jit_step(0) --threads python3
"""

import argparse
import lzma
from pathlib import Path

from stack_profile.traces.wire import PADDING, encode_bytes, fields, signed

_MICRO = 1_000_000


def integer(number: int, value: int) -> bytes:
    out = bytearray()
    for each in (number << 3, value % (1 << 64)):
        rest = each
        while rest > 127:
            out.append(rest & 127 | 128)
            rest >>= 7
        out.append(rest)
    return bytes(out)


def cut(data: bytes, start_ps: int, end_ps: int, programs: set[str], threads: set[str], buffers: bool) -> bytes:
    """Returns an XSpace with the events that start in the window, and the HLO of the named programs."""
    data = data + bytes(PADDING)
    found = bytearray()
    for number, value in fields(data, 0, len(data) - PADDING):
        if number != 1:
            continue
        name = _name(data, value, 2)
        if name.startswith(("/device:", "Task Environment")):
            found += encode_bytes(1, _plane(data, value, start_ps, end_ps, None))
        elif name == "/host:CPU":
            found += encode_bytes(1, _plane(data, value, start_ps, end_ps, threads))
        elif name == "/host:metadata":
            found += encode_bytes(1, _metadata(data, value, programs, buffers))
    return bytes(found)


def _name(data: bytes, place: tuple[int, int], number: int) -> str:
    return next((data[slice(*value)].decode() for key, value in fields(data, *place) if key == number), "")


def _plane(data: bytes, place: tuple[int, int], start_ps: int, end_ps: int, threads: set[str] | None) -> bytes:
    parts, used, texts = bytearray(), set(), set()
    kept = list(fields(data, *place))
    for number, value in kept:
        if number == 3 and (threads is None or _name(data, value, 2) in threads):
            parts += encode_bytes(3, _line(data, value, start_ps, end_ps, used, texts))
    for number, value in kept:
        if number == 4 and _key(data, value) in used:
            parts += encode_bytes(4, data[slice(*value)])
            texts |= set(_stats(data, dict(fields(data, *value))[2], 5))
    for number, value in kept:
        if number == 6:
            texts |= set(_stat(data, value))
    for number, value in kept:
        if (number == 5 and _key(data, value) in texts) or number in (2, 6):
            parts += encode_bytes(number, data[slice(*value)])
        elif isinstance(value, int):
            parts += integer(number, value)
    return bytes(parts)


def _key(data: bytes, entry: tuple[int, int]) -> int:
    return signed(dict(fields(data, *entry)).get(1, 0))


def _line(data: bytes, place: tuple[int, int], start_ps: int, end_ps: int, used: set[int], texts: set[int]) -> bytes:
    parts = bytearray()
    origin_ps = 1000 * next((value for number, value in fields(data, *place) if number == 3), 0)
    for number, value in fields(data, *place):
        if number != 4:
            parts += integer(number, value) if isinstance(value, int) else encode_bytes(number, data[slice(*value)])
            continue
        event = dict(fields(data, *value))
        if start_ps <= origin_ps + event.get(2, 0) < end_ps:
            parts += encode_bytes(4, data[slice(*value)])
            used.add(signed(event.get(1, 0)))
            texts |= set(_stats(data, value, 4))
    return bytes(parts)


def _stats(data: bytes, place: tuple[int, int], number: int) -> list[int]:
    return [key for each, value in fields(data, *place) if each == number for key in _stat(data, value)]


def _stat(data: bytes, place: tuple[int, int]) -> list[int]:
    return [signed(value) for number, value in fields(data, *place) if number in (1, 7)]


def _metadata(data: bytes, place: tuple[int, int], programs: set[str], buffers: bool) -> bytes:
    parts = bytearray()
    for number, value in fields(data, *place):
        if number != 4:
            parts += integer(number, value) if isinstance(value, int) else encode_bytes(number, data[slice(*value)])
            continue
        entry = dict(fields(data, *value))
        if _name(data, entry[2], 2) in programs:
            parts += encode_bytes(4, integer(1, entry.get(1, 0)) + encode_bytes(2, _program(data, entry[2], buffers)))
    return bytes(parts)


def _program(data: bytes, place: tuple[int, int], buffers: bool) -> bytes:
    """Returns a program's event metadata, without the assignment of buffers unless asked for."""
    parts = bytearray()
    for number, value in fields(data, *place):
        if isinstance(value, int):
            parts += integer(number, value)
            continue
        content = data[slice(*value)]
        if number == 5 and not buffers:
            stat = bytearray()
            for key, part in fields(data, *value):
                if isinstance(part, int):
                    stat += integer(key, part)
                elif key == 6:
                    module = [encode_bytes(1, data[slice(*each)]) for found, each in fields(data, *part) if found == 1]
                    stat += encode_bytes(key, b"".join(module))
                else:
                    stat += encode_bytes(key, data[slice(*part)])
            content = bytes(stat)
        parts += encode_bytes(number, content)
    return bytes(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start-ms", type=float, required=True)
    parser.add_argument("--end-ms", type=float, required=True)
    parser.add_argument("--programs", nargs="*", default=[])
    parser.add_argument("--threads", nargs="*", default=[])
    parser.add_argument("--buffers", action="store_true")
    given = parser.parse_args()
    window = (int(given.start_ms * 1000) * _MICRO, int(given.end_ms * 1000) * _MICRO)
    content = cut(given.trace.read_bytes(), *window, set(given.programs), set(given.threads), given.buffers)
    given.out.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
