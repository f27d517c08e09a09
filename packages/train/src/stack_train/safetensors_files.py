"""Reading and writing of safetensors files, one tensor at a time.

Files are read with the safetensors library. The library can write a file only with all of its tensors in memory, so
this module writes the format itself: the size of the header in bytes (uint64, little-endian), the header (JSON: name ->
dtype, shape, and the byte range [start, end) relative to the end of the header), and the tensors, row-major and without
gaps.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from stack_core.abi.errors import ConversionError

__all__ = ["StoredTensor", "TensorSpec", "plan_shards", "read_tensors", "write_shards"]

_STEM = "model"

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Of tensors that are written; codes are read by the modules that know their layouts.
_NAMES = {dtype: name for name, dtype in _DTYPES.items()} | {
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
}


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, whose values are not loaded.

    Attributes:
      path: path of the file.
      name: name of the tensor.
      dtype: name of the dtype in the file; `numpy_dtype` is None unless it is F32, F16 or BF16.
      shape: shape of the tensor.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy_dtype(self) -> np.dtype[Any] | None:
        return _DTYPES.get(self.dtype)

    def read(self) -> np.ndarray:
        """Reads the values. NumPy must have the dtype: F32, F16, BF16, or integers such as U8.

        The file is mapped into memory for this call only, because the pages read count as memory of this process until
        the file is closed.

        Raises:
          ConversionError: the file was deleted or truncated in the meantime.
        """
        with _opened(self.path) as file:
            return file.get_tensor(self.name)


def read_tensors(directory: Path, stem: str = _STEM) -> dict[str, StoredTensor]:
    """Finds the tensors of a checkpoint with one file or an index of several files; reads only the headers.

    Args:
      stem: file name without extension and shard number: "model" for "model-00001-of-00002.safetensors".

    Raises:
      ConversionError: the checkpoint or a file is missing, a file is damaged, or index and files disagree.
    """
    single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if not (directory / index).is_file():
        if not (directory / single).is_file():
            raise ConversionError(f"{directory} holds neither {single} nor {index}; other weight formats are not read.")
        return _tensors_of(directory / single)
    try:
        located = json.loads((directory / index).read_bytes())["weight_map"]
        files = sorted(set(located.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{directory / index} cannot be read: {type(error).__name__}: {error}.") from error
    by_file = {file: _tensors_of(directory / file) for file in files}
    absent = [f"{name} ({file})" for name, file in located.items() if name not in by_file[file]]
    # Also finds a tensor that two files contain.
    unlisted = [f"{name} ({file})" for file in files for name in by_file[file] if located.get(name) != file]
    if absent or unlisted:
        raise ConversionError(
            f"{directory / index} and its files disagree. Listed, but not there: {', '.join(absent) or 'none'}. "
            f"There, but not listed: {', '.join(unlisted) or 'none'}. Download the checkpoint again."
        )
    return {name: by_file[file][name] for name, file in located.items()}


def plan_shards(specs: Iterable[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Divides tensors into files of at most `max_shard_bytes`, in order; a larger tensor gets a file to itself."""
    shards: list[list[TensorSpec]] = [[]]
    size_bytes = 0
    for spec in specs:
        if shards[-1] and size_bytes + spec.size_bytes > max_shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(spec)
        size_bytes += spec.size_bytes
    return shards


def write_shards(
    directory: Path,
    shards: Sequence[Sequence[TensorSpec]],
    tensors: Iterable[tuple[str, np.ndarray]],
    stem: str = _STEM,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors to one file, or to several files and an index.

    Args:
      directory: existing directory of the files.
      shards: tensors of each file.
      tensors: names and values of all tensors, in the order of `shards`; consumed one by one.
      stem: as in `read_tensors`.
      metadata: additional metadata of each file.

    Raises:
      ValueError: a tensor differs from the planned one in name, dtype or shape.
    """
    incoming = iter(tensors)
    count = len(shards)
    names = (
        [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if count > 1
        else [f"{stem}.safetensors"]
    )
    for name, specs in zip(names, shards, strict=True):
        with (directory / name).open("wb") as file:
            file.write(_header(specs, metadata or {}))
            for spec in specs:
                tensor_name, tensor = next(incoming)
                if (tensor_name, tensor.dtype, tensor.shape) != (spec.name, spec.dtype, spec.shape):
                    raise ValueError(f"{tensor_name} {tensor.dtype}{tensor.shape} came where {spec} was planned.")
                # As bytes, because the buffer protocol does not support bfloat16.
                file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
            file.flush()
            # A full disk may show only here.
            os.fsync(file.fileno())
    if count > 1:
        located = {spec.name: name for name, specs in zip(names, shards, strict=True) for spec in specs}
        total_bytes = sum(spec.size_bytes for specs in shards for spec in specs)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": located}
        path = directory / f"{stem}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    # transformers refuses files without the entry "format".
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for spec in specs:
        end = start + spec.size_bytes
        header[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [start, end]}
        start = end
    content = json.dumps(header).encode()
    # Like the safetensors library, pads the header to align the tensors to 8 bytes.
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ConversionError(
            f"{path} is not a complete safetensors file: {type(error).__name__}: {error}. Download it again."
        ) from error


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
    return {name: StoredTensor(path, name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
