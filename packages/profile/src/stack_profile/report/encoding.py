"""Compact text form of columns and texts for an HTML page, which `web/src/data.ts` decodes.

Columns are little-endian and stored byte by byte: first the lowest byte of every value, then the second, and so on. The
high bytes of small numbers are then long runs of zeros, which deflate removes.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

__all__ = ["deflate", "pack", "pack_json"]

_LEVEL: Final = 6


def pack(columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns columns of equal length as {"length", "columns": [[name, dtype], ...], "data": base64}."""
    length = len(next(iter(columns.values()))) if columns else 0
    planes = [
        np.ascontiguousarray(column.astype(column.dtype.newbyteorder("<"), copy=False))
        .view(np.uint8)
        .reshape(length, column.dtype.itemsize)
        .T.tobytes()
        for column in columns.values()
    ]
    described = [[name, column.dtype.str.lstrip("<>|=")] for name, column in columns.items()]
    return {"length": length, "columns": described, "data": deflate(b"".join(planes))}


def pack_json(value: Any) -> str:
    """Returns JSON as compressed base64, in which no text can be mistaken for markup."""
    return deflate(json.dumps(value, separators=(",", ":")).encode())


def deflate(data: bytes) -> str:
    """Returns data as base64 of a zlib stream."""
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode()
