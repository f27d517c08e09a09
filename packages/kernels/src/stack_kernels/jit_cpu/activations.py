"""The activations of `gated_linear_unit` for vectors of float32, with their derivatives."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from stack_kernels.jit_cpu.builder import Builder
from stack_kernels.jit_cpu.vectors import constant, exp, tanh

__all__ = ["ACTIVATIONS"]

_MIN_EXP_INPUT = -87.3
_CUBIC, _GELU_SCALE = 0.044715, math.sqrt(2 / math.pi)


def _silu(builder: Builder, x: Any) -> tuple[Any, Any]:
    """Computes f = x s and f' = s + f (1 - s), with s the sigmoid."""
    build, one = builder.build, constant(1, x.type.count)
    sigmoid = build.fdiv(one, build.fadd(exp(builder, build.fneg(x)), one))
    # The sigmoid becomes 0 below the range of `exp`, where it is less than any normal number; 0 times -inf is NaN, as
    # in the reference.
    sigmoid = build.select(
        build.fcmp_ordered("<", x, constant(_MIN_EXP_INPUT, x.type.count)), constant(0, x.type.count), sigmoid
    )
    value = build.fmul(x, sigmoid)
    return value, builder.fma(value, build.fsub(one, sigmoid), sigmoid)


def _gelu_tanh(builder: Builder, x: Any) -> tuple[Any, Any]:
    """Computes f = x (1 + t) / 2 and f' = (1 + t) / 2 + x (1 - t^2) u' / 2, with u = k (x + c x^3) and t = tanh(u)."""
    build, lanes = builder.build, x.type.count
    one, square = constant(1, lanes), build.fmul(x, x)
    scaled = build.fmul(x, constant(_GELU_SCALE, lanes))
    t = tanh(builder, build.fmul(scaled, builder.fma(square, constant(_CUBIC, lanes), one)))
    half = build.fmul(x, constant(0.5, lanes))
    inner = build.fmul(constant(_GELU_SCALE, lanes), builder.fma(square, constant(3 * _CUBIC, lanes), one))
    bent = build.fmul(half, builder.fma(build.fneg(t), t, one))
    rising = builder.fma(t, constant(0.5, lanes), constant(0.5, lanes))
    return builder.fma(half, t, half), builder.fma(bent, inner, rising)


def _relu(builder: Builder, x: Any) -> tuple[Any, Any]:
    build, zero = builder.build, constant(0, x.type.count)
    value = build.select(build.fcmp_ordered("<", x, zero), zero, x)
    return value, build.select(build.fcmp_ordered(">", x, zero), constant(1, x.type.count), zero)


def _relu_squared(builder: Builder, x: Any) -> tuple[Any, Any]:
    positive, _ = _relu(builder, x)
    return builder.build.fmul(positive, positive), builder.build.fadd(positive, positive)


ACTIVATIONS: Mapping[str, Callable[[Builder, Any], tuple[Any, Any]]] = {
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu_squared": _relu_squared,
    "silu": _silu,
}
"""The supported activations by name: f(x), which is NaN if x is, and f'(x)."""
