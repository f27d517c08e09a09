"""The activations of `gated_linear_unit` for vectors of float32, with their slopes."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from stack_kernels.llvm.code import Code
from stack_kernels.llvm.vectors import constant, exp, tanh

__all__ = ["ACTIVATIONS"]

_CUBIC, _GELU_SCALE = 0.044715, math.sqrt(2 / math.pi)


def _silu(code: Code, x: Any) -> tuple[Any, Any]:
    """f = x s and f' = s + f (1 - s), s the sigmoid."""
    build, one = code.build, constant(1, x.type.count)
    grown = build.fadd(exp(code, build.fneg(x)), one)
    value, sigmoid = build.fdiv(x, grown), build.fdiv(one, grown)
    return value, code.fma(value, build.fsub(one, sigmoid), sigmoid)


def _gelu_tanh(code: Code, x: Any) -> tuple[Any, Any]:
    """f = x (1 + t) / 2 and f' = (1 + t) / 2 + x (1 - t^2) u' / 2, of u = k (x + c x^3) and t = tanh(u)."""
    build, lanes = code.build, x.type.count
    one, square = constant(1, lanes), build.fmul(x, x)
    scaled = build.fmul(x, constant(_GELU_SCALE, lanes))
    t = tanh(code, build.fmul(scaled, code.fma(square, constant(_CUBIC, lanes), one)))
    half = build.fmul(x, constant(0.5, lanes))
    inner = build.fmul(constant(_GELU_SCALE, lanes), code.fma(square, constant(3 * _CUBIC, lanes), one))
    bent = build.fmul(half, code.fma(build.fneg(t), t, one))
    rising = code.fma(t, constant(0.5, lanes), constant(0.5, lanes))
    return code.fma(half, t, half), code.fma(bent, inner, rising)


def _relu(code: Code, x: Any) -> tuple[Any, Any]:
    build, zero = code.build, constant(0, x.type.count)
    value = build.select(build.fcmp_ordered("<", x, zero), zero, x)
    return value, build.select(build.fcmp_ordered(">", x, zero), constant(1, x.type.count), zero)


def _relu_squared(code: Code, x: Any) -> tuple[Any, Any]:
    positive, _ = _relu(code, x)
    return code.build.fmul(positive, positive), code.build.fadd(positive, positive)


ACTIVATIONS: Mapping[str, Callable[[Code, Any], tuple[Any, Any]]] = {
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu_squared": _relu_squared,
    "silu": _silu,
}
"""Those that there are, by name: f(x), which is NaN where x is, and f'(x)."""
