"""Protocol of XLA's foreign function interface for handlers, and checks of compiled handlers."""

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

from jax import ffi

from stack_core.abi.errors import HardwareError

__all__ = ["VERSION", "ask_version", "check_handler", "interface_refusal"]

VERSION = (0, 3)
"""Version that `xla_call.ll` is written for and declares; XLA supports a version for at least a year."""

_METADATA, _UNKNOWN = 1, 99  # types of extensions
_HEADER = "xla/ffi/api/c_api.h"


@functools.cache
def interface_refusal() -> str:
    """Returns why this jaxlib cannot call handlers written for `VERSION`.

    "" if it can, or if its version is unknown.
    """
    header = Path(ffi.include_dir()) / _HEADER
    if not header.exists():
        return ""
    numbers = re.findall(r"^#define XLA_FFI_API_M(?:AJOR|INOR) (\d+)$", header.read_text(), re.MULTILINE)
    major, minor = map(int, numbers)
    if major == VERSION[0] and minor >= VERSION[1]:
        return ""
    return (
        f"it is written for XLA's foreign function interface {VERSION[0]}.{VERSION[1]}, and jaxlib has {major}.{minor}"
    )


class _Extension(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("version_size", ctypes.c_size_t),
        ("version_extensions", ctypes.c_void_p),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("traits", ctypes.c_uint32),
        ("state_type", ctypes.c_int64),
    ]


class _Frame(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("rest", ctypes.c_int64 * 16)]


def ask_version(address: int) -> tuple[int, int]:
    """Returns the version that a handler declares.

    The query is an extension of the call frame, as in XLA, placed after an extension of an unknown type.

    Raises:
      HardwareError: the handler wrote to the unknown extension, or wrote anything but its version.
    """
    metadata, untouched = _Metadata(), (ctypes.c_int64 * 8)()
    question = _Extension(32, _METADATA, None, ctypes.addressof(metadata))
    other = _Extension(32, _UNKNOWN, ctypes.addressof(question), ctypes.addressof(untouched))
    frame = _Frame(ctypes.sizeof(_Frame), ctypes.addressof(other))
    handler: Any = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
    error = handler(ctypes.addressof(frame))
    others = (metadata.struct_size, metadata.version_size, metadata.version_extensions or 0, metadata.traits)
    if error is not None or any(untouched) or any(others):
        raise HardwareError(
            "A compiled kernel answers XLA's question for its version in another way than it is written to. "
            "STACK_CPU_KERNELS=xla does without machine code."
        )
    return metadata.major, metadata.minor


def check_handler(address: int) -> None:
    """Raises HardwareError unless a compiled handler declares `VERSION` and follows the protocol of the query."""
    declared = ask_version(address)
    if declared != VERSION:
        raise HardwareError(
            f"A compiled kernel declares version {declared} of XLA's foreign function interface; expected {VERSION}. "
            "STACK_CPU_KERNELS=xla does without machine code."
        )
