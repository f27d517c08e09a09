"""Object code of kernels, cached in the directory of JAX's compilation cache."""

import contextlib
import hashlib
import os
from pathlib import Path

import jax

__all__ = ["load", "store"]

_DIGEST_BYTES = 32


def load(key: str) -> bytes | None:
    """Returns the object code that was stored under `key`; None if JAX caches no programs or the file is damaged."""
    if (path := _path(key)) is None:
        return None
    try:
        content = path.read_bytes()
    except OSError:  # not stored, or not readable
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def store(key: str, code: bytes) -> None:
    """Stores object code if JAX caches programs in a local directory that can be written."""
    if (path := _path(key)) is None:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(hashlib.sha256(code).digest() + code)
        # Atomic, so that other processes read a complete file.
        partial.rename(path)


def _path(key: str) -> Path | None:
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or "://" in folder or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    return Path(folder) / "stack_kernels" / key
