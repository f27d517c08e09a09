"""The contract suite of `gated_linear_unit`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.testing._cases import OpCase, OpSuite, dense

__all__ = ["SUITE"]


def _gated_case(name: str, x: tuple[int, ...], out: int, **options: Any) -> OpCase:
    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        return {"x": rng.normal(size=x), "w_gate": rng.normal(size=(x[-1], out)), "w_up": rng.normal(size=(x[-1], out))}

    return OpCase("gated_linear_unit", name, arrays, options)


_CASES = (
    _gated_case("odd_sizes", (2, 37, 19), 33),
    _gated_case("empty_rows", (2, 0, 8), 4),
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
