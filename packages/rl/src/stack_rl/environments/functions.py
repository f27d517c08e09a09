"""Import of user functions that a config refers to by name."""

import importlib
from collections.abc import Callable
from typing import Any

from stack_core.abi.errors import ConfigError

__all__ = ["imported"]


def imported(address: Any, *, label: str) -> Callable[..., Any]:
    """Imports the function at "module:function".

    Args:
      address: "module:function".
      label: kind of the function, for messages.

    Raises:
      ConfigError: it cannot be imported or is not callable.
    """
    module, separator, name = str(address).partition(":")
    try:
        found = getattr(importlib.import_module(module), name) if separator else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{label} {address!r} cannot be imported: {error}. Correct it, or PYTHONPATH.") from error
    if not callable(found):
        raise ConfigError(f"{label} {address!r} is not a function; write 'module:function'.")
    return found
