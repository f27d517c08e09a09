"""Two residual MLP blocks, 512 to 2048 and back, and a single 4096 x 4096 weight, in each scheme of quantized operands.

A scheme says what the weights are and whether activations are quantized too, one scale a row and tile, as they come.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from op_cases import Case, normal
from stack_core import ops
from stack_core.abi.ops import QView

BLOCKS, D_IN, D_MLP = 2, 512, 2048
NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.24611230, 0.33791524, 0.44070983, 0.5626170, 0.72295684, 1.0),
)
"""Dettmers et al., QLoRA, 2023 (arXiv:2305.14314)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stored:
    """Codes and scales, and a codebook for nf4; as stack-quant does, it keeps any codes of 4 bits as int4."""

    codes: Any
    scales: Any
    codebook: Any = None
    dtype: str = field(default="int8", metadata={"static": True})

    def __stack_qview__(self) -> QView:
        codes = lax.bitcast_convert_type(self.codes, self.dtype) if self.codes.dtype == jnp.int4 else self.codes
        return QView((1, 0), codes, self.scales, None, "benchmark", self.codebook)


@dataclass(frozen=True)
class Scheme:
    """Absmax quantization of weights, and of activations if they have a dtype.

    Attributes:
      tile: entries of d_in a scale; None for one scale a column of a weight and row of activations.
      tolerance: how far rounding of the activations may move the result.
    """

    name: str
    weights: str
    activations: str | None = None
    tile: int | None = None
    tolerance: float = 1e-4


SCHEMES = (
    Scheme("w8", "int8"),
    Scheme("w4 t128", "int4", tile=128),
    Scheme("nf4 t128", "nf4", tile=128),
    Scheme("fp8", "float8_e4m3fn"),
    Scheme("fp8 e5m2", "float8_e5m2"),
    Scheme("mxfp4", "float4_e2m1fn", tile=32),
    Scheme("w8a8", "int8", "int8", tolerance=0.03),
    Scheme("w4a8 t128", "int4", "int8", 128, tolerance=0.03),
    Scheme("w4a4 t128", "int4", "int4", 128, tolerance=0.4),
)


def _quantized(array: Any, dtype: str, tile: int | None, axis: int) -> Stored:
    """Tiles along `axis` of a matrix; elsewhere each row or column has its own scales."""
    parts = 1 if tile is None else array.shape[axis] // tile
    tiles = jnp.stack(jnp.split(array, parts, axis))
    largest = jnp.max(jnp.abs(tiles), axis=axis + 1, keepdims=True)
    integer = jnp.issubdtype(jnp.int8 if dtype == "nf4" else dtype, jnp.integer)
    limit = 1.0 if dtype == "nf4" else float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    scale = jnp.maximum(largest, 1e-12) / limit
    scale = 2 ** jnp.ceil(jnp.log2(scale)) if dtype == "float4_e2m1fn" else scale
    values = jnp.concatenate(list(tiles / scale), axis)
    scale = jnp.concatenate(list(scale), axis)
    if dtype == "nf4":
        levels = jnp.asarray(NF4, jnp.float32)
        codes = jnp.searchsorted((levels[1:] + levels[:-1]) / 2, values).astype(jnp.uint4)
        return Stored(lax.bitcast_convert_type(codes, jnp.int4), scale, levels, "uint4")
    if dtype == "float4_e2m1fn":
        codes = lax.bitcast_convert_type(values.astype(dtype), jnp.int4)
        return Stored(codes, scale.astype(jnp.float8_e8m0fnu), None, dtype)
    return Stored((jnp.round(values) if integer else values).astype(dtype), scale, None, dtype)


def _activations(scheme: Scheme, x: Any) -> Any:
    return x if scheme.activations is None else _quantized(x, scheme.activations, scheme.tile, 1)


def _mlp(product: Callable[[Any, Any], Any], x: Any, weights: Any) -> Any:
    for *first, last in weights:
        hidden = x
        for weight in first:
            hidden = jax.nn.relu(product(hidden, weight))
        x = x + product(hidden, last)
    return x


def _ours(scheme: Scheme, x: Any, weights: Any, **named: Any) -> Any:
    return _mlp(lambda x, weight: ops.linear(_activations(scheme, x), weight, **named), x, weights)


def _dense(x: Any, weights: Any) -> Any:
    return x, [[ops.dequantize(weight, jnp.float32) for weight in block] for block in weights]


def _qwix(scheme: Scheme, x: Any, weights: Any) -> Any:
    import qwix

    def product(x: Any, weight: Any) -> Any:
        if scheme.activations is not None:
            tiles = {} if scheme.tile is None else {1: scheme.tile}
            x = qwix.quantize(x, scheme.activations, channelwise_axes=[0], tiled_axes=tiles)
        return qwix.dot_general(x, weight, (((1,), (0,)), ((), ())))

    return _mlp(product, x, weights)


def _for_qwix(scheme: Scheme, x: Any, weights: Any) -> Any:
    import qwix

    tiles = {} if scheme.tile is None else {0: scheme.tile}
    quantize = partial(qwix.quantize, channelwise_axes=[1], tiled_axes=tiles)
    kind = "mxfp4" if scheme.weights == "float4_e2m1fn" else scheme.weights
    return x, [[quantize(weight, kind) for weight in block] for block in _dense(x, weights)[1]]


def _dequantized_by_qwix(x: Any, weights: Any) -> Any:
    """Qwix maps the largest entry of a tile half a step beyond its code, so that its weights differ from ours."""
    import qwix

    return x, [[qwix.dequantize(weight) for weight in block] for block in weights]


def _case(scheme: Scheme, rows: int, shapes: tuple[tuple[tuple[int, int], ...], ...]) -> Case:
    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        weights = [
            [
                _quantized(jnp.asarray(normal(rng, shape, "float32", shape[0] ** -0.5)), scheme.weights, scheme.tile, 0)
                for shape in block
            ]
            for block in shapes
        ]
        return normal(rng, (rows, shapes[0][0][0]), "float32"), weights

    contenders = {
        "stack": partial(_ours, scheme),
        "core": partial(_ours, scheme, implementation="reference"),
        "fp32": partial(_mlp, jnp.matmul),
        "qwix": partial(_qwix, scheme),
    }
    what = f"{scheme.name}, {rows} rows, {'MLP' if len(shapes) > 1 else '4096 x 4096'}"
    prepare = {"fp32": _dense, "qwix": partial(_for_qwix, scheme)}
    return Case(
        name=what,
        operands=operands,
        contenders=contenders,
        prepare=prepare,
        stands_for={"qwix": _dequantized_by_qwix},
        tolerance=scheme.tolerance,
    )


_MLP = BLOCKS * (((D_IN, D_MLP), (D_MLP, D_IN)),)
CASES = (
    *(_case(scheme, rows, _MLP) for scheme in SCHEMES for rows in (1, 8, 128, 512)),
    *(_case(scheme, rows, (((4096, 4096),),)) for scheme in SCHEMES for rows in (1, 8)),
)
