"""Functions named on a command line as FILE.py:fn, with example arguments from the same file."""

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from stack_core.abi.errors import ArgumentError, StackError, UnknownName, nearest

__all__ = ["named_function", "tracing"]

_ARGUMENTS: Final = "example_args"


def named_function(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Loads the function named by "FILE.py:fn", and the arguments returned by `example_args()` of the same file.

    The file is executed like a script, with its folder first in `sys.path`. A function without parameters needs no
    `example_args`.

    Raises:
      UnknownName: the file or the function does not exist, or the function lacks arguments.
      ArgumentError: the file raises an error.
    """
    path, separator, name = target.rpartition(":")
    if not separator or not Path(path).is_file():
        raise UnknownName(f"{target!r} does not name a function of a file; write FILE.py:fn, with an existing file.")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise UnknownName(f"{path!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except StackError:
        raise
    except Exception as error:  # A user's file may raise anything.
        raise ArgumentError(f"{path!r} cannot be run: {_format_error(error, path)}") from error
    fn = getattr(module, name, None)
    if not callable(fn):
        functions = [each for each, value in vars(module).items() if callable(value)]
        raise UnknownName(f"{path!r} has no function {name!r}.{nearest(name, functions)}")
    return fn, _arguments(module, fn, target)


@contextlib.contextmanager
def tracing(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[None]:
    """Converts errors raised while the block traces the function, for instance by a wrong argument, to one line.

    Raises:
      ArgumentError: the function raised anything but a `StackError`.
    """
    try:
        yield
    except StackError:
        raise
    except Exception as error:  # A user's function may raise anything.
        file = getattr(getattr(inspect.unwrap(fn), "__code__", None), "co_filename", None)
        given = ", ".join(map(_type_of, arguments)) or "no arguments"
        raise ArgumentError(
            f"The function cannot be traced for ({given}): {_format_error(error, file)} "
            f"Check its arguments; on a command line {_ARGUMENTS}() returns them."
        ) from error


def _format_error(error: Exception, file: str | None) -> str:
    """Returns the type of an error, its last line in a file, and the first line of its message."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f" at {frame.filename}:{frame.lineno}" for frame in frames if frame.filename == file]
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}{(lines or [''])[-1]}: {reason[:300]}"


def _type_of(argument: Any) -> str:
    """Returns the dtype and shape of an array, such as "float32[3, 8]", or the type's name for other values."""
    if hasattr(argument, "shape") and hasattr(argument, "dtype"):
        return f"{argument.dtype}{list(argument.shape)}"
    return type(argument).__name__


def _arguments(module: ModuleType, fn: Callable[..., Any], target: str) -> tuple[Any, ...]:
    if hasattr(module, _ARGUMENTS):
        arguments = getattr(module, _ARGUMENTS)()
        return arguments if isinstance(arguments, tuple) else (arguments,)
    required = [
        parameter.name
        for parameter in inspect.signature(fn).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        raise UnknownName(
            f"{target} takes {', '.join(required)}, but its file has no {_ARGUMENTS}(). Define one that returns the "
            "tuple of arguments; an array may be a jax.ShapeDtypeStruct(shape, dtype)."
        )
    return ()
