"""Compiled programs kept between processes, so that a run that starts again does not compile again."""

import hashlib
from pathlib import Path

from stack_core.user_cache import user_cache_dir

__all__ = ["keep_compiled"]

_MOST_BYTES = 2 << 30


def keep_compiled() -> None:
    """Lets JAX keep under `$XDG_CACHE_HOME/stack/compiled` what took it a second or more to compile, 2 GiB of it.

    It sets options of the whole process, so commands call it and libraries do not. A cache that was chosen by
    `JAX_COMPILATION_CACHE_DIR` is left as it is, `JAX_ENABLE_COMPILATION_CACHE=false` goes on meaning none, and where
    nothing can be written nothing is kept.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        folder = user_cache_dir() / "compiled" / _machine_digest()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return
    jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _machine_digest() -> str:
    """Of what the CPU can do: a home directory may be shared, and JAX's key for CPU programs does not hold it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = list[str]()
    facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
