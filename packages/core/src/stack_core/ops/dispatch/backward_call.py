"""Backward passes written as functions of one value."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stack_core.abi.errors import ArgumentError

__all__ = ["BackwardCall", "as_backward"]


@dataclass(frozen=True, kw_only=True)
class BackwardCall:
    """Arguments of a backward pass.

    Attributes:
      arrays: array arguments of the forward call by parameter name; None for omitted ones.
      options: its other arguments by parameter name.
      outputs: its result.
      residuals: its residuals by name.
      cotangents: cotangents of the result, in its structure.
      requested: names of the parameters whose gradients are needed.
    """

    arrays: Mapping[str, Any]
    options: Mapping[str, Any]
    outputs: Any
    residuals: Mapping[str, Any]
    cotangents: Any
    requested: frozenset[str]


def as_backward(function: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
    """Converts a function of a `BackwardCall` to the backward pass of an `OpImplementation`.

    Args:
      function: takes the call and, by keyword, `config` if the implementation has a `default`. Returns gradients by
        parameter name. Gradients that were not requested are dropped.

    Raises:
      ArgumentError: the function does not take the call as its only positional parameter.
    """
    parameters = inspect.signature(function).parameters.values()
    settings = [each for each in parameters if each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    if len(parameters) != len(settings) + 1:
        raise ArgumentError(
            f"as_backward: {function!r} takes {inspect.signature(function)}; expected a function of (call), or of "
            "(call, *, config) if the implementation has configs."
        )

    def backward(
        arrays: Mapping[str, Any],
        options: Mapping[str, Any],
        outputs: Any,
        residuals: Mapping[str, Any],
        cotangents: Any,
        *,
        requested: frozenset[str],
        **config: Any,
    ) -> Mapping[str, Any]:
        found = function(
            BackwardCall(
                arrays=arrays,
                options=options,
                outputs=outputs,
                residuals=residuals,
                cotangents=cotangents,
                requested=requested,
            ),
            **config,
        )
        return {name: gradient for name, gradient in found.items() if name in requested}

    # The signature names the function's own keywords, so that a missing or an unknown `config` is found when the
    # implementation is registered and not in the first gradient.
    *own, _ = inspect.signature(backward).parameters.values()
    backward.__signature__ = inspect.Signature([*own, *settings])  # pyrefly: ignore
    return backward
