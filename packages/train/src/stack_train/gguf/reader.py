"""Reader of GGUF files: their settings, and their tensors as views of the mapped file.

The `gguf` package creates several NumPy arrays for each token of a vocabulary, which takes seconds for 50,000 tokens.

Source: the specification of the format in ggml (docs/gguf.md), versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.errors import ConversionError

__all__ = ["MAGIC", "GgufFile", "StoredTensor", "open_file", "read_file"]

MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by the number of a value's type."""
_DEFAULT_ALIGNMENT = 32
_MOST_AXES = 4


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
      shape: shape, with the axis that varies fastest last.
      tensor_type: its `gguf.GGMLQuantizationType`.
      data: uint8[..., bytes], rows of blocks.
    """

    shape: tuple[int, ...]
    tensor_type: Any
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """The contents of a file.

    Attributes:
      settings: numbers, strings, booleans and lists by key.
      tensors: tensors by name.
      mapping: mapped file that contains the tensors.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    mapping: mmap.mmap

    def release_pages(self) -> None:
        """Removes the file's pages from the memory of this process; the next access to a tensor maps them again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self.mapping.madvise(mmap.MADV_DONTNEED)


class _Cursor:
    """Cursor over the bytes of a file. Each method reads the next value."""

    def __init__(self, contents: np.ndarray) -> None:
        self._contents = memoryview(contents.data)
        self.place = 0

    def bytes(self, size: int) -> bytes:
        start, self.place = self.place, self.place + size
        self._check_end(self.place)
        return bytes(self._contents[start : self.place])

    def numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{letter}", self.bytes(struct.calcsize(letter) * count))

    def number(self, letter: str) -> Any:
        return self.numbers(letter, 1)[0]

    def text(self) -> str:
        # Tokens of byte-level vocabularies are valid UTF-8; others may end within a character.
        return self.bytes(self.number("Q")).decode("utf-8", "replace")

    def texts(self, count: int) -> list[str]:
        """Reads strings in one loop, because a vocabulary has 100,000 of them."""
        contents, place, read_size = self._contents, self.place, struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = place + 8
            self._check_end(start)
            place = start + read_size(contents, place)[0]
            self._check_end(place)
            texts.append(str(contents[start:place], "utf-8", "replace"))
        self.place = place
        return texts

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_letter(kind))
        inner, count = self.number("I"), self.number("Q")
        if inner == _STRING:
            return self.texts(count)
        if inner == _ARRAY:
            return [self.value(inner) for _ in range(count)]
        return list(self.numbers(_letter(inner), count))

    def _check_end(self, place: int) -> None:
        if place > len(self._contents):
            raise ValueError(f"the file has {len(self._contents)} bytes, and a value ends at {place}")


def open_file(gguf: Any, path: Path) -> GgufFile:
    """Reads a file as `read_file` does.

    Raises:
      ConversionError: the file is missing, incomplete, or not a GGUF file.
    """
    if not path.is_file():
        files = sorted(each.name for each in path.glob("*.gguf"))  # empty unless it is a directory
        example = f"gguf:{path / files[0]}" if files else "gguf:models/model.gguf"
        problem = "is a directory" if path.is_dir() else "does not exist"
        raise ConversionError(f"gguf:{path}: the file {problem}. Give the path of a file, such as {example}.")
    try:
        return read_file(gguf, path)
    except (OSError, ValueError) as error:
        raise ConversionError(
            f"{path} is not a complete GGUF file: {type(error).__name__}: {error}. Give a complete file."
        ) from error


def read_file(gguf: Any, path: Path) -> GgufFile:
    """Reads the settings of a file and maps its tensors.

    Args:
      gguf: the module of the `gguf` package, which knows the sizes of the types.

    Raises:
      ValueError: the file is not a GGUF file, is cut off, or has an unknown version or type.
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    contents = np.frombuffer(mapping, np.uint8)
    cursor = _Cursor(contents)
    if cursor.bytes(len(MAGIC)) != MAGIC:
        raise ValueError("GGUF magic invalid")
    if (version := cursor.number("I")) not in (2, 3):
        raise ValueError(f"version {version}; 2 and 3 are read, little-endian")
    tensor_count, setting_count = cursor.numbers("Q", 2)
    settings = {}
    for _ in range(setting_count):
        key = cursor.text()
        settings[key] = cursor.value(cursor.number("I"))
    infos = [_read_info(gguf, cursor) for _ in range(tensor_count)]
    alignment = settings.get("general.alignment", _DEFAULT_ALIGNMENT)
    start = -(-cursor.place // alignment) * alignment
    tensors = {info[0]: _map_tensor(gguf, contents, start, *info) for info in infos}
    return GgufFile(settings, tensors, mapping)


def _letter(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"a setting has type {kind}, which GGUF does not define")
    return _NUMBERS[kind]


def _read_info(gguf: Any, cursor: _Cursor) -> tuple[str, tuple[int, ...], Any, int]:
    """Reads the name, shape, type and offset of a tensor."""
    name, axes = cursor.text(), cursor.number("I")
    if axes > _MOST_AXES:
        raise ValueError(f"{name} has {axes} axes; GGUF has at most {_MOST_AXES}")
    shape = tuple(reversed(cursor.numbers("Q", axes)))
    return name, shape, gguf.GGMLQuantizationType(cursor.number("I")), cursor.number("Q")


def _map_tensor(
    gguf: Any, contents: np.ndarray, start: int, name: str, shape: tuple[int, ...], type_: Any, offset: int
) -> StoredTensor:
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    *outer, row = shape or (1,)
    if row % block:
        raise ValueError(f"rows of {name} have {row} entries, which blocks of {block} do not divide")
    stored_shape = (*outer, row // block * block_bytes)
    first, size = start + offset, int(np.prod(stored_shape, dtype=object))
    if first + size > len(contents):
        raise ValueError(f"the file has {len(contents)} bytes, and {name} ends at {first + size}")
    return StoredTensor(shape, type_, contents[first : first + size].reshape(stored_shape))
