"""Import of the packages of other people's environments, which are extras of stack-rl."""

import importlib
from typing import Any

from stack_core.abi.errors import ConfigError
from stack_core.abi.installing import install_command

__all__ = ["optional_module"]


def optional_module(module: str, *, environment: str, extra: str) -> Any:
    """Imports a module of an optional package.

    Args:
      module: name of the module.
      environment: name of the environment in the registry, for messages.
      extra: extra of stack-rl that installs the package.

    Raises:
      ConfigError: the package is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        command = install_command(f"stack-rl[{extra}]")
        raise ConfigError(
            f"The environment {environment!r} needs the package of {module!r}, which cannot be imported ({error}). "
            f"Install it: {command}"
        ) from error
