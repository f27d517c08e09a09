"""Live arrays of devices that are out of memory, with the Python stacks of their creation.

JAX describes them as a profile of pprof. https://github.com/google/pprof/blob/main/proto/profile.proto
"""

import gzip
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stack_profile.traces.instructions import Frame
from stack_profile.traces.wire import Value, WireError, fields, varints

__all__ = ["LiveArrays", "LiveStack", "read_live_arrays"]


@dataclass(frozen=True)
class LiveStack:
    """Arrays of one device that one Python stack made.

    Attributes:
      size_bytes: size of the arrays.
      arrays: number of arrays.
      kind: "buffer", or "executable" for the code of compiled programs.
      device: name of the device, "" for programs.
      frames: the stack, innermost frame first.
    """

    size_bytes: int
    arrays: int
    kind: str
    device: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class LiveArrays:
    """All live arrays of one process."""

    stacks: tuple[LiveStack, ...]


def read_live_arrays(file: Path, damage: list[str]) -> LiveArrays | None:
    """Reads the live arrays of a process; None without an out-of-memory error.

    Args:
      file: file of the profile, which may be missing.
      damage: receives the reason why a file cannot be read.
    """
    try:
        return _Profile(gzip.decompress(file.read_bytes())).live_arrays()
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, WireError, LookupError, TypeError) as error:
        damage.append(f"{file.name}, the live arrays, cannot be read: {error!r}")
        return None


# Field numbers by message.
_SAMPLE, _LOCATION, _FUNCTION, _STRING = 2, 4, 5, 6
_SAMPLE_LOCATIONS, _SAMPLE_VALUES, _SAMPLE_LABELS = 1, 2, 3
_LABEL_KEY, _LABEL_TEXT = 1, 2
_LOCATION_ID, _LOCATION_LINES = 1, 4
_LINE_FUNCTION, _LINE_NUMBER = 1, 2
_FUNCTION_ID, _FUNCTION_NAME, _FUNCTION_FILE = 1, 2, 4


class _Profile:
    """The tables of a profile."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        found = list(fields(data))
        self._samples = [place for number, place in found if number == _SAMPLE]
        self._texts = [self._bytes(place).decode(errors="replace") for number, place in found if number == _STRING]
        functions = [self._message(place) for number, place in found if number == _FUNCTION]
        self._functions = {each[_FUNCTION_ID]: each for each in functions}
        locations = [self._message(place) for number, place in found if number == _LOCATION]
        self._frames = {each[_LOCATION_ID]: self._frame(each[_LOCATION_LINES]) for each in locations}

    def live_arrays(self) -> LiveArrays:
        return LiveArrays(tuple(map(self._stack, self._samples)))

    def _bytes(self, place: Value) -> bytes:
        assert isinstance(place, tuple), "a field of bytes"
        return self._data[slice(*place)]

    def _message(self, place: Value) -> Mapping[int, Value]:
        assert isinstance(place, tuple), "a field of a message"
        return dict(fields(self._data, *place))

    def _frame(self, line: Value) -> Frame:
        found = self._message(line)
        function = self._functions[found[_LINE_FUNCTION]]
        file, name = (self._texts[self._number(function.get(each))] for each in (_FUNCTION_FILE, _FUNCTION_NAME))
        return Frame(file, self._number(found.get(_LINE_NUMBER)), name)

    def _number(self, value: Value | None) -> int:
        return value if isinstance(value, int) else 0

    def _stack(self, place: Value) -> LiveStack:
        assert isinstance(place, tuple), "a field of a message"
        numbers: dict[int, list[int]] = {_SAMPLE_LOCATIONS: [], _SAMPLE_VALUES: []}
        labels: dict[str, str] = {}
        for number, value in fields(self._data, *place):
            if number in numbers:
                numbers[number] += varints(self._data, value)
            elif number == _SAMPLE_LABELS:
                label = self._message(value)
                key, text = (self._texts[self._number(label.get(each))] for each in (_LABEL_KEY, _LABEL_TEXT))
                labels[key] = text
        count, size_bytes = numbers[_SAMPLE_VALUES]
        frames = tuple(self._frames[location] for location in numbers[_SAMPLE_LOCATIONS])
        return LiveStack(size_bytes, count, labels.get("kind", ""), labels.get("device", ""), frames)
