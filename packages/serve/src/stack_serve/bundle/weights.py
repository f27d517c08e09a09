"""Arrays in safetensors files, aligned to 64 bytes, so that XLA's CPU client uses them without a copy.

The format wants no gaps between tensors, so bytes between them are tensors, too: `__pad.N`, which other readers see.
Source: the safetensors format, https://github.com/huggingface/safetensors.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from stack_core.abi.errors import BundleError
from stack_serve.bundle.manifest import DTYPES, unique_keys

__all__ = ["read", "write"]

_ALIGNMENT_BYTES = 64
_PAD = "__pad."
_OF_CODE = {code: dtype for dtype, code in DTYPES.items()}


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays by name.

    Raises:
      BundleError: the format does not support a dtype.
    """
    header: dict[str, object] = {}
    parts: list[np.ndarray | bytes] = []
    place = 0
    for number, (name, array) in enumerate(arrays.items()):
        if array.dtype.name not in DTYPES:
            raise BundleError(f"{name} is {array.dtype.name}, which safetensors has no name for. Use {_known()}.")
        if gap := -place % _ALIGNMENT_BYTES:
            header[f"{_PAD}{number}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [place, place + gap]}
            parts.append(bytes(gap))
            place += gap
        offsets = [place, place + array.nbytes]
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        parts.append(array)
        place += array.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    # Offsets count from the end of the header, so the header ends at a multiple, too. The format permits spaces here.
    head += b" " * (-(8 + len(head)) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for part in parts:
            file.write(part if isinstance(part, bytes) else _bytes_of(part))


def read(content: memoryview | bytes) -> dict[str, np.ndarray]:
    """Returns read-only views of the arrays in a file with a verified digest.

    Raises:
      BundleError: the file is not a safetensors file, or has an unknown dtype.
    """
    try:
        return dict(_entries(memoryview(content)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise BundleError(
            f"A file of weights or examples is not a safetensors file: {error!r}. Export again."
        ) from error


def _entries(content: memoryview) -> Iterator[tuple[str, np.ndarray]]:
    (head_bytes,) = struct.unpack_from("<Q", content)
    start = 8 + head_bytes
    for name, entry in json.loads(bytes(content[8:start]), object_pairs_hook=unique_keys).items():
        if name == "__metadata__" or name.startswith(_PAD):
            continue
        begin, end = entry["data_offsets"]
        dtype = jnp.dtype(_OF_CODE[entry["dtype"]])
        yield name, np.frombuffer(content[start + begin : start + end], dtype).reshape(entry["shape"])


def _bytes_of(array: np.ndarray) -> memoryview:
    # As bytes, because Python's buffer protocol lacks bfloat16 and fp8.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _known() -> str:
    return ", ".join(DTYPES)
