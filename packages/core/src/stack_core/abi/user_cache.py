"""The user's cache directory, for results that are expensive to compute."""

import os
from pathlib import Path

__all__ = ["user_cache_dir"]


def user_cache_dir() -> Path:
    """Returns `$XDG_CACHE_HOME/stack`, or `~/.cache/stack` without an absolute path there. It may not exist yet.

    Raises:
      RuntimeError: the user has no home directory.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "stack"
