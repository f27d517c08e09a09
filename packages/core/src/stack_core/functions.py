"""Import of functions that a config refers to by name."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stack_core.abi.errors import ConfigError

__all__ = ["import_function"]


def import_function(address: Any, *, label: str) -> Callable[..., Any]:
    """Imports the function or class at "module:name".

    Args:
      address: "module:name".
      label: config key or kind of the function, for messages.

    Raises:
      ConfigError: it cannot be imported or is not callable.
    """
    module, separator, name = str(address).partition(":")
    if not separator:
        raise ConfigError(f"{label} is {address!r}; expected 'module:function'.")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        remedy, file = "Correct it, or PYTHONPATH.", Path(*module.split(".")).with_suffix(".py")
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0] and file.is_file():
            remedy = f"{file} is in the current directory: set PYTHONPATH=."
        raise ConfigError(f"{label} {address!r} cannot be imported: {error}. {remedy}") from error
    if not callable(found):
        raise ConfigError(f"{label} {address!r} is a {type(found).__name__}; a function was expected.")
    return found
