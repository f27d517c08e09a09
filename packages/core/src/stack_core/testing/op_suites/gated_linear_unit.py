"""The contract suite of `gated_linear_unit`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.testing.cases import OpCase, OpSuite, Quantized, dense, in_tiles, spoiled

__all__ = ["SUITE"]


def _gated_case(name: str, x: tuple[int, ...], out: int, biases: tuple[str, ...] = (), **options: Any) -> OpCase:
    shapes = {"x": x, "w_gate": (x[-1], out), "w_up": (x[-1], out), **dict.fromkeys(biases, (out,))}
    draw = _normal if "limit" not in options else _exact
    # The cube of a sum of many products, from `relu_squared`, would overflow in fp16.
    scales = dict.fromkeys(("w_gate", "w_up"), x[-1] ** -0.5 if x[-1] >= 64 else 1.0)

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        return {name: draw(rng, shape) * scales.get(name, 1.0) for name, shape in shapes.items()}

    return OpCase("gated_linear_unit", name, arrays, options)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape)


def _exact(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Samples multiples of 1/2, whose products and sums are exact in every dtype, so rounding crosses no limit."""
    return rng.integers(-2, 3, size=shape) / 2


def _quantized_case(
    name: str, *quantized: str, zeros: bool = False, codebook: bool = False, biased: bool = False
) -> OpCase:
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
        biases = {bias: rng.normal(size=10) for bias in ("bias_gate", "bias_up") if biased}
        return {"x": rng.normal(size=(3, 12)), **plain, **{name: weight(rng) for name in quantized}, **biases}

    return OpCase("gated_linear_unit", name, arrays, fixed=quantized)


def _tiled_case(name: str, tiles: int, dtype: str, *, rows: int, biased: bool = False) -> OpCase:
    """Builds a case with weights of 128 x 64 and a scale for each column of each of the tiles along d_in."""
    largest = {"int8": 127, "int4": 7}[dtype]

    def weight(rng: np.random.Generator) -> Quantized:
        values = rng.integers(-largest, largest + 1, size=(128, 64)).astype(jnp.dtype(dtype))
        return Quantized(values, (rng.uniform(0.1, 0.2, size=(tiles, 64)) / largest).astype(np.float32))

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        biases = {bias: rng.normal(size=64) for bias in ("bias_gate", "bias_up") if biased}
        return {"x": rng.normal(size=(rows, 128)), "w_gate": weight(rng), "w_up": weight(rng), **biases}

    return OpCase("gated_linear_unit", name, arrays, fixed=("w_gate", "w_up"))


_CASES = (
    _gated_case("odd_sizes", (2, 37, 19), 33),
    _gated_case("empty_rows", (2, 0, 8), 4),
    _quantized_case("quantized", "w_gate", "w_up", zeros=True),
    _quantized_case("one_quantized", "w_up"),
    _quantized_case("one_with_a_codebook", "w_gate", codebook=True),
    _quantized_case("quantized_with_biases", "w_gate", "w_up", biased=True),
    _gated_case("one_bias", (3, 12), 10, biases=("bias_up",)),
    _gated_case("limit", (3, 12), 10, limit=1.125),
    _gated_case("up_offset", (3, 12), 10, up_offset=1.0),
    _gated_case(
        "gpt_oss",
        (2, 5, 12),
        10,
        biases=("bias_gate", "bias_up"),
        activation="quick_gelu",
        limit=1.625,
        up_offset=1.0,
    ),
    *(
        _gated_case(activation, (3, 12), 10, activation=activation)
        for activation in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "sigmoid")
    ),
    spoiled(
        _gated_case("", (3, 12), 10), "not_a_number", x=((1, 4), np.nan), w_gate=((2, 7), np.nan), w_up=((0, 3), np.nan)
    ),
    spoiled(_gated_case("", (3, 12), 10), "infinity", x=((1, 4), np.inf)),
)

_FOR_ACCELERATORS = in_tiles(
    _gated_case("full", (128, 128), 256),
    _gated_case("partial_rows", (2, 67, 64), 128),
    _gated_case("one_row", (1, 192), 128),
    _gated_case("no_rows", (0, 64), 128),
    *(
        _gated_case(activation, (64, 128), 128, activation=activation)
        for activation in ("gelu_tanh", "relu", "sigmoid", "gelu", "quick_gelu", "relu_squared")
    ),
    _gated_case("biases", (64, 128), 128, biases=("bias_gate", "bias_up")),
    _tiled_case("int8_by_channel_one_row", 1, "int8", rows=1),
    _tiled_case("int8_by_tile_and_biases", 4, "int8", rows=64, biased=True),
    _tiled_case("int4_by_channel", 1, "int4", rows=21),
    _tiled_case("int4_by_tile", 2, "int4", rows=7),
)

_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "gelu": lambda x: x * 0.5 * (1 + jax.scipy.special.erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + jnp.exp(-1.702 * x)),
    "relu": lambda x: jnp.where(x > 0, x, 0.0),
    "relu_squared": lambda x: jnp.where(x > 0, x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + jnp.exp(-x)),
    "silu": lambda x: x / (1 + jnp.exp(-x)),
}


def _oracle(
    x: Any,
    w_gate: Any,
    w_up: Any,
    *,
    bias_gate: Any = 0.0,
    bias_up: Any = 0.0,
    activation: str = "silu",
    limit: float = np.inf,
    up_offset: float = 0.0,
) -> Any:
    gate, up = x @ dense(w_gate) + bias_gate, x @ dense(w_up) + bias_up
    return _ACTIVATIONS[activation](jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + up_offset)


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
