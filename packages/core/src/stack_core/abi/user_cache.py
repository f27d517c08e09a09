"""Where results that are expensive to compute are kept between processes."""

import os
from pathlib import Path

__all__ = ["user_cache_dir"]


def user_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/stack`, or `~/.cache/stack` where that is not set to an absolute path; it may not exist yet.

    Raises:
      RuntimeError: the user has no home directory.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "stack"
