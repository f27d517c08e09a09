"""The contract suite of `linear`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from stack_core.testing.cases import OpCase, OpSuite, Quantized, dense, in_tiles, spoiled

__all__ = ["SUITE"]


def _linear_case(name: str, x: tuple[int, ...], out: int, bias: bool = False, **options: Any) -> OpCase:
    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        drawn = {"x": rng.normal(size=x), "weight": rng.normal(size=(x[-1], out))}
        return drawn | ({"bias": rng.normal(size=out)} if bias else {})

    return OpCase("linear", name, arrays, options)


_CODES = {"int8": 127, "uint8": 255, "int4": 7, "float8_e4m3fn": 448, "float8_e5m2": 57344, "float4_e2m1fn": 6}
"""Largest magnitude by dtype of the quantized values."""


def _quantized(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    scales: tuple[int, ...],
    dtype: str = "int8",
    zeros: Any = None,
    levels: int = 0,
    scale_dtype: Any = np.float32,
) -> Quantized:
    """Samples a quantized array with entries of the order of 1.

    Args:
      zeros: dtype of the zero points; None for symmetric quantization.
      levels: number of codebook levels; 0 for values without a codebook.
    """
    largest = levels - 1 if levels else _CODES[dtype]
    lowest = 0 if levels or dtype == "uint8" else -largest
    # The powers of 2 make floating-point codes take all their exponents.
    drawn = rng.uniform(lowest, largest, size=shape) * (2.0 ** rng.integers(-6, 1, size=shape) if lowest else 1)
    values = (np.rint(drawn) if jnp.issubdtype(dtype, jnp.integer) else drawn).astype(jnp.dtype(dtype))
    scale = rng.uniform(1, 2, size=scales) / (1 if levels else largest)
    offsets = None if zeros is None else rng.uniform(0.1 * lowest, 0.4 * largest, size=scales).astype(zeros)
    codebook = np.sort(rng.normal(size=levels)).astype(np.float32) if levels else None
    return Quantized(values, scale.astype(scale_dtype), offsets, codebook)


def _weight_case(
    name: str,
    scales: tuple[int, int],
    dtype: str = "int8",
    *,
    rows: int = 3,
    shape: tuple[int, int] = (12, 10),
    bias: bool = False,
    fixed: bool = False,
    **quantization: Any,
) -> OpCase:
    """Builds a case with a quantized weight, whose scales have a gradient unless `fixed`."""

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        weight = _quantized(rng, shape, scales, dtype, **quantization)
        drawn = {"x": rng.normal(size=(rows, shape[0])), "weight": weight}
        return drawn | ({"bias": rng.normal(size=shape[1])} if bias else {})

    return OpCase("linear", name, arrays, fixed=("weight",) if fixed else ())


def _both_case(
    name: str,
    x: tuple[str, tuple[int, ...]],
    weight: tuple[str, tuple[int, int]],
    *,
    shape: tuple[int, ...] = (3, 12),
    out: int = 10,
    zeros: tuple[Any, Any] = (None, None),
    bias: bool = False,
) -> OpCase:
    """Builds a case with two quantized operands, each given by the dtype of its values and the shape of its scales."""

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        left = _quantized(rng, shape, x[1], x[0], zeros[0])
        right = _quantized(rng, (shape[-1], out), weight[1], weight[0], zeros[1])
        return {"x": left, "weight": right} | ({"bias": rng.normal(size=out)} if bias else {})

    return OpCase("linear", name, arrays)


def _quantized_x(rng: np.random.Generator) -> Mapping[str, Any]:
    return {"x": _quantized(rng, (3, 12), (3, 4)), "weight": rng.normal(size=(12, 10))}


_CASES = (
    _linear_case("plain", (3, 5, 12), 10),
    _linear_case("bias", (4, 12), 9, bias=True),
    _linear_case("vector", (7,), 5),
    _linear_case("odd_sizes", (131, 67), 33),
    _linear_case("empty_rows", (0, 8), 4),
    _linear_case("fp32_result", (5, 130), 3, preferred_dtype="float32"),
    _weight_case("quantized_by_tensor", (1, 1), zeros=np.int8),
    _weight_case("quantized_by_channel", (1, 10)),
    _weight_case("quantized_one_row", (1, 10), rows=1, zeros=np.float32),
    _weight_case("quantized_no_rows", (1, 10), rows=0),
    _weight_case("quantized_by_row_tile", (4, 10), scale_dtype=jnp.bfloat16, fixed=True),
    _weight_case("quantized_by_tile", (3, 5), zeros=np.int8),
    _weight_case("quantized_by_d_in", (12, 1)),
    _weight_case("quantized_uint8", (2, 10), "uint8", zeros=np.uint8),
    _weight_case("quantized_int4", (3, 10), "int4"),
    _weight_case("quantized_fp8", (1, 10), "float8_e4m3fn"),
    _weight_case("quantized_fp8_wide", (1, 1), "float8_e5m2"),
    _weight_case("quantized_mx", (3, 10), "float4_e2m1fn", scale_dtype=jnp.float8_e8m0fnu, fixed=True),
    _weight_case("quantized_codebook", (4, 10), "uint8", levels=16),
    _weight_case("quantized_codebook_zeros", (1, 10), "int4", levels=8, zeros=np.float32, rows=1),
    OpCase("linear", "quantized_x", _quantized_x),
    _both_case("w8a8", ("int8", (3, 1)), ("int8", (1, 10))),
    _both_case("w8a8_zeros", ("uint8", (3, 1)), ("int8", (1, 10)), zeros=(np.uint8, np.int8), bias=True),
    _both_case("w8a8_tiles", ("int8", (3, 6)), ("int8", (3, 5)), zeros=(np.int8, np.float32)),
    _both_case("w8a8_one_row", ("int8", (1, 1)), ("int8", (1, 1)), shape=(1, 12)),
    _both_case("w8a8_batch", ("int8", (2, 3, 1)), ("int8", (1, 9)), shape=(2, 3, 8), out=9),
    _both_case("w8a8_odd_sizes", ("int8", (37, 1)), ("int8", (67, 33)), shape=(37, 67), out=33),
    _both_case("w4a8", ("int8", (3, 1)), ("int4", (2, 10))),
    _both_case("w4a4", ("int4", (3, 3)), ("int4", (3, 10))),
    _both_case("w4a4_vector", ("int4", (2,)), ("int4", (2, 10)), shape=(12,)),
    _both_case("fp8_both", ("float8_e4m3fn", (3, 1)), ("float8_e4m3fn", (1, 10))),
    spoiled(_linear_case("", (4, 12), 10), "not_a_number", x=((1, 4), np.nan), weight=((2, 7), np.nan)),
    spoiled(_linear_case("", (4, 12), 10), "infinity", x=((1, 4), np.inf), weight=((2, 7), -np.inf)),
)


def _tiled(name: str, tiles: int, dtype: str = "int8", *, rows: int = 16, **rest: Any) -> OpCase:
    """Builds a case with a weight of 256 x 128 and a scale for each column of each of the tiles along d_in."""
    return _weight_case(name, (tiles, 128), dtype, rows=rows, shape=(256, 128), **rest)


_FOR_ACCELERATORS = in_tiles(
    _linear_case("full", (128, 128), 256),
    _linear_case("partial_rows", (2, 67, 128), 192, bias=True),
    _linear_case("fp32_result", (64, 256), 128, preferred_dtype="float32"),
    _tiled("int8_by_channel", 1),
    _tiled("int8_by_channel_one_row", 1, rows=1),
    _tiled("int8_by_channel_and_bias", 1, rows=21, bias=True),
    _tiled("int8_by_channel_no_rows", 1, rows=0),
    _tiled("int8_by_tile", 4, rows=64),
    _tiled("int8_by_tile_many_rows", 2, rows=131),
    _tiled("int4_by_channel", 1, "int4"),
    _tiled("int4_by_tile", 4, "int4", rows=7),
    _tiled("int4_by_tile_many_rows", 2, "int4", rows=131),
    _tiled("fp8_by_channel", 1, "float8_e4m3fn"),
)


def _oracle(x: Any, weight: Any, *, bias: Any = None, preferred_dtype: Any = None) -> Any:
    product = jnp.einsum("...i,io->...o", dense(x), dense(weight))
    return product if bias is None else product + bias


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
