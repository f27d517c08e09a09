"""Signature checks for the functions of implementations."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from stack_core.abi.errors import ArgumentError, PluginError, nearest
from stack_core.abi.ops import OpImplementation
from stack_core.ops.dispatch.op import function_of

__all__ = ["check_parameters", "check_signature", "check_takes", "parameters_of"]

_OF_CALLERS = ("implementation", "axes")


@functools.cache
def parameters_of(op: str) -> tuple[str, ...]:
    """Returns the parameters of an op that are passed to its implementations.

    Raises:
      UnknownName: unknown op.
    """
    return tuple(name for name in inspect.signature(function_of(op)).parameters if name not in _OF_CALLERS)


@functools.lru_cache(maxsize=1024)
def check_signature(found: OpImplementation) -> None:
    """Checks that the functions of a registered implementation accept the arguments they are called with.

    Raises:
      PluginError: wrong parameters.
    """
    subject, config = f"ops '{found.op}/{found.name}'", () if found.default is None else ("config",)
    takes = ("arrays", "options", "outputs", "residuals", "cotangents")
    try:
        check_parameters(f"{subject}: forward", found.forward, (*parameters_of(found.op), "requested", *config))
        if found.backward is not None:
            check_takes(f"{subject}: backward", found.backward, takes, ("requested", *config))
        check_takes(f"{subject}: supports", found.supports, ("call", "chip", "config"))
        for name in ("default", "space"):
            if getattr(found, name) is not None:
                check_takes(f"{subject}: {name}", getattr(found, name), ("call", "chip"))
    except ArgumentError as error:
        raise PluginError(str(error)) from error


def check_parameters(subject: str, function: Callable[..., Any], expected: tuple[str, ...]) -> None:
    """Raises ArgumentError unless the function has exactly these parameters, all accepted by name."""
    found = inspect.signature(function).parameters.values()
    named = [each.name for each in found if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in found)
    missing = [name for name in expected if name not in named and not takes_all]
    problems = [f"it lacks {', '.join(missing)}"] if missing else []
    problems += [
        f"nothing is passed as {each}{nearest(each, missing or expected)}" for each in named if each not in expected
    ]
    problems += [f"{each.name} must not be positional-only" for each in found if each.kind is each.POSITIONAL_ONLY]
    if problems:
        name = getattr(function, "__name__", function)
        raise ArgumentError(
            f"{subject}: the parameters of {name!r} do not fit: {'; '.join(problems)}. "
            f"Expected, all passed by name: {', '.join(expected)}."
        )


def check_takes(subject: str, value: Any, takes: tuple[str, ...], keywords: tuple[str, ...] = ()) -> None:
    """Raises ArgumentError unless the value can be called with these arguments."""
    try:
        inspect.signature(value).bind(*takes, **dict.fromkeys(keywords))
    except TypeError as error:
        listing = ", ".join((*takes, *keywords))
        raise ArgumentError(f"{subject} is {value!r}; expected a function of ({listing}): {error}.") from error
