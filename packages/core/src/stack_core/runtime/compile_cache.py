"""Persistent cache of compiled programs, shared by the processes of one user."""

import hashlib
from pathlib import Path

from stack_core.abi.user_cache import user_cache_dir

__all__ = ["keep_compiled"]

_MAX_BYTES = 2 << 30
_MIN_COMPILE_S = 0.2  # JAX's default of 1 s leaves out most programs of a small model


def keep_compiled() -> None:
    """Caches programs that take 0.2 s or more to compile, up to 2 GiB, in `$XDG_CACHE_HOME/stack/compiled`.

    Sets process-wide options, so only commands call it. Changes nothing if `JAX_COMPILATION_CACHE_DIR` names
    another cache, `JAX_ENABLE_COMPILATION_CACHE` is false, or the directory cannot be written.

    Source lines are part of a program's key. A program compiled before an edit that only moved lines would otherwise
    be reused with the old line numbers, which profiles then show.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        folder = user_cache_dir() / "compiled" / _machine_digest()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_S)
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _machine_digest() -> str:
    """Hashes the CPU's model and features.

    Machines may share a home directory, and JAX's cache key for CPU programs includes neither.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = list[str]()
    facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
