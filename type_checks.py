"""How tests check annotations: beartype, which `--jaxtyping-packages` names through this file."""

from collections.abc import Callable, Hashable
from typing import Any

import beartype

_CHECKS: dict[Hashable, Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Defers beartype to the first call, and gives equal signatures one check.

    jaxtyping hands over two functions without a body for each definition. Tests never call most definitions of a
    package, and every call of an outer function defines its inner ones anew.
    """
    check = None

    def checking(*arguments: Any, **named: Any) -> Any:
        nonlocal check
        check = check or _check(function)
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
