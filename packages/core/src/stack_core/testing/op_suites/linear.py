"""The contract suite of `linear`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from stack_core.testing._cases import OpCase, OpSuite, TiledInt8, dense

__all__ = ["SUITE"]


def _linear_case(name: str, x: tuple[int, ...], out: int, bias: bool = False, **options: Any) -> OpCase:
    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        drawn = {"x": rng.normal(size=x), "weight": rng.normal(size=(x[-1], out))}
        return drawn | ({"bias": rng.normal(size=out)} if bias else {})

    return OpCase("linear", name, arrays, options)


def _quantized_case(name: str, scales: tuple[int, int], zeros: bool = False, scale_dtype: Any = np.float32) -> OpCase:
    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        offsets = rng.integers(-4, 5, size=scales).astype(np.int8) if zeros else None
        values = rng.integers(-100, 101, size=(12, 10)).astype(np.int8)
        weight = TiledInt8(values, rng.uniform(0.01, 0.02, size=scales).astype(scale_dtype), offsets)
        return {"x": rng.normal(size=(3, 12)), "weight": weight}

    return OpCase("linear", name, arrays, fixed=("weight",))


_CASES = (
    _linear_case("plain", (3, 5, 12), 10),
    _linear_case("bias", (4, 12), 9, bias=True),
    _linear_case("vector", (7,), 5),
    _linear_case("odd_sizes", (131, 67), 33),
    _linear_case("empty_rows", (0, 8), 4),
    _linear_case("fp32_result", (5, 130), 3, preferred_dtype="float32"),
    _quantized_case("quantized_by_tensor", (1, 1), zeros=True),
    _quantized_case("quantized_by_channel", (1, 10)),
    _quantized_case("quantized_by_row_tile", (4, 10), scale_dtype=jnp.bfloat16),
    _quantized_case("quantized_by_tile", (3, 5), zeros=True),
)


def _oracle(x: Any, weight: Any, *, bias: Any = None, preferred_dtype: Any = None) -> Any:
    product = jnp.einsum("...i,io->...o", x, dense(weight))
    return product if bias is None else product + bias


SUITE = OpSuite(_CASES, _oracle)
