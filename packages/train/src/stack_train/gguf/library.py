"""The optional package `gguf`."""

from typing import Any

from stack_core.abi.errors import ConversionError
from stack_core.abi.installing import install_command

__all__ = ["library"]


def library() -> Any:
    """Imports the `gguf` package.

    Raises:
      ConversionError: the package is not installed.
    """
    try:
        import gguf  # optional dependency
    except ImportError as error:
        raise ConversionError(
            f"GGUF files are read and written by the gguf package: {error}. Install it: "
            f"{install_command('stack-train[gguf]')}"
        ) from error
    return gguf
