"""Direct calls of an implementation's functions, without core's dispatch and JAX's derivatives.

Pallas' TPU interpreter fills unwritten memory with NaN. It runs ordered callbacks, which neither `jax.custom_vjp` nor
`jax.custom_batching` supports, so kernels are called directly in it.
"""

import dataclasses
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips.context import target_chip
from stack_core.ops.dispatch.choosing import answer
from stack_core.ops.dispatch.dispatch import recording
from stack_core.ops.dispatch.request import Request

__all__ = ["first_call", "isolated_value_and_gradients"]


class _Called(Exception):
    def __init__(self, request: Request, operands: Sequence[Any]) -> None:
        super().__init__()
        self.request, self.operands = request, operands


def _called(function: Callable[..., Any], *arrays: Any) -> _Called:
    def stop(request: Request, operands: Sequence[Any]) -> Any:
        raise _Called(request, operands)

    try:
        with recording(stop):
            function(*arrays)
    except _Called as called:
        return called
    raise AssertionError("the function calls no op")


def first_call(function: Callable[..., Any], *arrays: Any) -> OpCall:
    """Returns the first call of an op in `function(*arrays)`, as choosers see it, without running anything.

    Args:
      arrays: pytrees of arrays or of `jax.ShapeDtypeStruct`.
    """
    found = []

    def traced(*arrays: Any) -> None:
        called = _called(function, *arrays)
        found.append(called.request.call(called.operands))

    jax.eval_shape(traced, *arrays)
    return found[0]


def isolated_value_and_gradients(
    function: Callable[..., Any],
    arrays: Mapping[str, Any],
    implementation: OpImplementation,
    cotangent: Callable[[Any], Any],
) -> tuple[Any, Mapping[str, Any] | None]:
    """Computes the result, and the gradients by parameter name, of the first call of an op in `function(arrays)`.

    Args:
      cotangent: function from the result to its cotangent.

    Returns:
      The result and the gradients. The gradients are None if the implementation does not support the backward pass of
        the call after its own forward pass.

    Raises:
      unittest.SkipTest: the implementation rejects the forward pass; the message is its reason.
    """
    called = _called(function, arrays)
    request, call, operands = (
        called.request,
        called.request.call(called.operands),
        called.request.arrays(called.operands),
    )
    if (refused := answer(implementation, call)) is not True:
        raise unittest.SkipTest(str(refused))
    keywords: dict[str, Any] = {}
    if implementation.default is not None:
        keywords["config"] = implementation.default(call, target_chip())
    requested = frozenset(implementation.residuals)
    outputs, residuals = jax.jit(
        lambda operands: implementation.forward(**operands, **request.options, requested=requested, **keywords)
    )(operands)
    behind = dataclasses.replace(
        call, direction="backward", forward=implementation.name, residuals=implementation.residuals
    )
    if implementation.backward is None or answer(implementation, behind) is not True:
        return outputs, None
    backward, moving = implementation.backward, frozenset(name for name, x in operands.items() if x is not None)

    def pull_back(operands: Any, *values: Any) -> Any:
        return backward(operands, request.options, *values, requested=moving, **keywords)

    gradients = jax.jit(pull_back)(operands, outputs, residuals, cotangent(outputs))
    return outputs, gradients
