"""How tests check annotations: beartype, which `--jaxtyping-packages` names through this file."""

import inspect
import sys
from collections.abc import Callable, Hashable
from typing import Any

import beartype

# Checking all of the 138,000 calls in the tests of the Llama took a fifth of their time.
CHECKED_CALLS = 20

_CHECKS: dict[Hashable, Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Defers beartype to the first call, gives equal signatures one check, and ends after some calls of a definition.

    jaxtyping hands over two functions without a body for each definition. Tests never call most definitions of a
    package, and every call of an outer function defines its inner ones anew: these are checked in every call.
    """
    check, calls = None, 0

    def checking(*arguments: Any, **named: Any) -> Any:
        nonlocal check, calls
        check, calls = check or _check(function), calls + 1
        if calls == CHECKED_CALLS:
            _spare(function)
        return check(*arguments, **named)

    return checking


def _check(function: Callable[..., Any]) -> Callable[..., Any]:
    defaults = (len(function.__defaults__ or ()), tuple(function.__kwdefaults__ or ()))
    key = (function.__module__, function.__code__, defaults, tuple(function.__annotations__.items()))
    try:
        if key not in _CHECKS:
            _CHECKS[key] = beartype.beartype(function)
    except TypeError:  # an annotation has no hash
        return beartype.beartype(function)
    return _CHECKS[key]


def _spare(function: Callable[..., Any]) -> None:
    """Has jaxtyping call the definition that has this signature without further checks."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = inspect.getattr_static(found, name, None)
    found = getattr(found, "__func__", found)  # of a static or class method
    # Of the wrapper, `typing.get_type_hints` would then find no annotations.
    if inspect.isfunction(inner := getattr(found, "__wrapped__", None)):
        inner.__no_type_check__ = True
