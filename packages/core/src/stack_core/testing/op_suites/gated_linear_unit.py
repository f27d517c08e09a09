"""The contract suite of `gated_linear_unit`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.testing._cases import OpCase, OpSuite, Quantized, dense

__all__ = ["SUITE"]


def _gated_case(name: str, x: tuple[int, ...], out: int, **options: Any) -> OpCase:
    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        return {"x": rng.normal(size=x), "w_gate": rng.normal(size=(x[-1], out)), "w_up": rng.normal(size=(x[-1], out))}

    return OpCase("gated_linear_unit", name, arrays, options)


def _quantized_case(name: str, *quantized: str, zeros: bool = False, codebook: bool = False) -> OpCase:
    def weight(rng: np.random.Generator) -> Quantized:
        if codebook:
            codes = rng.integers(0, 16, size=(12, 10)).astype(np.uint8)
            levels = np.linspace(-1, 1, 16).astype(np.float32)
            return Quantized(codes, rng.uniform(0.5, 2, size=(3, 10)).astype(np.float32), None, levels)
        values = rng.integers(-100, 101, size=(12, 10)).astype(np.int8)
        offsets = rng.integers(-4, 5, size=(3, 5)).astype(np.int8) if zeros else None
        return Quantized(values, rng.uniform(0.01, 0.02, size=(3, 5)).astype(np.float32), offsets)

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        plain = {name: rng.normal(size=(12, 10)) for name in ("w_gate", "w_up")}
        return {"x": rng.normal(size=(3, 12)), **plain, **{name: weight(rng) for name in quantized}}

    return OpCase("gated_linear_unit", name, arrays, fixed=quantized)


_CASES = (
    _gated_case("odd_sizes", (2, 37, 19), 33),
    _gated_case("empty_rows", (2, 0, 8), 4),
    _quantized_case("quantized", "w_gate", "w_up", zeros=True),
    _quantized_case("one_quantized", "w_up"),
    _quantized_case("one_with_a_codebook", "w_gate", codebook=True),
    *(
        _gated_case(activation, (3, 12), 10, activation=activation)
        for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu_squared", "sigmoid")
    ),
)


_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "gelu": lambda x: x * 0.5 * (1 + jax.scipy.special.erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: jnp.where(x > 0, x, 0.0),
    "relu_squared": lambda x: jnp.where(x > 0, x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + jnp.exp(-x)),
    "silu": lambda x: x / (1 + jnp.exp(-x)),
}


def _oracle(x: Any, w_gate: Any, w_up: Any, *, activation: str = "silu") -> Any:
    return _ACTIVATIONS[activation](x @ dense(w_gate)) * (x @ dense(w_up))


SUITE = OpSuite(_CASES, _oracle)
